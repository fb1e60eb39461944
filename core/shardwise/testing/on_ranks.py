"""The workers' part of :func:`shardwise.testing.check_gradients`: compare one call on real ranks with one device."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor

from shardwise.discovery.process import default_registry
from shardwise.errors import NoStrategyError, RuleError
from shardwise.kernel.dispatcher import observe
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import REPLICATE, Placement, partial, shard, show_all
from shardwise.kernel.plan import Plan
from shardwise.kernel.plurals import counted
from shardwise.kernel.rule import AnyRule
from shardwise.kernel.signature import Op, op_name, signature
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.shards import scatter_local
from shardwise.testing.judge import difference
from shardwise.testing.meshes import mesh
from shardwise.testing.partials import can_be_partial, place
from shardwise.testing.rounding import Rounding, rounds, sizes_of
from shardwise.testing.trial import copied, flat_operands, split_results, with_operands
from shardwise.testing.values import Sample, made

__all__ = ["CaseOutcome", "RealCase", "run_cases"]

_SEED = 20


@frozen
class RealCase:
    """One call to try: the index of its sample, its mesh, and the seed of its placements.

    With ``write_whole`` the operands that the op writes are replicated. No rule can refuse that.
    """

    sample: int
    mesh_shape: tuple[int, ...]
    seed: int
    write_whole: bool = False


@define
class CaseOutcome:
    """The outcome of one case, the same on every rank.

    ``wrong`` says what is wrong, or is empty. ``refused`` says why no rank ran it. ``results`` and ``gradients`` count
    the tensors that were compared. ``ran`` names the rule and the rows of every op that ran; ``source`` and ``rows``
    are those of the op itself.
    """

    wrong: str = ""
    refused: str = ""
    illegal: bool = False
    results: int = 0
    gradients: int = 0
    placements: str = ""
    shown: str = ""
    source: str = ""
    rows: tuple[str, ...] = ()
    ran: list[str] = field(factory=list)


def run_cases(
    op: Op, rules: Sequence[AnyRule], samples: Sequence[Sample], cases: Sequence[RealCase]
) -> list[CaseOutcome]:
    """Try cases in order until one is wrong. ``rules`` override those of the installed plugins meanwhile."""
    undo = default_registry().override(*rules) if rules else None
    outcomes = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for case in cases:
                outcomes.append(_Attempt(op, samples[case.sample], case).run())
                if outcomes[-1].wrong:
                    break
    finally:
        if undo is not None:
            undo()
    return outcomes


@frozen(eq=False)
class _Answer:
    """Flat tensor results, other results, the operands after the call, and the gradient of each operand."""

    tensors: tuple[Any, ...]
    others: tuple[Any, ...]
    operands: tuple[Any, ...]
    gradients: tuple[Any, ...] = ()


@define(eq=False)
class _Attempt:
    """One case on this rank."""

    op: Op
    sample: Sample
    case: RealCase
    outcome: CaseOutcome = field(factory=CaseOutcome, init=False)
    values: list[Any] = field(init=False)
    follow: bool = field(default=True, init=False)
    sizes: list[Tensor | None] = field(factory=list, init=False)
    piecewise: bool = field(default=False, init=False)
    rounding: Rounding = field(init=False)

    def run(self) -> CaseOutcome:
        self.values = signature(self.op).bind(*self.sample)
        whole = self._on_one_device()
        if whole is None:
            self.outcome.illegal = True
            return self.outcome
        try:
            cotangents = [
                made(t.shape, t.dtype, i) if t is not None and t.requires_grad else None
                for i, t in enumerate(whole.tensors)
            ]
            whole = self._with_gradients(whole, cotangents)
        except Exception:  # noqa: BLE001  without a formula for its gradient only the forward is compared
            cotangents = [None] * len(whole.tensors)
        self._on_mesh(whole, cotangents)
        return self.outcome

    def _on_one_device(self) -> _Answer | None:
        """The op's answer on one device, without gradients if it refuses them; ``None`` if it refuses the sample."""
        for self.follow in (True, False):
            with suppress(Exception):  # an op may raise anything for a call that it refuses
                return self._call([None if t is None else copied(t) for t in flat_operands(self.op, self.values)])
        return None

    # -- both sides --
    def _call(self, operands: list[Any]) -> _Answer:
        written = self._written()
        for i, operand in enumerate(operands):
            if self.follow and operand is not None and i not in written and operand.is_floating_point():
                operand.requires_grad_()
        torch.manual_seed(_SEED)
        args, kwargs = signature(self.op).unbind(with_operands(self.op, self.values, operands))
        return _Answer(*split_results(self.op, self.op(*args, **kwargs)), tuple(operands))

    def _with_gradients(self, answer: _Answer, cotangents: Sequence[Any]) -> _Answer:
        pairs = [(t, c) for t, c in zip(answer.tensors, cotangents, strict=True) if c is not None]
        leaves = [t for t in answer.operands if t is not None and t.requires_grad]
        if not pairs or not leaves:
            return answer
        computed = iter(torch.autograd.grad([t for t, _ in pairs], leaves, [c for _, c in pairs], allow_unused=True))
        gradients = tuple(next(computed) if t is not None and t.requires_grad else None for t in answer.operands)
        return _Answer(answer.tensors, answer.others, answer.operands, gradients)

    def _written(self) -> set[int]:
        positions: set[int] = set()
        at = 0
        for arg, value in zip(signature(self.op).args, self.values, strict=True):
            flat = flat_operands_of(arg, value)
            if arg.written:
                positions.update(range(at, at + flat))
            at += flat
        return positions

    # -- the ranks --
    def _on_mesh(self, whole: _Answer, cotangents: Sequence[Any]) -> None:
        rng = random.Random(self.case.seed)  # noqa: S311  chance, no secret
        device_mesh = mesh(self.case.mesh_shape)
        operands = self._place_operands(device_mesh, rng)
        self.rounding = self._rounding(whole, cotangents)
        names: list[str] = []
        for arg, value in zip(signature(self.op).args, self.values, strict=True):
            is_list = isinstance(value, (list, tuple))
            names += [f"{arg.name}[{i}]" if is_list else arg.name for i in range(flat_operands_of(arg, value))]
        answer = self._step(
            "forward", lambda: self._call(list(operands)), lambda a: self._forward_pairs(whole, a, names)
        )
        if answer is None or not any(c is not None for c in cotangents):
            return
        on_mesh: list[MeshTensor | None] = []
        for full in cotangents:
            if full is None:
                on_mesh.append(None)
                continue
            spec = TensorSpec(device_mesh, _placements(full.ndim, device_mesh.ndim, (), rng), TensorMeta.of(full))
            on_mesh.append(MeshTensor(scatter_local(full, spec), spec))

        def gradient_pairs(answer: _Answer) -> list[_Pair]:
            triples = zip(names, whole.gradients, answer.gradients, strict=True)
            first = len(whole.tensors) + len(whole.operands)
            pairs = [
                _Pair(f"the gradient of {name!r}", first + i, one, on, is_gradient=True)
                for i, (name, one, on) in enumerate(triples)
            ]
            return [pair for pair in pairs if pair.is_there]

        self._step("backward", lambda: self._with_gradients(answer, on_mesh), gradient_pairs)

    def _place_operands(self, device_mesh: Any, rng: random.Random) -> list[Any]:
        """MeshTensors of the operands, with random placements. The outcome describes them."""
        generator = torch.Generator().manual_seed(self.case.seed)
        written = self._written()
        tensors: list[Any] = []
        for i, full in enumerate(flat_operands(self.op, self.values)):
            self.sizes.append(None)
            if full is None:
                tensors.append(None)
                continue
            kinds = ("sum",) if i not in written and can_be_partial("sum", full.dtype) else ()
            placements = _placements(full.ndim, device_mesh.ndim, kinds, rng)
            if i in written and self.case.write_whole:
                placements = (REPLICATE,) * device_mesh.ndim
            spec = TensorSpec(device_mesh, placements, TensorMeta.of(full))
            parts = place(full.detach(), spec, generator)
            if rounds(full):
                self.sizes[-1] = sizes_of(full.detach(), spec, parts)
                self.piecewise = self.piecewise or bool(spec.reductions)
            tensors.append(MeshTensor(parts[spec.coordinate()], spec))
        self.outcome.placements = ", ".join("-" if t is None else show_all(t.placements) for t in tensors)
        self.outcome.shown = ", ".join("-" if t is None else str(t.spec.tensor_meta) for t in tensors)
        return tensors

    def _step(
        self, direction: str, work: Callable[[], _Answer], pairs: Callable[[_Answer], list[_Pair]]
    ) -> _Answer | None:
        """Run one part on this rank and compare. ``None`` if it failed on some rank; the outcome then says how.

        Every rank reports its result before the next collective, so that no rank waits for one that has raised.
        """
        answer, wrong, refused = None, "", ""
        compared: list[_Pair] = []
        try:
            with self._listening(direction):
                answer = work()
            compared = pairs(answer)
            wrong = next((f"{p.what}: {fault}" for p in compared if (fault := p.local_fault())), "")
        except (NoStrategyError, RuleError) as error:
            refused = f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001  any error of a rank is evidence
            wrong = f"it raised {type(error).__name__}: {error}"
        if not self._all_ranks_succeed(wrong, refused):
            return None
        for pair in compared:
            wrong = wrong or pair.difference(self.rounding, signs=not self.piecewise)
        if not self._all_ranks_succeed(wrong):
            return None
        for pair in compared:
            self.outcome.gradients += pair.is_gradient
            self.outcome.results += not pair.is_gradient
        return answer

    def _all_ranks_succeed(self, wrong: str, refused: str = "") -> bool:
        """Whether every rank reports success. If not, the outcome gets the first report of a fault or a refusal."""
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, (wrong, refused))
        self.outcome.wrong = next((f"on rank {r} {w}" for r, (w, _) in enumerate(reports) if w), "")
        self.outcome.refused = next((f for _, f in reports if f), "")
        if self.outcome.refused and not all(f for _, f in reports):
            self.outcome.wrong = self.outcome.wrong or f"some ranks refuse it and some do not: {self.outcome.refused}"
        return not (self.outcome.wrong or self.outcome.refused)

    # -- comparing --
    def _rounding(self, whole: _Answer, cotangents: Sequence[Any]) -> Rounding:
        def flat(answer: _Answer) -> list[Tensor | None]:
            gradients = answer.gradients or [None] * len(answer.operands)
            return [None if t is None else t.detach() for t in (*answer.tensors, *answer.operands, *gradients)]

        def again(
            operands: Sequence[Tensor | None], dtypes: Mapping[torch.dtype, torch.dtype] = MappingProxyType({}), /
        ) -> list[Tensor | None]:
            answer = self._call([None if t is None else copied(t.detach()) for t in operands])
            cast = [t.to(dtypes.get(t.dtype, t.dtype)) if isinstance(t, Tensor) else t for t in cotangents]
            return flat(self._with_gradients(answer, cast))

        by_chance = torch.Tag.nondeterministic_seeded in self.op.tags
        return Rounding(
            again, flat_operands(self.op, self.values), self.sizes, flat(whole), pointwise=False, random=by_chance
        )

    def _forward_pairs(self, whole: _Answer, answer: _Answer, names: Sequence[str]) -> list[_Pair]:
        if len(whole.tensors) != len(answer.tensors) or whole.others != answer.others:
            shown = f"{counted(len(answer.tensors), 'tensor')} and {answer.others}"
            raise AssertionError(
                f"it answers {shown}, one device {counted(len(whole.tensors), 'tensor')} and {whole.others}"
            )
        both = zip(whole.tensors, answer.tensors, strict=True)
        pairs = [_Pair(f"result {i}", i, *pair) for i, pair in enumerate(both)]
        pairs += [
            _Pair(f"the written operand {names[i]!r}", len(whole.tensors) + i, whole.operands[i], answer.operands[i])
            for i in sorted(self._written())
        ]
        return [pair for pair in pairs if pair.is_there]

    @contextmanager
    def _listening(self, direction: str) -> Iterator[None]:
        def note(plan: Plan) -> None:
            op, source, rows = plan.schema.op, plan.entry.rule.source, plan.names
            line = f"{direction}: {op_name(op)} by {' | '.join(rows)!r} ({source})"
            if line not in self.outcome.ran:
                self.outcome.ran.append(line)
            if op is self.op:
                self.outcome.source, self.outcome.rows = source, rows

        with observe(note):
            yield


@frozen(eq=False)
class _Pair:
    """One tensor on one device, its index among those that rounding is measured of, and the same tensor on the mesh."""

    what: str
    index: int
    expected: Tensor | None
    actual: Any
    is_gradient: bool = False

    @property
    def is_there(self) -> bool:
        return self.expected is not None or self.actual is not None

    def local_fault(self) -> str:
        """What is wrong with the form of the tensor on this rank. With a fault its parts must not be joined."""
        expected, actual = self.expected, self.actual
        if expected is None or actual is None:
            mine, whole = ("missing" if t is None else "present" for t in (actual, expected))
            return f"it is {mine}, on one device {whole}"
        if not isinstance(actual, MeshTensor):
            return f"it is a plain {type(actual).__name__}"
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            return f"it is {actual.spec.tensor_meta}, on one device {TensorMeta.of(expected)}"
        local, shape = tuple(actual.to_local().shape), actual.spec.local_shape()
        return "" if local == shape else f"under {actual.spec} its local tensor has shape {local}, not {shape}"

    def difference(self, rounding: Rounding, *, signs: bool) -> str:
        """How the whole tensor differs from that of one device. Communicates."""
        assert self.expected is not None
        with torch.no_grad():
            full = self.actual.detach().full_tensor()
        spec = TensorSpec(AbstractMesh(()), (), TensorMeta.of(self.expected))
        within = functools.partial(rounding.within, self.index)
        wrong = difference({(): full}, spec, self.expected.detach(), within, signs=signs)
        return f"{self.what}, {self.actual.spec}: {wrong}" if wrong else ""


def flat_operands_of(arg: Any, value: Any) -> int:
    """The number of tensor operands that an argument stands for."""
    if arg.kind.name == "TENSOR":
        return 1
    return len(value or ()) if arg.kind.name == "TENSORS" else 0


def _placements(ndim: int, mesh_ndim: int, kinds: Sequence[str], rng: random.Random) -> tuple[Placement, ...]:
    choices = [REPLICATE, *map(shard, range(ndim)), *map(partial, kinds)]
    return tuple(rng.choice(choices) for _ in range(mesh_ndim))
