"""Completion in a shell: the script of ``shardwise completion``, and the names of plugins and ops that it offers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import PurePath

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ShellComplete, ZshComplete

__all__ = ["completion", "offer_ops", "offer_plugins", "offer_plugins_and_paths", "offer_programs"]

_FISH_FILE = (
    "mkdir -p ~/.config/fish/completions; shardwise completion fish > ~/.config/fish/completions/shardwise.fish"
)
VARIABLE = "_SHARDWISE_COMPLETE"
SHELLS: dict[str, tuple[type[ShellComplete], str]] = {
    "bash": (BashComplete, """echo 'eval "$(shardwise completion bash)"' >> ~/.bashrc"""),
    "zsh": (ZshComplete, """echo 'eval "$(shardwise completion zsh)"' >> ~/.zshrc"""),
    "fish": (FishComplete, _FISH_FILE),
}
# Without it zsh says "command not found: compdef" at each start, where nothing else loads its completion.
BEFORE = {"zsh": "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }"}


@click.command()
@click.argument("shell", type=click.Choice(sorted(SHELLS)), required=False)
@click.pass_context
def completion(ctx: click.Context, shell: str | None) -> None:
    """Print the completion script for SHELL (default: the one of $SHELL). Its first lines say how to install it.

    A script of click's own, which asks shardwise for the words: commands, options, plugins, ops.
    """
    chosen = shell or PurePath(os.environ.get("SHELL", "")).name
    if chosen not in SHELLS:
        raise click.UsageError(f"$SHELL is not one of {', '.join(sorted(SHELLS))}: name one, as in completion bash")
    complete, install = SHELLS[chosen]
    # By the template alone: click's source() would start a bash to learn its version.
    maker = complete(ctx.find_root().command, {}, "shardwise", VARIABLE)
    click.echo(f"# Completion of shardwise for {chosen}. To install it, once:\n#   {install}")
    if chosen in BEFORE:
        click.echo(BEFORE[chosen])
    click.echo(maker.source_template % maker.source_vars())


# -- what is offered -------------------------------------------------------------------------------------------------

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _offering(names: Callable[[], Iterable[str]], *, files: bool = False) -> Complete:
    """Offer names, after files: click's script for bash forgets all words before a file."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
        try:
            offered = sorted({name for name in names() if name.startswith(incomplete)})
        except Exception:  # noqa: BLE001  a broken plugin must not break the shell's line
            offered = []
        # The shell looks for the files itself; fish is told what they begin with.
        first = [CompletionItem(incomplete, type="file")] if files else []
        return [*first, *map(CompletionItem, offered)]

    return complete


def _plugins() -> list[str]:
    from shardwise.discovery.entry_points import discover
    from shardwise.settings import Settings

    return [plugin.origin.plugin for plugin in discover(Settings())]


def _ops() -> list[str]:
    from shardwise.cli.plugin_states import plugin_states
    from shardwise.kernel.signature import op_name

    names = {op_name(entry.op) for entry in plugin_states().registry.ops()}
    # As people type them: with and without namespace and overload.
    packets = {name.rpartition(".")[0] for name in names}
    return [*names, *packets, *(name.partition(".")[2] for name in packets)]


offer_plugins = _offering(_plugins)
offer_plugins_and_paths = _offering(_plugins, files=True)
offer_programs = _offering(tuple, files=True)
offer_ops = _offering(_ops)
