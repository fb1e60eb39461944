"""What a program writes for ``inputs=`` and ``outputs=`` of :func:`shardwise.local`, as one layout per tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.errors import LocalPlacementError
from shardwise.kernel.placements import REPLICATE, Placement, Replicate, check_placements, show_all
from shardwise.kernel.plurals import counted
from shardwise.private_torch import trees as pytree

__all__ = ["AS_IT_LIES", "layout_of_leaf", "layouts_in", "mesh_dims", "normal", "of_arguments", "spread"]

AS_IT_LIES = "as it lies"
"""The entry of an argument whose placements are to stay whatever they are."""


def normal(entry: Any, names: Sequence[str], ndim: int, asked: str) -> Any:
    """An entry in one form: a list of placements, one per mesh dim, for all tensors; a tuple of entries; or None.

    A program may write one placement (on a mesh of one dim; ``Replicate()`` on any), a list of placements, or a
    mapping from mesh dim names, with the other dims replicated. A tuple is one entry for each value, unless it is what
    ``x.placements`` gives. Raises :class:`LocalPlacementError` for anything else.
    """
    if entry is None or entry is AS_IT_LIES:
        return entry
    if isinstance(entry, Placement):
        if ndim == 1 or isinstance(entry, Replicate):
            return [entry] * ndim
        found = f"the placement {entry} does not say which of the mesh's {counted(ndim, 'dim')} it is for"
        raise _refusal(asked, found, "Write a list with one placement per mesh dim, or {name: placement}.")
    if isinstance(entry, Mapping):
        unknown = [name for name in entry if name not in names]
        if unknown:
            found = f"the mesh has no dim {unknown[0]!r}; it has {', '.join(names) or 'dims without names'}"
            raise _refusal(asked, found, "Use the mesh's dim names, or a list with one placement per mesh dim.")
        return [entry.get(name, REPLICATE) for name in names]
    if isinstance(entry, tuple) and not (len(entry) == ndim > 1 and all(isinstance(p, Placement) for p in entry)):
        return tuple(normal(part, names, ndim, asked) for part in entry)
    if isinstance(entry, (list, tuple)) and all(isinstance(p, Placement) for p in entry) and len(entry) == ndim:
        return list(entry)
    found = f"{entry!r} is not the placements of a tensor on a mesh of {counted(ndim, 'dim')}"
    raise _refusal(asked, found, "Write a list with one placement per mesh dim, and a tuple for several tensors.")


def _refusal(asked: str, found: str, do: str) -> LocalPlacementError:
    return LocalPlacementError(asked=asked, found=found, do=do)


def spread(entry: Any, value: Any, asked: str) -> list[Any]:
    """One entry in normal form for each leaf of nested values: a tuple has an entry for each part.

    Raises :class:`LocalPlacementError` where the numbers differ.
    """
    if isinstance(value, (tuple, list, dict)) and isinstance(entry, tuple):
        parts = list(value.values()) if isinstance(value, dict) else list(value)
        if len(parts) != len(entry):
            found = f"there are {counted(len(entry), 'entry')} for {counted(len(parts), 'value')}"
            raise _refusal(asked, found, "Give an entry for each value, None for what is not a tensor.")
        spread_parts: list[Any] = []
        for own, part in zip(entry, parts, strict=True):
            spread_parts += spread(own, part, asked)
        return spread_parts
    leaves = len(pytree.tree_leaves(value))
    if isinstance(entry, tuple):
        if len(entry) == 1 and leaves == 1:
            return [entry[0]]
        raise _refusal(
            asked, f"there are {counted(len(entry), 'entry')} for one value", "Give an entry for each value."
        )
    return [entry] * leaves


def layouts_in(entry: Any) -> list[tuple[Placement, ...]]:
    """The layouts of an entry in normal form."""
    if isinstance(entry, tuple):
        found: list[tuple[Placement, ...]] = []
        for part in entry:
            found += layouts_in(part)
        return found
    return [] if entry is None else [tuple(entry)]


def of_arguments(
    inputs: Any, parameters: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], asked: str
) -> list[tuple[str, Any, Any]]:
    """Name, entry and value of each argument of a call, positional ones first.

    ``inputs`` has an entry per positional argument (a tuple), entries by name (a mapping), or one for all. Raises
    :class:`LocalPlacementError` for entries that no argument has.
    """
    names = [parameters[i] if i < len(parameters) else f"number {i}" for i in range(len(args))]
    values = list(zip(names, args, strict=True)) + list(kwargs.items())
    if inputs is None:
        return [(name, AS_IT_LIES, value) for name, value in values]
    if isinstance(inputs, Mapping):
        known = [*parameters, *kwargs]
        unknown = [name for name in inputs if name not in known]
        if unknown:
            found = f"inputs= names {unknown[0]!r}, and the arguments are {', '.join(known) or 'without names'}"
            raise _refusal(asked, found, "Name arguments; what is not named is passed as it is.")
        return [(name, inputs.get(name), value) for name, value in values]
    if isinstance(inputs, tuple):
        if len(inputs) != len(args):
            found = f"inputs= has {counted(len(inputs), 'entry')} for {counted(len(args), 'positional argument')}"
            raise _refusal(asked, found, "Give an entry for each, None for what is not a tensor, or a dict by name.")
        return [
            (name, entry, value) for (name, value), entry in zip(values, (*inputs, *[None] * len(kwargs)), strict=True)
        ]
    return [(name, inputs, value) for name, value in values]


def layout_of_leaf(
    leaf: Any, lies: tuple[Placement, ...] | None, entry: Any, mesh_ndim: int, asked: str
) -> tuple[Placement, ...] | None:
    """The placements that a leaf is to have, ``None`` for one that is passed as it is."""
    if lies is None:
        if entry is not None and entry is not AS_IT_LIES:
            what = "a plain tensor" if isinstance(leaf, torch.Tensor) else f"{leaf!r}, no tensor"
            raise LocalPlacementError(
                asked=asked,
                found=f"it is {what}, and inputs= has placements for it",
                do="Distribute it first (distribute_tensor, from_local), or put None in its place: then each rank "
                "passes its own.",
            )
        return None
    if entry is None:
        raise LocalPlacementError(
            asked=asked,
            found=f"it is a MeshTensor {show_all(lies)}, and inputs= has no placements for it",
            do="Give its placements, one per mesh dim; by name for an argument passed by keyword.",
        )
    return lies if entry is AS_IT_LIES else check_placements(entry, mesh_ndim, leaf.ndim)


def mesh_dims(dims: Sequence[int | str], names: Sequence[str], ndim: int, asked: str) -> frozenset[int]:
    """The numbers of mesh dims that are given by number or name; raises :class:`LocalPlacementError` for others."""
    known = set()
    for dim in dims:
        if isinstance(dim, str) and dim in names:
            known.add(list(names).index(dim))
        elif isinstance(dim, int) and -ndim <= dim < ndim:
            known.add(dim % ndim)
        else:
            raise LocalPlacementError(
                asked=asked,
                found=f"communicates= names the mesh dim {dim!r}, and there are {', '.join(names) or ndim}",
                do="Use names or numbers of mesh dims.",
            )
    return frozenset(known)
