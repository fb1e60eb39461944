"""A trial of one sample call: run the whole op, and run it on simulated ranks under given specs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from shardwise.errors import RuleArgumentError
from shardwise.kernel.local_strides import alias
from shardwise.kernel.mesh import AbstractMesh, coordinates
from shardwise.kernel.placements import REPLICATE
from shardwise.kernel.rule import AnyRule
from shardwise.kernel.schema import OpSchema, RuntimeSchemaInfo
from shardwise.kernel.signature import Kind, Op, Signature, signature
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.results import output_metas
from shardwise.planning.strategies import make_call
from shardwise.rng.generator import manual_seed, mode
from shardwise.rule.lowering import LocalCall
from shardwise.testing.partials import place
from shardwise.testing.rounding import Rounding, rounds, sizes_of
from shardwise.testing.simulated import Coordinate, RankError, SilentComm, SimulatedComm, run_ranks
from shardwise.testing.special_values import degrees_of
from shardwise.tools.one_device import on_one_device

__all__ = ["TOLERANCE", "Answer", "Case", "Illegal", "Trial"]

# Relative to the largest value. Parts of a partial tensor are rounded once more than on one device.
TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.bfloat16: 4e-2,
    torch.float16: 1e-2,
}
_SEED = 20
_LOSES_STRIDES = 0.3
# What factors or solves, and distances by a product of matrices.
_NORMWISE = ("linalg", "_euclidean_dist")


class Illegal(Exception):  # noqa: N818  not an error: the op itself refuses the sample
    """The op refuses the sample."""


@frozen(eq=False)
class Answer:
    """The tensor results of one run of an op, its other results, and the tensor operands after the call."""

    tensors: tuple[Tensor | None, ...]
    others: tuple[Any, ...]
    operands: tuple[Tensor | None, ...]


@frozen(eq=False)
class Case:
    """Specs for all operands (``out=`` last) and all results of one call, and the rows that ask for them."""

    inputs: tuple[TensorSpec | None, ...]
    outputs: tuple[TensorSpec | None, ...]
    rows: tuple[str, ...]
    lowered: bool
    mesh: AbstractMesh


@frozen(eq=False)
class Trial:
    """One sample call of one op under one rule, and the whole op's answer. ``run`` is the op or its stand-in.

    ``planned`` has the metas of the tensor results without data; None for a shape that depends on data.
    ``disagreement`` says how they differ from the real ones, if they do.
    """

    rule: AnyRule
    op: Op
    values: tuple[Any, ...]
    run: Callable[..., Any]
    expected: Answer
    planned: tuple[TensorMeta | None, ...]
    disagreement: str | None

    @classmethod
    def of(
        cls, rule: AnyRule, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], run: Callable[..., Any]
    ) -> Trial:
        """Run the whole op once. Raises :class:`Illegal` when the op itself refuses the call."""
        values = tuple(signature(op).bind(args, kwargs))
        operands = tuple(None if t is None else copied(t) for t in flat_operands(op, values))
        try:
            expected = _alone(run, op, values, operands)
        except Exception as error:
            raise Illegal(str(error)) from error
        if any(a is not None and a.shape != b.shape for a, b in zip(operands, flat_operands(op, values), strict=True)):
            raise Illegal("it changes the shape of an operand")
        metas = tuple(None if t is None else TensorMeta.of(t) for t in expected.tensors)
        return cls(rule, op, values, run, expected, *_planned(rule, op, values, metas))

    @property
    def signature(self) -> Signature:
        """The signature of the op."""
        return signature(self.op)

    @cached_property
    def operands(self) -> tuple[Tensor | None, ...]:
        """The whole tensor operands, lists flattened, ``out=`` last."""
        return tuple(flat_operands(self.op, self.values))

    @cached_property
    def written(self) -> tuple[int, ...]:
        """Indices of the operands that the op writes."""
        return self.schema(AbstractMesh(())).written

    @cached_property
    def operand_names(self) -> tuple[str, ...]:
        """The names that go with :attr:`operands`."""
        return self.schema(AbstractMesh(())).operand_names

    @cached_property
    def outs(self) -> int:
        """The number of operands for ``out=``. They are the last ones, and nothing depends on what is in them."""
        values = zip(self.signature.args, self.values, strict=True)
        return sum((1 if a.kind is Kind.TENSOR else len(v or ())) for a, v in values if a.is_out)

    @cached_property
    def tolerance(self) -> float:
        """The coarsest of the floating dtypes in the call."""
        dtypes = [t.dtype for t in (*self.operands, *self.expected.tensors) if t is not None]
        return max((TOLERANCE.get(dtype, 0.0) for dtype in dtypes), default=0.0)

    # -- rounding --
    def rounding(
        self, case: Case, operands: Mapping[Coordinate, tuple[Tensor | None, ...]], *, piecewise: bool
    ) -> Rounding:
        """What rounding may do to the results, then to the operands, when ranks start from these local operands.

        ``piecewise`` says that some operand is the sum of partial pieces, whose roundings count.
        """
        if not piecewise:
            return self._rounding
        return self._rounding_of(
            [
                None
                if full is None or spec is None or not rounds(full)
                else sizes_of(full, spec, {at: t for at, ts in operands.items() if (t := ts[i]) is not None})
                for i, (full, spec) in enumerate(zip(self._read, case.inputs, strict=False))
            ]
        )

    @cached_property
    def _rounding(self) -> Rounding:
        return self._rounding_of([t.abs() if t is not None and rounds(t) else None for t in self._read])

    @property
    def _read(self) -> Sequence[Tensor | None]:
        return self.operands[: len(self.operands) - self.outs]

    def _rounding_of(self, sizes: Sequence[Tensor | None]) -> Rounding:
        def whole(
            operands: Sequence[Tensor | None], dtypes: Mapping[torch.dtype, torch.dtype] = MappingProxyType({}), /
        ) -> tuple[Tensor | None, ...]:
            values = [dtypes.get(v, v) if isinstance(v, torch.dtype) else v for v in self.values]
            answer = _alone(self.run, self.op, values, [None if t is None else copied(t) for t in operands])
            return *answer.tensors, *answer.operands

        if any(part in str(self.op) for part in _NORMWISE):
            # Exact for operands that differ by a rounding of their norms, also in elements that are zero.
            sizes = [
                None
                if size is None or not size.numel()
                else torch.full_like(size, float(size.nan_to_num(0, 0, 0).max()))
                for size in sizes
            ]
        # A degree that is moved is another degree.
        degrees = degrees_of(self.op)
        sizes = [None if name in degrees else size for name, size in zip(self.operand_names, sizes, strict=False)]
        expected = (*self.expected.tensors, *self.expected.operands)
        sizes = [*sizes, *[None] * self.outs]
        return Rounding(whole, self.operands, sizes, expected, torch.Tag.pointwise in self.op.tags, self.random)

    @property
    def random(self) -> bool:
        """Whether the op draws from a generator."""
        return torch.Tag.nondeterministic_seeded in self.op.tags

    def schema(self, mesh: AbstractMesh) -> OpSchema:
        """The call with every operand replicated over a mesh."""
        return _schema(self.op, self.values, mesh, self.rule)

    def __str__(self) -> str:
        shown = [_shown_value(v) for v in self.values]
        named = [f"{a.name}={v}" if a.kwarg_only else v for a, v in zip(self.signature.args, shown, strict=True)]
        return f"({', '.join(named)})"

    # -- running a case --
    def scatter(self, case: Case, generator: torch.Generator) -> dict[Coordinate, tuple[Tensor | None, ...]]:
        """Local operands of every rank."""
        # A real local tensor may have lost the order of the strides of the whole tensor.
        loses_strides = torch.rand((), generator=generator) < _LOSES_STRIDES
        memory_format = torch.contiguous_format if loses_strides else torch.preserve_format
        parts = [
            None if full is None or spec is None else place(full, spec, generator, memory_format)
            for full, spec in zip(self.operands, case.inputs, strict=True)
        ]
        return {c: tuple(None if p is None else p[c] for p in parts) for c in coordinates(case.mesh.shape)}

    def locally(
        self, case: Case, call: Any, operands: Mapping[Coordinate, tuple[Tensor | None, ...]]
    ) -> dict[Coordinate, Answer]:
        """Run the local op or the lowering on every rank; ``operands`` are written where the op writes."""
        _seed()

        lowering = self.rule.lowering if case.lowered else None

        def work(at: Coordinate, comm: SimulatedComm) -> Answer:
            local = LocalCall(call, case.inputs[: len(call.operands)], case.outputs, at, comm)
            values = with_operands(self.op, self._local_values(local), operands[at])
            run = self.run if lowering is None else partial(lowering, local)
            with torch.no_grad():
                tensors, others = split_results(self.op, _run(run, self.op, values))
            return Answer(tensors, others, operands[at])

        if lowering is not None:
            return run_ranks(case.mesh.shape, work)
        answers = {}
        for at in operands:
            if self.random:
                _seed()
            try:
                answers[at] = work(at, SilentComm())
            except Exception as error:
                raise RankError(at, error) from error
        return answers

    def _local_values(self, local: LocalCall) -> list[Any]:
        if self.rule.local_args is None:
            return list(self.values)
        replaced = dict(self.rule.local_args(evolve(local, comm=SilentComm())))
        by_value = RuntimeSchemaInfo.of(self.op, self.rule.static).by_value
        unknown = sorted(set(replaced) - by_value)
        if unknown:
            raise RuleArgumentError(
                asked=f"localise the arguments of {self.op}",
                found=f"local_args replaces {unknown}, which are not keyed by value",
                do="Name them in static=, or correct the names.",
                argument=unknown[0],
            )
        return [replaced.get(a.name, v) for a, v in zip(self.signature.args, self.values, strict=True)]


def _alone(run: Callable[..., Any], op: Op, values: Sequence[Any], operands: Sequence[Tensor | None]) -> Answer:
    """The op on one device. In shardwise's own random modes one device must draw by the same mode."""
    _seed()
    with nullcontext() if mode() == "torch" else on_one_device():
        returned = _run(run, op, with_operands(op, values, operands))
    return Answer(*split_results(op, returned), tuple(operands))


def _seed() -> None:
    """Seed torch's generator, or shardwise's if it is in use."""
    if mode() == "torch":
        torch.default_generator.manual_seed(_SEED)
    else:
        manual_seed(_SEED)


# -- arguments and results, flat and back ------------------------------------------------------------------------


def flat_operands(op: Op, values: Sequence[Any]) -> list[Any]:
    """The tensor operands among the schema arguments, lists flattened; ``None`` for an absent one."""
    operands: list[Any] = []
    for arg, value in zip(signature(op).args, values, strict=True):
        if arg.kind is Kind.TENSOR:
            operands.append(value)
        elif arg.kind is Kind.TENSORS:
            operands += value or ()
    return operands


def with_operands(op: Op, values: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """The schema arguments with other operands (flat); the inverse of :func:`flat_operands`."""
    left = iter(operands)
    arguments: list[Any] = []
    for arg, value in zip(signature(op).args, values, strict=True):
        if arg.kind is Kind.TENSOR:
            arguments.append(next(left))
        elif arg.kind is Kind.TENSORS:
            arguments.append(None if value is None else [next(left) for _ in value])
        else:
            arguments.append(value)
    return arguments


def split_results(op: Op, result: Any) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
    """Tensor results (lists flattened) and other results."""
    described = signature(op).results
    values = (result,) if len(described) == 1 else tuple(result or ())
    tensors: list[Tensor | None] = []
    others: list[Any] = []
    for one, value in zip(described, values, strict=True):
        if not one.is_tensor:
            others.append(value)
        elif one.is_list:
            tensors += value
        else:
            tensors.append(value)
    return tuple(tensors), tuple(others)


def copied(tensor: Tensor) -> Tensor:
    """A copy with the same strides and offset, overlapping ones included."""
    storage = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _run(run: Callable[..., Any], op: Op, values: Sequence[Any]) -> Any:
    values = [v.clone_state() if isinstance(v, torch.Generator) else v for v in values]
    if any(result.reseats for result in signature(op).results):
        # As a plan does: the changed tensor is the answer, and the operand does not change.
        values[0] = alias(values[0])
    args, kwargs = signature(op).unbind(values)
    return run(*args, **kwargs)


def _schema(op: Op, values: Sequence[Any], mesh: AbstractMesh, rule: AnyRule) -> OpSchema:
    whole = (REPLICATE,) * mesh.ndim
    specs = [None if t is None else TensorSpec(mesh, whole, TensorMeta.of(t)) for t in flat_operands(op, values)]
    return OpSchema(op, tuple(with_operands(op, values, specs)), RuntimeSchemaInfo.of(op, rule.static, rule.writes))


def _planned(
    rule: AnyRule, op: Op, values: Sequence[Any], metas: tuple[TensorMeta | None, ...]
) -> tuple[tuple[TensorMeta | None, ...], str | None]:
    schema = _schema(op, values, AbstractMesh(()), rule)
    try:
        outputs = output_metas(op, schema.values, rule.meta)
    except Exception as error:  # noqa: BLE001  a meta kernel may raise anything
        return metas, f"on the meta device it raises {type(error).__name__}: {error}"
    if outputs is None:
        return (None,) * len(metas), None
    outputs = make_call(rule, schema, outputs).outputs
    shown, real = ([None if m is None else (tuple(m.shape), m.dtype) for m in which] for which in (outputs, metas))
    return metas, None if shown == real else f"on the meta device its results are {shown}, on data {real}"


def _shown_value(value: Any) -> str:
    if isinstance(value, Tensor):
        dense = "" if value.is_contiguous() else f" strided {value.stride()}"
        return f"{TensorMeta.of(value)}{dense}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown_value, value))}]"
    return repr(value)
