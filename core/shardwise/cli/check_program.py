"""``shardwise check``: whether a program on a mesh has the numbers of one device, module by module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from attrs import asdict
from rich.console import Console

from shardwise import errors
from shardwise.cli.completion import offer_programs
from shardwise.cli.modules import load_function_of_mesh, refuse_no_file
from shardwise.cli.output import json_option, print_json, print_rows, print_text
from shardwise.cli.program_errors import OWN_MESH, TO_NAME, is_of_meshes
from shardwise.cli.tensor_text import mesh_dim_names, mesh_option_shape
from shardwise.errors import WorkerError
from shardwise.kernel.plurals import counted
from shardwise.testing.pool import NO_ANSWER
from shardwise.testing.step_check import ASKED, STAGES, StepReport, check_step
from shardwise.testing.step_differences import Difference
from shardwise.tools.program_errors import program_lines

__all__ = ["check_program"]

_MOST_RANKS = 64
_SHOWN = 10  # rows of the table of differences


@click.command("check")
@click.argument("program", metavar="FILE.py:FUNCTION", shell_complete=offer_programs)
@click.option(
    "--mesh",
    "mesh_shape",
    callback=mesh_option_shape,
    required=True,
    help="Sizes of the mesh dims: 2x2. One process each.",
)
@click.option("--names", help="Names of the mesh dims, with commas: dp,tp.")
@click.option(
    "--plan",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The ranks run by this plan; one device does not.",
)
@click.option(
    "--rtol",
    type=click.FloatRange(0, 1),
    help="What rounding may do, relative to the largest value of a tensor.  [default: by dtype]",
)
@click.option("--double", is_flag=True, help="Make tensors in double precision, where rounding hides nothing.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of all random numbers.")
@click.option(
    "--timeout", type=click.IntRange(1), default=300, show_default=True, help="Seconds for a run of the step."
)
@json_option
def check_program(  # noqa: PLR0913  # an argument per option
    *,
    program: str,
    mesh_shape: tuple[int, ...],
    names: str | None,
    plan: Path | None,
    rtol: float | None,
    double: bool,
    seed: int,
    timeout: int,
    as_json: bool,
) -> None:
    """Run a program on local processes and on one device, and compare the results of its modules, its gradients, and
    its parameters after the step: which module and which op is the first that differs.

    FUNCTION (of a file, or of a module: package.module:FUNCTION) takes the mesh. It runs a training step on it, or
    returns a loss, or (model, inputs), or (model, inputs, optimizer). One device is a mesh of one rank. For a plugin
    there is plugins check. Exits with 1 for a difference.
    """
    _refuse_plugins(program)
    words = mesh_dim_names(names, mesh_shape)
    if math.prod(mesh_shape) > _MOST_RANKS:
        raise click.UsageError(
            f"a mesh of {math.prod(mesh_shape):,} ranks needs as many processes here: check a small mesh of the same "
            "dims, such as 2x2x2"
        )
    where = program.rpartition(":")[0]
    if where.endswith(".py"):
        refuse_no_file(Path(where))
    with _progress(shown=not as_json) as tell:
        try:
            report = check_step(
                program,
                mesh_shape,
                words,
                load=load_function_of_mesh,
                plan=None if plan is None else str(plan.resolve()),
                rtol=rtol,
                double=double,
                seed=seed,
                timeout=timeout,
                tell=tell,
            )
        except WorkerError as error:
            first = next((f for f in error.errors if f is not None and f.rank == error.rank), None)
            raise _of_program(error, words, math.prod(mesh_shape)) from (None if first is None else first.error)
    if report.is_same and not any(report.compared.values()):
        raise click.ClickException(
            f"{program} left nothing to compare: no module gave a tensor or a number, and the program returned not "
            "one. Run a step, or return a loss, (model, inputs) or (model, inputs, optimizer)."
        )
    if as_json:
        print_json(_as_json(report))
    else:
        _print(report)
    if not report.is_same:
        click.get_current_context().exit(1)


def _refuse_plugins(program: str) -> None:
    if ":" in program:
        return
    from shardwise.cli.plugin_states import plugins_named
    from shardwise.discovery.entry_points import discover
    from shardwise.settings import Settings

    is_plugin = (
        bool(plugins_named(program, discover(Settings()))) or Path(program).suffix == ".whl" or Path(program).is_dir()
    )
    if is_plugin:
        raise click.UsageError(f"{program} is a plugin: `shardwise plugins check {program}` judges its rules")
    raise click.UsageError(
        f"{program!r} does not name a function: write path/to/file.py:function or package.module:function"
    )


def _of_program(error: WorkerError, names: Sequence[str] | None, size: int) -> click.ClickException:
    """What the program raised, with its own lines, and the rank that raised it first."""
    first = next((failure for failure in error.errors if failure is not None and failure.rank == error.rank), None)
    if first is None:
        return click.ClickException(str(error))
    where = _where_failed(error, size)
    if first.kind in NO_ANSWER:
        more = " --timeout SECONDS gives it longer." if first.kind == "hung" else ""
        if first.message.endswith("SIGKILL"):
            more = (
                " The system does that where memory is short. Each process makes the whole model before it keeps its "
                "part, and one device keeps all: check a model of fewer layers."
            )
        return click.ClickException(f"the program did not return {where}: {first.message}.{more}\n{first.traceback}")
    is_ours = hasattr(errors, first.kind)
    if first.kind in (click.ClickException.__name__, click.UsageError.__name__) or (
        is_ours and first.message.startswith(f"{ASKED}:")
    ):
        return click.ClickException(str(first.message))
    hint = f" {TO_NAME}" if first.kind == errors.PlacementCountError.__name__ and not names else ""
    said = f"the program raised {first.kind} {where}: {first.message}".rstrip(": ")
    own_mesh = OWN_MESH if is_of_meshes(first.traceback) else ""
    return click.ClickException(
        f"{said}{hint}\n{program_lines(first.traceback, on_purpose=is_ours)}{own_mesh}".rstrip()
    )


def _where_failed(error: WorkerError, size: int) -> str:
    """Of the processes that failed, those that did not only fail because another one had."""
    if len(error.errors) == 1 and size > 1:
        return "on one device"
    kinds = {failure.rank: failure.kind for failure in error.errors if failure is not None}
    return _on_ranks([rank for rank, kind in kinds.items() if kind == kinds[error.rank]], size)


@contextmanager
def _progress(*, shown: bool) -> Iterator[Callable[[str], None]]:
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield lambda _: None
        return
    with console.status("starting processes") as status:
        yield status.update


# -- printing --------------------------------------------------------------------------------------------------------


def _ranks(ranks: Sequence[int], size: int) -> str:
    return "all" if len(ranks) == size else ", ".join(map(str, ranks))


def _on_ranks(ranks: Sequence[int], size: int) -> str:
    if len(ranks) == size:
        return "on all ranks"
    return f"on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _print(report: StepReport) -> None:
    shape, size = "x".join(map(str, report.mesh_shape)), math.prod(report.mesh_shape)
    counts = ", ".join(_count(report.compared[stage], stage) for stage in STAGES if report.compared.get(stage))
    small = ""
    if report.small_gradients:
        small = (
            f"\nAll gradients are below {report.small_gradients:.1e}, where rounding may be all there is: only what is "
            "off by more than that is told. --double tells more."
        )
    if report.is_same:
        print_text(f"The same as on one device, on {size} ranks ({shape}): {counts}.{small}")
        return
    if report.differences:
        rows = [
            {
                "stage": difference.place.stage,
                "where": _where(difference),
                "lies": difference.placements,
                "ranks": _ranks(ranks, size),
                "off by": "-" if difference.worst == math.inf else f"{difference.worst:.2g}",
            }
            for difference, ranks in report.differences[:_SHOWN]
        ]
        print_rows(rows, ("stage", "where", "lies", "ranks", "off by"))
        more = len(report.differences) - _SHOWN
        click.echo(f"and {more} more\n" if more > 0 else "")
        first, ranks = report.differences[0]
        print_text(f"The first that differs, {_on_ranks(ranks, size)}: {first.place}\n  {first.found}")
        print_text(_op_text(report))
    if report.error:
        print_text(f"The ranks then raised {report.error}")
    print_text(f"Compared on {size} ranks ({shape}): {counts or 'nothing'}.{small}")


_COUNTED = {
    "start": ("parameter", "at the start"),
    "inputs": ("input", ""),
    "forward": ("result", "of modules"),
    "result": ("result", "of the program"),
    "gradients": ("gradient", ""),
    "parameters": ("parameter", "after the step"),
    "buffers": ("buffer", "after the step"),
}


def _count(number: int, stage: str) -> str:
    what, more = _COUNTED[stage]
    return f"{counted(number, what)} {more}".rstrip()


def _where(difference: Difference) -> str:
    place = difference.place
    if place.stage != "forward":
        return place.what
    return f"{place.module or 'the model'}{f' (call {place.call + 1})' if place.call else ''}"


def _op_text(report: StepReport) -> str:
    assert report.first is not None
    stage = report.first[0].place.stage
    if stage in ("start", "inputs"):
        return (
            "  The program makes other tensors on this mesh than on one device: make them whole, from the same seed on "
            "every rank,\n  and distribute them."
        )
    if report.op is None:
        more = report.more
        also = f"\n  The ranks also run {more.op}{_at(more)}, which one device does not." if more is not None else ""
        return (
            "  No op on MeshTensors gives a wrong value there: look at what goes through to_local, from_local or "
            f"shardwise.local.{also}"
        )
    op, _ = report.op
    if op.place.what.startswith(f"{op.op} reads"):
        return (
            f"  The first op with a wrong value, {op.op}{_at(op)}, reads it, and no op before gave it: it\n"
            "  comes through from_local or shardwise.local, or a plain tensor or a number of the program differs.\n"
            f"  {op.placements}: {op.found}"
        )
    rule = f"\n  by the rule of {op.rule}, rows {'; '.join(op.rows)}" if op.rule else ""
    return f"  The first op of it that differs is {op.op}{_at(op)}{rule}\n  {op.placements}: {op.found}"


def _at(op: Difference) -> str:
    return f" at {op.line}" if op.line else ""


def _as_json(report: StepReport) -> dict[str, Any]:
    def described(one: tuple[Difference, tuple[int, ...]] | None) -> Any:
        if one is None:
            return None
        difference, ranks = one
        facts = asdict(difference)
        del facts["position"]  # the list is in this order
        worst = None if difference.worst == math.inf else difference.worst
        return {**facts.pop("place"), **facts, "worst": worst, "ranks": list(ranks)}

    return {
        "mesh": list(report.mesh_shape),
        "same": report.is_same,
        "compared": report.compared,
        "differences": [described(one) for one in report.differences],
        "op": described(report.op),
        "more": described(None if report.more is None else (report.more, ())),
        "small_gradients": report.small_gradients,
        "error": report.error,
    }
