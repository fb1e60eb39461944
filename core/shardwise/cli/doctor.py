"""``shardwise doctor``: whether an environment can run programs on a mesh."""

from __future__ import annotations

import click

from shardwise.cli.environment import CHECKS as OF_ENVIRONMENT
from shardwise.cli.findings import FAILED, Finding, report
from shardwise.cli.installation import CHECKS as OF_INSTALLATION
from shardwise.cli.output import json_option

__all__ = ["doctor"]


@click.command()
@json_option
@click.option("--strict", is_flag=True, help="Warnings are failures.")
def doctor(*, as_json: bool, strict: bool) -> None:
    """Check the environment: Python, torch and its backends, copies of shardwise, the settings in force and where each
    was read, measured link figures, plugins, dependencies, rules in conflict.

    Exits with 1 when a check fails.
    """
    findings: list[Finding] = []
    for name, check in {**OF_ENVIRONMENT, **OF_INSTALLATION}.items():
        try:
            # Each check by itself: a broken one must not hide the others.
            findings += list(check())
        except Exception as error:  # noqa: BLE001  a broken installation may raise anything anywhere
            found = f"the check raises {type(error).__name__}: {error}"
            findings.append(Finding(name, FAILED, found, "Reinstall shardwise."))
    report(findings, as_json=as_json, strict=strict)
