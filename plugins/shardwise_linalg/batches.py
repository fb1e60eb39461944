"""Rules for ops on batches of matrices: batch dims broadcast and pass, the dims of one matrix are whole.

A notation such as ``"_ _, _ n -> _ n, _"`` names what each tensor has behind its batch dims: ``_`` for a dim that is
whole, a name for one that passes too, as the right-hand sides of a system do; ``()`` where there is nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch

from shardwise.rule import Call, Facts, Flow, LocalCall, Op, Rule, TensorMeta, rule_from, whole

__all__ = ["matrices", "on_batches", "ops", "raise_together"]

aten = torch.ops.aten
_Labels = list[str | None]


def ops(names: str) -> list[Op]:
    """Overloads of ATen by name (``mm.default mm.out``)."""
    return [getattr(getattr(aten, name), overload) for name, _, overload in (n.partition(".") for n in names.split())]


def on_batches(
    of: str,
    notation: str,
    *,
    partial: Sequence[Facts] = (),
    lowering: Callable[..., Any] | None = None,
    lowered: Sequence[str] = ("*",),
    unless: str = "",
    results: Any = None,
    meta: Callable[..., Any] | None = None,
) -> Rule:
    """One rule for ops of a notation; see the module.

    With the flag ``unless`` set, all operands are whole. ``lowering`` runs the rows ``lowered``: all but the whole one,
    if nothing is said.
    """

    def describe(call: Call) -> Flow:
        if unless and call.args[unless]:
            return whole(call)
        return matrices(call, notation, partial=partial, lowered=() if lowering is None else lowered)

    describe.__doc__ = f"Batch dims pass; behind them {notation}." + "".join(f" It is {facts}." for facts in partial)
    return rule_from(ops(of), lowering=lowering, results=results, meta=meta)(describe)


def matrices(
    call: Call,
    notation: str,
    *,
    partial: Iterable[Facts] = (),
    lowered: Iterable[str] = (),
    nonempty: Iterable[str] = (),
) -> Flow:
    """The named dims of one call. A result without the batch dims of the call does not depend on sharded dims."""
    left, _, right = notation.partition("->")
    inputs = [_trailing(text) for text in left.split(",")]
    outputs = [_trailing(text) for text in right.split(",")]
    pairs = zip(call.operands, inputs, strict=True)
    batches = [meta.shape[: meta.ndim - len(last)] for meta, last in pairs if meta is not None]
    sizes = tuple(torch.broadcast_shapes(*batches))  # type: ignore[no-untyped-call]
    read = [_named(meta, last, sizes, exact=False) for meta, last in zip(call.operands, inputs, strict=True)]
    written = [_named(meta, last, sizes, exact=True) for meta, last in zip(call.outputs, outputs, strict=True)]
    names = {label for labels in read for label in labels or () if label}
    gone = dict.fromkeys(names, "R")
    return Flow(read, written, reduce=gone, partial=partial, lowered=lowered, nonempty=nonempty, scattered="*")


def _trailing(text: str) -> list[str | None]:
    return [None if word == "_" else word for word in text.split() if word != "()"]


def _named(meta: TensorMeta | None, last: Sequence[str | None], sizes: Sequence[int], *, exact: bool) -> _Labels | None:
    """Labels of one tensor; ``exact`` for a result, which has all batch dims or none of them."""
    if meta is None:
        return None
    batch = meta.ndim - len(last)
    if batch < 0 or (exact and batch != len(sizes)):
        return None
    names: _Labels = [f"b{i}" for i in range(batch, 0, -1)]
    if exact:
        names = [name if n == size else None for name, n, size in zip(names, meta.shape, sizes, strict=False)]
    return [*names, *last]


# -- errors ------------------------------------------------------------------------------------------------------


LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # documented, not in __all__

# How an op ended on a rank; the greatest of all ranks counts.
FINE, REFUSED, FAILED = 0, 1, 2
_MOST_RANKS = 1 << 32


def raise_together(local: LocalCall, *args: Any, **kwargs: Any) -> Any:
    """The local op; if it fails on one rank, every rank raises, or the others would wait for that rank.

    Compiled code cannot ask the other ranks: there each rank raises for itself.
    """
    results, failure = None, None
    try:
        results = local.call.op(*args, **kwargs)
    except RuntimeError as error:
        failure = error
    if not torch.compiler.is_compiling():
        tensor = next(arg for arg in args if isinstance(arg, torch.Tensor))
        fate = FINE if failure is None else FAILED if isinstance(failure, LinAlgError) else REFUSED
        # The mesh dims along which ranks hold different matrices.
        mesh_dims = sorted({m for spec in local.inputs if spec is not None for m in local.sharding(spec)})
        # And of those with the greatest, the first rank.
        shape = next(spec.mesh_shape for spec in local.inputs if spec is not None)
        place = sum(at * prod(shape[m + 1 :]) for m, at in enumerate(local.coordinate))
        said = tensor.new_full((), fate * _MOST_RANKS - place, dtype=torch.int64)
        worst, place = divmod(-int(local.comm.all_reduce(said, "max", mesh_dims).item()), _MOST_RANKS)
        if failure is None and -worst != FINE:
            at = tuple(place // prod(shape[m + 1 :]) % n for m, n in enumerate(shape))
            kind = LinAlgError if -worst == FAILED else RuntimeError
            failure = kind(f"{local.call.op}: it failed on a batch element that the rank at {at} of the mesh holds.")
    if failure is not None:
        raise failure
    return results
