"""What the shell offers while a command is typed: names of plugins and of ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

__all__ = ["offer_ops", "offer_plugins", "offer_plugins_and_paths"]

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _offering(names: Callable[[], Iterable[str]], *more: CompletionItem) -> Complete:
    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
        try:
            found = sorted({name for name in names() if name.startswith(incomplete)})
        except Exception:  # noqa: BLE001  a broken plugin must not break the shell's line
            found = []
        return [*map(CompletionItem, found), *more]

    return complete


def _plugins() -> list[str]:
    from shardwise.discovery.entry_points import discover
    from shardwise.settings import Settings

    return [found.origin.plugin for found in discover(Settings())]


def _ops() -> list[str]:
    from shardwise.cli.survey import survey
    from shardwise.kernel.signature import op_name

    names = {op_name(entry.op) for entry in survey().registry.ops()}
    # As people type them: with and without namespace and overload.
    packets = {name.rpartition(".")[0] for name in names}
    return [*names, *packets, *(name.partition(".")[2] for name in packets)]


offer_plugins = _offering(_plugins)
offer_plugins_and_paths = _offering(_plugins, CompletionItem(None, type="file"))
offer_ops = _offering(_ops)
