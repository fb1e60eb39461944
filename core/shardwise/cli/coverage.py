"""``shardwise coverage``: the ops of a program that have no rule, without a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from shardwise.cli.completion import offer_programs
from shardwise.cli.modules import load_function
from shardwise.cli.output import json_option, print_json, print_rows, print_text
from shardwise.cli.program_errors import check_takes, program_errors
from shardwise.kernel.plurals import counted
from shardwise.kernel.signature import op_name
from shardwise.tools.coverage import Coverage, Use, cover
from shardwise.tools.program import PHASES

__all__ = ["coverage"]

COLUMNS = ("op", "rule", "calls", "phase", "first called at")
INCOMPLETE = 1
"""Exit code if an op has no rule or the program stopped early; 2 is click's, for wrong options."""

_TAKES_NO_MESH = (
    "shardwise coverage runs a program on one device, without a mesh; `shardwise rehearse FILE.py:FUNCTION --mesh 2x2` "
    "follows one that takes a mesh."
)


@click.command()
@click.argument("program", metavar="FILE.py:FUNCTION", shell_complete=offer_programs)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Whose kernels.")
@click.option("--all", "show_all", is_flag=True, help="List the ops that have a rule, too.")
@json_option
def coverage(*, program: str, device: str, show_all: bool, as_json: bool) -> None:
    """Run a program without data and list the ops that no plugin has a rule for. Starts no process, takes no memory.

    FUNCTION (of a file, or of a module: package.module:FUNCTION) takes no arguments. It runs a training step itself, or
    returns a loss, or (model, inputs), or (model, inputs, optimizer).

    Exits with 1 when an op has no rule or the program could not be followed to its end.
    """

    def load() -> Callable[[], Any]:
        function = load_function(program)
        check_takes(program, function, do=_TAKES_NO_MESH)
        return function

    with program_errors(program):
        covered = cover(load, device)
    if not covered.uses and not covered.stopped:
        raise click.ClickException(
            f"{program} ran no op. Run a step, or return a loss, (model, inputs) or (model, inputs, optimizer)."
        )
    if as_json:
        ops = [
            {
                "op": use.name,
                "plugin": use.plugin,
                "conflict": use.conflict,
                "parts": [op_name(part) for part in use.parts],
                "calls": use.calls,
                "phases": [phase for phase in PHASES if phase in use.phases],
                "site": use.site,
                "depends_on_data": use.data,
            }
            for use in _missing_first(covered)
        ]
        missing = [use.name for use in covered.missing]
        print_json({"ops": ops, "missing": missing, "stopped": covered.stopped})
    else:
        _print_coverage(covered, show_all=show_all)
    if not covered.is_complete:
        raise SystemExit(INCOMPLETE)


def _missing_first(coverage: Coverage) -> list[Use]:
    """Ops without a rule first, then ops that are decomposed, then the others, each in the order of their calls."""
    return sorted(coverage.uses, key=lambda use: 2 if use.plugin is not None else 1 if use.parts else 0)


def _print_coverage(coverage: Coverage, *, show_all: bool) -> None:
    rows: list[dict[str, object]] = []
    for use in _missing_first(coverage):
        if use.plugin is None or show_all:
            parts = f"decomposed into {', '.join(map(op_name, use.parts))}" if use.parts else ""
            conflict = f"conflict: {use.conflict}" if use.conflict else "no rule"
            phases = ", ".join(phase for phase in PHASES if phase in use.phases)
            cells = (use.name, use.plugin or parts or conflict, use.calls, phases, use.site)
            rows.append(dict(zip(COLUMNS, cells, strict=True)))
    if rows:
        print_rows(rows, COLUMNS, drop=("phase", "calls"))
    data = [use for use in coverage.uses if use.data]
    for use in data:
        print_text(f"{use.name} at {use.site}: data decides this number; 1 was taken for it")
    if coverage.stopped:
        print_text(f"stopped early: {coverage.stopped}")
    covered = len(coverage.uses) - len(coverage.missing)
    decomposed = sum(1 for use in coverage.uses if use.plugin is None and use.parts)
    runs = f" or run as ops that have one ({decomposed})" if decomposed else ""
    where = ", up to there" if coverage.stopped else ""
    print_text(f"{covered} of {counted(len(coverage.uses), 'op')} have a rule{runs}{where}")
