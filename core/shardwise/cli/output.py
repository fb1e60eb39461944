"""How commands print: tables for people, JSON for programs.

On a terminal a table fits the window. In a file or a pipe the rows of a list are one line each, without borders, so
that ``grep`` and ``cut`` work; what a command shows in several tables is as wide as the environment variable
``COLUMNS`` says. Colours and trailing blanks are for terminals only.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from copy import copy
from pathlib import Path
from typing import Any, TextIO

import click
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text, TextType

from shardwise.kernel.foreign_files import read_beginning, reason

__all__ = [
    "json_alone",
    "json_option",
    "on_terminal",
    "pipe_width",
    "print_facts",
    "print_json",
    "print_parts",
    "print_rows",
    "print_text",
    "progress",
    "refuse_no_folder",
    "refuse_to_overwrite",
]

# Columns of a table that goes to a file or a pipe, where nobody says how many there are.
_PIPE_WIDTH = 200

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


def refuse_to_overwrite(option: str, path: Path | None, head: bytes, what: str) -> None:
    """Refuse a file to write in whose place another file lies than ``what`` this command writes, which begins with
    ``head``, before anything is computed for it.
    """
    if path is None or not path.exists():
        return
    try:
        begins = read_beginning(path, len(BOM_UTF8) + 2 * len(head)).removeprefix(BOM_UTF8).replace(b"\r\n", b"\n")
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{option} {path}: {reason(error)}") from error
    if begins and not begins.startswith(head):
        raise click.UsageError(f"{option} {path}: that file is not {what}, and it would be overwritten")


def refuse_no_folder(option: str, path: Path | None) -> None:
    """Refuse a file to write whose folder is not there, before anything is computed for it."""
    if path is not None and not path.name:
        raise click.UsageError(f"{option} {str(path)!r} is not the name of a file")
    if path is not None and not path.absolute().parent.is_dir():
        raise click.UsageError(f"{option} {path}: there is no folder {path.absolute().parent}")


def pipe_width() -> int:
    """Columns of a table that goes to a file or a pipe: what the environment variable ``COLUMNS`` says, or 200."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdecimal() and int(text) > 0 else _PIPE_WIDTH


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


def print_text(text: str) -> None:
    """Print sentences; on a terminal words stay whole."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(Text(text))
    else:
        click.echo(text)


def print_parts(parts: Sequence[RenderableType]) -> None:
    """Print tables and texts with an empty line between them; without colours and trailing blanks for a pipe.

    Where there is no room for the words of a table its rows are lists of names and values.
    """
    console = Console(highlight=False)
    if console.is_terminal:
        for i, part in enumerate(parts):
            console.print(*([] if i == 0 else [""]), _fitting(console, part), sep="\n")
        return
    plain = Console(width=pipe_width(), highlight=False, no_color=True, force_terminal=False)
    with plain.capture() as capture:
        for part in parts:
            plain.print(_fitting(plain, part), "")
    click.echo("\n".join(line.rstrip() for line in capture.get().rstrip().splitlines()))


# -- tables that fit -------------------------------------------------------------------------------------------------

# Words of at most so many characters stay whole; a longer one, such as a path or the name of an op, may be broken where
# its parts are joined. The second is for tables that have no room with the first.
_LONGEST_WORD = 30
_LONGEST_PART = 20
# No row of a table is as long as this.
_UNBOUNDED = 100_000
_FIGURE = re.compile(r"\d[\d,.]* \S+")
_PART = re.compile(r"[^./_:,-]*[./_:,-]+|[^./_:,-]+")


def _fitting(console: Console, part: RenderableType, indent: int = 0) -> RenderableType:
    """A table with room for whole words in every column; its rows as lists where there is none. The tables of a group
    are fitted one by one; ``indent`` is what is around the part.
    """
    if isinstance(part, Group):
        return Group(*(_fitting(console, inner, indent) for inner in part.renderables))
    if isinstance(part, Padding):
        inner = _fitting(console, part.renderable, indent + part.left + part.right)
        return Padding(inner, (part.top, part.right, part.bottom, part.left))
    if not isinstance(part, Table):
        return part
    width = console.width - indent
    if (fitted := _fitted(console, part, width)) is not None:
        return fitted
    names = [console.render_str(str(column.header), highlight=False) for column in part.columns]
    rows = list(zip(*(column.cells for column in part.columns), strict=True))
    return _records(console, names, rows, width, part.title)


def _fitted(console: Console, table: Table, width: int, *, exact: bool = False) -> Table | None:
    """The table in so many columns, where there is room for whole words, or else for figures with their units and for
    the parts of long words. With ``exact`` figures and words stay whole.
    """
    options = console.options.update_width(_UNBOUNDED)
    whole = Measurement.get(console, options, table).maximum
    if whole <= width:
        return table
    columns = [_texts(console, table, column) for column in table.columns]
    most = [max((text.cell_len for line in texts for text in line.split()), default=0) for texts in columns]
    room = width - (whole - sum(most))
    # Rather than that a figure and its unit part, words are broken.
    ways = [(_LONGEST_WORD, True), (_LONGEST_PART, True), (_LONGEST_WORD, False), (_LONGEST_PART, False)]
    for limit, keeps_figures in ways[:1] if exact else ways:
        pairs = zip(table.columns, columns, strict=True)
        least = [_least_width(column, texts, limit, keeps_figures=keeps_figures) for column, texts in pairs]
        if sum(least) <= room:
            return _narrowed(table, columns, _shared(least, most, room))
    return None


def _texts(console: Console, table: Table, column: Column) -> list[Text]:
    """The heading of a column, and its cells."""
    cells = (column.header, *column.cells) if table.show_header else tuple(column.cells)
    return [cell if isinstance(cell, Text) else console.render_str(str(cell), highlight=False) for cell in cells]


def _least_width(column: Column, texts: Sequence[Text], limit: int, *, keeps_figures: bool) -> int:
    """The width that a column needs at least."""
    if column.no_wrap:
        return max((text.cell_len for text in texts), default=0)
    words = [word for text in texts for word in text.plain.split()]
    parts = [part for word in words if len(word) > limit for part in _PART.findall(word)]
    least = max([*(min(len(word), limit) for word in words), *(len(part) for part in parts if len(part) <= limit), 0])
    if keeps_figures:
        numeric = column.justify == "right"
        figures = [text.cell_len for text in texts[1:] if numeric or _FIGURE.fullmatch(text.plain)]
        return max([least, *figures])
    return least


def _narrowed(table: Table, columns: Sequence[Sequence[Text]], widths: Sequence[int]) -> Table:
    """The table with columns of these widths. rich makes the widest column narrower, also below its longest word, and
    then cuts off the last ones.
    """
    narrow = copy(table)
    narrow.columns, narrow.rows = [column.copy() for column in table.columns], []
    for column, width in zip(narrow.columns, widths, strict=True):
        column.width, column.overflow = width, "fold"
    cells = [texts[1:] if table.show_header else texts for texts in columns]
    for row, texts in zip(table.rows, zip(*cells, strict=True), strict=True):
        broken = (_broken(text, width) for text, width in zip(texts, widths, strict=True))
        narrow.add_row(*broken, style=row.style, end_section=row.end_section)
    return narrow


def _broken(text: Text, width: int) -> Text:
    """The text with longer words broken where their parts are joined."""
    at: list[int] = []
    for word in re.finditer(r"\S+", text.plain):
        start = word.start()
        for part in _PART.finditer(text.plain, *word.span()) if word.end() - start > width else ():
            if part.end() - start > width and part.start() > start:
                start = part.start()
                at.append(start)
    return Text("\n").join(text.divide(at)) if at else text


def _shared(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """Widths from ``least`` to ``most`` that fill the room: the narrowest columns are whole first."""
    widths = list(least)
    for n, i in enumerate(sorted(range(len(widths)), key=lambda i: most[i] - least[i])):
        spare = room - sum(widths)
        widths[i] += min(most[i] - least[i], spare // (len(widths) - n))
    return widths


def _records(
    console: Console,
    names: Sequence[RenderableType],
    rows: Sequence[Sequence[RenderableType]],
    width: int,
    title: TextType | None = None,
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
    return _fitted(console, table, width) or table


def print_rows(rows: Sequence[Mapping[str, object]], columns: Sequence[str], drop: Sequence[str] = ()) -> None:
    """Print the named columns of the rows as a table; numbers stand on the right.

    On a terminal that is too narrow for whole words the columns of ``drop`` are left out, the first ones first. Where
    that is not enough, rows are lists of names and values.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        _print(console, _table_of(rows, columns, Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))))
        return
    for dropped in range(len(drop) + 1):
        left_out = drop[:dropped]
        table = _table_of(rows, [column for column in columns if column not in left_out], Table())
        if (fitted := _fitted(console, table, console.width, exact=dropped < len(drop))) is not None:
            console.print(fitted)
            if left_out:
                print_text(f"not shown: {', '.join(left_out)}; a wider window or --json has them")
            return
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    console.print(_records(console, columns, cells, console.width))


def _table_of(rows: Sequence[Mapping[str, object]], columns: Sequence[str], table: Table) -> Table:
    for column in columns:
        numeric = any(isinstance(row[column], int) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in columns))
    return table


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
