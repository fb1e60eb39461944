"""``shardwise rules``: which ops have a rule, what it says and who supplied it."""

from __future__ import annotations

import click

from shardwise.cli.output import json_option, print_json, print_rows
from shardwise.discovery import default_registry
from shardwise.registry import Entry
from shardwise.signature import op_name

__all__ = ["rules"]

COLUMNS = ("op", "plugin", "rule")


@click.command()
@click.argument("pattern", default="*")
@json_option
def rules(*, pattern: str, as_json: bool) -> None:
    """List the rules of the ops that match PATTERN, a shell pattern such as 'mm' or '*norm*'."""
    rows = [_row(entry) for entry in default_registry().ops(pattern)]
    if as_json:
        print_json(rows)
    elif rows:
        print_rows(rows, COLUMNS)
    else:
        raise click.ClickException(f"no op with a rule matches {pattern!r}; shardwise rules lists all")


def _row(entry: Entry) -> dict[str, object]:
    return {
        "op": op_name(entry.op),
        "plugin": entry.origin.plugin,
        "distribution": entry.origin.distribution,
        "version": entry.origin.version,
        "rule": entry.rule.text,
        "source": entry.rule.source,
    }
