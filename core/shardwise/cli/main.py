"""The group of commands, and how an error of shardwise ends one.

A command is imported when it is called, or when its own help or its arguments are asked for: most import torch.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from shardwise.cli.help_text import HelpContext, fits_terminal
from shardwise.cli.signals import Terminated, unwinding_at_signals
from shardwise.cli.streams import open_streams, writing_any_letter
from shardwise.errors import ShardingError
from shardwise.kernel.first_party import core_version

__all__ = ["COMMANDS", "INTERRUPTED", "main"]

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 and the number of SIGINT, as shells give it. After SIGTERM it is 143."""

_AS_JSON = "shardwise.as_json"

COMMANDS = {
    "calibrate": ("shardwise.cli.calibrate", "Measure the links of a mesh, for the cost model."),
    "check": ("shardwise.cli.check_program:check_program", "Compare a step on a mesh with one device, by module."),
    "completion": ("shardwise.cli.completion", "Print the completion script for a shell."),
    "coverage": ("shardwise.cli.coverage", "List the ops of a program that no plugin has a rule for."),
    "demo": ("shardwise.demo.command", "Train a GPT on a mesh of local processes and on one device, and compare."),
    "doctor": ("shardwise.cli.doctor", "Say what is wrong with the environment."),
    "explain": ("shardwise.cli.explain", "Show every legal strategy of one call, with its cost."),
    "infer": ("shardwise.cli.infer", "Find the rows of an op by numeric search."),
    "lock": ("shardwise.cli.lock", "Write down what a step sends, or compare it with what is written."),
    "new": ("shardwise.cli.new", "Make a plugin to start from."),
    "plan": ("shardwise.cli.plan", "Choose the layouts of a whole step together."),
    "plugins": ("shardwise.cli.plugins", "Show the installed plugins; check one."),
    "rehearse": ("shardwise.cli.rehearse", "Show memory and collectives of a step on a mesh of any size."),
    "rules": ("shardwise.cli.rules", "List the rules of the ops that match a pattern."),
    "timeline": ("shardwise.cli.timeline", "List what each collective of a recorded step cost, and who waited."),
    "why": ("shardwise.cli.why", "Say which rule holds for an op, and why."),
}
"""By name: the module that has the command, with the name of its function if that is another, and what it does."""


_OF_PLUGINS = ("doctor", "explain", "infer", "plugins", "rules", "why")
"""Commands that run code of plugins and none of the user's."""


class Commands(click.Group):
    """A group that imports a command when it is called, and shows a :class:`ShardingError` as a message."""

    context_class = HelpContext

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run as the program of this process."""
        try:
            open_streams()
            with writing_any_letter(), unwinding_at_signals():
                return super().__call__(*args, **kwargs)
        except SystemExit as end:
            if sys.argv[1:2] and sys.argv[1] in _OF_PLUGINS:
                _end_without_threads(end.code)
            raise

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        """All names."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command, imported."""
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name][0].partition(":")
        command = getattr(import_module(module), function or cmd_name)
        assert isinstance(command, click.Command)
        return fits_terminal(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the arguments name; an unknown one is refused with the nearest."""
        name = args[0]
        if name in COMMANDS or ctx.resilient_parsing or name.startswith("-"):
            return super().resolve_command(ctx, args)
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else f" There are {', '.join(sorted(COMMANDS))}."
        raise click.UsageError(f"No such command {name!r}.{hint}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The list of commands, with what each does, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in sorted(COMMANDS.items())])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The names of commands that begin so, without importing them."""
        names = [CompletionItem(n, help=text) for n, (_, text) in sorted(COMMANDS.items()) if n.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and note whether stdout is for JSON."""
        # The demo's option of that name takes a file.
        ctx.meta[_AS_JSON] = "--json" in args and args[0] != "demo" and not ctx.resilient_parsing
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a refusal of shardwise exits with 1, Ctrl-C and SIGTERM with what shells call them."""
        if not ctx.meta.get(_AS_JSON):
            return self._run(ctx)
        from shardwise.cli.output import json_alone, print_json

        with json_alone() as is_printed:
            try:
                return self._run(ctx)
            except click.ClickException as error:
                if not is_printed():
                    print_json({"error": _as_json(error)})
                raise

    def _run(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ShardingError as error:
            raise click.ClickException(f"{type(error).__name__}: {error}") from error
        except Terminated as end:
            ctx.exit(_end_of(end))
        except (KeyboardInterrupt, click.Abort):
            click.echo("Aborted!", err=True)
            ctx.exit(INTERRUPTED)


def _end_of(signal: Terminated) -> int:
    """Say so, where somebody still reads it, and give the exit code."""
    with suppress(OSError):  # after SIGHUP the terminal is gone
        click.echo("Terminated!", err=True)
    return 128 + signal.number


def _end_without_threads(code: Any) -> None:
    """End the process now if a plugin has started a thread at import that still runs: Python would wait for it."""
    main_thread = threading.main_thread()
    others = (thread for thread in threading.enumerate() if thread is not main_thread and not thread.daemon)
    # Simulated ranks are threads of a pool of ours, which ends by itself.
    left = [thread.name for thread in others if not thread.name.startswith("shardwise-")]
    if left:
        click.echo(f"A plugin's thread still runs ({', '.join(left)}); this command ends without it.", err=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _as_json(error: click.ClickException) -> dict[str, Any]:
    """An error for programs: its type and message, and what was asked, found and to be done where shardwise says so."""
    cause = error.__cause__
    if not isinstance(cause, ShardingError):
        kind = "UsageError" if isinstance(error, click.UsageError) else "Error"
        return {"type": kind, "message": error.format_message()}
    parts = {"asked": cause.asked, "found": cause.found, "do": cause.do}
    return {"type": type(cause).__name__, "message": str(cause), **parts}


def _print_version(ctx: click.Context, _parameter: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        click.echo(f"shardwise, version {core_version()}")
        ctx.exit()


_version = click.Option(
    ["--version"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)


@click.group(cls=Commands, params=[_version], context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Ordinary PyTorch code on a mesh of devices."""
