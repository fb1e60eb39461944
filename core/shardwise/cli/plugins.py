"""``shardwise plugins``: all installed plugins with their status; one plugin with its metadata and rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import click

from shardwise.cli.check import check
from shardwise.cli.completion import offer_plugins
from shardwise.cli.output import (
    json_option,
    print_facts,
    print_json,
    print_rows,
    refuse_to_overwrite,
)
from shardwise.cli.plugin_states import PluginStates, no_such_plugin, plugin_states, plugins_named
from shardwise.discovery.entry_points import InstalledPlugin, discover
from shardwise.discovery.frozen_rules import HEAD
from shardwise.discovery.frozen_rules import freeze as lock_of
from shardwise.discovery.loading import Status
from shardwise.kernel.first_party import FAMILIES, core_version
from shardwise.kernel.known_rules import known_plugins, ops_of_families
from shardwise.kernel.plurals import counted
from shardwise.kernel.signature import op_name
from shardwise.kernel.whole_files import write_whole
from shardwise.settings import Settings

__all__ = ["plugins"]

COLUMNS = ("plugin", "distribution", "version", "status", "ops", "reason")
RULE_COLUMNS = ("op", "rule", "holds", "source")
SEARCH_COLUMNS = ("plugin", "version", "installed", "what it is for", "ops", "oracle", "tried with")
# Names of ops in a row of the search.
_SOME = 3


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def plugins(ctx: click.Context, *, as_json: bool) -> None:
    """See what is installed and what became of it; check a plugin. Without a command: list."""
    if ctx.invoked_subcommand is None:
        _print_list(as_json=as_json)


@plugins.command("list", short_help="List the installed plugins.")
@json_option
@click.pass_context
def list_(ctx: click.Context, *, as_json: bool) -> None:
    """List the installed plugins: loaded, failed, blocked, refused or needing an upgrade.

    Exits with 1 where no program could look up a rule: bad settings, strict mode, a broken first-party plugin.
    """
    _print_list(as_json=as_json or _outer_json(ctx))


@plugins.command(short_help="Show one plugin, with its failure.")
@click.argument("name", shell_complete=offer_plugins)
@json_option
@click.pass_context
def show(ctx: click.Context, name: str, *, as_json: bool) -> None:
    """Show what is known of the plugin NAME, also of one that failed or is left out: its metadata, the traceback of its
    failure, its rules and what they replace.
    """
    states = plugin_states()
    known = [status.plugin for status in states.statuses]
    chosen = plugins_named(name, known)
    if not chosen:
        raise no_such_plugin(name, known)
    shown = [_plugin_json(states, status) for status in states.statuses if status.plugin in chosen]
    if as_json or _outer_json(ctx):
        print_json(shown)
        return
    for i, facts in enumerate(shown):
        if i:
            click.echo()
        print_facts(
            {
                "plugin": facts["plugin"],
                "distribution": f"{facts['distribution']} {facts['version']}",
                "summary": facts["summary"],
                "home page": facts["home_page"],
                "status": facts["status"],
                "reason": facts["reason"],
                "location": facts["location"],
                "entry point": facts["entry_point"],
                "requires": facts["requires"],
                "hides": facts["hides"],
                "replaces": [f"{name}: {', '.join(ops)}" for name, ops in facts["replaces"].items()],
                "conflicts": facts["conflicts"],
                "but now": facts["refusal"],
                "ops": facts["ops"],
            }
        )
        if facts["traceback"]:
            click.echo(f"\n{facts['traceback'].rstrip()}")
        if facts["rules"]:
            click.echo()
            print_rows(facts["rules"], RULE_COLUMNS, drop=("source", "holds"))


@plugins.command(short_help="Write a lock of all rules.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file, not to stdout.")
def freeze(out: Path | None) -> None:
    """Write the versions and the digests of all rules that are loaded, sorted, as a lock.

    With SHARDWISE_LOCK=FILE, or `lock` in [tool.shardwise], a program refuses to load anything else.
    """
    refuse_to_overwrite("--out", out, HEAD.encode(), "a lock of rules")
    states = plugin_states(heed_lock=False)
    broken = [status for status in states.statuses if status.status not in ("loaded", "blocked")]
    if broken:
        listed = "; ".join(f"{status.plugin.origin} {status.status}: {status.reason}" for status in broken)
        raise click.ClickException(f"a lock has plugins that load: {listed}. Mend or disable them first.")
    if states.refusal is not None:
        raise states.refusal
    text = lock_of(states.statuses).text()
    if out is None:
        click.echo(text, nl=False)
        return
    try:
        write_whole(out, text)
    except OSError as error:
        raise click.ClickException(f"{out} cannot be written: {error.strerror}") from error
    click.echo(f"{out}: {counted(len(states.statuses), 'plugin')}", err=True)


@plugins.command(short_help="Look for plugins that are known.")
@click.argument("words", nargs=-1, required=True)
@json_option
@click.pass_context
def search(ctx: click.Context, words: tuple[str, ...], *, as_json: bool) -> None:
    """Look for plugins that are known, installed or not: by words in their names and descriptions, or by an op, as in
    'fft' or 'aten._int_mm'. Nothing is fetched; the page on plugins of others has the same list.

    Exits with 1 where nothing is found.
    """
    # Not through plugin_states: no plugin is imported to look for one.
    installed = {p.origin.plugin: p.origin.version for p in discover(Settings())}
    rows = [row for row in _known_rows(installed) if all(_matches(row, word) for word in words)]
    if as_json or _outer_json(ctx):
        print_json(rows)
    elif rows:
        shown = [{**row, "ops": _some(row["ops"])} for row in rows]
        print_rows(shown, SEARCH_COLUMNS, drop=("oracle", "tried with", "ops", "installed"))
    if not rows:
        asked = " ".join(words)
        raise click.ClickException(f"no plugin that is known matches {asked!r}; one word, or a part of one, finds more")


plugins.add_command(check)


def _outer_json(ctx: click.Context) -> bool:
    """Whether the group got ``--json``, as in ``plugins --json show NAME``."""
    return bool(ctx.parent and ctx.parent.params.get("as_json"))


def _print_list(*, as_json: bool) -> None:
    states = plugin_states()
    rows = [_status_row(status) for status in states.statuses]
    if as_json:
        print_json(rows)
    elif rows:
        print_rows(rows, COLUMNS, drop=("distribution", "version", "ops"))
    if states.refusal is not None:
        raise states.refusal


def _status_row(status: Status) -> dict[str, object]:
    origin = status.plugin.origin
    return {
        "plugin": origin.plugin,
        "distribution": origin.distribution,
        "version": origin.version,
        "module": status.plugin.entry.value,
        "status": status.status,
        "reason": status.reason,
        "ops": status.ops,
    }


# -- the directory ---------------------------------------------------------------------------------------------------


def _known_rows(installed: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The families of shardwise, and the plugins of the directory."""
    families: dict[str, list[str]] = {}
    for op, family in ops_of_families().items():
        families.setdefault(family, []).append(op)
    for family in FAMILIES:
        about = "ships with shardwise"
        yield _known_row(family, about, families[family], installed, version=core_version())
    for plugin in known_plugins():
        about, tested = plugin.summary, plugin.tested
        yield _known_row(plugin.name, about, plugin.ops, installed, plugin.version, plugin.oracle, tested, plugin.home)


def _known_row(
    name: str,
    summary: str,
    ops: Iterable[str],
    installed: Mapping[str, str],
    version: str,
    oracle: str = "",
    tested: str = "",
    home: str = "",
) -> dict[str, Any]:
    have = installed.get(name, "no")
    cells = (name, version, have, summary, sorted(ops), oracle, tested, home)
    return dict(zip((*SEARCH_COLUMNS, "home"), cells, strict=True))


def _matches(row: Mapping[str, Any], word: str) -> bool:
    word = word.lower().replace("::", ".")
    ops = row["ops"]
    named = any(word in op.lower() or fnmatchcase(word, op) or fnmatchcase(f"{word}.default", op) for op in ops)
    return named or word in row["plugin"].lower() or word in row["what it is for"].lower()


def _some(ops: Sequence[str]) -> str:
    """A few of the names, for a row."""
    return ", ".join(ops[:_SOME]) + (f" and {len(ops) - _SOME} more" if len(ops) > _SOME else "")


# -- one plugin ------------------------------------------------------------------------------------------------------


def _plugin_json(known: PluginStates, status: Status) -> dict[str, Any]:
    plugin, registry = status.plugin, known.registry
    absent = registry.see_all()
    refusal = known.refusal
    rules: list[dict[str, object]] = []
    replaced: dict[str, list[str]] = {}  # the ops whose rules are replaced, by distribution
    for entry in registry.ops(plugin=plugin.origin.plugin):
        if entry.origin != plugin.origin:
            continue
        losers = registry.resolve(entry.op).losers
        lost = next((reason for loser, reason in losers if loser is entry), "")
        holds = f"no: {lost}" if lost else "yes"
        cells = (op_name(entry.op), entry.rule.text, holds, entry.rule.source)
        rules.append(dict(zip(RULE_COLUMNS, cells, strict=True)))
        if entry.replaces is not None:
            replaced.setdefault(entry.replaces, []).append(op_name(entry.op))
    rules += [
        dict(zip(RULE_COLUMNS, (name, "got when the op is first seen", f"later: {why}", ""), strict=True))
        for name, why in absent.items()
        if (name, plugin.origin) in registry.later()
    ]
    conflicts = []
    for resolution in registry.conflicts():
        origins = [entry.origin for entry, _ in resolution.losers]
        if plugin.origin in origins:
            rivals = ", ".join(str(origin) for origin in origins if origin != plugin.origin)
            conflicts.append(f"{op_name(resolution.op)} with {rivals}")
    return {
        **_status_row(status),
        "location": plugin.location,
        "entry_point": f"[{plugin.entry.group}] {plugin.entry.name} = {plugin.entry.value}",
        **_metadata(plugin),
        "hides": list(plugin.hides),
        "replaces": replaced,
        "conflicts": conflicts,
        "refusal": "" if refusal is None else f"{type(refusal).__name__}: {refusal}",
        "traceback": status.traceback,
        "rules": rules,
    }


def _metadata(plugin: InstalledPlugin) -> dict[str, object]:
    dist = plugin.entry.dist
    if dist is None:
        return {"summary": "", "home_page": "", "requires": []}
    urls = [url.partition(",")[2].strip() for url in dist.metadata.get_all("Project-URL") or ()]
    return {
        "summary": _field(dist, "Summary"),
        "home_page": _field(dist, "Home-page") or next(iter(urls), ""),
        "requires": list(dist.requires or ()),
    }


def _field(dist: Distribution, name: str) -> str:
    # Asking for a field that is missing gives None, and is deprecated from Python 3.12 on.
    return dist.metadata[name] if name in dist.metadata else ""  # noqa: SIM401  it promises no get()
