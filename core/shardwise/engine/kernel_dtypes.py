"""Whether the kernels of a device take the dtypes of a call. Only the kernels know.

The meta device computes shapes for dtypes that the kernels of a device refuse. A lowering made of other ops would then
return numbers where torch raises, and ranks with empty shards would go on where others raise. So the first call of an
op with new dtypes runs the kernel once on a few elements, before anything is communicated.

Not every kernel may be asked. Some trust their operands and read memory by what they find there (offsets, lengths,
sizes): these take sizes as arguments, or integers beside floats. So only torch's own ops are asked, where all operands
have one dtype and no argument is a size.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise.kernel.nested import freeze
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.signature import Kind, Op, signature
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.symbols import hint
from shardwise.private_torch.fake import has_cuda
from shardwise.private_torch.ops import direct_call, draws

__all__ = ["refuse_dtypes"]

# The dtypes for which torch writes every kernel, and None for an operand that is absent: nobody needs to ask.
_ALWAYS = frozenset({torch.float32, torch.float64, None})

# Names of arguments in torch's schemas that are not sizes, offsets or counts, beside numbers and flags.
_NO_SIZES = frozenset(
    (
        "dim",
        "dims",
        "axis",
        "dtype",
        "half_to_float",
        "correction",
        "unbiased",
        "ord",
        "p",
        "rounding_mode",
        "approximate",
    )
)

# By op, device type and dtypes: what the kernel raises, or None. A handful per op, as long as the process.
_known: dict[Any, Exception | None] = {}


def refuse_dtypes(schema: OpSchema) -> None:
    """Raise what the op's kernel raises for the dtypes of this call's operands, if it takes other dtypes."""
    dtypes = [None if spec is None else spec.dtype for spec in schema.specs]
    if _ALWAYS.issuperset(dtypes):
        return
    named = tuple(v for v in schema.values if isinstance(v, (torch.dtype, bool)))
    key = (schema.op, schema.mesh.device_type, freeze(dtypes), named)
    if key not in _known:
        _known[key] = _refusal(schema.op, schema.mesh.device_type, schema.values)
    refusal = _known[key]
    if refusal is not None:
        raise type(refusal)(*refusal.args)


def _refusal(op: Op, device_type: str, values: Sequence[Any]) -> Exception | None:
    """What the kernel raises on a few ones of each operand's dtype, if it raises nothing for float32 in place of one
    operand's dtype or of all. If it raises then too, dtypes are not the reason.
    """
    if draws(op) or not _has_kernels(device_type) or not _may_ask(op, values):
        return None
    refusal = _raised(op, device_type, values, {})
    if refusal is None:
        return None
    unusual = [i for i, dtype in enumerate(_dtypes(values)) if dtype not in _ALWAYS]
    trials = [unusual, *([i] for i in unusual)]
    runs_in_float = (_raised(op, device_type, values, dict.fromkeys(trial, torch.float32)) is None for trial in trials)
    return refusal if any(runs_in_float) else None


def _may_ask(op: Op, values: Sequence[Any]) -> bool:
    """Whether the op's kernel is safe on made-up operands."""
    if op.namespace != "aten" or len(set(_dtypes(values))) != 1:
        return False
    statics = (
        (a, v) for a, v in zip(signature(op).args, values, strict=True) if a.kind in (Kind.BY_VALUE, Kind.BY_TYPE)
    )
    return all(v is None or isinstance(v, (bool, float, complex)) or a.name in _NO_SIZES for a, v in statics)


def _has_kernels(device_type: str) -> bool:
    return device_type == "cpu" or (device_type == "cuda" and has_cuda())


def _dtypes(values: Sequence[Any]) -> Iterator[torch.dtype]:
    """The dtypes of all tensor operands, in order."""
    for value in values:
        if isinstance(value, TensorSpec):
            yield value.dtype
        elif isinstance(value, (tuple, list)):
            yield from _dtypes(value)


def _raised(op: Op, device_type: str, values: Sequence[Any], instead: Mapping[int, torch.dtype]) -> Exception | None:
    """What the kernel raises. ``instead`` has other dtypes for the tensor operands of some numbers."""
    numbers = iter(range(len(values) + sum(len(v) for v in values if isinstance(v, tuple))))

    def stand_in(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            # At most two elements a dim: sizes that are equal stay equal, and indices of ones stay in range.
            shape = [min(int(hint(n)), 2) for n in value.shape]
            return torch.ones(shape, dtype=instead.get(next(numbers), value.dtype), device=device_type)
        if isinstance(value, (tuple, list)):
            return [stand_in(part) for part in value]
        return value

    args, kwargs = signature(op).unbind([stand_in(value) for value in values])
    try:
        with torch.no_grad(), torch.autocast(device_type, enabled=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            direct_call(op)(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  # whatever the kernel raises
        return error
    return None
