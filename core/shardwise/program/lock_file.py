"""The lockfile of a step's communication: what one rank sends, as text that a person reviews, and reading it.

The text is sorted and aligned. The same step gives the same bytes in every process. It has no lines of the program: an
edit above a line would change it. Layers that send the same are one row, as ``blocks.{0-11}.wq``, because a reviewer
reads one row rather than twelve, and the pattern names each of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from shardwise.errors import LockFileError, LockFitError, LockVersionError
from shardwise.kernel.foreign_files import read_text, reason, short
from shardwise.program.lock_patterns import collapsed, escaped, expanded, module_order, unescaped

__all__ = ["CAUSES", "HEAD", "MEMORY", "Lock", "PHASES", "Row", "parse", "patterns_of", "read_lock"]

VERSION = 2
PHASES = ("forward", "backward", "optimizer")
CAUSES = ("implicit", "explicit")
MEMORY = ("parameters", "buffers", "gradients", "optimizer", "kept", *(f"peak in {phase}" for phase in PHASES))
"""What the memory of a rank is counted as: see :class:`shardwise.tools.rehearse.Memory`."""

HEAD = "# What one rank sends in a step. Written by `shardwise lock`, compared by `shardwise lock --check`."
_COLUMNS = ("# times", "bytes", "kind", "mesh dims", "module", "op", "cause", "why")
_MERGED = ("<<<<<<<", "|||||||", "=======", ">>>>>>>")
_MOST_ROWS = 200_000  # that are read: a small file may stand for many
_LONGEST = 500  # letters of what a message says of a line
_RIGHT = 2  # so many columns are numbers


@frozen(order=True)
class Row:
    """What one module sends for one reason: how often, and how many bytes a rank sends in, all times together."""

    phase: str
    module: str
    op: str
    kind: str
    mesh_dims: tuple[str, ...]
    implicit: bool
    why: str
    times: int = field(order=False)
    nbytes: int = field(order=False)

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells rows apart: all but the figures."""
        return (self.phase, self.module, self.op, self.kind, self.mesh_dims, self.implicit, self.why)

    @property
    def place(self) -> tuple[Any, ...]:
        """The order of rows in a file."""
        module = module_order(self.module)
        return (PHASES.index(self.phase), module, self.op, self.kind, self.mesh_dims, self.why, self.implicit)


@frozen
class Lock:
    """The content of a lockfile. ``memory`` has bytes by the names of :data:`MEMORY`, without those that are 0.

    ``device`` is the type of the devices whose kernels the step runs. ``lines`` has the line of each row in the file
    that was read.
    """

    program: str
    mesh_names: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    device: str
    plan: str
    memory: Mapping[str, int]
    rows: tuple[Row, ...]
    source: str = field(default="", kw_only=True, eq=False)
    lines: Mapping[tuple[Any, ...], int] = field(factory=dict, kw_only=True, eq=False)

    @property
    def mesh_text(self) -> str:
        """The mesh as people write it: ``pod 8, tp 16, dp 8``."""
        return _mesh_text(self.mesh_names, self.mesh_shape)

    @property
    def times(self) -> int:
        """How many collectives a rank issues."""
        return sum(row.times for row in self.rows)

    @property
    def nbytes(self) -> int:
        """How many bytes a rank sends in."""
        return sum(row.nbytes for row in self.rows)

    def text(self) -> str:
        """The whole file."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield HEAD
        for name, value in zip(_TOP, (str(VERSION), self.program, self.mesh_text, self.device, self.plan), strict=True):
            yield f"{name:8} {value if name == 'mesh' else escaped(value)}"
        yield ""
        yield "[memory]  # bytes of one rank"
        memory = [(name, f"{self.memory[name]:,}") for name in MEMORY if self.memory.get(name)]
        width = max((len(figure) for _, figure in memory), default=0)
        yield from (f"{name:24}{figure:>{width}}" for name, figure in memory)
        for phase in PHASES:
            yield ""
            yield f"[{phase}]"
            yield from _table([_cells(row) for row in patterns_of(r for r in self.rows if r.phase == phase)])
        yield ""
        yield f"end      {self.times:,} collectives, {self.nbytes:,} bytes"

    def check_fits(self, asked: str, program: str, names: Sequence[str], shape: Sequence[int], device: str) -> None:
        """Raise :class:`LockFitError` where the file is for another mesh, device or program."""
        pairs = {
            "program": (self.program, program),
            "mesh": (self.mesh_text, _mesh_text(names, shape)),
            "device": (self.device, device),
        }
        for name, (has, wanted) in pairs.items():
            line = _TOP.index(name) + 2
            if has != wanted:
                raise LockFitError(
                    asked=asked,
                    found=f"{self.source}, line {line}: it is of the {name} {short(has)}, and this is {wanted}",
                    do="Compare what it was written for, or name another file with --out.",
                    path=self.source,
                    line=line,
                )


_TOP = ("version", "program", "mesh", "device", "plan")


def _mesh_text(names: Sequence[str], shape: Sequence[int]) -> str:
    return ", ".join(f"{escaped(name, ', ')} {n}" for name, n in zip(names, shape, strict=True))


def patterns_of(rows: Iterable[Row]) -> list[Row]:
    """Rows whose modules differ by numbers alone, and that send the same each, as one: figures are those of all."""
    alike: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        alike.setdefault((*evolve(row, module="").key, row.times, row.nbytes), []).append(row)
    patterns = []
    for group in alike.values():
        for pattern in collapsed(row.module for row in group):
            count, one = len(expanded(pattern)), group[0]
            patterns.append(evolve(one, module=pattern, times=one.times * count, nbytes=one.nbytes * count))
    return sorted(patterns, key=lambda row: (row.place, row.times, row.nbytes))


def _cells(row: Row) -> list[str]:
    """The columns of a row whose module is a pattern."""
    dims = ",".join(escaped(name, ",") for name in row.mesh_dims)
    texts = (row.kind, row.op, CAUSES[not row.implicit], row.why)
    kind, op, cause, why = map(escaped, texts)
    return [f"{row.times:,}", f"{row.nbytes:,}", kind, dims or "-", row.module or "-", op, cause, why]


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Aligned columns. Widths are multiples of eight, so that a longer row rarely changes the others' blanks."""
    if not rows:
        return
    cells = [_COLUMNS, *rows]
    widths = [-(-max(len(row[i]) for row in cells) // 8) * 8 for i in range(len(_COLUMNS))]
    for row in cells:
        parts = [f"{c:>{w}}" if i < _RIGHT else f"{c:{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        first = parts[0].replace(" # times", "# times") if row is _COLUMNS else parts[0]
        yield "  ".join([first, *parts[1:]]).rstrip()


# -- reading ---------------------------------------------------------------------------------------------------------

_END = re.compile(r"end +(\S+) collectives, (\S+) bytes")


def parse(text: str, source: str) -> Lock:
    """The content of a lockfile's text.

    Raises :class:`LockVersionError` for a file of another version, and :class:`LockFileError`, with the line, for any
    other text that is not a whole lockfile. Nothing is read in part.
    """
    return _Reader(text.replace("\r\n", "\n").split("\n"), source).lock()


def read_lock(path: Path) -> Lock:
    """The content of a lockfile. Raises as :func:`parse`, also for a file that is not there or is not text."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise LockFileError(
            asked=f"read the lockfile {path}",
            found=f"it is not text: {error}" if isinstance(error, UnicodeDecodeError) else reason(error),
            do="Write it with `shardwise lock`.",
            path=str(path),
            line=None,
        ) from error
    return parse(text, str(path))


@frozen
class _Reader:
    texts: Sequence[str]
    source: str

    def lock(self) -> Lock:
        head = self.head()
        sections: dict[str, list[tuple[int, str]]] = {}
        here: list[tuple[int, str]] | None = None
        end = None
        for number, line in enumerate(self.texts, 1):
            section = re.match(r"\[(\w+)\](?P<rest>.*)", line)
            if number <= len(_TOP) + 1 or not line.strip() or line.lstrip().startswith("#"):
                continue
            if line.startswith(_MERGED):
                raise self.wrong(f"{line[:60]!r} is what a merge leaves where two versions differ", number)
            if end is not None:
                raise self.wrong("nothing follows the end", number)
            if section is not None:
                rest = section["rest"].strip()
                if section[1] not in ("memory", *PHASES) or section[1] in sections or rest.partition("#")[0]:
                    raise self.wrong(f"{line[:60]!r} has no place here", number)
                here = sections.setdefault(section[1], [])
            elif line.startswith("end "):
                end = number
            elif here is None:
                raise self.wrong(f"{line[:60]!r} has no place here", number)
            else:
                here.append((number, line))
        for name in ("memory", *PHASES):
            if name not in sections:
                raise self.wrong(f"it has no [{name}]: it is cut short", len(self.texts))
        if end is None:
            raise self.wrong("it has no end: it is cut short", len(self.texts))
        rows: dict[tuple[Any, ...], tuple[Row, int]] = {}
        for phase in PHASES:
            for number, line in sections[phase]:
                self.add(rows, phase, line, number)
        lock = Lock(
            program=head["program"],
            mesh_names=tuple(name for name, _ in self.mesh(head["mesh"])),
            mesh_shape=tuple(n for _, n in self.mesh(head["mesh"])),
            device=head["device"],
            plan=head["plan"],
            memory=self.memory(sections["memory"]),
            rows=tuple(sorted((row for row, _ in rows.values()), key=lambda row: row.place)),
            source=self.source,
            lines={key: number for key, (_, number) in rows.items()},
        )
        self.check_end(lock, end)
        return lock

    def head(self) -> dict[str, str]:
        if not self.texts[0].startswith(HEAD[:32]):
            raise self.wrong("it is not a lockfile of communication", 1)
        values = {}
        for number, name in enumerate(_TOP, 2):
            line = self.texts[number - 1] if number <= len(self.texts) else ""
            if not line.startswith(f"{name} "):
                at = min(number, len(self.texts))
                raise self.wrong(f"it has no {name!r}: it is cut short, or not a lockfile", at)
            word = line[len(name) :].strip()
            values[name] = word if name == "mesh" else self.word(word, number)
            if name == "version" and values[name] != str(VERSION):
                is_earlier = values[name] in map(str, range(1, VERSION))
                raise LockVersionError(
                    asked=f"read the lockfile {self.source}",
                    found=f"line {number}: it is of version {short(values[name])}, and this release reads version "
                    f"{VERSION}",
                    do="Write it again with this release, or read it with the release that wrote it.",
                    path=self.source,
                    line=number,
                    version=values[name],
                    is_earlier=is_earlier,
                )
        return values

    def mesh(self, text: str) -> list[tuple[str, int]]:
        line = _TOP.index("mesh") + 2
        dims = [word.rpartition(" ") for word in text.split(", ")]
        if not all(name and re.fullmatch(r"[1-9]\d{0,8}", n, re.ASCII) for name, _, n in dims):
            raise self.wrong(f"{text[:60]!r} is not a mesh", line)
        return [(self.word(name, line), int(n)) for name, _, n in dims]

    def memory(self, lines: Sequence[tuple[int, str]]) -> dict[str, int]:
        memory: dict[str, int] = {}
        for number, line in lines:
            name, *rest = re.split(r"  +", line.strip())
            if name not in MEMORY or name in memory or len(rest) != 1:
                raise self.wrong(f"{line.strip()[:60]!r} is not a figure of the memory", number)
            memory[name] = self.count(rest[0], number)
        return memory

    def add(self, rows: dict[tuple[Any, ...], tuple[Row, int]], phase: str, line: str, number: int) -> None:
        words = re.split(r"  +", line.strip(" "))
        if len(words) != len(_COLUMNS):
            raise self.wrong(f"it has {len(words)} columns, and a row has {len(_COLUMNS)}", number)
        times, nbytes = self.count(words[0], number), self.count(words[1], number)
        kind, op, cause, why = (self.word(words[i], number) for i in (2, 5, 6, 7))
        dims = () if words[3] == "-" else tuple(self.word(word, number) for word in words[3].split(","))
        if cause not in CAUSES:
            raise self.wrong(f"{cause!r} is not a cause; causes are {' and '.join(CAUSES)}", number)
        try:
            modules = expanded("" if words[4] == "-" else words[4])
        except ValueError as error:
            raise self.wrong(str(error), number) from error
        if times % len(modules) or nbytes % len(modules) or not times:
            raise self.wrong(f"{times} times and {nbytes} bytes are not those of {len(modules)} modules", number)
        if len(rows) + len(modules) > _MOST_ROWS:
            raise self.wrong(f"it stands for more than {_MOST_ROWS:,} rows", number)
        each = times // len(modules), nbytes // len(modules)
        for module in modules:
            one = Row(phase, module, op, kind, dims, cause == CAUSES[0], why, *each)
            if one.key in rows:
                raise self.wrong(f"line {rows[one.key][1]} says the same of {module or 'no module'}", number)
            rows[one.key] = one, number

    def check_end(self, lock: Lock, number: int) -> None:
        """The sums: a file that lost rows, or whose figures were edited, is not read."""
        match = _END.fullmatch(self.texts[number - 1].strip())
        if match is None:
            raise self.wrong("it does not end as a lockfile does", number)
        sums = self.count(match[1], number), self.count(match[2], number)
        if sums != (lock.times, lock.nbytes):
            raise self.wrong(
                f"its rows have {lock.times:,} collectives and {lock.nbytes:,} bytes, and the end says "
                f"{sums[0]:,} and {sums[1]:,}",
                number,
            )

    def word(self, word: str, number: int) -> str:
        try:
            return unescaped(word)
        except ValueError as error:
            raise self.wrong(str(error), number) from error

    def count(self, word: str, number: int) -> int:
        if not re.fullmatch(r"\d{1,3}(,\d{3}){0,6}", word, re.ASCII):
            raise self.wrong(f"{word[:60]!r} is not a number as 1,024", number)
        return int(word.replace(",", ""))

    def wrong(self, found: str, line: int) -> LockFileError:
        return LockFileError(
            asked=f"read the lockfile {self.source}",
            found=f"line {line}: {short(found, _LONGEST)}",
            do="Write it again with `shardwise lock`.",
            path=self.source,
            line=line,
        )
