"""The group of commands, and how an error of shardwise ends one."""

from __future__ import annotations

from typing import Any

import click

from shardwise.cli.calibrate import calibrate
from shardwise.cli.check_program import check_program
from shardwise.cli.completion import completion
from shardwise.cli.coverage import coverage
from shardwise.cli.doctor import doctor
from shardwise.cli.explain import explain
from shardwise.cli.infer import infer
from shardwise.cli.new import new
from shardwise.cli.plan import plan
from shardwise.cli.plugins import plugins
from shardwise.cli.rehearse import rehearse
from shardwise.cli.rules import rules
from shardwise.cli.why import why
from shardwise.demo.command import demo
from shardwise.errors import ShardingError

__all__ = ["main"]


class Commands(click.Group):
    """A group whose commands show a :class:`ShardingError` as a message and not as a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a refusal of shardwise exits with 1."""
        try:
            return super().invoke(ctx)
        except ShardingError as error:
            raise click.ClickException(f"{type(error).__name__}: {error}") from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shardwise")
def main() -> None:
    """Ordinary PyTorch code on a mesh of devices."""


main.add_command(calibrate)
main.add_command(check_program)
main.add_command(completion)
main.add_command(coverage)
main.add_command(demo)
main.add_command(doctor)
main.add_command(explain)
main.add_command(infer)
main.add_command(new)
main.add_command(plan)
main.add_command(plugins)
main.add_command(rehearse)
main.add_command(rules)
main.add_command(why)
