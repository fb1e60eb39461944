"""``shardwise why OP``: which rule holds for an op and why, its rivals, and the settings that would change it."""

from __future__ import annotations

from typing import Any

import click

from shardwise.cli.completion import offer_ops
from shardwise.cli.modules import import_option
from shardwise.cli.ops import ops_named
from shardwise.cli.output import json_option, print_facts, print_json
from shardwise.cli.plugin_states import PluginStates, plugin_states, readable_settings
from shardwise.discovery.loading import Status
from shardwise.engine.decomposition import formulas
from shardwise.kernel.known_rules import providers
from shardwise.kernel.precedence import Entry, Resolution, prefer_settings
from shardwise.kernel.signature import op_name
from shardwise.private_torch.ops import is_composite
from shardwise.settings import Settings, preferred

__all__ = ["why"]


@click.command()
@click.argument("op", shell_complete=offer_ops)
@import_option
@json_option
def why(*, op: str, as_json: bool) -> None:
    """Say which rule holds for OP and why: aten.mm.default, aten.mm (all overloads with rules), mm, acme::kernel.

    Lists the rivals, why each lost, and the setting that would make it win. Exits with 1 where no rule holds.
    """
    states = plugin_states()
    if states.refusal is not None:
        click.echo(f"Programs cannot look up a rule now: {states.refusal}", err=True)
    resolutions = _resolutions(op, states)
    settings = readable_settings()
    shown = [_resolution_json(resolution, settings, states) for resolution in resolutions]
    if as_json:
        print_json(shown)
    else:
        for i, facts in enumerate(shown):
            if i:
                click.echo()
            winner, losers = facts["winner"], facts["losers"]
            lines: dict[str, Any] = {"op": facts["op"]}
            if winner is None:
                lines["conflict"] = f"no rule holds: {facts['reason']}"
            else:
                lines |= {
                    "holds": _plugin_title(winner),
                    "because": winner["reason"],
                    "rule": winner["rule"],
                    "at": winner["source"],
                }
            print_facts({**lines, "setting": facts["settings"]})
            for loser in losers:
                click.echo()
                choose = loser["to_choose_it"]
                print_facts(
                    {
                        "  rival": _plugin_title(loser),
                        "  lost by": "" if winner is None else loser["reason"],
                        "  rule": loser["rule"],
                        "  at": loser["source"],
                        "  to choose it": [choose["environment"], *choose["pyproject"].splitlines()],
                    }
                )
    if states.refusal is not None or any(resolution.winner is None for resolution in resolutions):
        click.get_current_context().exit(1)


def _resolutions(name: str, states: PluginStates) -> list[Resolution]:
    registry = states.registry
    ops = ops_named(name, registry)
    resolutions = [registry.resolve(op) for op in ops if op in registry]
    if not resolutions:
        sentences = [f"no plugin has a rule for {', '.join(map(op_name, ops))}."]
        if all(map(is_composite, ops)):
            sentences.append("torch writes it in terms of other ops, which need the rules.")
        elif names := dict.fromkeys(f.name for op in ops for f in formulas(op) if f.may_run(registry)):
            sentences.append(
                f"It runs decomposed ({', '.join(names)}) where every part has a rule; "
                "that depends on the call: shardwise explain shows it."
            )
        advice = registry.known(map(op_name, ops))
        sentences += advice.values()
        unused = [
            text for status, text in _not_loaded(states) if not any(status.plugin.origin.is_called(n) for n in advice)
        ]
        if unused:
            sentences.append(f"Possible cause: {'; '.join(unused)}.")
        raise click.ClickException(" ".join(sentences))
    return resolutions


def _not_loaded(states: PluginStates) -> list[tuple[Status, str]]:
    left = (status for status in states.statuses if status.status != "loaded")
    return [(status, f"{status.plugin.origin}: {status.status}, {status.reason}") for status in left]


def _is_not_asked(status: Status, op: str) -> str:
    """What is said of a plugin that a setting excludes."""
    has = any(status.plugin.origin.is_called(name) for name in providers(op))
    return f"{status.plugin.origin}{', which has a rule for it,' if has else ''} is not asked: {status.reason}"


def _resolution_json(resolution: Resolution, settings: Settings, states: PluginStates) -> dict[str, Any]:
    winner = resolution.winner
    # The settings that bear on this op, and where they were read.
    pair = preferred(settings.prefer, op_name(resolution.op))
    chosen = [] if pair is None else [f"prefer {pair[0]} = {pair[1]}, from {settings.source('prefer')}"]
    blocked = (s for s in states.statuses if s.status == "blocked")
    return {
        "op": op_name(resolution.op),
        "winner": None if winner is None else _entry_json(winner, resolution.reason),
        "reason": resolution.reason,
        "losers": [
            {**_entry_json(entry, reason), "to_choose_it": prefer_settings(resolution.op, entry)}
            for entry, reason in resolution.losers
        ],
        "settings": chosen + [_is_not_asked(status, op_name(resolution.op)) for status in blocked],
        "not_loaded": [text for _, text in _not_loaded(states)],
    }


def _entry_json(entry: Entry, reason: str) -> dict[str, Any]:
    return {
        "plugin": entry.origin.plugin,
        "distribution": entry.origin.distribution,
        "version": entry.origin.version,
        "rule": entry.rule.text,
        "source": entry.rule.source,
        "reason": reason,
    }


def _plugin_title(entry: dict[str, Any]) -> str:
    return f"{entry['plugin']} ({entry['distribution']} {entry['version']})"
