"""When everything of a simulation happened: arrays of times, one row per instruction and one column per rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from traceanalyzer.simulate.costs import Costs
from traceanalyzer.simulate.program import Group, Ints, Program, Walked

NEVER = int(np.iinfo(np.int64).min)
"""Time of what did not happen: an instruction behind a hang, the device time of one that is host work alone."""


@dataclass(frozen=True)
class Hang:
    """A call that never ended: the rank, the call in words, and the ranks it waits for that have not come to it."""

    rank: int
    call: str
    waits_for: tuple[int, ...]

    @property
    def sentence(self) -> str:
        """The same in words."""
        shown = ", ".join(map(str, self.waits_for[:8])) + (" and more" if len(self.waits_for) > 8 else "")
        who = f"rank{'s' if len(self.waits_for) != 1 else ''} {shown}" if self.waits_for else "a call that nobody makes"
        return f"rank {self.rank} waits in {self.call} for {who}"


@dataclass(frozen=True)
class ProgramTimes:
    """Times of one program, ns, true ones: arrays of shape (steps, instructions, kept ranks); NEVER where there is none.

    issue: when the host came to the instruction. start, end: of its kernel (of coalesced calls: of their one kernel), or
    of the host's own time in a Host, a Sync or a Wait(host). finish: when the host was done with all. columns: places of
    the kept ranks in ``program.ranks``.
    """

    program: Program
    columns: Ints
    ranks: Ints
    issue: Ints
    start: Ints
    end: Ints
    finish: Ints

    def after(self) -> Ints:
        """When the host was done with each instruction, shaped like issue."""
        flat = self.issue.reshape(-1, self.issue.shape[2])
        found: Ints = np.concatenate([flat[1:], self.finish[None, :]]).reshape(self.issue.shape)
        return found


@dataclass(frozen=True)
class CallPlan:
    """What of a program's calls does not depend on time.

    Keys are instructions. number: collective calls of the same role before this one in a step; calls launched as one share
    it. messages: c10d's sequence number of each call within a step: that same number, but of a send or recv by itself the
    messages before it. unit: first instruction of those launched as one with it. parts: of a first one, all of them. pair:
    of a send or recv, number of the message in a step, one per rank of the program, -1 where nobody is at the other end.
    """

    number: dict[int, int]
    messages: dict[int, int]
    unit: dict[int, int]
    parts: dict[int, tuple[int, ...]]
    pair: dict[int, Ints]
    collectives: dict[str, int]
    """Role -> collective calls in a step (batches of messages, which count on c10d's number, included)."""
    turn: dict[int, int] = field(default_factory=dict)
    """Of a collective, those of the same role before it in a step without batches of messages: by it the ranks of a group
    meet."""
    turns: dict[str, int] = field(default_factory=dict)
    """Role -> collectives in a step without batches of messages."""


@dataclass(frozen=True)
class Timeline:
    """A simulated run. start_ns: unix time at which it begins; hang: None, or who waits for whom at its end."""

    walked: Walked
    costs: Costs
    steps: int
    first_step: int
    start_ns: int
    programs: list[ProgramTimes]
    plans: list[CallPlan]
    hang: list[Hang] | None = None
    group_index: dict[str, Ints] = field(default_factory=dict)
    """Role -> place in walked.groups of the group of each global rank, -1 where it has none."""

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return 1 + max(max(p.program.ranks) for p in self.programs)

    @property
    def kept(self) -> list[int]:
        """Ranks whose times were kept, ascending."""
        return sorted(int(r) for p in self.programs for r in p.ranks)

    @property
    def groups(self) -> list[Group]:
        """All process groups, in the order in which they were made; the default group first."""
        return self.walked.groups

    def group_of(self, role: str, rank: int) -> Group:
        """The group of a rank that plays a role."""
        return self.walked.groups[int(self.group_index[role][rank])]
