"""Schemas: one call described without data, and its strategies. The names are DTensor's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from attrs import field, frozen

from shardwise.kernel.mesh import Mesh
from shardwise.kernel.nested import freeze
from shardwise.kernel.placements import show_all
from shardwise.kernel.signature import Kind, Op, Signature, op_name, scalar_type, signature
from shardwise.kernel.spec import TensorSpec

__all__ = ["OpSchema", "OpStrategy", "OutputSharding", "PlacementStrategy", "RuntimeSchemaInfo", "TupleStrategy"]


@frozen(cache_hash=True)
class RuntimeSchemaInfo:
    """Which non-tensor arguments are part of the cache key, and how: by value or by type only."""

    by_value: frozenset[str]
    by_type: frozenset[str]
    writes: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, op: Op, static: frozenset[str] = frozenset(), writes: frozenset[str] = frozenset()
    ) -> RuntimeSchemaInfo:
        """From the op's schema. ``static`` moves arguments from by-type to by-value, ``writes`` adds written ones."""
        args = signature(op).args
        return cls(
            by_value=frozenset(
                a.name for a in args if a.kind is Kind.BY_VALUE or (a.kind is Kind.BY_TYPE and a.name in static)
            ),
            by_type=frozenset(a.name for a in args if a.kind is Kind.BY_TYPE and a.name not in static),
            writes=writes,
        )


# Each plan keeps one, and nothing refers to it weakly.
@frozen(eq=False, weakref_slot=False)
class OpSchema:
    """One call: the op and, per schema argument, a :class:`TensorSpec`, a tuple of them, ``None`` or a static value.

    ``fixed`` lists operands (flat indices) that cannot be redistributed: Python numbers where the op takes a tensor.

    Two schemas are equal when their specs and their static arguments are equal. :class:`RuntimeSchemaInfo` says which
    arguments are static.
    """

    op: Op
    values: tuple[Any, ...] = field(converter=freeze)
    info: RuntimeSchemaInfo
    fixed: tuple[int, ...] = ()

    @classmethod
    def of(cls, op: Op, *args: Any, static: frozenset[str] = frozenset(), **kwargs: Any) -> OpSchema:
        """From arguments as in a call of the op, with specs in place of tensors."""
        return cls(op, tuple(signature(op).bind(args, kwargs)), RuntimeSchemaInfo.of(op, static))

    @cached_property
    def signature(self) -> Signature:
        return signature(self.op)

    @property
    def starts(self) -> list[int]:
        """Per argument, the index in :attr:`specs` of its first tensor."""
        return self.signature.starts(self.values)

    @property
    def args(self) -> Mapping[str, Any]:
        """Argument name -> value."""
        return {a.name: v for a, v in zip(self.signature.args, self.values, strict=True)}

    def _tensors(self) -> Iterator[tuple[str, TensorSpec | None, bool, bool]]:
        """Name, spec, is-out, is-written of each tensor operand, lists flattened; ``out=`` last, as schemas have it."""
        for arg, value in zip(self.signature.args, self.values, strict=True):
            if arg.kind is Kind.TENSOR:
                yield arg.name, value, arg.is_out, arg.written or arg.name in self.info.writes
            elif arg.kind is Kind.TENSORS:
                for i, spec in enumerate(value or ()):
                    yield f"{arg.name}[{i}]", spec, arg.is_out, arg.written

    @cached_property
    def specs(self) -> tuple[TensorSpec | None, ...]:
        """Specs of all tensor operands in schema order, lists flattened, ``out=`` included and last."""
        flat: list[TensorSpec | None] = []
        for arg, value in zip(self.signature.args, self.values, strict=True):
            if arg.kind is Kind.TENSOR:
                flat.append(value)
            elif arg.kind is Kind.TENSORS:
                flat.extend(value or ())
        specs = tuple(flat)
        # Schemas stay in memory with their plans, and many ops take tensors only: one tuple serves for both.
        return self.values if specs == self.values else specs

    @cached_property
    def operand_names(self) -> tuple[str, ...]:
        return tuple(name for name, _, _, _ in self._tensors())

    @cached_property
    def written(self) -> tuple[int, ...]:
        """Indices in :attr:`specs` of the operands that the op writes."""
        if not self.signature.writes and not self.info.writes:
            return ()
        return tuple(i for i, (_, spec, _, written) in enumerate(self._tensors()) if written and spec is not None)

    @property
    def is_view(self) -> bool:
        """Whether all results share the memory of operands and the op writes none."""
        results = [r for r in self.signature.results if r.is_tensor]
        return bool(results) and all(r.alias is not None and not r.written for r in results)

    def returned(self, count: int) -> list[int | None]:
        """For each of ``count`` tensor results (lists flattened), the operand that the op writes and returns as it."""
        declared = [r for r in self.signature.results if r.is_tensor]
        starts = self.starts
        flat: list[int | None] = []
        for of in declared:
            length = count - len(declared) + 1 if of.is_list else 1
            first = starts[of.alias] if of.written and of.alias is not None else None
            flat += [None if first is None else first + k for k in range(length)]
        return flat

    @property
    def mesh(self) -> Mesh:
        spec = next((s for s in self.specs if s is not None), None)
        if spec is None:
            raise ValueError(f"{op_name(self.op)} was called without a tensor")
        return spec.mesh

    @property
    def is_symbolic(self) -> bool:
        """Whether a size of an operand is symbolic."""
        return any(s is not None and s.tensor_meta.is_symbolic for s in self.specs)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Op, specs and static arguments. A plan may depend on nothing else."""
        parts: list[Any] = [self.op]
        for arg, value in zip(self.signature.args, self.values, strict=True):
            if arg.kind is Kind.BY_TYPE:
                kind = scalar_type(value)
                parts.append((kind, value) if arg.name in self.info.by_value else kind)
            else:
                parts.append(value)
        return tuple(parts)

    def with_specs(self, specs: Sequence[TensorSpec | None]) -> OpSchema:
        """The same call with other specs for its tensor operands (flat, as in :attr:`specs`)."""
        rest = iter(specs)
        values: list[Any] = []
        for arg, value in zip(self.signature.args, self.values, strict=True):
            if arg.kind is Kind.TENSOR:
                values.append(next(rest))
            elif arg.kind is Kind.TENSORS:
                values.append(None if value is None else tuple(next(rest) for _ in value))
            else:
                values.append(value)
        return OpSchema(self.op, tuple(values), self.info, self.fixed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpSchema) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        shown = ", ".join(f"{n}: {'-' if s is None else s}" for n, s, _, _ in self._tensors())
        return f"{op_name(self.op)}({shown})"


@frozen(weakref_slot=False)
class PlacementStrategy:
    """One legal choice for a whole mesh: specs of inputs and outputs, and the cost of redistributing the inputs.

    Specs are flat: lists flattened, ``None`` where absent. ``redistribute_cost`` has seconds per input. ``names`` has
    the name of the row of each mesh dim. ``lowered`` says that the rule's lowering runs in place of the op.
    """

    input_specs: tuple[TensorSpec | None, ...]
    output_specs: tuple[TensorSpec | None, ...]
    redistribute_cost: tuple[float, ...]
    names: tuple[str, ...] = ()
    lowered: bool = False

    @property
    def cost(self) -> float:
        """Seconds, all inputs together."""
        return sum(self.redistribute_cost)

    def __str__(self) -> str:
        shown = [show_all(s.placements) if s else "-" for s in (*self.input_specs, *self.output_specs)]
        n = len(self.input_specs)
        return f"{', '.join(shown[:n])} -> {', '.join(shown[n:])}"


@frozen
class OpStrategy:
    """Every legal choice for one call (or one list position), cheapest first."""

    strategies: tuple[PlacementStrategy, ...]

    def _spec(self) -> TensorSpec:
        first = self.strategies[0]
        spec = next((s for s in (*first.output_specs, *first.input_specs) if s is not None), None)
        if spec is None:
            raise ValueError("a strategy without any tensor has no shape")
        return spec

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape of the first output (of the first input, for an op without tensor results)."""
        return tuple(self._spec().shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        return self._spec().mesh_shape


@frozen
class TupleStrategy:
    """One strategy per position of the op's tensor lists."""

    children: tuple[OpStrategy, ...]


@frozen
class OutputSharding:
    """The result of propagation: output specs, and the schema to which the inputs must be redistributed, if any."""

    output_spec: TensorSpec | tuple[TensorSpec | None, ...] | None
    redistribute_schema: OpSchema | None = None

    @property
    def needs_redistribute(self) -> bool:
        return self.redistribute_schema is not None
