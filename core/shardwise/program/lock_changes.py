"""What is different between two lockfiles, and budgets for what a step may send."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from shardwise.errors import CallError
from shardwise.kernel.plurals import counted
from shardwise.program.amounts import parse_size, size_text
from shardwise.program.lock_file import MEMORY, PHASES, Lock, Row, patterns_of

__all__ = [
    "OTHERWISE",
    "Budget",
    "Change",
    "MemoryChange",
    "changes",
    "difference_text",
    "memory_changes",
    "read_budget",
    "row_text",
]

ANY = "*"


@frozen
class Change:
    """Rows that are in one lockfile alone, or with other figures: ``added``, ``gone``, ``grown`` or ``shrunk``.

    ``row`` has a pattern of modules, and the figures of all of them together; ``times`` and ``nbytes`` are those of the
    earlier file. ``line`` is the line of the program that sends it, or where it is gone the line of the lockfile.
    """

    kind: str
    row: Row
    times: int
    nbytes: int
    line: str = ""

    @property
    def more(self) -> int:
        """How many bytes more than before."""
        return (0 if self.kind == "gone" else self.row.nbytes) - self.nbytes

    def __str__(self) -> str:
        if self.kind in ("added", "gone"):
            return row_text(self.row)
        before, now = _figures(self.times, self.nbytes), _figures(self.row.times, self.row.nbytes)
        return row_text(self.row, f"{before} before, {now} now")


@frozen
class MemoryChange:
    """A figure of the memory that is another one: ``grown`` or ``shrunk``."""

    kind: str
    name: str
    before: int
    now: int

    def __str__(self) -> str:
        return f"memory, {self.name}: {size_text(self.before)} before, {size_text(self.now)} now"


def row_text(row: Row, figures: str = "") -> str:
    """A row in one line, where its module may be a pattern."""
    where = f"{row.phase} {row.kind} over {', '.join(row.mesh_dims)} at {row.module or '(no module)'}"
    cause = "implicit: " if row.implicit else ""
    return f"{where}: {figures or _figures(row.times, row.nbytes)} | {row.op} | {cause}{row.why}"


def _figures(times: int, nbytes: int) -> str:
    return f"{times:,} x, {size_text(nbytes)}"


def changes(before: Lock, now: Lock, line_of: Callable[[Row], str] = lambda _row: "") -> list[Change]:
    """What is different, module by module, with repeated layers as one; most bytes first within a kind.

    ``line_of`` gives the line of the program for a row of ``now``.
    """
    olds, news = ({row.key: row for row in lock.rows} for lock in (before, now))
    groups: dict[tuple[str, int, int, str], list[Row]] = {}
    for key in [*news, *(key for key in olds if key not in news)]:
        old, new = olds.get(key), news.get(key)
        kind = _kind(old, new)
        if kind:
            row = new if new is not None else olds[key]
            earlier = (0, 0) if old is None else (old.times, old.nbytes)
            where = line_of(row) if new is not None else _line_in(before, key)
            groups.setdefault((kind, *earlier, where), []).append(row)
    listed = [
        Change(kind, row, times * count, nbytes * count, where)
        for (kind, times, nbytes, where), rows in groups.items()
        for row, count in _counted(rows)
    ]
    return sorted(listed, key=lambda c: (_KINDS.index(c.kind), -abs(c.more), c.row.place, c.line))


_KINDS = ("added", "grown", "gone", "shrunk")


def _kind(old: Row | None, new: Row | None) -> str:
    if old is None or new is None:
        return "added" if old is None else "gone"
    if (new.nbytes, new.times) == (old.nbytes, old.times):
        return ""
    return "grown" if (new.nbytes, new.times) > (old.nbytes, old.times) else "shrunk"


def _line_in(lock: Lock, key: tuple[Any, ...]) -> str:
    return f"{lock.source}:{lock.lines[key]}" if key in lock.lines else ""


def _counted(rows: Sequence[Row]) -> Iterator[tuple[Row, int]]:
    """Patterns of rows, each with the number of modules that it stands for."""
    ones = [evolve(row, times=1, nbytes=1) for row in rows]
    figures = {(row.key): (row.times, row.nbytes) for row in rows}
    by_figures: dict[tuple[int, int], list[Row]] = {}
    for row in ones:
        by_figures.setdefault(figures[row.key], []).append(row)
    for (times, nbytes), alike in by_figures.items():
        for pattern in patterns_of(alike):
            count = pattern.times
            yield evolve(pattern, times=times * count, nbytes=nbytes * count), count


def memory_changes(before: Lock, now: Lock) -> list[MemoryChange]:
    """The figures of the memory that are others."""
    pairs = ((name, before.memory.get(name, 0), now.memory.get(name, 0)) for name in MEMORY)
    return [MemoryChange("grown" if new > old else "shrunk", name, old, new) for name, old, new in pairs if new != old]


def difference_text(before: Lock, now: Lock, line_of: Callable[[Row], str] = lambda _row: "") -> Iterator[str]:
    """What is different, in lines for people; nothing for locks with the same text."""
    if before.text() == now.text():
        return
    rows, memory = changes(before, now, line_of), memory_changes(before, now)
    for kind in dict.fromkeys([*(c.kind for c in rows), *(m.kind for m in memory)]):
        yield f"{kind}:"
        for change in rows:
            if change.kind == kind:
                yield f"  {change}"
                yield from [f"    {change.line}"] if change.line else []
        yield from (f"  {change}" for change in memory if change.kind == kind)
    if not (rows or memory):
        yield OTHERWISE


OTHERWISE = "It is written in another way, or for another program or plan."
_MOST_SHOWN = 5  # rows of a budget that is exceeded

# -- budgets ---------------------------------------------------------------------------------------------------------


@frozen
class Budget:
    """The most bytes that a rank may send in over a mesh dim in a phase; ``*`` stands for any."""

    mesh_dim: str
    phase: str
    limit: int

    def __str__(self) -> str:
        return f"{self.mesh_dim} {self.phase} {size_text(self.limit)}"

    def rows(self, lock: Lock) -> list[Row]:
        """The rows that it is about, repeated layers as one, most bytes first."""
        rows = (row for row in lock.rows if self.phase in (ANY, row.phase))
        over = (row for row in rows if self.mesh_dim in (ANY, *row.mesh_dims))
        return sorted(patterns_of(over), key=lambda row: (-row.nbytes, row.place))

    def used(self, lock: Lock) -> int:
        """The bytes that the step sends in."""
        return sum(row.nbytes for row in self.rows(lock))

    def excess_text(self, lock: Lock) -> Iterator[str]:
        """What a step sends over the budget, in lines for people; nothing within it."""
        used = self.used(lock)
        if used > self.limit:
            yield f"over the budget {self}: {size_text(used)}, most of it from"
            yield from (f"  {row_text(row)}" for row in self.rows(lock)[:_MOST_SHOWN])


def read_budget(text: str, mesh_names: Sequence[str]) -> Budget:
    """The budget ``tp forward 10GiB``. Raises :class:`CallError` for another text, mesh dim or phase."""
    words = text.split(None, 2)
    names: Mapping[int, Sequence[str]] = {0: (*mesh_names, ANY), 1: (*PHASES, ANY)}
    found = "" if len(words) == 3 else f"it has {counted(len(words), 'word')}"  # noqa: PLR2004  # mesh dim, phase, size
    for i, known in names.items():
        if not found and words[i] not in known:
            found = f"{words[i]!r} is not one of {', '.join(known)}"
    if not found:
        try:
            return Budget(words[0], words[1], parse_size(words[2]))
        except ValueError as error:
            found = str(error)
    raise CallError(
        asked=f"hold a step to the budget {text!r}",
        found=found,
        do="Write a mesh dim, a phase and a size: 'tp forward 10GiB'; * stands for any mesh dim or phase.",
        budget=text,
    )
