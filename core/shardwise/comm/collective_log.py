"""What a rank has issued over a process group: a digest that rolls over all calls, and the last ones with their sites.

Every collective of shardwise is recorded, those of compiled graphs too; nothing is sent. A thread compares the digests
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

__all__ = [
    "KEPT",
    "Call",
    "CollectiveLog",
    "call_code",
    "compare_with",
    "comparing",
    "in_words",
    "kind_of",
    "subject_code",
]

KEPT = 1024
"""Calls that are kept of a process group."""

_ROOM = 2 * KEPT  # a power of two; a thread may read the oldest call that is kept while others are recorded
_MASK = _ROOM - 1
_TOGETHER = 64  # calls for which a digest is rolled at a time
_AGAIN = _TOGETHER - 1  # and one of so many calls looks for its line again
_MOST = 4096  # calls that are told apart by the one before them
_MOST_SUBJECTS = 1 << 16  # texts of tensors that are kept

_STEP = crc32(b"an optimizer step")
_AFTER = "after"  # with which what a call says of optimizer steps begins
_SEVERAL = "for several tensors"

_kinds: dict[int, tuple[str, tuple[int, ...]]] = {}
_subjects: dict[int, str] = {}


def call_code(kind: str, mesh_dims: Sequence[int]) -> int:
    """A number that stands for a kind of collective over some mesh dims, the same on every rank."""
    dims = tuple(mesh_dims)
    code = crc32(f"{kind} {dims}".encode())
    _kinds[code] = kind, dims
    return code


def subject_code(key: str, text: str) -> int:
    """A number that stands for what a collective is issued for, the same on every rank that has the same ``key``."""
    return _named(crc32(key.encode()) or 1, f"for {text}")


def _named(subject: int, text: str) -> int:
    if len(_subjects) >= _MOST_SUBJECTS:
        _subjects.clear()
    _subjects[subject] = text
    return subject


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


class _Entry:
    """A kind of call and where it was made; all such calls of a log are one entry.

    ``code`` is inverted for a call whose bytes depend on the rank. ``next`` is the entry that followed the last time.
    ``subject`` stands for the tensor that the call is for, 0 where that is not said. An entry with the code 0 is no
    call: the call that follows it has its subject.
    """

    __slots__ = ("code", "nbytes", "next", "site", "subject")

    def __init__(self, code: int, nbytes: int, site: Site | None, subject: int = 0) -> None:
        self.code = code
        self.nbytes = nbytes
        self.site = site
        self.subject = subject
        # A call is often followed by one like it, which is for another tensor where that is said.
        self.next = self if not subject else _NO_CALL

    def rolled(self, digest: int) -> int:
        """The digest after this call. A hash of numbers is the same in every process."""
        if self.subject:
            digest = hash((digest, self.subject))
        return hash((digest, self.code)) if self.code < 0 else hash((digest, self.code, self.nbytes))


_NO_CALL = _Entry(0, 0, None)


class CollectiveLog:
    """The calls of this rank over one process group. ``name`` is the group's on every rank, ``ranks`` its global ranks.

    ``work`` is the last call's where waiting for it does not hold up the host, else None.

    A program makes the same calls in the same order, step after step. So each entry knows the one that followed it, and
    a call that follows again costs two comparisons and two references: what a program has pushed out of the caches
    costs more than any arithmetic. Digests are rolled for 64 calls at a time.
    """

    __slots__ = (
        "__weakref__",
        "_at",
        "_calls",
        "_entries",
        "_group",
        "_rolled",
        "_subjects",
        "count",
        "holds_work",
        "name",
        "ranks",
        "steps",
        "work",
    )

    def __init__(self, name: str = "", ranks: Sequence[int] = (), *, holds_work: bool = False) -> None:
        self._group = f"{name}-{sha256(repr(tuple(ranks)).encode()).hexdigest()[:12]}"
        self.ranks = tuple(ranks)
        self.holds_work = holds_work
        # By a call and the one before it.
        self._entries: dict[tuple[int, ...], _Entry] = {}
        self._subjects: dict[int, _Entry] = {}
        self.start_anew(0)

    def start_anew(self, epoch: int) -> None:
        """Forget all calls; every rank does this after the same ones. ``epoch`` becomes part of the name."""
        self.name = f"{self._group}-{epoch}"
        self.work: Any = None
        self.count = 0
        self.steps = 0  # of optimizers, since the first call
        self._at = _Entry(0, 0, None)
        self._calls = [self._at] * _ROOM
        self._rolled = [0] * (_ROOM // _TOGETHER)  # digests after every 64th call

    def record(self, code: int, nbytes: int) -> None:
        """A call is issued now that has the same bytes on every rank."""
        count = self.count
        entry = self._at.next
        if entry.code != code or entry.nbytes != nbytes or not count & _AGAIN:
            entry = self._entry(code, nbytes)
        self._at = self._calls[count & _MASK] = entry
        self.count = count + 1

    def tell_subject(self, subject: int) -> None:
        """The next call is for the tensor that a number stands for, of :func:`subject_code`. Several add up."""
        at, added = self._at, subject
        if at.code == 0 and at.subject:
            subject = hash((at.subject, subject))
        known = self._subjects.get(subject)
        if known is None:
            before = _subjects.get(at.subject, "") if subject != added else ""
            if before.startswith(_AFTER):
                also = _subjects.get(added, _SEVERAL)
                _named(subject, "after optimizer steps" if also.startswith(_AFTER) else f"{before}, {also}")
            if len(self._subjects) >= _MOST:
                self._subjects.clear()
            known = self._subjects[subject] = _Entry(0, 0, None, subject)
        self._at = known

    def tell_step(self) -> None:
        """An optimizer step begins that all ranks make: the next call comes after it."""
        if self.count:  # as on the other ranks, which may have this log since another moment
            self.steps += 1
            self.tell_subject(_named(_STEP, f"{_AFTER} an optimizer step"))

    def record_uneven(self, code: int, nbytes: int) -> None:
        """A call is issued now whose bytes depend on the rank."""
        count, code = self.count, ~code
        entry = self._at.next
        if entry.code != code or entry.nbytes != nbytes or not count & _AGAIN:
            entry = self._entry(code, nbytes)
        self._at = self._calls[count & _MASK] = entry
        self.count = count + 1

    def _entry(self, code: int, nbytes: int) -> _Entry:
        """The entry of a call that does not follow as before, or of every 64th."""
        count, last = self.count, self._at
        if not count & _AGAIN and count:
            digest = self._roll(count - _TOGETHER, count)
            self._rolled[(count & _MASK) // _TOGETHER] = digest
        # A frame takes a microsecond to look at. A call that follows the same call as before is taken to be at the same
        # line; now and then it is looked at again.
        subject = 0 if last.code else last.subject
        context = (last.code, last.nbytes, subject, code, nbytes) if code >= 0 else (last.code, subject, code)
        entry = self._entries.get(context)
        looks = entry is None or not count & _AGAIN
        site = site_of(inspect.currentframe()) if looks or entry is None else entry.site
        if entry is None or entry.site != site or entry.nbytes != nbytes:
            if len(self._entries) >= _MOST:
                self._entries.clear()
            entry = self._entries[context] = _Entry(code, nbytes, site, subject)
        last.next = entry
        return entry

    def _roll(self, start: int, number: int) -> int:
        """The digest after some number of calls, of which ``start``, a multiple of 64, are rolled already."""
        digest = self._rolled[(start & _MASK) // _TOGETHER] if start else 0
        for i in range(start, number):
            digest = self._calls[i & _MASK].rolled(digest)
        return digest

    def _compare_and_record(self, code: int, nbytes: int) -> None:
        comparing[-1](self, code, nbytes)
        _record(self, code, nbytes)

    def _compare_and_record_uneven(self, code: int, nbytes: int) -> None:
        comparing[-1](self, code, None)
        _record_uneven(self, code, nbytes)

    # -- for the thread that compares; calls may be recorded meanwhile --

    @property
    def digest(self) -> int:
        """The digest after all calls."""
        return self.digest_after(self.count) or 0

    def digests(self) -> dict[int, int]:
        """Digests after some numbers of calls, which other ranks will have chosen as well: few, up to the last call."""
        count = self.count
        chosen = {count} | {((count >> k) - back) << k for k in range(10) for back in (0, 1)}
        found = {n: self.digest_after(n) for n in sorted(chosen)}
        return {n: digest for n, digest in found.items() if digest is not None}

    def digest_after(self, number: int) -> int | None:
        """The digest after so many calls, None where it is not known or no longer."""
        if not 0 < number <= self.count or self.count - number >= KEPT:
            return None
        digest = self._roll((number - 1) // _TOGETHER * _TOGETHER, number)
        return digest if self.count - number < KEPT else None

    def call(self, number: int) -> Call | None:
        """The call with a number, None where it is not known or no longer."""
        digest = self.digest_after(number)
        if digest is None:
            return None
        entry = self._calls[(number - 1) & _MASK]
        code = ~entry.code if entry.code < 0 else entry.code
        subject = f", {_subjects.get(entry.subject, _SEVERAL)}" if entry.subject else ""
        return Call(number, f"{in_words(code, entry.nbytes)}, {in_line(entry.site)}{subject}", digest)

    def calls(self) -> list[Call]:
        """All calls that are kept, in order."""
        count = self.count
        found = (self.call(number) for number in range(max(1, count - KEPT + 1), count + 1))
        return [call for call in found if call is not None]


# -- what compares a call over the ranks before it is issued -----------------------------------------------------------

Compare = Callable[[CollectiveLog, int, int | None], None]

comparing: list[Compare] = []
"""The last one compares; empty unless a program asks for that."""

_record, _record_uneven = CollectiveLog.record, CollectiveLog.record_uneven


def compare_with(now: list[Compare]) -> None:
    """Compare each call of all logs with the last of some functions from now on; with none, only record.

    The methods that record are replaced, so that a record has nothing to look at while nobody compares.
    """
    comparing[:] = now
    names = ("record", "record_uneven")
    methods = (CollectiveLog._compare_and_record, CollectiveLog._compare_and_record_uneven)  # noqa: SLF001
    for name, method in zip(names, methods if now else (_record, _record_uneven), strict=True):
        setattr(CollectiveLog, name, method)
