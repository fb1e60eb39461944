"""``shardwise rules``: which ops have a rule, what it says and who supplied it."""

from __future__ import annotations

import click

from shardwise.cli.output import json_option, print_json, print_rows
from shardwise.discovery import default_registry
from shardwise.registry import Entry, Registry
from shardwise.signature import op_name

__all__ = ["rule_table", "rules"]

COLUMNS = ("op", "plugin", "rule")


@click.command()
@click.argument("pattern", default="*")
@json_option
@click.option("--markdown", is_flag=True, help="One line per rule, as in the documentation.")
def rules(*, pattern: str, as_json: bool, markdown: bool) -> None:
    """List the rules of the ops that match PATTERN, a shell pattern such as 'mm' or '*norm*'."""
    if markdown:
        click.echo(rule_table(default_registry(), pattern), nl=False)
        return
    rows = [_row(entry) for entry in default_registry().ops(pattern)]
    if as_json:
        print_json(rows)
    elif rows:
        print_rows(rows, COLUMNS)
    else:
        raise click.ClickException(f"no op with a rule matches {pattern!r}; shardwise rules lists all")


def rule_table(registry: Registry, pattern: str = "*") -> str:
    """A Markdown table of the rules by plugin: the ops (without their overloads), and the rule as it reads."""
    groups: dict[tuple[str, int], tuple[str, list[str]]] = {}
    for entry in registry.ops(pattern):
        found = groups.setdefault((entry.origin.plugin, id(entry.rule)), (entry.rule.text, []))
        name = op_name(entry.op).removeprefix("aten.").partition(".")[0]
        if name not in found[1]:
            found[1].append(name)
    lines = ["| plugin | ops | rule |", "|---|---|---|"]
    rows = sorted((plugin, " ".join(f"`{n}`" for n in names), text) for (plugin, _), (text, names) in groups.items())
    lines += [f"| {plugin} | {names} | {_escaped(text)} |" for plugin, names, text in rows]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _row(entry: Entry) -> dict[str, object]:
    return {
        "op": op_name(entry.op),
        "plugin": entry.origin.plugin,
        "distribution": entry.origin.distribution,
        "version": entry.origin.version,
        "rule": entry.rule.text,
        "source": entry.rule.source,
    }
