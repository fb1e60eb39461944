"""The closing report, as tables for people and as JSON for programs."""

from __future__ import annotations

from typing import Any

from attrs import asdict
from rich.console import Console
from rich.table import Table

from shardwise.demo.comparison import Comparison
from shardwise.demo.observation import Observed
from shardwise.demo.progress import tokens_per_second
from shardwise.demo.run import Outcome

__all__ = ["as_json", "print_report"]


def print_report(outcome: Outcome, console: Console) -> None:
    """Print what ran, what was communicated, and the verdict."""
    console.print(_operators(outcome.observed))
    console.print(_collectives(outcome))
    console.print(_differences(outcome.comparison))
    settings = outcome.settings
    for where, steps in (
        (f"mesh {settings.mesh_text} ({settings.device}, {outcome.backend})", outcome.steps),
        ("one device", outcome.single_steps),
    ):
        speed = tokens_per_second(settings, steps)
        console.print(f"{where}: loss {steps[0].loss:.4f} -> {steps[-1].loss:.4f}, {speed:,.0f} tokens/s")
    verdict = "[green]the mesh and one device agree" if outcome.comparison.agrees else "[red]the two runs DIFFER"
    console.print(f"{verdict} over {settings.steps} steps")


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The same as plain values: settings, losses, uses and differences."""
    observed = outcome.observed
    return {
        "settings": outcome.settings.as_json(),
        "backend": outcome.backend,
        "agrees": outcome.comparison.agrees,
        "differences": [
            {**asdict(difference), "within": difference.within} for difference in outcome.comparison.differences
        ],
        "mesh": _run_json(outcome, on_mesh=True),
        "one_device": _run_json(outcome, on_mesh=False),
        "operators": [{**asdict(use), "times": times} for use, times in sorted(observed.operators.items())],
        "collectives": [
            {**asdict(use), "times": times, "bytes": observed.nbytes[use]}
            for use, times in sorted(observed.collectives.items())
        ],
    }


def _run_json(outcome: Outcome, *, on_mesh: bool) -> dict[str, Any]:
    steps = outcome.steps if on_mesh else outcome.single_steps
    return {
        "losses": [step.loss for step in steps],
        "gradient_norms": [step.norm for step in steps],
        "tokens_per_second": tokens_per_second(outcome.settings, steps),
    }


def _operators(observed: Observed) -> Table:
    table = Table("plugin", "operator", "strategy", title="Operators (on rank 0)")
    table.add_column("times", justify="right")
    before = ("", "")
    for use, times in sorted(observed.operators.items()):
        plugin = use.plugin if use.plugin != before[0] else ""
        operator = use.operator if (use.plugin, use.operator) != before else ""
        table.add_row(plugin, operator, _plain(use.strategy), f"{times:,}", end_section=False)
        before = (use.plugin, use.operator)
    return table


def _collectives(outcome: Outcome) -> Table:
    table = Table("collective", "mesh dims", title="Collectives (on rank 0)")
    for heading in ("ranks", "times", "bytes"):
        table.add_column(heading, justify="right")
    names, observed = outcome.settings.mesh_names, outcome.observed
    for use, times in sorted(observed.collectives.items()):
        dims = ", ".join(names[dim] for dim in use.mesh_dims)
        table.add_row(use.kind, dims, str(use.group_size), f"{times:,}", f"{observed.nbytes[use]:,}")
    return table


def _differences(comparison: Comparison) -> Table:
    table = Table("largest difference in", "where", title="Mesh against one device")
    for heading in ("difference", "tolerance"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for difference in comparison.differences:
        verdict = "[green]within" if difference.within else "[red]BEYOND"
        figures = (f"{difference.value:.2e}", f"{difference.tolerance:.0e}")
        table.add_row(difference.what, difference.where, *figures, verdict)
    return table


def _plain(text: str) -> str:
    # rich reads [S(0), R] as markup unless the bracket is escaped
    return text.replace("[", r"\[")
