"""The closing report, as tables for people and as JSON for programs."""

from __future__ import annotations

from typing import Any

from attrs import asdict
from rich.console import Console
from rich.table import Table

from shardwise.demo.progress import tokens_per_second
from shardwise.demo.run import RunResult
from shardwise.kernel.plurals import counted

__all__ = ["as_json", "print_report"]


def print_report(result: RunResult, console: Console) -> None:
    """Print what ran, what was communicated, and the verdict."""
    names, observed = result.settings.mesh_names, result.observed
    table = Table("plugin", "operator", "strategy", title="Operators (on rank 0)")
    table.add_column("times", justify="right")
    before = ("", "")
    for ran, times in sorted(observed.operators.items()):
        plugin = ran.plugin if ran.plugin != before[0] else ""
        name = ran.operator if (ran.plugin, ran.operator) != before else ""
        # rich reads [S(0), R] as markup unless the bracket is escaped.
        table.add_row(plugin, name, ran.strategy.replace("[", r"\["), f"{times:,}", end_section=False)
        before = (ran.plugin, ran.operator)
    console.print(table)
    table = Table("collective", "mesh dims", title="Collectives (on rank 0)")
    for heading in ("ranks", "times", "bytes"):
        table.add_column(heading, justify="right")
    for use, times in sorted(observed.collectives.items()):
        dims = ", ".join(names[dim] for dim in use.mesh_dims)
        table.add_row(use.kind, dims, str(use.group_size), f"{times:,}", f"{observed.nbytes[use]:,}")
    console.print(table)
    table = Table("largest difference in", "where", title="Mesh against one device")
    for heading in ("difference", "tolerance"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for difference in result.comparison.differences:
        within = "[green]within" if difference.within else "[red]BEYOND"
        figures = (f"{difference.value:.2e}", f"{difference.tolerance:.0e}")
        table.add_row(difference.what, difference.where, *figures, within)
    console.print(table)
    settings = result.settings
    for where, steps in (
        (f"mesh {settings.mesh_text} ({settings.device}, {result.backend})", result.steps),
        ("one device", result.single_steps),
    ):
        speed = tokens_per_second(settings, steps)
        console.print(f"{where}: loss {steps[0].loss:.4f} -> {steps[-1].loss:.4f}, {speed:,.0f} tokens/s")
    if result.learned is not None:
        console.print(f"learned from the first step: {result.learned}")
    verdict = "[green]the mesh and one device agree" if result.comparison.agrees else "[red]the two runs DIFFER"
    console.print(f"{verdict} over {counted(settings.steps, 'step')}")


def as_json(result: RunResult) -> dict[str, Any]:
    """The same as plain values: settings, losses, uses and differences."""
    observed = result.observed
    return {
        "settings": result.settings.as_json(),
        "backend": result.backend,
        "learned": result.learned,
        "agrees": result.comparison.agrees,
        "differences": [
            {**asdict(difference), "within": difference.within} for difference in result.comparison.differences
        ],
        "mesh": _run_json(result, on_mesh=True),
        "one_device": _run_json(result, on_mesh=False),
        "operators": [{**asdict(use), "times": times} for use, times in sorted(observed.operators.items())],
        "collectives": [
            {**asdict(use), "times": times, "bytes": observed.nbytes[use]}
            for use, times in sorted(observed.collectives.items())
        ],
    }


def _run_json(result: RunResult, *, on_mesh: bool) -> dict[str, Any]:
    steps = result.steps if on_mesh else result.single_steps
    return {
        "losses": [step.loss for step in steps],
        "gradient_norms": [step.norm for step in steps],
        "tokens_per_second": tokens_per_second(result.settings, steps),
    }
