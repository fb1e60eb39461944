"""Plans for every shape of mesh that some number of ranks can have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import PlanError
from shardwise.kernel.plurals import counted
from shardwise.steps.planning import Planned, plan

__all__ = ["cheapest_plan", "mesh_shapes", "plan_shapes"]


def mesh_shapes(ranks: int, most: int) -> list[tuple[int, ...]]:
    """The shapes of meshes of ``ranks`` ranks with at most ``most`` dims, each of at least 2: fewer dims first."""
    return [shape for ndim in range(1, most + 1) for shape in _products(ranks, ndim)]


def _products(ranks: int, ndim: int) -> Iterator[tuple[int, ...]]:
    if ndim == 1:
        if ranks > 1:
            yield (ranks,)
        return
    for first in range(2, ranks // 2 + 1):
        if ranks % first == 0:
            yield from ((first, *rest) for rest in _products(ranks // first, ndim - 1))


def plan_shapes(
    program: Callable[[DeviceMesh], Any],
    ranks: int,
    mesh_names: Sequence[str],
    *,
    wires: Sequence[str] | None = None,
    tell: Callable[[str, int], None] | None = None,
    **options: Any,
) -> dict[tuple[int, ...], Planned | Exception]:
    """Plan a program on every shape of mesh that ``ranks`` ranks can have, as :func:`shardwise.plan` does on one.

    There are at most as many mesh dims as names. A mesh with fewer has the last of them, and so with ``wires``: the
    last mesh dim is the one of neighbours. ``options`` and ``tell`` are those of :func:`shardwise.plan`. A
    shape that the program does not take, or on which no plan keeps the limit on memory, has the error.

    Raises :class:`PlanError` for less than two ranks, and where there are not as many wires as names.
    """
    if ranks <= 1:
        raise PlanError(
            asked="plan for every shape of a mesh", found=f"it has {ranks} ranks", do="Give a number of at least 2."
        )
    if wires is not None and len(wires) != len(mesh_names):
        raise PlanError(
            asked=f"plan for {ranks} ranks on meshes of up to {counted(len(mesh_names), 'dim')}",
            found=f"there are {counted(len(wires), 'wire')}",
            do="Give one for each name of a mesh dim, that of neighbours last.",
        )
    made: dict[tuple[int, ...], Planned | Exception] = {}
    for shape in mesh_shapes(ranks, len(mesh_names)):
        of = None if wires is None else wires[-len(shape) :]
        names = mesh_names[-len(shape) :]
        try:
            made[shape] = plan(program, shape, names, wires=of, tell=tell, **options)
        except Exception as error:  # noqa: BLE001  # of the program, which may want other mesh dims; it is shown
            made[shape] = error
    return made


def cheapest_plan(made: Mapping[tuple[int, ...], Planned | Exception]) -> Planned:
    """The cheapest plan, the first of equals. Where there is none, the last error is raised."""
    plans = [one for one in made.values() if isinstance(one, Planned)]
    if not plans:
        *_, error = made.values()
        assert isinstance(error, Exception)
        raise error
    return min(plans, key=lambda one: one.cost)
