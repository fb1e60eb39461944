"""Sample calls for the oracle: from the rule's author, from a related op, or from the schema.

A sample is ``(args, kwargs)`` of one op with small whole CPU tensors. ``Samples`` maps ops to lists of samples, or to
functions that return such lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise.kernel.nested import tensors_in
from shardwise.kernel.signature import Kind, Op, op_name, signature
from shardwise.private_torch.ops import OpLike, schema_of
from shardwise.testing.given_samples import given_samples
from shardwise.testing.schema_samples import samples_from_schema
from shardwise.testing.values import DTYPES, SHAPES, Sample, made, one_op

__all__ = ["Sample", "Samples", "by_op", "generic_samples", "made", "out_variants", "samples_of", "without_complex"]

T = TypeVar("T")

# Keys are ops; a mapping's key type is invariant, so that naming it would refuse mappings with one kind of them.
Samples = Mapping[Any, Callable[[], Sequence[Sample]] | Sequence[Sample]]


def by_op(given: Mapping[OpLike, T]) -> dict[Op, T]:
    """The same mapping with op overloads as keys; raises :class:`RuleError` for a key that is not an op."""
    return {one_op(key, "read samples"): value for key, value in given.items()}


def samples_of(op: Op, given: Samples, *, guess_complex: bool = True) -> list[Sample]:
    """The calls to judge an op by: its own samples, or those of a related overload, or calls from its schema.

    With ``guess_complex=False`` calls from the schema have no complex numbers, unless the op takes nothing else.
    """
    by_overload = by_op(given)
    if op in by_overload:
        return given_samples(op, by_overload[op])
    # A related op differs only in writing in place or with ``out=``.
    relative = next((other for other in by_overload if _family(op) == _family(other)), None)
    # Wrong sizes crash some of torch's own kernels, so their calls are guessed with more care.
    guess = generic_samples if op.namespace == "aten" else samples_from_schema
    if relative is not None:
        base = given_samples(relative, by_overload[relative])
    else:
        base = guess(op) if guess_complex else without_complex(guess(op))
    return [sample for call in base if (sample := _with_out(op, call)) is not None]


def without_complex(samples: list[Sample]) -> list[Sample]:
    """The samples that have no complex numbers; all of them if each has."""
    return [sample for sample in samples if not any(t.is_complex() for t in tensors_in(sample))] or samples


def _family(op: Op) -> tuple[Any, ...]:
    name = op_name(op).split(".")[1].rstrip("_")
    return name, tuple((a.name, a.kind, a.kwarg_only) for a in signature(op).args if not a.is_out)


# -- out= --------------------------------------------------------------------------------------------------------


def _with_out(op: Op, sample: Sample) -> Sample | None:
    """The sample with ``out=`` tensors of the right dtype and wrong content if the op takes ``out=``; None if it takes
    no such tensors that are tried.
    """
    args, kwargs = sample
    outs = [a for a in signature(op).args if a.is_out and a.name not in kwargs]
    if not outs:
        return sample
    if any(a.kind is Kind.TENSORS for a in outs):
        like = next((v for v in args if isinstance(v, (list, tuple))), None)
        if like is None:
            return None
        return args, {**kwargs, outs[0].name: [torch.full_like(t, 3) for t in like]}
    own = next((t.dtype for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), DTYPES[0])
    for dtypes in product((own, *DTYPES), repeat=len(outs)):
        filled = {a.name: torch.empty(0, dtype=dtype) for a, dtype in zip(outs, dtypes, strict=True)}
        with suppress(RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):  # refused: try others
            op(*args, **{**kwargs, **filled})
            return args, {**kwargs, **{name: torch.full_like(t, 1) for name, t in filled.items()}}
    return None


def out_variants(given: Mapping[Op, Callable[[], Sequence[Sample]]]) -> dict[Op, Callable[[], Sequence[Sample]]]:
    """Samples of the overloads with ``out=``, from samples of the ops that return their results.

    For ops whose results have several dtypes, or others than their operands.
    """
    variants: dict[Op, Callable[[], Sequence[Sample]]] = {}
    for op, calls in given.items():
        overloads = (getattr(op.overloadpacket, name) for name in op.overloadpacket.overloads())
        for other in overloads:
            if other is not op and signature(other).has_outs:
                variants[other] = partial(_with_results, op, other, calls)
                break
    return variants


def _with_results(op: Op, other: Op, calls: Callable[[], Sequence[Sample]]) -> list[Sample]:
    names = [arg.name for arg in signature(other).args if arg.is_out]
    samples: list[Sample] = []
    for args, kwargs in calls():
        results: Any = op(*args, **kwargs)
        results = results if isinstance(results, (tuple, list)) else [results]
        outs = {name: torch.full_like(x, 1) for name, x in zip(names, results, strict=True)}
        samples.append((args, {**kwargs, **outs}))
    return samples


# -- generic -----------------------------------------------------------------------------------------------------


def generic_samples(op: Op) -> list[Sample]:
    """Calls of an elementwise-like op, from its schema alone. The op may refuse some; the oracle leaves those out.

    There are none for an op that needs more than tensors and scalars: guessed sizes crash some kernels.
    """
    for arg in schema_of(op).arguments:
        if not ("Tensor" in str(arg.type) or arg.has_default_value() or str(arg.type) in _GUESSED):
            return []
    return [sample for shapes, dtype, turned in _forms(op) if (sample := _call(op, shapes, dtype, turned))]


def _forms(op: Op) -> Iterator[tuple[tuple[tuple[int, ...], ...], torch.dtype, bool]]:
    """Shapes for the tensor arguments, a dtype, and whether the first tensor is transposed and so not contiguous."""
    count = max(1, sum(not a.is_out for a in signature(op).tensor_args))
    in_place = any(a.written and not a.is_out for a in signature(op).args)
    for shape in SHAPES:
        yield (shape,) * count, torch.float32, False
    for dtype in DTYPES[1:]:
        yield ((5, 7),) * count, dtype, False
    yield ((6, 8),) * count, torch.float32, True
    if count > 1:
        yield ((5, 7), *((7,),) * (count - 1)), torch.float32, False
        yield ((5, 7), *((5, 1),) * (count - 1)), torch.float32, False
        yield ((5, 7), *((),) * (count - 1)), torch.float32, False
        if not in_place:
            yield ((1, 7), *((5, 1),) * (count - 1)), torch.float32, False
            yield ((6,), *((4, 6),) * (count - 1)), torch.float32, False


def _call(op: Op, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, turned: bool) -> Sample | None:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    left = list(shapes)
    for seed, (arg, raw) in enumerate(zip(signature(op).args, schema_of(op).arguments, strict=True)):
        if arg.is_out:
            continue
        if arg.kind is Kind.TENSOR:
            value: Any = made(left.pop(0), dtype, seed)
            value = value.t().contiguous().t() if turned and value.ndim > 1 else value
        elif arg.kind is Kind.TENSORS:
            shape = left.pop(0)
            value = [made(s, dtype, seed + i) for i, s in enumerate((shape, (3, *shape), (5, 2)))]
        elif arg.has_default:
            continue
        else:
            value = _GUESSED[str(raw.type)][0 if dtype.is_floating_point else 1]
        if arg.kwarg_only:
            kwargs[arg.name] = value
        else:
            args.append(value)
    return args, kwargs


# Argument type -> a value beside floating tensors, and one beside others.
_GUESSED: dict[str, tuple[Any, Any]] = {
    "number": (-1.5, 2),
    "float": (0.5, 0.5),
    "int": (1, 1),
    "bool": (False, False),
    "List[number]": ([-1.5, 2.0, 0.5], [2, 3, 1]),
    "List[float]": ([0.5, 2.0, 1.5], [0.5, 2.0, 1.5]),
}
