"""``shardwise completion``: the script that lets a shell complete commands, options, plugins and ops."""

from __future__ import annotations

import os
from pathlib import PurePath

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

__all__ = ["completion"]

VARIABLE = "_SHARDWISE_COMPLETE"
SHELLS: dict[str, tuple[type[ShellComplete], str]] = {
    "bash": (BashComplete, """echo 'eval "$(shardwise completion bash)"' >> ~/.bashrc"""),
    "zsh": (ZshComplete, """echo 'eval "$(shardwise completion zsh)"' >> ~/.zshrc"""),
    "fish": (FishComplete, "shardwise completion fish > ~/.config/fish/completions/shardwise.fish"),
}


@click.command()
@click.argument("shell", type=click.Choice(sorted(SHELLS)), required=False)
@click.pass_context
def completion(ctx: click.Context, shell: str | None) -> None:
    """Print the completion script for SHELL (default: the one of $SHELL). Its first lines say how to install it.

    A script of click's own, which asks shardwise for the words: commands, options, plugins, ops.
    """
    chosen = shell or PurePath(os.environ.get("SHELL", "")).name
    if chosen not in SHELLS:
        raise click.UsageError(f"$SHELL is none of {', '.join(sorted(SHELLS))}: name one, as in completion bash")
    complete, install = SHELLS[chosen]
    # By the template alone: click's source() would start a bash to learn its version.
    maker = complete(ctx.find_root().command, {}, "shardwise", VARIABLE)
    click.echo(f"# Completion of shardwise for {chosen}. To install it, once:\n#   {install}")
    click.echo(maker.source_template % maker.source_vars())
