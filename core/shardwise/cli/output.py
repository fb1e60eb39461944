"""How commands print: tables for people, JSON for programs.

On a terminal a table fits the window. In a file or a pipe each row is one line, without borders, colours or trailing
blanks, so that ``grep`` and ``cut`` work.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

import click
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text, TextType

__all__ = [
    "PIPE_WIDTH",
    "json_alone",
    "json_option",
    "on_terminal",
    "print_facts",
    "print_json",
    "print_parts",
    "print_rows",
    "progress",
    "refuse_no_folder",
]

PIPE_WIDTH = 200
"""Columns of a table that goes to a file or a pipe."""

# No row of a table is as long as this.
_UNBOUNDED = 100_000
_COLOURS = {
    "ok": "green",
    "loaded": "green",
    "warning": "yellow",
    "blocked": "yellow",
    "failed": "red",
    "refused": "red",
    "needs upgrade": "red",
    "conflict": "red",
}

json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON document to stdout, of an error too, and all else to stderr.",
)


def on_terminal() -> bool:
    """Whether stdout is a terminal."""
    return Console().is_terminal


def refuse_no_folder(option: str, path: Path | None) -> None:
    """Refuse a file to write whose folder is not there, before anything is computed for it."""
    if path is not None and not path.absolute().parent.is_dir():
        raise click.UsageError(f"{option} {path}: there is no folder {path.absolute().parent}")


@contextmanager
def progress(what: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """A function that shows the progress by a live bar if stderr is a terminal; None elsewhere."""
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Few refreshes: the cores are for the measurements.
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _JsonStream:
    """Where JSON goes: None for stdout. ``is_used`` says that a document was printed."""

    stream: TextIO | None = None
    is_used = False


@contextmanager
def json_alone() -> Iterator[Callable[[], bool]]:
    """Keep stdout for one JSON document: whatever else is printed meanwhile goes to stderr, also by the program that a
    command runs and by its processes. The function says whether there is a document.
    """
    before = _JsonStream.stream, _JsonStream.is_used
    _JsonStream.stream, _JsonStream.is_used = sys.stdout, False
    is_real = sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__  # not those of a test
    kept = os.dup(1) if is_real else -1
    try:
        if is_real:
            sys.stdout.flush()
            os.dup2(2, 1)
            _JsonStream.stream = os.fdopen(kept, "w", encoding="utf-8", closefd=False)
        with redirect_stdout(sys.stderr):
            yield lambda: _JsonStream.is_used
    finally:
        if is_real:
            os.dup2(kept, 1)
            os.close(kept)
        _JsonStream.stream, _JsonStream.is_used = before


def print_json(document: object) -> None:
    """Print a document as JSON; what is no number in JSON, NaN and infinity, is null."""
    click.echo(json.dumps(_finite(document), indent=1, allow_nan=False), file=_JsonStream.stream)
    _JsonStream.is_used = True


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def print_parts(parts: Sequence[RenderableType]) -> None:
    """Print tables and texts with an empty line between them; without colours and trailing blanks for a pipe.

    On a terminal that has no room for the words of a table its rows are lists of names and values.
    """
    console = Console(highlight=False)
    if console.is_terminal:
        for i, part in enumerate(parts):
            console.print(*([] if i == 0 else [""]), _fitting(console, part), sep="\n")
        return
    plain = Console(width=PIPE_WIDTH, highlight=False, no_color=True, force_terminal=False)
    with plain.capture() as capture:
        for part in parts:
            plain.print(part, "")
    click.echo("\n".join(line.rstrip() for line in capture.get().rstrip().splitlines()))


def _fitting(console: Console, part: RenderableType, indent: int = 0) -> RenderableType:
    """A table with room for whole words in every column; its rows as lists where there is none. The tables of a group
    are fitted one by one; ``indent`` is what is around the part.
    """
    if isinstance(part, Group):
        return Group(*(_fitting(console, inner, indent) for inner in part.renderables))
    if isinstance(part, Padding):
        inner = _fitting(console, part.renderable, indent + part.left + part.right)
        return Padding(inner, (part.top, part.right, part.bottom, part.left))
    options, room = console.options.update_width(_UNBOUNDED), console.width - indent
    if not isinstance(part, Table) or (whole := Measurement.get(console, options, part).maximum) <= room:
        return part
    least, most = zip(*(_column_widths(console, options, part, column) for column in part.columns), strict=True)
    around = whole - sum(most)
    if around + sum(least) > room:
        names = [console.render_str(str(column.header), highlight=False) for column in part.columns]
        return _records(names, list(zip(*(column.cells for column in part.columns), strict=True)), part.title)
    # rich makes the widest column narrower, also below its longest word, and then cuts off the last ones.
    for column, width in zip(part.columns, _shared(least, most, room - around), strict=True):
        column.width, column.overflow = width, "fold"
    return part


def _column_widths(console: Console, options: ConsoleOptions, table: Table, column: Column) -> tuple[int, int]:
    """The width of a column's longest word, and that of its longest cell. A grid folds what is longer than a word."""
    cells = (column.header, *column.cells) if table.show_header else tuple(column.cells)
    sizes = [Measurement.get(console, options, cell) for cell in cells]
    most = max((size.maximum for size in sizes), default=0)
    if column.no_wrap:
        return most, most
    word = max((size.minimum for size in sizes), default=0)
    return (word if table.show_header else min(word, _LONGEST_WORD)), most


def _shared(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """Widths from ``least`` to ``most`` that fill the room: the narrowest columns are whole first."""
    widths = list(least)
    for n, i in enumerate(sorted(range(len(widths)), key=lambda i: most[i] - least[i])):
        spare = room - sum(widths)
        widths[i] += min(most[i] - least[i], spare // (len(widths) - n))
    return widths


def _records(
    names: Sequence[RenderableType], rows: Sequence[Sequence[RenderableType]], title: TextType | None = None
) -> Table:
    """Rows as lists of names and values, with an empty line between them."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), title=title, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for i, row in enumerate(rows):
        if i:
            table.add_row("", "")
        for name, value in zip(names, row, strict=True):
            if value not in ("", Text("")):
                # A mark, such as that of the row that is taken, has no name.
                table.add_row(*((name, value) if name not in ("", Text("")) else (value, "")))
    return table


def print_rows(rows: Sequence[Mapping[str, object]], columns: Sequence[str], drop: Sequence[str] = ()) -> None:
    """Print the named columns of the rows as a table; numbers stand on the right.

    On a terminal that is too narrow for whole words the columns of ``drop`` are left out, the first ones first. Where
    that is not enough, rows are lists of names and values.
    """
    console = Console(highlight=False)
    left_out = _too_wide(rows, columns, drop, console.width) if console.is_terminal else ()
    if left_out is None:
        _print(console, _records(columns, [[_cell(row[column]) for column in columns] for row in rows]))
        return
    columns = [column for column in columns if column not in left_out]
    table = Table() if console.is_terminal else Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        numeric = any(isinstance(row[column], int) for row in rows)
        # Columns of single words keep their room, and sentences share the rest.
        whole = all(len(str(row[column])) <= _longest_word(rows, column) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in columns))
    _print(console, table)
    if left_out:
        click.echo(f"not shown: {', '.join(left_out)}; a wider window or --json has them")


# A word that is longer, such as a path, is folded rather than that a column goes.
_LONGEST_WORD = 30


def _too_wide(
    rows: Sequence[Mapping[str, object]], columns: Sequence[str], drop: Sequence[str], width: int
) -> list[str] | None:
    """The columns that must go so that the others have room for whole words; each has two blanks and a line. None where
    all that may go is not enough.
    """
    left_out: list[str] = []
    need = 1 + sum(3 + _longest_word(rows, column) for column in columns)
    for column in drop:
        if need <= width:
            break
        left_out.append(column)
        need -= 3 + _longest_word(rows, column)
    return left_out if need <= width else None


def _longest_word(rows: Sequence[Mapping[str, object]], column: str) -> int:
    words = [word for row in rows for word in str(row[column]).split()]
    return max(min(len(word), _LONGEST_WORD) for word in [column, *words])


def print_facts(facts: Mapping[str, object]) -> None:
    """Print names and values, one below the other: a line per element of a sequence, no line for an empty value."""
    console = Console(highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold" if console.is_terminal else None)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        lines = [value] if isinstance(value, (str, int)) else list(value or ())  # type: ignore[call-overload]
        for i, line in enumerate(line for line in lines if line != ""):
            table.add_row(name if i == 0 else "", _cell(line))
    _print(console, table)


def _cell(value: object) -> Text:
    """A value as it is: rich would read ``[S(0), R]`` as markup."""
    text = str(value)
    return Text(text, style=_COLOURS.get(text, ""))


def _print(console: Console, table: Table) -> None:
    if console.is_terminal:
        console.print(table)
        return
    plain = Console(width=_UNBOUNDED, no_color=True, force_terminal=False, highlight=False)
    with plain.capture() as captured:
        plain.print(table)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
