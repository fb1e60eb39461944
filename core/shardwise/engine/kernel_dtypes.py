"""Whether the kernels of a device take the dtypes of a call, and what it writes. Only the kernels know.

The meta device computes shapes for dtypes that the kernels of a device refuse. A lowering made of other ops would then
return numbers where torch raises, and ranks with empty shards would go on where others raise. So the first call of an
op with new dtypes runs the kernel once on a few elements, before anything is communicated.

Not every kernel may be asked. Some trust their operands and read memory by what they find there: they have operands
for indices, offsets or lengths. Some take sizes as arguments, which must fit their operands. So only torch's own ops
are asked, with integers beside other dtypes only where no operand's name is that of a place in memory, and where the
arguments are numbers, flags, or the geometry of a window. A call with a window is asked with operands of its own
shapes, if they are small.

An operand that is written may have several elements in one place, as an expanded tensor has. Some kernels take it,
most refuse it, and the meta device takes it. A shard may have one element of each place, or none, so its kernel would
write where one device raises. So the first such call runs the kernel once on a few elements in one place.

A card is asked less. A kernel of the CPU that meets an index out of range raises. One of CUDA fails an assertion, and
then the process can do nothing more on its card. So no kernel of a card gets made-up places, or made-up masks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import Any

import torch
from attrs import evolve

from shardwise.kernel.nested import freeze
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.signature import Kind, Op, signature
from shardwise.kernel.spec import SymbolicSpec, TensorSpec
from shardwise.kernel.symbols import guess
from shardwise.private_torch.fake import has_cuda
from shardwise.private_torch.ops import direct_call, draws

__all__ = ["is_safe_to_ask", "refuse_dtypes", "refuse_shared_places", "run_on_ones"]

# The dtypes for which torch writes every kernel: where all operands have one of them, nobody needs to ask.
_ALWAYS = frozenset({torch.float32, torch.float64})

# What an operand has whose dtype is right: a value, an index.
_OTHERS = (torch.float32, torch.int64)

# Names of arguments in torch's schemas that are not sizes, offsets or counts, beside numbers and flags.
_NO_SIZES = frozenset(
    (
        "dim",
        "dims",
        "axis",
        "dtype",
        "input_dtype",
        "half_to_float",
        "correction",
        "unbiased",
        "ord",
        "p",
        "rounding_mode",
        "approximate",
        "reduction",
        "ignore_index",
        "alpha",
        "value",
        "reduce",
    )
)

# Names of arguments that say how a window moves over its operand; the shapes of the operands must fit them.
_WINDOWS = frozenset(("kernel_size", "stride", "padding", "dilation", "output_padding", "groups"))
# Parts of the names of operands that kernels read memory by. An "index" is checked against the size of its dim.
_PLACES = (
    "indices",
    "offs",
    "length",
    "pivot",
    "bag",
    "seed",
    "sorter",
    "cum_seq",
    "repeats",
    "reserve",
    "sizes",
)
# The same for kernels of a card, which check by an assertion.
_ASSERTED = ("index", "mask", "target", "condition", "boundaries", "bins")
# Beginnings of the names of ops whose kernels read and write as if all operands were what they should be.
_TRUSTING = ("_fused_", "segment_reduce", "_segment_reduce", "_assert", "_functional_assert")
# Operands of more elements than this in all are too much for a question.
_SMALL = 1 << 16

# By op, device type and dtypes: what the kernel raises, or None. A handful per op, as long as the process.
_known: dict[Any, Exception | None] = {}


def refuse_dtypes(schema: OpSchema, *, lowers: bool = False) -> None:
    """Raise what the op's kernel raises for the dtypes of this call's operands, if it takes other dtypes.

    Of operands without elements a kernel takes any dtype. A rule that ``lowers`` need not, so its calls are asked as if
    they had some; but where an index has none, every rank's part of it has none, and the kernel looks at nothing.
    """
    lowers = lowers and not _picks_nothing(schema)
    dtypes = [None if spec is None else spec.dtype for spec in schema.specs]
    there = {dtype for dtype in dtypes if dtype is not None}
    mixed = len(there) > 1
    named = tuple(v for v in schema.values if isinstance(v, (torch.dtype, bool)))
    asked = {v for v in named if isinstance(v, torch.dtype)}
    if not mixed and there <= _ALWAYS and asked <= _ALWAYS:
        return
    # What a window does with operands of several dtypes may depend on the algorithm that torch takes for their sizes.
    sizes = tuple(schema.values) if mixed and _has_window(schema.op, schema.values) else ()
    empty = () if lowers else _empty(schema)
    kinds = _kinds_of_numbers(schema)
    key = (schema.op, schema.mesh.device_type, freeze(dtypes), named, empty, kinds, freeze(_metas(sizes)))
    if key not in _known:
        values = _with_ordinary_numbers(schema)
        _known[key] = _refusal(schema.op, schema.mesh.device_type, _with_elements(values) if lowers else values)
    refusal = _known[key]
    if refusal is not None:
        raise type(refusal)(*refusal.args)


def refuse_shared_places(schema: OpSchema) -> None:
    """Raise what the op's kernel raises where elements of an operand that it writes share memory."""
    shared = [i for i in schema.written if _shares_places(schema.specs[i])]
    if not shared:
        return
    there = [i for i, spec in enumerate(schema.specs) if spec is not None]
    numbers = frozenset(there.index(i) for i in shared)
    described = freeze([s and (s.dtype, s.ndim) for s in schema.specs])
    key = (schema.op, schema.mesh.device_type, described, numbers, _empty(schema), _kinds_of_numbers(schema))
    if key not in _known:
        values = _with_ordinary_numbers(schema)
        _known[key] = _refusal_of_places(schema.op, schema.mesh.device_type, values, numbers)
    refusal = _known[key]
    if refusal is not None:
        raise type(refusal)(*refusal.args)


def _empty(schema: OpSchema) -> tuple[bool, ...]:
    """Which operands have no elements: a kernel that has nothing to do refuses nothing."""
    return tuple(spec is not None and 0 in map(guess, spec.shape) for spec in schema.specs)


def _picks_nothing(schema: OpSchema) -> bool:
    """Whether the call has an index without elements."""
    names = zip(schema.operand_names, schema.specs, strict=True)
    return any(spec is not None and name == "index" and 0 in map(guess, spec.shape) for name, spec in names)


def _numbers(schema: OpSchema) -> Iterator[tuple[int, Any]]:
    """The arguments by whose type alone a call is known, by their places."""
    args = enumerate(zip(schema.signature.args, schema.values, strict=True))
    return ((i, value) for i, (arg, value) in args if arg.kind is Kind.BY_TYPE)


def _kinds_of_numbers(schema: OpSchema) -> tuple[type, ...]:
    return tuple(type(value) for _, value in _numbers(schema))


def _with_ordinary_numbers(schema: OpSchema) -> list[Any]:
    """The values of a call with numbers that every kernel takes which takes their type: what it makes of an infinity
    says nothing of other numbers.
    """
    values = list(schema.values)
    for i, value in _numbers(schema):
        values[i] = _ordinary(value)
    return values


def _ordinary(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return type(value)(1)
    if isinstance(value, complex):
        return 1 + 1j
    return [_ordinary(part) for part in value] if isinstance(value, (tuple, list)) else value


def _with_elements(values: Any) -> Any:
    """The values with one element in each dim that has none."""
    if isinstance(values, TensorSpec):
        meta = values.tensor_meta
        return evolve(values, tensor_meta=evolve(meta, shape=tuple(1 if guess(n) == 0 else n for n in meta.shape)))
    return tuple(map(_with_elements, values)) if isinstance(values, (tuple, list)) else values


def _shares_places(spec: TensorSpec | None) -> bool:
    if spec is None or all(spec.stride):
        return False
    shape = [int(guess(n)) for n in spec.shape]
    return 0 not in shape and any(n > 1 and stride == 0 for n, stride in zip(shape, spec.stride, strict=True))


def _refusal_of_places(op: Op, device_type: str, values: Sequence[Any], shared: frozenset[int]) -> Exception | None:
    """What the kernel raises if some operands are expanded, where it raises nothing if they are not."""
    # A number is not a size, and whether a kernel takes it is not asked here.
    without_numbers = [
        None if arg.kind is Kind.BY_TYPE else value for arg, value in zip(signature(op).args, values, strict=True)
    ]
    if not _has_kernels(device_type) or not _may_ask(op, device_type, without_numbers):
        return None
    refusal = _raised(op, device_type, values, {}, shared)
    return None if refusal is None or _raised(op, device_type, values, {}) is not None else refusal


def _refusal(op: Op, device_type: str, values: Sequence[Any]) -> Exception | None:
    """What the kernel raises on a few ones of each operand's dtype, if it raises nothing for another dtype in place of
    one operand's or of all, or of a dtype that is an argument. If it raises then too, dtypes are not the reason.
    """
    if draws(op) or not _has_kernels(device_type) or not _may_ask(op, device_type, values):
        return None
    refusal = _raised(op, device_type, values, {})
    if refusal is None:
        return None
    dtypes = list(_dtypes(values))
    trials = [dict.fromkeys(range(len(dtypes)), torch.float32)]
    trials += [{i: other} for i in range(len(dtypes)) for other in _OTHERS]
    plain = [torch.float32 if isinstance(value, torch.dtype) else value for value in values]
    if any(_raised(op, device_type, plain, trial) is None for trial in ({}, *trials[:1])):
        return refusal
    return refusal if any(_raised(op, device_type, values, trial) is None for trial in trials) else None


def _may_ask(op: Op, device_type: str, values: Sequence[Any]) -> bool:
    """Whether a device's kernel of the op is safe on made-up operands."""
    # Fused kernels, and those that reduce segments, trust what their operands are.
    if op.namespace != "aten" or _is_view(op) or op.__name__.startswith(_TRUSTING):
        return False
    dtypes = set(_dtypes(values))
    if len(dtypes) != 1 and not all(map(_is_inexact, dtypes)) and _reads_by_operands(op, _PLACES):
        return False
    if device_type != "cpu" and _reads_by_operands(op, (*_PLACES, *_ASSERTED)):
        return False
    known = _NO_SIZES | _WINDOWS if sum(_elements(values)) <= _SMALL else _NO_SIZES
    return all(v is None or _is_no_size(v) or name in known for name, v in _statics(op, values))


def _is_view(op: Op) -> bool:
    """A view takes any dtype, and its sizes matter: of eight bytes as two integers."""
    return torch.Tag.view_copy in op.tags or any(
        result.alias is not None and not result.written for result in signature(op).results
    )


def _is_no_size(value: Any) -> bool:
    return isinstance(value, (bool, float, complex)) or (
        isinstance(value, (tuple, list)) and all(isinstance(part, bool) for part in value)
    )


def _reads_by_operands(op: Op, places: Sequence[str]) -> bool:
    return any(part in arg.name for arg in signature(op).tensor_args for part in places)


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _has_window(op: Op, values: Sequence[Any]) -> bool:
    return any(name in _WINDOWS and value is not None for name, value in _statics(op, values))


def _metas(values: Any) -> Any:
    """The values with shapes in place of specs."""
    if isinstance(values, TensorSpec):
        return tuple(int(guess(n)) for n in values.shape)
    return tuple(map(_metas, values)) if isinstance(values, (tuple, list)) else values


def _statics(op: Op, values: Sequence[Any]) -> list[tuple[str, Any]]:
    """The arguments that are no tensors, with their names."""
    arguments = zip(signature(op).args, values, strict=True)
    return [(arg.name, value) for arg, value in arguments if arg.kind in (Kind.BY_VALUE, Kind.BY_TYPE)]


def _has_kernels(device_type: str) -> bool:
    return device_type == "cpu" or (device_type == "cuda" and has_cuda())


def _dtypes(values: Sequence[Any]) -> Iterator[torch.dtype]:
    """The dtypes of all tensor operands, in order."""
    return (spec.dtype for spec in _specs(values))


def _elements(values: Sequence[Any]) -> Iterator[int]:
    """The numbers of elements of all tensor operands."""
    return (math.prod(int(guess(n)) for n in spec.shape) for spec in _specs(values))


def _places(spec: TensorSpec) -> int:
    """How many elements the memory of a tensor has, with the gaps between them."""
    return 1 + sum((n - 1) * stride for n, stride in zip(spec.shape, spec.stride, strict=True) if n > 1)


def _specs(values: Sequence[Any]) -> Iterator[TensorSpec]:
    for value in values:
        if isinstance(value, TensorSpec):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _specs(value)


def is_safe_to_ask(op: Op, values: Sequence[Any]) -> bool:
    """Whether a kernel of the CPU may run on ones of the shapes that a call has, whatever its other arguments, and what
    it returns then has the shapes that it has for other values.
    """
    if op.namespace != "aten" or draws(op) or _is_view(op) or op.__name__.startswith(_TRUSTING):
        return False
    if torch.Tag.dynamic_output_shape in op.tags:
        return False
    if any(isinstance(spec, SymbolicSpec) for spec in _specs(values)) or sum(map(_places, _specs(values))) > _SMALL:
        return False
    there = [arg.name for arg, value in zip(signature(op).args, values, strict=True) if value is not None]
    return not any(part in arg.name for arg in signature(op).tensor_args if arg.name in there for part in _PLACES)


def _raised(
    op: Op,
    device_type: str,
    values: Sequence[Any],
    instead: Mapping[int, torch.dtype],
    shared: Collection[int] = (),
) -> Exception | None:
    """What the kernel raises on a few ones. ``instead`` has other dtypes for the tensor operands of some numbers. Of
    those in ``shared`` all elements lie in one place.
    """
    # At most two elements a dim: sizes that are equal stay equal, and indices of ones stay in range.
    most = math.inf if _has_window(op, values) else 2
    return run_on_ones(op, device_type, values, instead, shared, most)[0]


def _dense(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def run_on_ones(
    op: Op,
    device_type: str,
    values: Sequence[Any],
    instead: Mapping[int, torch.dtype] = MappingProxyType({}),
    shared: Collection[int] = (),
    most: float = math.inf,
) -> tuple[Exception | None, Any]:
    """What the kernel raises on operands of ones, of at most so many elements a dim, and what it returns."""
    numbers = count()

    def stand_in(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            shape = [int(min(int(guess(n)), most)) for n in value.shape]
            number = next(numbers)
            stride = [0] * len(shape) if number in shared else value.stride if most == math.inf else _dense(shape)
            ones = torch.empty_strided(shape, stride, dtype=instead.get(number, value.dtype), device=device_type)
            return ones.fill_(1)
        if isinstance(value, (tuple, list)):
            return [stand_in(part) for part in value]
        return value

    named = zip(signature(op).args, values, strict=True)
    args, kwargs = signature(op).unbind(
        [torch.Generator(device_type) if arg.name == "generator" else stand_in(value) for arg, value in named]
    )
    try:
        with torch.no_grad(), torch.autocast(device_type, enabled=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return None, direct_call(op)(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  # whatever the kernel raises
        return error, None
