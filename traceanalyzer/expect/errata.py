"""Where the seed document and real Megatron part, in a sentence each: the words behind the codes that rules carry.

Codes are those of the document's errata. A rule names them in ``document``; several are joined with commas.
"""

from __future__ import annotations

import re

ERRATA: dict[str, str] = {
    "E1": "the document's pipeline group contradicts its own rank order",
    "E2": "the document divides the sequence by TP and CP more than once; the shard is S/(TP*CP)",
    "E3": "the document's all-to-all shapes keep all heads; a tensor-parallel rank has Nh/TP",
    "E4": "the document multiplies EP into the world size; Megatron lays it over the data-parallel ranks",
    "E5": "the document numbers the layers of a stage wrongly",
    "E6": "plain tensor parallelism has two all-reduces a layer and direction and no all-gather",
    "E7": "the document forgets the all-gather before the MLP",
    "E8": "the document swaps the directions of the experts' backward exchanges",
    "E9": "end stages have one neighbour",
    "E10": "interleaving sends v times the messages of the same size, and wraps around",
    "E11": "uneven stages are what the job says, there is no default",
    "E12": "updated shards of parameters are all-gathered, not all-reduced",
    "E13": "the schedule is 1F1B: backward passes in the order of the forward ones",
    "E14": "the document computes one all-to-all half as large as its own formula",
    "E15": "the document's ring keeps the length of two ranks for four",
    "E16": "a rank receives EP splits of tokens, not one",
    "E17": "a product is wrong in the document",
    "E18": "the document's sum for a layer with experts is not the sum of its rows",
    "E19": "the document's ZeRO-3 example is off by a factor",
    "E20": "the document's ZeRO-3 total is not the sum of its rows",
    "E21": "the document's memory estimate divides by the wrong degrees",
    "E22": "the document's parameter counts are not those of its configuration",
    "E23": "the document adds the own part of a tensor to what is received",
    "E24": "the document compares three ways of context parallelism on three bases",
    "E25": "the document charges all-gather and reduce-scatter with the factor of an all-reduce",
    "E26": "the document counts all-gather off-rank and reduce-scatter in full",
    "E27": "the document's summary mixes configurations",
    "E28": "the document adds all layers and stages to one rank",
    "E29": "the document's bubble leaves out the backward pass",
    "E30": "the document has two formulas for the capacity of an expert",
    "E31": "a statement about other software that does not hold",
    "E32": "a slip in a formula without effect on bytes",
    "E33": "a formula that the document's text lost",
    "E34": "real Megatron makes these calls, the document does not mention them",
}

_CODE = re.compile(r"\bE\d{1,2}\b")


def in_words(text: str) -> str:
    """A rule's remark with the sentence behind each code: "E9, E10" -> "E9: end stages ...; E10: interleaving ..."."""
    codes = [code for code in _CODE.findall(text) if code in ERRATA]
    rest = _CODE.sub(lambda found: "" if found[0] in ERRATA else found[0], text).strip(" ,;.")
    parts = [f"{code}: {ERRATA[code]}" for code in dict.fromkeys(codes)]
    return "; ".join([*parts, *([rest] if rest else [])])
