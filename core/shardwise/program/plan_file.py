"""The plan file: a plan of a whole step that a person reads and reviews, and its text.

It is TOML, written in a readable and stable order: the same program gives the same bytes in every process.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from attrs import field, frozen

from shardwise.errors import PlanFileError, PlanVersionError, ShardingError
from shardwise.kernel.foreign_files import load_toml, reason, short
from shardwise.kernel.placements import REPLICATE, Placement, parse_placement, show
from shardwise.program.step_graph import Places

__all__ = ["Layout", "Line", "PlanFile", "parse", "patterns_of", "starred"]

VERSION = 1

Layout = Mapping[str, str]
"""Placements by mesh dim name, as :func:`show` writes them. A mesh dim that is not there is replicated."""


def starred(name: str) -> str:
    """A qualified name with its numbers as ``*``: the name of all layers."""
    return re.sub(r"\d+", "*", name)


@frozen
class Line:
    """A move of the plan: of a result, or of the ``operand`` with this name.

    ``at`` is the module with its numbers as ``*``, ``to`` the placements on the mesh dims that change, and ``times``
    how often it happens in a step.
    """

    at: str
    op: str
    phase: str
    to: Layout
    why: str = ""
    times: int = 1
    operand: str = ""

    @property
    def place(self) -> tuple[str, str, str]:
        """The module, the op and the phase."""
        return (self.at, self.op, self.phase)

    @property
    def key(self) -> tuple[str, ...]:
        """What tells lines apart: all but the times and the reason."""
        return (self.at, self.op, self.phase, self.operand, json.dumps(self.to))


@frozen(eq=False)
class PlanFile:
    """The content of a plan file.

    ``predicted`` are figures of one rank. ``communication`` has the collectives of each phase, one text for each kind
    and group of mesh dims.
    """

    program: str
    mesh_names: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    figures: str
    predicted: Mapping[str, str | float | int]
    parameters: Mapping[str, Layout]
    inputs: Mapping[str, Layout]
    rests: tuple[Line, ...]
    moves: tuple[Line, ...]
    communication: Mapping[str, Sequence[str]]
    #: Where it was read, for messages.
    source: str = field(default="", kw_only=True)

    @property
    def mesh_text(self) -> str:
        """The mesh as people write it: ``pod 8, tp 16, dp 8``."""
        return ", ".join(f"{name} {n}" for name, n in zip(self.mesh_names, self.mesh_shape, strict=True))

    @property
    def digest(self) -> str:
        """A digest of what the decisions were made for. Figures, reasons and comments are no part of it."""
        lines = [(*line.key, str(line.times)) for line in (*self.rests, *self.moves)]
        mesh = [self.mesh_names, self.mesh_shape]
        layouts = [{name: dict(layout) for name, layout in of.items()} for of in (self.parameters, self.inputs)]
        text = json.dumps([VERSION, mesh, layouts, lines], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def placements_of(self, name: str) -> tuple[str, Places] | None:
        """The pattern of a parameter or buffer and its placements; None if the plan does not have it."""
        for pattern, layout in self.parameters.items():
            if fnmatchcase(name, pattern):
                return pattern, placements_in(layout, self.mesh_names)
        return None

    # -- as text -------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """The whole file."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        mesh = dict(zip(self.mesh_names, self.mesh_shape, strict=True))
        yield f"version = {VERSION}"
        yield f"program = {_quoted(self.program)}"
        yield f"mesh = {_inline(mesh)}"
        yield f"figures = {_quoted(self.figures)}"
        yield "\n[predicted]  # of one rank"
        yield from (f"{name} = {_value(value)}" for name, value in self.predicted.items())
        yield "\n[parameters]  # the first pattern that matches holds"
        width = max((len(_quoted(name)) for name in self.parameters), default=0)
        yield from (f"{_quoted(name):{width}} = {_inline(layout)}" for name, layout in self.parameters.items())
        yield "\n[inputs]"
        yield from (f"{_key(name)} = {_inline(layout)}" for name, layout in self.inputs.items())
        for table, lines in (("rests", self.rests), ("moves", self.moves)):
            for line in lines:
                yield f"\n[[{table}]]"
                yield f"at = {_quoted(line.at)}"
                yield f"op = {_quoted(line.op)}"
                if line.operand:
                    yield f"operand = {_quoted(line.operand)}"
                yield f"phase = {_quoted(line.phase)}"
                yield f"to = {_inline(line.to)}"
                yield f"times = {line.times}"
                if line.why:
                    yield f"why = {_quoted(line.why)}"
        yield "\n[communication]  # what one rank hands in"
        for phase, uses in self.communication.items():
            yield f"{_key(phase)} = [" + ("" if uses else "]")
            yield from (f"    {_quoted(use)}," for use in uses)
            if uses:
                yield "]"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else _quoted(text)


def _value(value: str | float) -> str:
    return _quoted(value) if isinstance(value, str) else repr(value)


def _inline(values: Mapping[str, str | int]) -> str:
    return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in values.items()) + " }" if values else "{}"


# -- from layouts to patterns ----------------------------------------------------------------------------------------


def layout_text(mesh_names: Sequence[str], placements: Sequence[Placement]) -> Layout:
    """Placements by mesh dim name, without those that are replicated."""
    return {name: show(p) for name, p in zip(mesh_names, placements, strict=True) if p != REPLICATE}


def placements_in(layout: Layout, mesh_names: Sequence[str]) -> Places:
    """The placements by mesh dim."""
    return tuple(parse_placement(layout[n]) if n in layout else REPLICATE for n in mesh_names)


def patterns_of(layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Layouts by pattern: a line for all layers where every name that it matches has that layout, else by name."""
    patterns: dict[str, Layout] = {}
    for name, layout in layouts.items():
        pattern = starred(name)
        if pattern not in patterns:
            agrees = all(other == layout for n, other in layouts.items() if fnmatchcase(n, pattern))
            patterns[pattern if agrees else name] = layout
    # What is exact comes first, since the first match holds.
    lines = dict(sorted(patterns.items(), key=lambda item: ("*" in item[0], item[0])))
    # A line after one that matches all of its names would never hold: norm* also matches norm.
    first = {name if name in lines else next(p for p in lines if fnmatchcase(name, p)) for name in layouts}
    return {pattern: layout for pattern, layout in lines.items() if pattern in first}


# -- reading ---------------------------------------------------------------------------------------------------------

_SECTIONS = ("predicted", "parameters", "inputs", "communication")
_KINDS: dict[type, str] = {dict: "table", list: "list", str: "text"}
_TOP = ("version", "program", "mesh", "figures")


def parse(text: str, source: str) -> PlanFile:
    """The content of a plan file's text.

    Raises :class:`PlanVersionError` for a file of another version, and :class:`PlanFileError`, with the line, for any
    other text that is not a whole plan.
    """
    return _Reader(text, source).plan()


@frozen
class _Reader:
    text: str
    source: str

    def content(self) -> dict[str, Any]:
        """The tables of the file: all those of a plan of this version, and no others."""
        try:
            content = load_toml(self.text)
        except ValueError as error:
            at = re.search(r"at line (\d+)", str(error))
            line = int(at[1]) if at else self.text.count("\n") + 1
            raise self.wrong(f"it is not TOML: {reason(error)}", line) from error
        if "version" not in content:
            raise self.wrong("it has no version, so it is not a plan", 1)
        if type(content["version"]) is not int or content["version"] != VERSION:
            version = short(repr(content["version"]))
            raise PlanVersionError(
                asked=f"read the plan {self.source}",
                found=f"line {self.line('version')}: it is of version {version}, and this release reads version "
                f"{VERSION}",
                do="Plan the program again with this release, or read the file with the release that wrote it.",
                path=self.source,
                version=content["version"],
            )
        for name in (*_TOP, *_SECTIONS):
            if name not in content:
                kind = f"[{name}]" if name in _SECTIONS else repr(name)
                raise self.wrong(f"it has no {kind}: it is cut short, or not a plan", self.text.count("\n") + 1)
        unknown = sorted(content.keys() - {*_TOP, *_SECTIONS, "rests", "moves"})
        if unknown:
            raise self.wrong(f"nothing in a plan is called {unknown[0]!r}", self.line(unknown[0]))
        return content

    def plan(self) -> PlanFile:
        content = self.content()
        mesh = self.table(content["mesh"], "mesh")
        for name, n in mesh.items():
            if not isinstance(n, int) or isinstance(n, bool) or n < 1:
                raise self.wrong(f"mesh dim {name!r} has the size {n!r}", self.line("mesh"))
        names = tuple(mesh)
        communication = {
            phase: tuple(self.text_of(use, phase) for use in self.list_of(uses, phase))
            for phase, uses in self.table(content["communication"], "communication").items()
        }
        for phase in ("forward", "backward"):
            if phase not in communication:
                raise self.wrong(f"[communication] has no {phase!r}: it is cut short", self.text.count("\n") + 1)
        return PlanFile(
            program=self.text_of(content["program"], "program"),
            mesh_names=names,
            mesh_shape=tuple(mesh.values()),
            figures=self.text_of(content["figures"], "figures"),
            predicted=self.predicted(content["predicted"]),
            parameters=self.layouts(content["parameters"], "parameters", names),
            inputs=self.layouts(content["inputs"], "inputs", names),
            rests=self.moves(content.get("rests", []), "rests", names),
            moves=self.moves(content.get("moves", []), "moves", names),
            communication=communication,
            source=self.source,
        )

    def predicted(self, table: Any) -> dict[str, str | float | int]:
        figures = self.table(table, "predicted")
        for name, value in figures.items():
            if not isinstance(value, (str, int, float)):
                raise self.wrong(f"{name!r} is {short(repr(value))}, and not a figure", self.line(name))
        return figures

    def layouts(self, table: Any, name: str, mesh_names: Sequence[str]) -> dict[str, Layout]:
        return {
            pattern: self.layout(layout, mesh_names, partial(self.line, pattern, after=f"[{name}]"))
            for pattern, layout in self.table(table, name).items()
        }

    def layout(self, layout: Any, mesh_names: Sequence[str], line: Callable[[], int]) -> Layout:
        if not isinstance(layout, dict):
            raise self.wrong(f"{short(repr(layout))} is not a table of placements by mesh dim", line())
        for name, placement in layout.items():
            if name not in mesh_names:
                raise self.wrong(f"{short(name)!r} is not a mesh dim; there are {', '.join(mesh_names)}", line())
            try:
                parse_placement(placement)
            except (ShardingError, AttributeError) as error:
                raise self.wrong(f"{short(repr(placement))} is not a placement", line()) from error
        return layout

    def moves(self, lines: Any, table: str, mesh_names: Sequence[str]) -> tuple[Line, ...]:
        starts = [i for i, line in enumerate(self.text.splitlines(), 1) if line.startswith(f"[[{table}]]")]
        return tuple(
            self.move(line, table, mesh_names, starts[k] if k < len(starts) else 1)
            for k, line in enumerate(self.list_of(lines, table))
        )

    def move(self, line: Any, table: str, mesh_names: Sequence[str], start: int) -> Line:
        line = self.table(line, table)
        texts = ("at", "op", "phase", *(("operand",) if table == "moves" else ()))
        for key in (*texts, "to", "times"):
            if key not in line:
                raise self.wrong(f"[[{table}]] has no {key!r}", start)
        for key in line:
            if key not in (*texts, "to", "times", "why"):
                raise self.wrong(f"[[{table}]] has no use for {key!r}", start)
        for key in texts:
            if not isinstance(line[key], str):
                raise self.wrong(f"{key!r} is {line[key]!r}, and it is a text", start)
        if not isinstance(line.get("why", ""), str):
            raise self.wrong(f"'why' is {short(line['why'])!r}, and it is a text", start)
        if not isinstance(line["times"], int) or isinstance(line["times"], bool) or line["times"] < 1:
            raise self.wrong(f"'times' is {line['times']!r}, and it is a number from 1 on", start)
        self.layout(line["to"], mesh_names, lambda: start)
        return Line(**line)

    # -- what is wrong -------------------------------------------------------------------------------------------

    def table(self, value: Any, name: str) -> dict[str, Any]:
        return dict(self.of(dict, value, name))

    def list_of(self, value: Any, name: str) -> list[Any]:
        return list(self.of(list, value, name))

    def text_of(self, value: Any, name: str) -> str:
        return str(self.of(str, value, name))

    def of(self, kind: type, value: Any, name: str) -> Any:
        if not isinstance(value, kind):
            raise self.wrong(f"{name!r} is {short(repr(value))}, and not a {_KINDS[kind]}", self.line(name))
        return value

    def line(self, key: str, after: str = "") -> int:
        """The line on which a key is given; the first if it cannot be found."""
        lines = self.text.splitlines()
        begin = next((i for i, line in enumerate(lines) if after and line.startswith(after)), 0)
        words = (key, f'"{key}"', f"[{key}]", f"[[{key}]]")
        found = (
            i
            for i, line in enumerate(lines[begin:], begin + 1)
            if any(line.startswith(w) and not line[len(w) : len(w) + 1].isalnum() for w in words)
        )
        return next(found, 1)

    def wrong(self, found: str, line: int) -> PlanFileError:
        return PlanFileError(
            asked=f"read the plan {self.source}",
            found=f"line {line}: {short(found, 1000)}",
            do="Correct the line, or plan the program again.",
            path=self.source,
            line=line,
        )
