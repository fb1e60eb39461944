"""``shardwise rehearse``: what a rank of a mesh of any size would hold and send, without the mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator

import click
from attrs import asdict
from rich.table import Table

from shardwise.cli.output import json_option, print_json, print_parts, print_text
from shardwise.cli.program_errors import program_errors
from shardwise.cli.step_program import StepProgram, op_progress, step_options
from shardwise.program.amounts import size_text
from shardwise.program.plan_file import PlanFile
from shardwise.settings import read_settings
from shardwise.tools.program import PHASES
from shardwise.tools.rehearse import Rehearsal, refuse_empty
from shardwise.tools.rehearse import rehearse as follow

__all__ = ["rehearse"]


@click.command()
@step_options
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help="The rank to play.")
@click.option("--by-op", is_flag=True, help="List the collectives of each op.")
@json_option
def rehearse(
    *,
    step: StepProgram,
    rank: int,
    by_op: bool,
    as_json: bool,
) -> None:
    """Follow a program on a mesh of any size, without data and without the mesh: what one rank holds and sends.

    FUNCTION (of a file, or of a module: package.module:FUNCTION) takes the mesh. It runs a training step on it, or
    returns a loss, or (model, inputs), or (model, inputs, optimizer). Rank 0 has the largest part of whatever is
    sharded unevenly.
    """
    plan = step.plan
    if rank >= math.prod(step.mesh_shape):
        raise click.UsageError(f"--rank {rank}: the mesh has the ranks 0 to {math.prod(step.mesh_shape) - 1}")
    with program_errors(step.text), op_progress(shown=not as_json) as tell:
        decisions, of_learning = step.decisions(tell)
        by = plan if decisions is None else decisions
        rehearsal = follow(
            step.run, step.mesh_shape, step.mesh_names, rank=rank, device=step.device, plan=by, tell=tell
        )
    refuse_empty(rehearsal)
    if as_json:
        memory = rehearsal.memory
        print_json(
            {
                "mesh": list(rehearsal.mesh_shape),
                "names": list(rehearsal.mesh_names),
                "coordinate": list(rehearsal.coordinate),
                "parameters": rehearsal.whole_parameters,
                "parameter_bytes": rehearsal.whole_parameter_bytes,
                "memory": {**asdict(memory), "peak": memory.peak, "activations": memory.activations},
                "collectives": [
                    {**asdict(use), "times": times, "bytes": nbytes} for use, times, nbytes in rehearsal.by_op
                ],
                "ops": dict(rehearsal.ops),
                **({"learned": decisions is not None} if step.is_learned else {}),
                **({} if plan is None else {"as_planned": not _unplanned(plan.file, rehearsal)}),
            }
        )
    else:
        print_parts(list(_tables(rehearsal, by_op=by_op)))
        if of_learning or _may_be_learned(step, rehearsal):
            print_text(of_learning or "This is the first step. Later ones may be learned: --learned shows them.")
        if plan is not None:
            unplanned = _unplanned(plan.file, rehearsal)
            head = "Not as planned:" if unplanned else "These are the collectives of the plan."
            print_text("\n".join([head, *(f"  {line}" for line in unplanned)]))


def _may_be_learned(step: StepProgram, rehearsal: Rehearsal) -> bool:
    """Whether a run of the program may send something else in later steps: it sends, it trains, and has no plan."""
    trains = "optimizer" in rehearsal.memory.peaks
    return step.plan is None and trains and bool(rehearsal.counts) and read_settings().learn is not False


def _unplanned(file: PlanFile, rehearsal: Rehearsal) -> list[str]:
    """What a rehearsal sends otherwise than a plan says."""
    from shardwise.steps.planning import communication_of

    now = communication_of(rehearsal)
    lines = []
    for phase in dict.fromkeys([*file.communication, *now]):
        planned, sent = set(file.communication.get(phase, ())), set(now.get(phase, ()))
        lines += [f"{phase} in the plan only: {use}" for use in sorted(planned - sent)]
        lines += [f"{phase} in the rehearsal only: {use}" for use in sorted(sent - planned)]
    return lines


# -- tables ----------------------------------------------------------------------------------------------------------


def _tables(rehearsal: Rehearsal, *, by_op: bool) -> Iterator[Table]:
    memory = rehearsal.memory
    shape = "x".join(map(str, rehearsal.mesh_shape))
    at = ", ".join(f"{n} {c}" for n, c in zip(rehearsal.mesh_names, rehearsal.coordinate, strict=True))
    memory_table = Table("what", title=f"One of {rehearsal.ranks:,} ranks ({shape}), at {at}")
    memory_table.add_column("bytes", justify="right")
    whole = f" (of {rehearsal.whole_parameters:,} parameters, {size_text(rehearsal.whole_parameter_bytes)})"
    rows = {
        f"parameters{whole if rehearsal.whole_parameters else ''}": memory.parameters,
        "buffers": memory.buffers,
        "gradients": memory.gradients,
        "optimizer states": memory.optimizer,
        "kept by forward for backward": memory.kept,
        **{f"most at a time in {phase}": memory.peaks[phase] for phase in PHASES if phase in memory.peaks},
    }
    for name, size in rows.items():
        if size:
            memory_table.add_row(name, size_text(size))
    yield memory_table
    uses = rehearsal.by_op if by_op else rehearsal.collectives
    table = Table("phase", "collective", "mesh dims", title="Collectives that it issues")
    for heading in ("ranks", "times", "bytes handed in"):
        table.add_column(heading, justify="right")
    if by_op:
        table.add_column("for")
    for use, times, nbytes in uses:
        figures = (f"{use.ranks:,}", f"{times:,}", size_text(nbytes))
        table.add_row(
            use.phase,
            use.kind,
            ", ".join(rehearsal.mesh_names[m] for m in use.mesh_dims),
            *figures,
            *([use.op] if by_op else []),
        )
    yield table
