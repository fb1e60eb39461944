"""The findings of ``plugins check`` and ``doctor``: what was checked, what was found, what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import click
from attrs import asdict, evolve, field, frozen, validators
from rich.console import Console

from shardwise.cli.output import on_terminal, print_json, print_rows
from shardwise.kernel.plurals import counted

__all__ = ["FAILED", "NOTE", "OK", "WARNING", "Finding", "report"]

OK, NOTE, WARNING, FAILED = "ok", "note", "warning", "failed"

# A terminal with fewer columns has none to spare for the name of a check.
_NARROW = 90


@frozen
class Finding:
    """One thing that was checked; ``result`` is ok, note, warning or failed. ``do`` says what to do where it is not ok.

    A note is about a convention: nothing is wrong, and ``strict`` lets it pass.
    """

    check: str
    result: str = field(validator=validators.in_((OK, NOTE, WARNING, FAILED)))
    found: str
    do: str = ""


def report(findings: Sequence[Finding], *, as_json: bool, strict: bool = False) -> None:
    """Print the findings and exit with 1 when one failed (with ``strict``: or is a warning)."""
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        # A row is one line; JSON has all of torch's long messages.
        findings = [evolve(one, found=one.found.strip().partition("\n")[0]) for one in findings]
        if on_terminal():
            # Sentences need width: what to do stands below what was found.
            joined = [evolve(one, found=f"{one.found}\n{one.do}".strip()) for one in findings]
            if Console().width < _NARROW:
                joined = [evolve(one, found=f"{one.check}: {one.found}") for one in joined]
                print_rows([asdict(one) for one in joined], ("result", "found"))
            else:
                print_rows([asdict(one) for one in joined], ("check", "result", "found"))
        else:
            print_rows([asdict(one) for one in findings], ("check", "result", "found", "do"))
        count = Counter(finding.result for finding in findings)
        notes = f"{counted(count[NOTE], 'note')}, " if count[NOTE] else ""
        click.echo(f"{count[OK]} ok, {notes}{counted(count[WARNING], 'warning')}, {count[FAILED]} failed")
    bad = (FAILED, WARNING) if strict else (FAILED,)
    if any(finding.result in bad for finding in findings):
        click.get_current_context().exit(1)
