"""Attention of one layer, with keys and values exchanged over the context-parallel ranks.

After TransformerEngine 2.20.2, attention/dot_product_attention/context_parallel.py: AttnFuncWithCPAndKVP2P (p2p and
a2a+p2p), AttnFuncWithCPAndKVAllGather, AttnFuncWithCPAndQKVOA2A. Tensors of a rank: ``query`` and ``key`` elements, of
its tokens and heads. Each rank holds two chunks of a sequence, an early and a late one, so that every rank has half of
each pair of blocks to compute.
"""

from __future__ import annotations

from traceanalyzer.job_rules import release
from traceanalyzer.simulate import walk_kernels as kernels
from traceanalyzer.simulate.program import Ints
from traceanalyzer.simulate.walk_tape import Tape


def core_attention(tape: Tape) -> None:
    """Attention itself."""
    sizes, job = tape.sizes, tape.sizes.job
    if sizes.cp == 1:
        _local(tape, sizes.sequence, sizes.sequence, sizes.heads, sizes.groups)
        return
    kind = job.cp_comm_type_of(tape.layer or 0)
    query = sizes.tokens * sizes.heads * sizes.head_width
    key = sizes.tokens * sizes.groups * sizes.head_width
    if kind == "p2p":
        _ring(tape, "cp", sizes.cp, key, sizes.sequence, sizes.heads, sizes.groups)
    elif kind == "all_gather":
        _gather(tape, key)
    elif kind == "a2a":
        _swap(tape, "cp", ("Q", "K", "V"), (query, key, key))
        tape.owes(lambda: _swap(tape, "cp", ("dQ", "dK", "dV"), (query, key, key)))
        length = sizes.sequence * sizes.cp
        _local(tape, length, length, sizes.heads // sizes.cp, max(sizes.groups // sizes.cp, 1))
        _swap(tape, "cp", ("O",), (query,))
        tape.owes(lambda: _swap(tape, "cp", ("dO",), (query,)))
    else:
        inner, outer = job.hierarchical_context_parallel_sizes
        _swap(tape, "cp_l0", ("Q", "K", "V"), (query, key, key))
        tape.owes(lambda: _swap(tape, "cp_l0", ("dQ", "dK", "dV"), (query, key, key)))
        heads, groups = sizes.heads // inner, max(sizes.groups // inner, 1)
        _ring(tape, "cp_l1", outer, key, sizes.sequence * inner, heads, groups)
        _swap(tape, "cp_l0", ("O",), (query,))
        # What came out was kept as the rank gave it away, and is fetched again, up to TransformerEngine 2.14.
        engine = release(job.transformer_engine_version)
        again = engine is not None and engine <= (2, 14)
        names = ("O again", "dO") if again else ("dO",)
        tape.owes(lambda: _swap(tape, "cp_l0", names, (query,) * len(names)))


def _local(tape: Tape, queries: int, keys: int, heads: int, groups: int) -> None:
    kernels.attention(tape, "attention", queries, keys, heads, groups, backward=False)
    tape.owes(lambda: kernels.attention(tape, "attention", queries, keys, heads, groups, backward=True))


def _swap(tape: Tape, role: str, names: tuple[str, ...], elems: tuple[int, ...]) -> None:
    """flash_attn_a2a_communicate: each tensor's heads for another's tokens, the next under way while one is sorted."""
    under_way: list[int | None] = []
    for name, size in zip(names, elems, strict=True):
        under_way.append(tape.call(role, "all_to_all", size, component=f"attention: {name}", overlap=True))
        if len(under_way) > 1:
            tape.wait(under_way.pop(0))
    for handle in under_way:
        tape.wait(handle)


def _gather(tape: Tape, key: int) -> None:
    sizes = tape.sizes

    def both(op: str, words: str) -> None:
        for name in ("K", "V"):
            ends = (key, key * sizes.cp) if op == "all_gather" else (key * sizes.cp, key)
            tape.call("cp", op, *ends, component=f"attention: {words.format(name)}")

    def attend(backward: bool) -> None:
        # Two steps, one for each chunk of the sequence, against all keys before it: half of the keys on average.
        kernels.attention(
            tape,
            "attention",
            sizes.sequence,
            sizes.sequence * sizes.cp,
            sizes.heads,
            sizes.groups,
            backward=backward,
        )

    both("all_gather", "{}")
    attend(backward=False)

    def backward() -> None:
        both("all_gather", "{} again")
        attend(backward=True)
        both("reduce_scatter", "d{}")

    tape.owes(backward)


def neighbours(tape: Tape, role: str, step: int) -> Ints:
    """The rank ``step`` places on in the ring of each rank of the program."""
    assert tape.ring is not None
    return tape.ring(role, step)


def _ring(tape: Tape, role: str, ranks: int, key: int, sequence: int, heads: int, groups: int) -> None:
    """Keys and values go round: a rank attends to its neighbour's while they travel on."""
    batched = tape.sizes.job.nvte_batch_mha_p2p_comm
    batched = ranks == 2 if batched is None else batched
    onward, back = neighbours(tape, role, 1), neighbours(tape, role, -1)

    def post(to: Ints, origin: Ints, elems: int, component: str) -> list[int | None]:
        number = tape.new_coalesced() if batched else None
        return [
            tape.call(
                role,
                op,
                elems,
                peer=peer,
                component=component,
                overlap=True,
                coalesce=number,
                # Single messages run on a stream of their pair of ranks.
                stream=None if batched else f"comm:{role} {'next' if peer is onward else 'previous'}",
            )
            for op, peer in (("send", to), ("recv", origin))
        ]

    def wait(handles: list[int | None]) -> None:
        for handle in handles:
            tape.wait(handle)

    under_way: list[int | None] = []
    for step in range(ranks):
        wait(under_way)
        under_way = post(onward, back, 2 * key, "attention: K and V") if step < ranks - 1 else []
        kernels.attention(tape, "attention", sequence, sequence, heads, groups, backward=False)

    def backward() -> None:
        under_way: list[int | None] = []
        for step in range(ranks):
            wait(under_way)
            if step == 0:
                under_way = post(back, onward, 2 * key, "attention: K and V again")
            elif step == ranks - 1:
                under_way = post(back, onward, 2 * key, "attention: dK and dV")
            else:
                under_way = post(back, onward, 4 * key, "attention: K, V and dK, dV")
            kernels.attention(tape, "attention", sequence, sequence, heads, groups, backward=True)
        wait(under_way)
        kernels.elementwise(tape, "attention", 2 * key, "add")

    tape.owes(backward)
