"""Sample calls with special values: zeros of both signs, infinities, NaN, and numbers far from 1.

They are made from the calls that there are: each floating tensor of a call gets special values here and there. Numbers
far from 1 are powers of two whose products, a few of them, still fit their dtype. Complex numbers get no infinities,
because what a product makes of them depends on the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.kernel.signature import Op, signature
from shardwise.testing.values import Sample

__all__ = ["degrees_of", "special_samples"]

_INFINITE = (float("inf"), float("-inf"), float("nan"))
# Per dtype the binary exponent of numbers far from 1. Samples of solvers are in double precision, and larger numbers
# would make their matrices singular up to rounding.
_FAR = {torch.float16: 4, torch.bfloat16: 16, torch.float32: 16, torch.float64: 4}
_FAR |= {torch.complex64: 16, torch.complex128: 4}
# Special elements: of zeros and numbers far from 1 every second, of infinities and NaN every eighth.
_OFTEN, _SELDOM = 0.5, 0.125
# Calls of these get no infinities and no NaN. For some of them the kernel of ``binomial`` never ends. LAPACK refuses a
# NaN in a right-hand side of ``lstsq``: torch leaves the solution as it was, or raises, by which batch element has it.
_FINITE = ("binomial", "linalg_lstsq")
# Nor do calls of these with this flag. The fused kernel of Adam takes the larger of two numbers in a vectorised loop,
# which keeps a NaN, and in a scalar loop for the last few elements, which drops it: of 12 elements the last 4 differ.
_FINITE_WITH = {"_fused_adam": "amsgrad"}
# Of these calls, the operands that get no infinities and no NaN where there is padding: some kernels multiply them by
# the zeros of the padding, and others leave the padding out.
_MEETS_PADDING = {
    "convolution": ("weight",),
    "convolution_backward": ("weight", "grad_output"),
}
# The operand of an orthogonal polynomial that is its degree: its fraction is cut off, and below 0 the value is 0. An
# infinite degree has no meaning; what becomes of it depends on the processor. These calls get no NaN elsewhere: up to
# torch 2.13 at least, most recurrences end before their first step then, and return what the memory of their result
# held, such as the value of the element before: https://github.com/pytorch/pytorch/issues/187761. So one device differs
# from itself there.
_DEGREES = {"_polynomial_": ("n",)}
_WHOLE = (*map(float, range(13)), 2.5, -1.0, -0.0)
# A tensor of so many elements shows more than one kind of value.
_ENOUGH = 6
# The kinds of calls by number: 0 has zeros and numbers far from 1, the last nothing but -0.0.
_INFINITIES = 1


def degrees_of(op: Op) -> tuple[str, ...]:
    """The names of the arguments that an op takes as whole numbers, although they are floating."""
    return next((names for part, names in _DEGREES.items() if part in op.__name__), ())


def special_samples(op: Op, samples: Sequence[Sample], most: int) -> list[Sample]:
    """Three calls from each of at most ``most`` calls: with zeros and numbers far from 1, with infinities and NaN, and
    with nothing but -0.0. Operands that the op only writes (``out=``) are left.
    """
    kinds: Sequence[int] = (0, 2) if op.__name__.startswith(_FINITE) else range(3)
    finite_with = [flag for name, flag in _FINITE_WITH.items() if op.__name__.startswith(name)]
    meets_padding = _MEETS_PADDING.get(op.__name__.partition(".")[0], ())
    degrees = degrees_of(op)
    bases = [call for call in samples if any(_takes(t) and t.numel() >= _ENOUGH for t in _tensors(op, call))]
    special: list[Sample] = []
    for seed, call in enumerate(bases[:most]):
        for kind in kinds:
            generator = torch.Generator().manual_seed(seed * 7919 + kind)
            pairs = list(zip(signature(op).args, signature(op).bind(*call), strict=True))
            if kind == _INFINITIES and any(arg.name in finite_with and value for arg, value in pairs):
                continue
            is_padded = any(any(value) for arg, value in pairs if arg.name == "padding")
            values = [
                value
                if arg.is_out or (kind == _INFINITIES and is_padded and arg.name in meets_padding)
                else _with_degrees(value, kind, generator)
                if arg.name in degrees
                else _with_special(value, kind, generator, _INFINITE[:2] if degrees else _INFINITE)
                for arg, value in pairs
            ]
            special.append(signature(op).unbind(values))
    return special


def _tensors(op: Op, sample: Sample) -> Iterator[Tensor]:
    for arg, value in zip(signature(op).args, signature(op).bind(*sample), strict=True):
        if not arg.is_out:
            yield from (t for t in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(t, Tensor))


def _takes(tensor: Tensor) -> bool:
    return tensor.dtype in _FAR


def _with_special(value: Any, kind: int, generator: torch.Generator, infinite: Sequence[float]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_with_special(v, kind, generator, infinite) for v in value]
    if not isinstance(value, Tensor) or not _takes(value):
        return value
    if value.is_complex():
        parts = torch.view_as_real(value.resolve_conj())
        drawn = torch.view_as_complex(_drawn(parts, _FAR[value.dtype], kind, generator, ()).contiguous())
    else:
        drawn = _drawn(value, _FAR[value.dtype], kind, generator, infinite)
    # The order of the strides is the call's.
    return torch.empty_like(value).copy_(drawn)


def _with_degrees(value: Any, kind: int, generator: torch.Generator) -> Any:
    """Degrees in place of a tensor or of a number; with NaN in the calls that have infinities."""
    choices = torch.tensor((*_WHOLE, float("nan")) if kind == _INFINITIES else _WHOLE, dtype=torch.float64)
    if not isinstance(value, Tensor):
        return float(choices[torch.randint(len(choices), (), generator=generator)])
    if not _takes(value):
        return value
    drawn = choices[torch.randint(len(choices), value.shape, generator=generator)]
    return torch.empty_like(value).copy_(drawn)


def _drawn(value: Tensor, far: int, kind: int, generator: torch.Generator, infinite: Sequence[float]) -> Tensor:
    if kind == 2:  # noqa: PLR2004  the last of three
        return torch.full_like(value, -0.0)
    choices = (0.0, -0.0, 2.0**far, -(2.0**far), 2.0**-far) if kind == 0 else (*infinite, 0.0, -0.0)
    special = torch.tensor(choices, dtype=torch.float64).to(value.dtype)
    chosen = special[torch.randint(len(choices), value.shape, generator=generator)]
    share = _OFTEN if kind == 0 else _SELDOM
    return torch.where(torch.rand(value.shape, generator=generator) < share, chosen, value)
