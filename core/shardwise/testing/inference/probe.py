"""A probe: place the operands on simulated ranks, run the op once on each, and find the placements of the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Literal

import torch
from attrs import define, evolve, field
from torch import Tensor

from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import REPLICATE, Partial, Placement, partial, shard
from shardwise.kernel.reductions import REDUCE_OPS
from shardwise.kernel.rule import Row
from shardwise.kernel.signature import Call
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.strategies import make_call
from shardwise.testing.judge import difference, judge
from shardwise.testing.partials import can_be_partial, place
from shardwise.testing.simulated import Coordinate
from shardwise.testing.trial import Answer, Case, Trial

__all__ = ["PARTS", "Probe", "placements_of", "tried", "written_results"]

Locals = dict[Coordinate, Tensor]
# How a partial tensor is split into parts. Plain parts are those of the oracle. Wild parts are far larger, so that
# thresholds and overflows show. Near parts differ from the reduced value by whole numbers, so that zeros and ties show.
Parts = Literal["plain", "wild", "near"]
PARTS: tuple[Parts, ...] = ("plain", "wild", "near")
_WILD = 64.0


def placements_of(meta: TensorMeta | None, *, partials: bool) -> list[Placement | None]:
    """The placements to try for an operand: whole, on each dim of more than one element, and optionally partial."""
    if meta is None:
        return [None]
    kinds = [kind for kind in REDUCE_OPS if partials and can_be_partial(kind, meta.dtype)]
    return [REPLICATE, *(shard(d) for d, n in enumerate(meta.shape) if n > 1), *map(partial, kinds)]


def tried(operands: Sequence[TensorMeta | None]) -> list[list[Placement | None]]:
    """The placements to try, for each operand.

    Integers and bools beside floats are never partial, because they are most likely indices and masks. A part of an
    index may lie out of range, and not every kernel checks that.
    """
    floats = [m is not None and (m.dtype.is_floating_point or m.dtype.is_complex) for m in operands]
    return [
        placements_of(m, partials=is_float or not any(floats)) for m, is_float in zip(operands, floats, strict=True)
    ]


@define(eq=False)
class Probe:
    """One trial on a mesh of one dim. ``parts`` says how partial tensors are split."""

    trial: Trial
    ranks: int
    generator: torch.Generator
    parts: Parts = "plain"
    mesh: AbstractMesh = field(init=False)
    call: Call = field(init=False)
    outputs: tuple[TensorMeta | None, ...] = field(init=False)
    outs: int = field(init=False)
    _pieces: dict[tuple[int, Placement], Locals] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.mesh = AbstractMesh((self.ranks,))
        self.outputs = tuple(None if t is None else TensorMeta.of(t) for t in self.trial.expected.tensors)
        self.call = make_call(self.trial.rule, self.trial.schema(self.mesh), self.outputs)
        self.outs = self.trial.outs

    def rows(self, inputs: tuple[Placement | None, ...], known: frozenset[Row] | None = None) -> frozenset[Row]:
        """The rows that have these input placements and hold here. If ``known`` is given, only those of ``known``."""
        pieces: list[Locals | None] = []
        for i, (spec, placement) in enumerate(zip(self._specs(inputs), inputs, strict=True)):
            if spec is None or placement is None:
                pieces.append(None)
                continue
            if (i, placement) not in self._pieces:
                self._pieces[i, placement] = self._split(i, spec, placement)
            pieces.append(self._pieces[i, placement])
        # An op gives an empty out= tensor the size of its result.
        outs = [t.new_empty(0) for t in self.trial.operands[len(inputs) :] if t is not None]
        operands: dict[Coordinate, tuple[Tensor | None, ...]] = {
            (rank,): (*(None if p is None else p[rank,].clone() for p in pieces), *(t.clone() for t in outs))
            for rank in range(self.ranks)
        }
        before = {at: tuple(None if t is None else t.clone() for t in ts) for at, ts in operands.items()}
        case = Case((*self._specs(inputs), *(None,) * self.outs), (), (), lowered=False, mesh=self.mesh)
        try:
            answers = self.trial.locally(case, self.call, operands)
        except Exception:  # noqa: BLE001  an op that raises on the pieces has no row for them
            return frozenset()
        candidates = self._candidates(inputs, answers) if known is None else known
        return frozenset(row for row in candidates if self._holds(row, case, before, answers))

    # -- inputs --
    def _spec(self, meta: TensorMeta | None, placement: Placement | None) -> TensorSpec | None:
        return None if meta is None or placement is None else TensorSpec(self.mesh, (placement,), meta)

    def _specs(self, inputs: Sequence[Placement | None]) -> list[TensorSpec | None]:
        metas = [None if t is None else TensorMeta.of(t) for t in self.trial.operands[: len(inputs)]]
        return [self._spec(meta, p) for meta, p in zip(metas, inputs, strict=True)]

    def _split(self, i: int, spec: TensorSpec, placement: Placement) -> Locals:
        full = self.trial.operands[i]
        assert full is not None
        kind = placement.reduce_op if isinstance(placement, Partial) else ""
        if kind in ("", "product") or not full.is_floating_point() or self.parts == "plain":
            return place(full, spec, self.generator)
        if self.parts == "wild":
            # The factor is a power of two, so nothing is rounded: the parts grow, and their reduction stays the same.
            return {at: part * _WILD for at, part in place(full / _WILD, spec, self.generator).items()}
        # Parts that differ from the whole by small whole numbers.
        steps = torch.randint(0, 3, (self.ranks, *full.shape), generator=self.generator)
        who = torch.randint(self.ranks, (1, *full.shape), generator=self.generator)
        if kind in ("max", "min"):
            parts = full - (1 if kind == "max" else -1) * steps.scatter(0, who, 0).to(full.dtype)
        else:
            # All parts but one are small whole numbers. The part of rank `who` is the rest.
            others = (steps - 1).scatter(0, who, 0).to(full.dtype)
            rest = full - others.sum(0, dtype=full.dtype)
            parts = (others + full if kind == "avg" else others).scatter(0, who, rest.unsqueeze(0))
        return {(rank,): part for rank, part in enumerate(parts)}

    # -- outputs --
    def _candidates(self, inputs: tuple[Placement | None, ...], answers: Mapping[Coordinate, Answer]) -> Iterator[Row]:
        """The rows that the results allow. Each result is judged by itself."""
        expected = self.trial.expected.tensors
        if any(len(answer.tensors) != len(expected) for answer in answers.values()):
            return
        possible: list[list[Placement | None]] = []
        for o, (whole, meta) in enumerate(zip(expected, self.outputs, strict=True)):
            locals_ = {at: answer.tensors[o] for at, answer in answers.items()}
            placements = placements_of(meta, partials=True)
            possible.append([p for p in placements if self._fits(locals_, whole, self._spec(meta, p))])
        same = written_results(self.trial)
        for outputs in product(*possible):
            if all(outputs[o] == inputs[i] for o, i in same if i < len(inputs)):
                yield Row(inputs, outputs)

    def _fits(self, locals_: Mapping[Coordinate, Tensor | None], whole: Tensor | None, spec: TensorSpec | None) -> bool:
        if spec is not None and any(t is None or tuple(t.shape) != spec.local_shape(at) for at, t in locals_.items()):
            return False
        return difference(locals_, spec, whole, self.trial.tolerance, signs=False) is None

    def _holds(
        self,
        row: Row,
        case: Case,
        before: Mapping[Coordinate, tuple[Tensor | None, ...]],
        answers: Mapping[Coordinate, Answer],
    ) -> bool:
        results = tuple(self._spec(meta, p) for meta, p in zip(self.outputs, row.outputs, strict=True))
        inputs = case.inputs[: len(case.inputs) - self.outs] + results[: self.outs]
        try:
            return judge(self.trial, evolve(case, inputs=inputs, outputs=results), before, answers, signs=False) is None
        except (RuntimeError, ValueError):  # the results cannot be compared
            return False


def written_results(trial: Trial) -> list[tuple[int, int]]:
    """Pairs of a result and the flat operand that it is. In-place ops return their operand."""
    starts: list[int] = []
    at = 0
    for arg, value in zip(trial.signature.args, trial.values, strict=True):
        starts.append(at)
        at += 1 if arg in trial.signature.tensor_args and not arg.is_list else 0
        at += len(value or ()) if arg in trial.signature.tensor_args and arg.is_list else 0
    described = [r for r in trial.signature.results if r.is_tensor]
    if any(r.is_list for r in described):
        return []
    return [(o, starts[r.alias]) for o, r in enumerate(described) if r.written and r.alias is not None]
