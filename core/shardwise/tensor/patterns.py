"""Patterns on the names of a module's tensors, and the placements that they give."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.engine.decided import in_force
from shardwise.errors import PlacementError
from shardwise.kernel.arguments import refuse_argument
from shardwise.kernel.placements import REPLICATE, Placement, check_placements, show_all
from shardwise.kernel.places import Places, per_mesh_dim
from shardwise.tensor.mesh_tensor import MeshTensor

__all__ = ["check_patterns", "check_placed", "check_tied", "placements_for"]


def check_patterns(kind: str, patterns: Mapping[str, Places], names: Sequence[str]) -> None:
    """Raise :class:`PlacementError` for a pattern of no effect: no name fits, or earlier patterns take all that do."""
    left = list(names)
    for pattern in patterns:
        if not isinstance(pattern, str):
            refuse_argument(f"place the tensors of a {kind}", "partition", pattern, "Its keys are patterns on names.")
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        if not fitting:
            raise PlacementError(
                asked=f"place the tensors {pattern!r} of a {kind}",
                found=f"no parameter or buffer has such a name; {_names_text(pattern, names)}",
                do=_correction(pattern, names),
                pattern=pattern,
            )
        if not set(fitting) & set(left):
            earlier = next(p for p in patterns if fnmatchcase(fitting[0], p))
            raise PlacementError(
                asked=f"place the tensors {pattern!r} of a {kind}",
                found=f"the first pattern that fits a name holds, and earlier ones take all that this one fits: "
                f"{earlier!r} takes {fitting[0]!r}",
                do=f"Put {pattern!r} before {earlier!r}, or leave it out.",
                pattern=pattern,
            )
        left = [name for name in left if name not in fitting]


def check_tied(kind: str, patterns: Mapping[str, Places], names_of: Sequence[Sequence[str]], mesh: DeviceMesh) -> None:
    """Raise :class:`PlacementError` for a pattern that only fits other names of tensors that a pattern places already.

    ``names_of`` has the names of each tensor: several of one that is tied. The first name that a pattern fits decides.
    """
    taken: dict[str, list[tuple[str, str, str]]] = {}
    has_effect = set()
    for names in names_of:
        fitting = [(n, p) for n in names if (p := _first(n, patterns)) is not None]
        if not fitting:
            continue
        (name, pattern), *others = fitting
        has_effect.add(pattern)
        places = tuple(per_mesh_dim(patterns[pattern], mesh)) if others else ()
        for other, second in others:
            if second != pattern and tuple(per_mesh_dim(patterns[second], mesh)) != places:
                taken.setdefault(second, []).append((other, name, pattern))
            else:
                has_effect.add(second)
    for pattern, tied in taken.items():
        if pattern not in has_effect:
            other, name, first = tied[0]
            raise PlacementError(
                asked=f"place the tensors {pattern!r} of a {kind}",
                found=f"{other!r} and {name!r} are one tensor (tied), and the pattern {first!r} places it otherwise",
                do=f"Give both the same placements, or leave {pattern!r} out.",
                pattern=pattern,
            )


# So many names are listed in full, and so many of a longer list.
_FEW, _NEAREST = 12, 5


def _names_text(pattern: str, names: Sequence[str]) -> str:
    """The names that there are; of many the nearest, with ``*`` for the numbers of layers."""
    if not names:
        return "it has no parameters and no buffers"
    if len(names) <= _FEW:
        return f"there are {', '.join(names)}"
    from difflib import get_close_matches  # only here: what is well needs none

    kinds = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names)
    near = get_close_matches(pattern, kinds, n=_NEAREST, cutoff=0)
    return f"of its {len(names)} the nearest are {', '.join(near)}"


def _correction(pattern: str, names: Sequence[str]) -> str:
    """What to write in place of a pattern that fits no name: torch's plans name modules, others' are regexes."""
    if any(name.startswith(f"{pattern}.") for name in names):
        return f"{pattern!r} is a module: write '{pattern}.weight', or '{pattern}.*' for all that it has."
    if any(sign in pattern for sign in ("\\", "$", "^")):
        return "Patterns are those of a shell, and no regular expressions: * stands for any text, and a dot for itself."
    return "Correct the pattern (shell style, on qualified names)."


def placements_for(
    names: Sequence[str], tensor: torch.Tensor, mesh: DeviceMesh, patterns: Mapping[str, Places]
) -> tuple[Placement, ...]:
    """The placements of a tensor: those of the first pattern that fits its name, else replicated.

    A tied tensor has several names; the first that a pattern fits decides.
    """
    chosen = None if in_force.placements is None else in_force.placements(names[0])
    if chosen is not None and len(chosen) == mesh.ndim:
        return check_placements(chosen, mesh.ndim, tensor.ndim)
    for name in names:
        pattern = _first(name, patterns)
        if pattern is not None:
            return _checked(name, pattern, tensor, mesh, patterns)
    return (REPLICATE,) * mesh.ndim


def check_placed(name: str, tensor: MeshTensor, mesh: DeviceMesh, patterns: Mapping[str, Places]) -> None:
    """Raise :class:`PlacementError` where a pattern asks for other placements than a tensor has, or another mesh."""
    pattern = _first(name, patterns)
    if pattern is None:
        return
    asked = f"place {name!r} by the pattern {pattern!r}"
    do = "Distribute a module once, or move the tensor: module.{} = nn.Parameter(t.redistribute(placements=...))."
    if tensor.device_mesh != mesh:
        raise PlacementError(
            asked=asked,
            found=f"it lies on {tensor.device_mesh} already, and the mesh here is {mesh}",
            do=do.format(name),
            pattern=pattern,
        )
    wanted = _checked(name, pattern, tensor, mesh, patterns)
    if wanted != tensor.placements:
        raise PlacementError(
            asked=f"{asked} as {show_all(wanted)}",
            found=f"it lies as {show_all(tensor.placements)} already, from an earlier call",
            do=do.format(name),
            pattern=pattern,
        )


def _first(name: str, patterns: Mapping[str, Places]) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def _checked(
    name: str, pattern: str, tensor: torch.Tensor, mesh: DeviceMesh, patterns: Mapping[str, Places]
) -> tuple[Placement, ...]:
    """The placements of a pattern. Errors name the tensor and the pattern."""
    try:
        return check_placements(per_mesh_dim(patterns[pattern], mesh), mesh.ndim, tensor.ndim)
    except PlacementError as error:
        named = f"place {name!r} of shape {tuple(tensor.shape)} by the pattern {pattern!r}"
        raise type(error)(
            asked=f"{named}: {error.asked}", found=error.found, do=error.do, **{**error.fields, "pattern": pattern}
        ) from None
