"""Rules of ops with an argument that names dims: which are whole, or which are reduced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from attrs import frozen

from shardwise.kernel.reductions import REDUCE_OPS
from shardwise.kernel.signature import Arg, Kind, Op, signature
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.testing.inference.sources import partial_options

__all__ = ["Body", "by_dims", "dims_expression"]


@frozen
class Body:
    """The lines of a rule's function, the arguments that they read, and its docstring."""

    uses: tuple[str, ...]
    lines: tuple[str, ...]
    summary: str


def dims_expression(name: str, values: Sequence[tuple[Any, TensorMeta | None]]) -> str | None:
    """An expression for the dims that an argument names; ``None`` if its values cannot name dims.

    ``values`` has its value in each sample, with the tensor whose dims it would name. In the expression ``{x}`` stands
    for that tensor.
    """
    pairs = [(value, meta.ndim) for value, meta in values if meta is not None]
    if all(_is_dim(value, ndim) for value, ndim in pairs):
        return f"({name},)"
    if all(v is None or (isinstance(v, tuple) and all(_is_dim(d, ndim) for d in v)) for v, ndim in pairs):
        return name if all(value for value, _ in pairs) else f"({name} or range({{x}}.ndim))"
    return None


def _is_dim(value: Any, ndim: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -ndim <= value < ndim


def by_dims(op: Op, tensor: Arg, name: str, dims: str, partials: Sequence[str]) -> Iterator[Body]:
    """Functions that leave the named dims whole, or drop them from the result with each reduction in turn."""
    x = f"{tensor.name}[0]" if tensor.kind is Kind.TENSORS else tensor.name
    partial = partial_options(op, partials)
    dims = dims.format(x=x)
    whole = f"return like({', '.join((x, f'whole={dims}', *partial))})"
    yield Body((tensor.name, name), (whole,), f"Every dim may be sharded except those that {name} names.")
    keeps = tuple(a.name for a in signature(op).args if a.name == "keepdim")
    kept = f"{keeps[0]} or i not in gone" if keeps else "i not in gone"
    for kind, nonempty in product((*REDUCE_OPS, None), (False, True)):
        what = f"leaves a partial {kind}" if kind else "must be whole"
        option = f'reduce={{names[i]: "{kind}" for i in gone}}' if kind else "replicate=[names[i] for i in gone]"
        options = [option, *(["nonempty=[names[i] for i in gone]"] if nonempty else []), *partial]
        yield Body(
            (tensor.name, name, *keeps),
            (
                f"gone = {{i % {x}.ndim for i in {dims}}}",
                f'names = [f"d{{i}}" for i in range({x}.ndim)]',
                f"kept = [None if i in gone else name for i, name in enumerate(names) if {kept}]",
                "return Flow(",
                *(f"    {part}," for part in ("[names]", "[kept]", *options)),
                ")",
            ),
            f"A dim that {name} names {what}.",
        )
