"""How commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import click
from rich.console import Console, RenderableType
from rich.table import Table

__all__ = ["json_option", "print_json", "print_parts", "print_rows"]

PIPE_WIDTH = 200
"""Columns of a table that goes to a file or a pipe, which has no width of its own."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def print_json(rows: Sequence[Mapping[str, object]]) -> None:
    """Print a JSON list, one object per row."""
    click.echo(json.dumps(rows, indent=1))


def print_parts(parts: Sequence[RenderableType]) -> None:
    """Print tables and texts with an empty line between them; without colours and trailing blanks for a pipe."""
    console = Console(highlight=False)
    if console.is_terminal:
        for i, part in enumerate(parts):
            console.print(*([] if i == 0 else [""]), part, sep="\n")
        return
    plain = Console(width=PIPE_WIDTH, highlight=False, no_color=True, force_terminal=False)
    with plain.capture() as capture:
        for part in parts:
            plain.print(part, "")
    click.echo("\n".join(line.rstrip() for line in capture.get().rstrip().splitlines()))


def print_rows(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> None:
    """Print the named columns of the rows as a table; numbers stand on the right."""
    table = Table()
    for column in columns:
        numeric = any(isinstance(row[column], int) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        # rich reads [S(0), R] as markup unless the bracket is escaped
        table.add_row(*(str(row[column]).replace("[", r"\[") for column in columns))
    console = Console()
    (console if console.is_terminal else Console(width=PIPE_WIDTH)).print(table)
