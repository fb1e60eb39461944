"""The plans that a model of transformers brings along, read as placements for ``shardwise.distribute_module``."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shardwise import Placement, Replicate
from shardwise_transformers.errors import ModelPlanError, StyleError
from shardwise_transformers.names import entry_for, generic, patterns_for
from shardwise_transformers.styles import PLACES, Place

__all__ = ["Plan", "expert_parallel", "placements_by_entry", "placements_by_name", "plan_of", "tensor_parallel"]

Plan = Mapping[str, str]
"""Names of modules and parameters, ``*`` for the number of a layer, and the style of each: what transformers calls a
``tp_plan`` or ``ep_plan``.
"""


def tensor_parallel(
    model: nn.Module, mesh_dim: str = "tp", *, plan: Plan | None = None, styles: Mapping[str, Place] | None = None
) -> dict[str, dict[str, Placement]]:
    """The placements that a model's ``tp_plan`` says, over one mesh dim, for :func:`shardwise.distribute_module`.

    ``plan`` is used in place of the model's own. ``styles`` says what styles of yours mean: a function of a parameter's
    name in its module and its number of dims that returns its placement.

    Raises :class:`ModelPlanError` for a model without a plan, for an entry of ``plan`` that names nothing in the model
    and for a plan that leaves every parameter whole, and :class:`StyleError` for a style that is not known.
    """
    return _over(mesh_dim, placements_by_name(model, "tp_plan", plan, styles))


def expert_parallel(
    model: nn.Module, mesh_dim: str = "ep", *, plan: Plan | None = None, styles: Mapping[str, Place] | None = None
) -> dict[str, dict[str, Placement]]:
    """The same of a model's ``ep_plan``: each rank has some of the experts."""
    return _over(mesh_dim, placements_by_name(model, "ep_plan", plan, styles))


def _over(mesh_dim: str, places: Mapping[str, Placement]) -> dict[str, dict[str, Placement]]:
    return {pattern: {mesh_dim: place} for pattern, place in patterns_for(places, Replicate()).items()}


def plan_of(model: nn.Module, kind: str) -> dict[str, str]:
    """A copy of the model's own ``tp_plan`` or ``ep_plan``; raises :class:`ModelPlanError` where it has none."""
    plan = getattr(model, kind, None)
    if plan:
        return dict(plan)
    raise ModelPlanError(
        asked=f"read the {kind} of a {type(model).__name__}",
        found="it has none",
        do="Give one, plan={'model.layers.*.mlp.up_proj': 'colwise', ...}, or place the model by patterns with "
        "shardwise.distribute_module.",
        kind=kind,
    )


def placements_by_name(
    model: nn.Module, kind: str, plan: Plan | None, styles: Mapping[str, Place] | None
) -> dict[str, Placement]:
    """The placement of every parameter and buffer on the mesh dim of one plan. Buffers are whole."""
    entries = plan_of(model, kind) if plan is None else dict(plan)
    if plan is not None:
        _check_names(model, kind, entries)
    places = placements_by_entry(model, kind, entries, styles)
    if all(place == Replicate() for place in places.values()):
        raise ModelPlanError(
            asked=f"place a {type(model).__name__} by the {kind} {entries}",
            found="no parameter is cut by it",
            do=f"Names are those of named_modules() and named_parameters(), as {next(iter(places), '')!r}; give the "
            "model that the plan is for, or a plan with its names.",
            kind=kind,
        )
    return places | {name: Replicate() for name, _ in model.named_buffers(remove_duplicate=False)}


def placements_by_entry(
    model: nn.Module, kind: str, entries: Plan, styles: Mapping[str, Place] | None
) -> dict[str, Placement]:
    """The placement of every parameter by the entries of a plan; tied ones follow the first name with an entry."""
    known = {**PLACES, **(styles or {})}
    names = dict(model.named_parameters(remove_duplicate=False))
    places: dict[int, Placement] = {}
    for name, parameter in names.items():
        key = entry_for(name, entries)
        if key is not None and id(parameter) not in places:
            place = _place(kind, key, entries[key], known)
            places[id(parameter)] = place(name.rpartition(".")[2], parameter.ndim)
    return {name: places.get(id(parameter), Replicate()) for name, parameter in names.items()}


def _check_names(model: nn.Module, kind: str, plan: Plan) -> None:
    """A model's own plan has entries for parts that this one lacks; in a plan that somebody wrote, it is a mistake."""
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    names |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names |= {generic(name) for name in names}
    for key in plan:
        if key not in names:
            raise ModelPlanError(
                asked=f"place a {type(model).__name__} by the {kind} entry {key!r}: {plan[key]!r}",
                found="no module and no parameter has this name",
                do="Write a name of named_modules() or named_parameters(), with * for the number of a layer: "
                "'model.layers.*.mlp.up_proj'.",
                pattern=key,
                style=plan[key],
            )


def _place(kind: str, pattern: str, style: str, known: Mapping[str, Place]) -> Place:
    if style in known:
        return known[style]
    raise StyleError(
        asked=f"read the {kind} entry {pattern!r}: {style!r}",
        found=f"the style {style!r} is not one of {', '.join(sorted(known))}",
        do=f"Say what it means for a parameter, styles={{{style!r}: lambda name, ndim: Shard(0)}}, or write "
        f"'replicate' for {pattern!r} in plan= and place its parameters by a pattern of your own.",
        style=style,
        pattern=pattern,
    )
