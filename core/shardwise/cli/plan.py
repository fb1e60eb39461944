"""``shardwise plan``: choose the layouts of a whole step together, without the mesh, and compare two plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from shardwise.cli.completion import offer_programs
from shardwise.cli.modules import load_function_of_mesh
from shardwise.cli.output import (
    json_option,
    print_json,
    print_parts,
    print_rows,
    print_text,
    refuse_no_folder,
    refuse_to_overwrite,
)
from shardwise.cli.program_errors import naming_mesh_dims, program_errors, staying_in_folder
from shardwise.cli.tensor_text import mesh_dim_names, mesh_option_shape, words_per_mesh_dim
from shardwise.program.amounts import milliseconds, parse_size, size_text
from shardwise.program.plan_file import Line, PlanFile, parse

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.steps.planning import Planned
    from shardwise.tools.rehearse import Rehearsal

__all__ = ["plan"]


class _WithPrograms(click.Group):
    """A group in which a word that is no command is a program to plan."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = bool(args) and (args[0] in self.commands or args[0] in ("-h", "--help"))
        return super().parse_args(ctx, args if named else ["step", *args])


@click.group(cls=_WithPrograms)
def plan() -> None:
    """Choose the layouts of a whole step together: shardwise plan FILE.py:FUNCTION --mesh 8x16x8.

    See shardwise plan step --help for all options, and shardwise plan diff --help.
    """


def _size(_ctx: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    """An option with a number of bytes."""
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


_KEEP = "A plan file: its placements of parameters and its moves without a why are kept, the rest is solved anew."
_FACTOR = "Try all meshes of so many ranks, with one mesh dim per name at most (three without --names)."
_RECIPE = "A plan file whose placements of parameters are tried, too; may be given several times."


@plan.command(short_help="Choose the layouts of a step.")
@click.argument("program", metavar="FILE.py:FUNCTION", shell_complete=offer_programs)
@click.option("--mesh", "mesh_shape", callback=mesh_option_shape, required=True, help="Sizes of the mesh dims: 8x16x8.")
@click.option("--names", help="Names of the mesh dims, with commas: dp,tp,pp.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Whose kernels.")
@click.option("--wires", help="Connection of each mesh dim: loopback, ethernet, infiniband, nvlink; with commas.")
@click.option("--fixed", type=click.Choice(["parameters"]), help="What stays as placed: plan activations only.")
@click.option("--memory", callback=_size, help="What a rank may hold at any time: 64GiB. Otherwise there is no limit.")
@click.option("--keep", type=click.Path(path_type=Path), help=_KEEP)
@click.option("--loose", is_flag=True, help="Lines of --keep that fit nothing are warnings, and are left out.")
@click.option("--recipe", "recipes", type=click.Path(path_type=Path), multiple=True, help=_RECIPE)
@click.option("--factor", is_flag=True, help=_FACTOR)
@click.option("--prove", is_flag=True, help="Find a bound that no plan undercuts, and how far the plan is above it.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan to this file.")
@json_option
def step(  # noqa: PLR0913  # the options of the command
    *,
    program: str,
    mesh_shape: tuple[int, ...],
    names: str | None,
    device: str,
    wires: str | None,
    fixed: str | None,
    memory: int | None,
    keep: Path | None,
    loose: bool,
    recipes: tuple[Path, ...],
    factor: bool,
    prove: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Choose where the parameters, activations and gradients of a step lie, for the least cost together, and verify
    the choice.

    FUNCTION (of a file, or of a module: package.module:FUNCTION) takes the mesh, as for shardwise rehearse. Inputs and
    buffers stay where it places them; with --fixed parameters, all parameters do. --out writes the plan, which
    distribute_module and shardwise rehearse take.
    """
    from shardwise.steps.factoring import cheapest_plan, plan_shapes
    from shardwise.steps.planning import plan as planned_by

    if factor and len(mesh_shape) != 1:
        raise click.UsageError("--factor tries all shapes: give --mesh the number of ranks alone")
    words = _factor_names(names) if factor else mesh_dim_names(names, mesh_shape)
    connections = (wires.split(",") if wires else None) if factor else words_per_mesh_dim("--wires", wires, mesh_shape)
    if loose and keep is None:
        raise click.UsageError("--loose is about the lines of a plan to keep: give --keep FILE too")
    refuse_no_folder("--out", out)
    refuse_to_overwrite("--out", out, b"version = ", "a plan")

    def run(mesh: DeviceMesh) -> Any:
        # Loaded where tensors have no data: a model that a file makes when it is imported takes no memory.
        function = load_function_of_mesh(program)
        with naming_mesh_dims(names), staying_in_folder():
            return function(mesh)

    options: dict[str, Any] = {
        "fixed": () if fixed is None else (fixed,),
        "memory": memory,
        "recipes": {path.stem: _read(path) for path in recipes},
        "keep": None if keep is None else _read(keep),
        "loose": loose,
        "prove": prove,
        "device": device,
        "wires": connections,
        "name": program,
    }
    shapes = None
    with program_errors(program), _progress(shown=not as_json, proves=prove) as tell:
        if factor:
            shapes = plan_shapes(run, mesh_shape[0], words or (), tell=tell, **options)
            made = cheapest_plan(shapes)
        else:
            made = planned_by(run, mesh_shape, words, tell=tell, **options)
    if out is not None:
        made.save(out)
    _print(made, shapes, as_json=as_json)


def _factor_names(names: str | None) -> list[str] | None:
    """Names for the mesh dims that may be, as many as are given."""
    text = names or "dim0,dim1,dim2"
    return mesh_dim_names(text, (1,) * len(text.split(",")))


@contextmanager
def _progress(*, shown: bool, proves: bool) -> Iterator[Callable[[str, int], None]]:
    """A live bar over the phases where stderr is a terminal."""
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield lambda _phase, _ops: None
        return
    phases = ("record", "solve", "verify", "prove")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Few refreshes: the cores are for the plan.
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("record", total=len(phases) if proves else len(phases) - 1)

        def tell(phase: str, ops: int) -> None:
            text = f"{phase}: {ops:,} ops" if ops else phase
            bar.update(task, completed=phases.index(phase), description=text)

        yield tell


def _print(made: Planned, shapes: Mapping[tuple[int, ...], Planned | Exception] | None, *, as_json: bool) -> None:
    """Print a plan, and what was found for each shape of the mesh where all were tried."""
    if as_json:
        print_json({**_as_json(made), **({} if shapes is None else {"shapes": _shapes_json(shapes)})})
    else:
        print_parts([*([] if shapes is None else [_shapes_table(shapes)]), *_tables(made)])
        print_text(f"\n{_verdict(made)}")


# -- one plan for each shape of the mesh -----------------------------------------------------------------------------


def _shapes_table(shapes: Mapping[tuple[int, ...], Planned | Exception]) -> Table:
    """A row per shape, the cheapest first; shapes without a plan come last, with the reason."""
    table = Table("mesh", title="All meshes of these ranks")
    for heading in ("forward and backward", "op by op", "most at a time"):
        table.add_column(heading, justify="right")
    table.add_column("", overflow="fold")
    for shape, one in sorted(shapes.items(), key=lambda item: getattr(item[1], "cost", math.inf)):
        mesh = "x".join(map(str, shape))
        if isinstance(one, Exception):
            table.add_row(mesh, "-", "-", "-", f"{type(one).__name__}: {one}".splitlines()[0])
            continue
        today = "-" if one.recorded_cost is None else milliseconds(one.recorded_cost)
        verified = "" if not one.differences else "not verified"
        table.add_row(mesh, milliseconds(one.cost), today, size_text(one.rehearsal.memory.later_peak), verified)
    return table


def _shapes_json(shapes: Mapping[tuple[int, ...], Planned | Exception]) -> list[dict[str, object]]:
    return [
        {"mesh": list(shape), "error": f"{type(one).__name__}: {one}"}
        if isinstance(one, Exception)
        else {
            "mesh": list(shape),
            "cost": one.cost,
            "op_by_op": one.recorded_cost,
            "peak": one.rehearsal.memory.later_peak,
            "verified": not one.differences,
        }
        for shape, one in shapes.items()
    ]


# -- one plan --------------------------------------------------------------------------------------------------------


def _verdict(made: Planned) -> str:
    seconds = ", ".join(f"{phase} {s:.1f} s" for phase, s in made.seconds.items())
    head = f"{made.calls:,} calls, {len(made.decisions):,} decisions; {seconds}."
    if not made.differences:
        return f"{head}\nVerified: a rehearsal of the plan issues the collectives that were predicted, byte by byte."
    lines = [f"{head}\nNot verified: a rehearsal of the plan issues other collectives than were predicted."]
    for one in made.differences:
        over = ", ".join(made.file.mesh_names[m] for m in one.use.mesh_dims)
        counts = (f"{times} times, {size_text(nbytes)}" for times, nbytes in (one.predicted, one.rehearsed))
        lines.append("  {} {} over {}: {} predicted, {} rehearsed".format(one.use.phase, one.use.kind, over, *counts))
    return "\n".join(lines)


def _tables(made: Planned) -> Iterator[Table]:
    shape = "x".join(map(str, made.file.mesh_shape))
    table = Table("one rank, one step", title=f"{made.file.program} on {shape} ({', '.join(made.file.mesh_names)})")
    table.add_column("op by op", justify="right")
    table.add_column("plan", justify="right")
    today = "-" if made.recorded_cost is None else milliseconds(made.recorded_cost)
    table.add_row("forward and backward, by the cost model", today, milliseconds(made.cost))
    if made.bound is not None and made.gap is not None:
        table.add_row("- no plan is below", "", f"{milliseconds(made.bound)} ({made.gap:.1%} less)")
    for name, cost in made.recipe_costs.items():
        table.add_row(f"- at best, with the parameters of {name}", "", "-" if cost is None else milliseconds(cost))
    for name, of in _MEMORY.items():
        table.add_row(name, size_text(of(made.recorded)), size_text(of(made.rehearsal)))
    before, after = made.recorded_collectives, made.collectives
    for use in sorted({*before, *after}, key=lambda u: (_ORDER.index(u.phase), u)):
        over = ", ".join(made.file.mesh_names[m] for m in use.mesh_dims)
        table.add_row(f"{use.phase} {use.kind} over {over}", _use(before.get(use)), _use(after.get(use)))
    yield table
    yield _parameters_table(made.file)
    if made.file.rests or made.file.moves:
        yield _lines_table("What moves, and why", [*made.file.rests, *made.file.moves])


def _parameters_table(file: PlanFile) -> Table:
    """A row per pattern; what is whole on every rank comes together."""
    table = Table("parameters and buffers", "placements", title="Where they lie")
    for name, layout in file.parameters.items():
        if layout:
            table.add_row(name, ", ".join(f"{mesh_dim} {placement}" for mesh_dim, placement in layout.items()))
    whole = [name for name, layout in file.parameters.items() if not layout]
    if whole:
        table.add_row(", ".join(whole), "whole on every rank")
    return table


_ORDER = ("forward", "backward", "optimizer")
_MEMORY: Mapping[str, Callable[[Rehearsal], int]] = {
    "kept by forward for backward": lambda r: r.memory.kept,
    "parameters, gradients and optimizer": lambda r: r.memory.state,
    "most at a time, from the second step on": lambda r: r.memory.later_peak,
}


def _use(figures: tuple[int, int] | None) -> str:
    return "-" if figures is None else f"{figures[0]:,} x, {size_text(figures[1])}"


def _lines_table(title: str, lines: Sequence[Line]) -> Table:
    table = Table("phase", "module", "op", "what", "to", title=title)
    table.add_column("times", justify="right")
    table.add_column("why", overflow="fold")
    for line in lines:
        table.add_row(
            line.phase, line.at or "-", line.op, line.operand or "result", _to(line), f"{line.times:,}", line.why
        )
    return table


def _to(line: Line) -> str:
    return ", ".join(f"{name} {placement}" for name, placement in line.to.items())


def _as_json(made: Planned) -> dict[str, Any]:
    def uses(of: Mapping[Any, tuple[int, int]]) -> list[dict[str, object]]:
        return [
            {"phase": u.phase, "kind": u.kind, "mesh_dims": list(u.mesh_dims), "times": times, "bytes": nbytes}
            for u, (times, nbytes) in of.items()
        ]

    def side(cost: float | None, rehearsal: Rehearsal, of: Mapping[Any, tuple[int, int]]) -> dict[str, object]:
        of_rank = rehearsal.memory
        memory = {"kept": of_rank.kept, "state": of_rank.state, "peak": of_rank.later_peak}
        return {"cost": cost, "memory": memory, "collectives": uses(of)}

    return {
        "program": made.file.program,
        "mesh": list(made.file.mesh_shape),
        "names": list(made.file.mesh_names),
        "figures": made.file.figures,
        "plan": side(made.cost, made.rehearsal, made.collectives),
        "op_by_op": side(made.recorded_cost, made.recorded, made.recorded_collectives),
        "bound": made.bound,
        "gap": made.gap,
        "recipes": dict(made.recipe_costs),
        "parameters": {name: dict(layout) for name, layout in made.file.parameters.items()},
        "verified": not made.differences,
        "differences": [
            {
                "phase": d.use.phase,
                "kind": d.use.kind,
                "mesh_dims": list(d.use.mesh_dims),
                "predicted": list(d.predicted),
                "rehearsed": list(d.rehearsed),
            }
            for d in made.differences
        ],
        "rests": [_line_json(line) for line in made.file.rests],
        "moves": [_line_json(line) for line in made.file.moves],
        "calls": made.calls,
        "decisions": len(made.decisions),
        "torn": made.torn,
        "seconds": dict(made.seconds),
    }


def _line_json(line: Line) -> dict[str, object]:
    operand = {"operand": line.operand} if line.operand else {}
    return {
        "at": line.at,
        "op": line.op,
        **operand,
        "phase": line.phase,
        "to": dict(line.to),
        "times": line.times,
        "why": line.why,
    }


# -- two plans -------------------------------------------------------------------------------------------------------


@plan.command(short_help="Compare two plan files.")
@click.argument("a", metavar="A", type=click.Path(path_type=Path))
@click.argument("b", metavar="B", type=click.Path(path_type=Path))
@json_option
def diff(*, a: Path, b: Path, as_json: bool) -> None:
    """Compare two plan files: figures and collectives side by side, then the lines that only one of them has."""
    first, second = _read(a), _read(b)
    figures = [{"what": name, "A": str(x), "B": str(y)} for name, x, y in _figures(first, second)]
    lines = _changed(first, second)
    if as_json:
        print_json({"figures": figures, "lines": lines})
        return
    print_rows(figures, ["what", "A", "B"])
    if lines:
        click.echo()
        print_rows(lines, ["change", "line", "A", "B"])
    else:
        click.echo("\nNo line differs.")


def _read(path: Path) -> PlanFile:
    from shardwise.program.step_plan import read_text

    return parse(read_text(path, "the plan"), str(path))


def _figures(a: PlanFile, b: PlanFile) -> Iterator[tuple[str, object, object]]:
    yield "program", a.program, b.program
    yield "mesh", a.mesh_text, b.mesh_text
    yield "figures", a.figures, b.figures
    for name in dict.fromkeys([*a.predicted, *b.predicted]):
        yield name, a.predicted.get(name, "-"), b.predicted.get(name, "-")
    for phase in dict.fromkeys([*a.communication, *b.communication]):
        uses = [_by_use(file.communication.get(phase, ())) for file in (a, b)]
        for use in dict.fromkeys([*uses[0], *uses[1]]):
            yield f"{phase} {use}", uses[0].get(use, "-"), uses[1].get(use, "-")


def _by_use(texts: Sequence[str]) -> dict[str, str]:
    """``all_reduce tp 16 ranks`` -> ``x67 8.51 GiB``, of the lines of a file's communication."""
    parts = (text.partition(" x") for text in texts)
    return {use: f"x{figures}" for use, _, figures in parts}


def _changed(a: PlanFile, b: PlanFile) -> list[dict[str, str]]:
    changes = []
    sides = [dict(_keyed(file)) for file in (a, b)]
    for line in dict.fromkeys([*sides[0], *sides[1]]):
        before, after = (side.get(line) for side in sides)
        if before != after:
            kind = "added" if before is None else "gone" if after is None else "changed"
            changes.append({"change": kind, "line": line, "A": before or "-", "B": after or "-"})
    return changes


def _keyed(file: PlanFile) -> Iterator[tuple[str, str]]:
    for table, layouts in (("parameters", file.parameters), ("inputs", file.inputs)):
        for name, layout in layouts.items():
            yield f"[{table}] {name}", ", ".join(f"{n} {p}" for n, p in layout.items()) or "replicated"
    seen: dict[str, str] = {}
    for table, lines in (("rests", file.rests), ("moves", file.moves)):
        for line in lines:
            what = f"[[{table}]] {line.phase} {line.at or '-'} {line.op} {line.operand}".rstrip()
            to = f"{_to(line)} x{line.times}"
            # One op of a module may have several lines.
            seen[what] = f"{seen[what]}; {to}" if what in seen else to
    yield from seen.items()
