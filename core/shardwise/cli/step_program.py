"""The step that a command rehearses: its function, its mesh, and a plan to run it by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import click
from attrs import frozen
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh

from shardwise.cli.completion import offer_programs
from shardwise.cli.modules import load_function_of_mesh
from shardwise.cli.program_errors import naming_mesh_dims, staying_in_folder
from shardwise.cli.tensor_text import mesh_dim_names, mesh_option_shape
from shardwise.program.decisions import Decisions
from shardwise.program.step_plan import StepPlan, read_plan

__all__ = ["StepProgram", "op_progress", "step_options"]

_EVERY = 25  # ops between two looks at the terminal


@frozen
class StepProgram:
    """A program as the command line names it, with its mesh, whose kernels it runs, and a plan or what it learns."""

    text: str
    mesh_shape: tuple[int, ...]
    mesh_names: Sequence[str] | None
    device: str
    plan: StepPlan | None
    plan_name: str
    is_learned: bool

    def decisions(self, tell: Callable[[str, int], None]) -> tuple[Decisions | None, str]:
        """The decisions by which the program runs once it is learned, and what to say of them; None without --learned,
        and where they would gain too little.
        """
        if not self.is_learned:
            return None, ""
        from shardwise.steps.automatic import is_worth_it
        from shardwise.steps.learned_step import learned_step

        learned = learned_step(self.run, self.mesh_shape, self.mesh_names, device=self.device, tell=tell)
        if is_worth_it(learned):
            return learned.decisions, f"A step after the first: {learned}."
        return None, f"Learning gains too little, so the program stays as it is: {learned}."

    def run(self, mesh: DeviceMesh) -> Any:
        """Load the function and call it: a model that a file makes when it is imported takes no memory here."""
        function = load_function_of_mesh(self.text)
        with naming_mesh_dims(self.mesh_names), staying_in_folder():
            return function(mesh)


_OPTIONS = (
    click.argument("program", metavar="FILE.py:FUNCTION", shell_complete=offer_programs),
    click.option("--mesh", "mesh_shape", callback=mesh_option_shape, help="Sizes of the mesh dims: 8x16x8."),
    click.option("--names", help="Names of the mesh dims, with commas: dp,tp,pp."),
    click.option(
        "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Whose kernels."
    ),
    click.option("--plan", "plan_path", type=click.Path(path_type=Path), help="Run by this plan, on its mesh."),
    click.option("--learned", "is_learned", is_flag=True, help="A step after the first, by what that one taught."),
)


def step_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say which step to rehearse, as one argument: ``step``."""

    @wraps(command)
    def call(
        *,
        program: str,
        mesh_shape: tuple[int, ...] | None,
        names: str | None,
        device: str,
        plan_path: Path | None,
        is_learned: bool,
        **others: Any,
    ) -> None:
        if is_learned and plan_path is not None:
            raise click.UsageError("--learned and --plan: a program that has a plan is not learned; give one of them")
        command(step=_step_program(program, mesh_shape, names, device, plan_path, is_learned=is_learned), **others)

    for option in reversed(_OPTIONS):
        call = option(call)
    return call


def _step_program(
    program: str,
    mesh_shape: tuple[int, ...] | None,
    names: str | None,
    device: str,
    plan_path: Path | None,
    *,
    is_learned: bool,
) -> StepProgram:
    """The step of a command's options. Raises :class:`click.UsageError` for those that do not fit."""
    plan = None if plan_path is None else read_plan(plan_path)
    of_plan = None
    if plan is not None and mesh_shape is None:
        mesh_shape, of_plan = plan.file.mesh_shape, list(plan.file.mesh_names)
    if mesh_shape is None:
        raise click.UsageError("it needs --mesh, or a --plan that has one")
    words = mesh_dim_names(names, mesh_shape) or of_plan
    return StepProgram(
        program, mesh_shape, words, device, plan, "" if plan_path is None else plan_path.name, is_learned
    )


@contextmanager
def op_progress(*, shown: bool) -> Iterator[Callable[[str, int], None]]:
    """A function that shows the phase and the number of ops, if stderr is a terminal."""
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield lambda _phase, _ops: None
        return
    with console.status("building") as status:

        def tell(phase: str, ops: int) -> None:
            if ops % _EVERY == 0:
                status.update(f"{phase}: {ops:,} ops")

        yield tell
