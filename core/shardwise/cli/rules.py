"""``shardwise rules``: which ops have a rule, what it says and who supplied it."""

from __future__ import annotations

from fnmatch import fnmatchcase

import click

from shardwise.cli.completion import offer_ops, offer_plugins
from shardwise.cli.output import json_option, print_json, print_rows
from shardwise.cli.plugin_states import no_such_plugin, plugins_named
from shardwise.discovery.process import default_registry, statuses
from shardwise.kernel.precedence import Entry
from shardwise.kernel.registry import Registry
from shardwise.kernel.rule import AnyRule
from shardwise.kernel.signature import op_name

__all__ = ["form_of", "rule_table", "rules"]

COLUMNS = ("op", "plugin", "rule", "form", "static")


@click.command()
@click.argument("pattern", default="*", shell_complete=offer_ops)
@click.option("--plugin", shell_complete=offer_plugins, help="Only the rules of this plugin, or of this distribution.")
@json_option
@click.option("--markdown", is_flag=True, help="One line per rule, as in the documentation.")
def rules(*, pattern: str, plugin: str | None, as_json: bool, markdown: bool) -> None:
    """List the rules of the ops that match PATTERN, a shell pattern such as 'mm' or '*norm*'.

    The form is the function that made the rule, and what it has beside its rows: its own local op (lowering), local
    arguments (local_args), a choice per position of tensor lists (zip_lists).
    """
    if markdown and as_json:
        raise click.UsageError("--markdown and --json both say how to print: give one of them")
    registry = default_registry()
    registry.read_modules()
    pattern = pattern.replace("::", ".")  # as torch's schemas write an op
    if markdown:
        _entries(registry, pattern, plugin)
        click.echo(rule_table(registry, pattern, plugin), nl=False)
        return
    absent = registry.see_all()
    entries = _entries(registry, pattern, plugin)
    rows: list[dict[str, object]] = [
        {
            "op": op_name(entry.op),
            "plugin": entry.origin.plugin,
            "distribution": entry.origin.distribution,
            "version": entry.origin.version,
            "rule": entry.rule.text,
            "form": form_of(entry.rule),
            "static": ", ".join(sorted(entry.rule.static)),
            "partial": list(getattr(entry.rule, "partial", ())),
            "source": entry.rule.source,
        }
        for entry in entries
    ]
    rows += [
        {
            "op": name,
            "plugin": origin.plugin,
            "distribution": origin.distribution,
            "version": origin.version,
            "rule": "got when the op is first seen",
            "form": f"later: {absent[name]}",
            "static": "",
            "partial": [],
            "source": "",
        }
        for name, origin in registry.later()
        if name in absent
        and (plugin is None or origin.is_called(plugin))
        and (fnmatchcase(name, pattern) or fnmatchcase(name, f"*{pattern}*"))
    ]
    if as_json:
        print_json(rows)
    elif rows:
        print_rows(rows, COLUMNS, drop=("static", "form", "plugin"))
    if not rows:
        raise click.ClickException(f"no op with a rule matches {pattern!r}; shardwise rules lists all")


def _entries(registry: Registry, pattern: str, plugin: str | None) -> list[Entry]:
    """The entries that match; raises for a name that is not a plugin's."""
    if plugin is None:
        return list(registry.ops(pattern))
    if not any(origin.is_called(plugin) for origin in registry.origins):
        known = [status.plugin for status in statuses()]
        unused = next(
            (s for s in statuses() if s.plugin in plugins_named(plugin, known) and s.status != "loaded"), None
        )
        if unused is None:
            raise no_such_plugin(plugin, known)
        raise click.ClickException(f"the plugin {plugin} is not loaded: {unused.status}, {unused.reason}")
    return [entry for entry in registry.ops(pattern) if entry.origin.is_called(plugin)]


def rule_table(registry: Registry, pattern: str = "*", plugin: str | None = None) -> str:
    """A Markdown table of the rules by plugin: the ops (without their overloads), and the rule as it reads."""
    later = dict(registry.later())
    groups: dict[tuple[str, int], tuple[str, list[str]]] = {}
    for entry in registry.ops(pattern):
        if (plugin is not None and not entry.origin.is_called(plugin)) or op_name(entry.op) in later:
            continue
        text = " | ".join(filter(None, (entry.rule.text, "; ".join(getattr(entry.rule, "partial", ())))))
        group = groups.setdefault((entry.origin.plugin, id(entry.rule)), (text, []))
        name = op_name(entry.op).removeprefix("aten.").rpartition(".")[0]
        if name not in group[1]:
            group[1].append(name)
    lines = ["| plugin | ops | rule |", "|---|---|---|"]
    rows = sorted((plugin, " ".join(f"`{n}`" for n in names), text) for (plugin, _), (text, names) in groups.items())
    for name, ops, text in rows:
        cell = text.replace("|", "\\|")
        lines.append(f"| {name} | {ops} | {cell} |")
    return "\n".join(lines) + "\n"


def form_of(rule: AnyRule) -> str:
    """The form of a rule and what it has beside its rows: ``rule_from, lowering``."""
    beside = {
        "zip_lists": rule.zip_lists,
        "lowering": rule.lowering is not None,
        "local_args": rule.local_args is not None,
        "writes": bool(rule.writes),
        "results": rule.results is not None,
    }
    return ", ".join([rule.form, *(name for name, there in beside.items() if there)])
