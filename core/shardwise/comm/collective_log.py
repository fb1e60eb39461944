"""What a rank has issued over a process group: a digest that rolls over all calls, and the last ones with their sites.

Every collective of shardwise is recorded, in less than a microsecond; nothing is sent. A thread compares the digests
of ranks (:mod:`shardwise.comm.call_posts`). What ranks compare of a call is its kind, reduction and mesh dims, and its
bytes where the kind has the same on all ranks; those of an exchange or a shift depend on the rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any
from zlib import crc32

from attrs import frozen

from shardwise.comm.call_sites import Site, in_line, site_of

__all__ = ["KEPT", "Call", "CollectiveLog", "call_code", "comparing", "in_words", "kind_of"]

KEPT = 1024
"""Calls that are kept of a process group."""

_MASK = KEPT - 1  # the number is a power of two
_AGAIN = 63  # every 64th call looks for its line
_MOST = 4096  # lines that are remembered

# What compares a call over the ranks before it is issued; empty unless a program asks for that.
comparing: list[Callable[[CollectiveLog, int, int | None], None]] = []

_kinds: dict[int, tuple[str, tuple[int, ...]]] = {}


def call_code(kind: str, mesh_dims: Sequence[int]) -> int:
    """A number that stands for a kind of collective over some mesh dims, the same on every rank."""
    dims = tuple(mesh_dims)
    code = crc32(f"{kind} {dims}".encode())
    _kinds[code] = kind, dims
    return code


def kind_of(code: int) -> tuple[str, tuple[int, ...]]:
    """The kind and mesh dims of a code."""
    return _kinds.get(code, ("collective", ()))


def in_words(code: int, nbytes: int | None) -> str:
    """A call in words; None for bytes that depend on the rank."""
    kind, dims = kind_of(code)
    dims_text = f"mesh dim{'s' if len(dims) > 1 else ''} {', '.join(map(str, dims))}"
    return f"{kind} over {dims_text}" + ("" if nbytes is None else f" of {nbytes} bytes")


@frozen
class Call:
    """One collective of a rank in words, to be shown to other ranks. ``number`` counts from 1."""

    number: int
    text: str
    digest: int

    def __str__(self) -> str:
        return self.text


class CollectiveLog:
    """The calls of this rank over one process group. ``name`` is the group's on every rank, ``ranks`` its global ranks.

    ``work`` is the last call's where waiting for it does not hold up the host, else None.
    """

    __slots__ = (
        "__weakref__",
        "_calls",
        "_group",
        "_last",
        "_sites",
        "count",
        "digest",
        "holds_work",
        "name",
        "ranks",
        "work",
    )

    def __init__(self, name: str = "", ranks: Sequence[int] = (), *, holds_work: bool = False) -> None:
        self._group = f"{name}-{sha256(repr(tuple(ranks)).encode()).hexdigest()[:12]}"
        self.ranks = tuple(ranks)
        self.holds_work = holds_work
        # By a hash of a call and the one before it, where it was made last.
        self._sites: dict[int | None, Site | None] = {}
        self.start_anew(0)

    def start_anew(self, epoch: int) -> None:
        """Forget all calls; every rank does this after the same ones. ``epoch`` becomes part of the name."""
        self.name = f"{self._group}-{epoch}"
        self.work: Any = None
        self.count = 0
        self.digest = 0
        self._last = 0
        self._calls: list[tuple[int, int, int, Site | None] | None] = [None] * KEPT

    def record(self, code: int, nbytes: int) -> None:
        """A call is issued now that has the same bytes on every rank."""
        if comparing:
            comparing[-1](self, code, nbytes)
        count = self.count
        # A frame takes a microsecond to look at. A call that follows the same call as before is taken to be at the same
        # line; now and then it is looked at again.
        context = hash((self._last, code, nbytes))
        try:
            site = self._sites[context if count & _AGAIN else None]
        except KeyError:
            site = self._look(context)
        self._last = code ^ nbytes
        # A hash of numbers is the same in every process.
        self.digest = digest = hash((self.digest, code, nbytes))
        self._calls[count & _MASK] = digest, code, nbytes, site
        self.count = count + 1

    def record_uneven(self, code: int, nbytes: int) -> None:
        """A call is issued now whose bytes depend on the rank."""
        if comparing:
            comparing[-1](self, code, None)
        count = self.count
        context = hash((self._last, code))
        try:
            site = self._sites[context if count & _AGAIN else None]
        except KeyError:
            site = self._look(context)
        self._last = code
        self.digest = digest = hash((self.digest, code))
        self._calls[count & _MASK] = digest, code, nbytes, site
        self.count = count + 1

    def _look(self, context: int) -> Site | None:
        if len(self._sites) >= _MOST:
            self._sites.clear()
        site = self._sites[context] = site_of(inspect.currentframe())
        return site

    # -- for the thread that compares; calls may be recorded meanwhile --

    def digests(self) -> dict[int, int]:
        """Digests after some numbers of calls, which other ranks will have chosen as well: few, up to the last call."""
        count = self.count
        chosen = {count} | {((count >> k) - back) << k for k in range(10) for back in (0, 1)}
        found = {n: self.digest_after(n) for n in sorted(chosen)}
        return {n: digest for n, digest in found.items() if digest is not None}

    def digest_after(self, number: int) -> int | None:
        """The digest after so many calls, None where it is not known or no longer."""
        if not 0 < number <= self.count:
            return None
        call = self._calls[(number - 1) & _MASK]
        return call[0] if call is not None and self.count - number < KEPT else None

    def call(self, number: int) -> Call | None:
        """The call with a number, None where it is not known or no longer."""
        if not 0 < number <= self.count:
            return None
        entry = self._calls[(number - 1) & _MASK]
        if entry is None or self.count - number >= KEPT:
            return None
        digest, code, nbytes, site = entry
        return Call(number, f"{in_words(code, nbytes)}, {in_line(site)}", digest)

    def calls(self) -> list[Call]:
        """All calls that are kept, in order."""
        count = self.count
        found = (self.call(number) for number in range(max(1, count - KEPT + 1), count + 1))
        return [call for call in found if call is not None]
