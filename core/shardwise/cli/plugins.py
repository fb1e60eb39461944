"""``shardwise plugins``: every installed plugin and what became of it."""

from __future__ import annotations

import click

from shardwise.cli.output import json_option, print_json, print_rows
from shardwise.discovery import Status, statuses

__all__ = ["plugins"]

COLUMNS = ("plugin", "distribution", "version", "status", "ops", "reason")


@click.command()
@json_option
def plugins(*, as_json: bool) -> None:
    """List the installed plugins: loaded, failed, blocked, refused or needing an upgrade."""
    rows = [_row(status) for status in statuses()]
    if as_json:
        print_json(rows)
    else:
        print_rows(rows, COLUMNS)


def _row(status: Status) -> dict[str, object]:
    origin = status.found.origin
    return {
        "plugin": origin.plugin,
        "distribution": origin.distribution,
        "version": origin.version,
        "module": status.found.entry.value,
        "status": status.status,
        "reason": status.reason,
        "ops": status.ops,
    }
