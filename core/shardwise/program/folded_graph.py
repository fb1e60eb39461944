"""A graph of variables and pairs, folded: variables that look alike as far as some hops are one class.

Example: in the chain a -- b -- b -- b -- b -- c, looked at as far as one hop, the two inner ones of the four b are one
class, and the pair between them is a pair of that class with itself. A step of many equal layers has the classes of a
few: the inner ones, and those at either end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from attrs import define, field

__all__ = ["FoldedGraph"]

_HOPS = 12
"""Where layers begin to be alike, messages hold for one of two neighbours alone, and the bound loses. With 12 hops that
is some four layers from either end, where messages have settled; a bound on 405 billion parameters stood still at 8.
"""

#: A kind of pair, and which of its two ends.
Slot = tuple[int, int]
#: A kind of pair, then the class and the slot's number at its first and at its second end.
FoldedPair = tuple[int, int, int, int, int]


@define(eq=False)
class FoldedGraph:
    """Classes of variables, and the pairs between them with how often each occurs.

    ``looks`` are equal for variables that are alike by themselves. ``pairs`` are (kind, u, v); alike pairs have one
    kind. All variables of a class have the same slots: one per pair that they are in. A class and the number of a slot
    stand for the ends of all pairs there.
    """

    looks: Sequence[Hashable]
    pairs: Sequence[tuple[int, int, int]]
    hops: int = _HOPS
    #: By variable, its class.
    classes: list[int] = field(init=False)
    #: By class, its variables.
    members: list[list[int]] = field(init=False)
    #: By class, its slots.
    slots: list[list[Slot]] = field(init=False)
    counts: Counter[FoldedPair] = field(factory=Counter, init=False)

    def __attrs_post_init__(self) -> None:
        ends: list[list[tuple[int, int, int, int]]] = [[] for _ in self.looks]  # kind, end, the other one, the pair
        for p, (kind, u, v) in enumerate(self.pairs):
            ends[u].append((kind, 0, v, p))
            ends[v].append((kind, 1, u, p))
        classes = _numbered(
            (look, tuple(sorted((kind, end) for kind, end, _, _ in of)))
            for look, of in zip(self.looks, ends, strict=True)
        )
        for _ in range(self.hops):
            classes = _numbered(
                (classes[v], tuple(sorted((kind, end, classes[u]) for kind, end, u, _ in of)))
                for v, of in enumerate(ends)
            )
        self.classes = classes
        self.members = [[] for _ in range(max(classes, default=-1) + 1)]
        for v, number in enumerate(classes):
            self.members[number].append(v)
        self.slots = [[] for _ in self.members]
        at: dict[tuple[int, int], int] = {}  # a pair and an end -> the slot's number
        for v, of in enumerate(ends):
            # Pairs of one kind in the order of what they lead to, so that alike variables have them alike.
            of.sort(key=lambda each: (*each[:2], classes[each[2]], each[3]))
            self.slots[classes[v]] = [each[:2] for each in of]
            at.update({(p, end): number for number, (_, end, _, p) in enumerate(of)})
        for p, (kind, u, v) in enumerate(self.pairs):
            self.counts[kind, classes[u], at[p, 0], classes[v], at[p, 1]] += 1


def _numbered(keys: Iterable[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
