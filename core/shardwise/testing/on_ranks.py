"""The workers' side of :func:`shardwise.testing.check_gradients`: one call on real ranks, compared with one
device.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor

from shardwise.discovery.process import default_registry
from shardwise.errors import NoStrategyError, RuleError
from shardwise.kernel.dispatcher import observe
from shardwise.kernel.placements import REPLICATE, Placement, partial, shard, show_all
from shardwise.kernel.plan import Plan
from shardwise.kernel.rule import AnyRule
from shardwise.kernel.signature import Op, op_name, signature
from shardwise.kernel.spec import AbstractMesh, TensorMeta, TensorSpec
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.shards import scatter_local
from shardwise.testing.judge import difference
from shardwise.testing.meshes import mesh
from shardwise.testing.partials import can_be_partial, place
from shardwise.testing.trial import TOLERANCE, copied, flat_operands, split_results, with_operands
from shardwise.testing.values import Sample, made

__all__ = ["CaseOutcome", "RealCase", "run_cases"]

_SEED = 20


@frozen
class RealCase:
    """One call to be tried: which sample, on which mesh, and the seed of its placements.

    With ``write_whole`` the operands that the op writes are replicated, which no rule can refuse.
    """

    sample: int
    mesh_shape: tuple[int, ...]
    seed: int
    write_whole: bool = False


@define
class CaseOutcome:
    """The outcome of one case, the same on every rank.

    ``wrong`` says what is wrong, empty for nothing; ``refused`` says why no rank ran it. ``results`` and ``gradients``
    count the tensors that were compared. ``ran`` says of every op that ran which rows of which rule it took, with
    ``source`` and ``rows`` those of the op itself.
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
    """Try cases in order until one is wrong; meanwhile ``rules`` override those of the installed plugins."""
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

    def run(self) -> CaseOutcome:
        self.values = signature(self.op).bind(*self.sample)
        whole = self._whole()
        if whole is None:
            self.outcome.illegal = True
            return self.outcome
        try:
            cotangents = [made(t.shape, t.dtype, i) if _flows(t) else None for i, t in enumerate(whole.tensors)]
            whole = self._with_gradients(whole, cotangents)
        except Exception:  # noqa: BLE001  no formula for its gradient: the forward is all there is
            cotangents = [None] * len(whole.tensors)
        self._on_mesh(whole, cotangents)
        return self.outcome

    def _whole(self) -> _Answer | None:
        """The op on one device; without gradients where it refuses them, ``None`` where it refuses the sample."""
        for self.follow in (True, False):
            with suppress(Exception):  # whatever an op raises for a call that it does not take
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
        operands = self._placed(device_mesh, rng)
        names = self._names()
        answer = self._step(
            "forward", lambda: self._call(list(operands)), lambda a: self._forward_pairs(whole, a, names)
        )
        if answer is None or not any(c is not None for c in cotangents):
            return
        given = [None if c is None else _spread(c, device_mesh, rng) for c in cotangents]
        self._step("backward", lambda: self._with_gradients(answer, given), lambda a: _gradient_pairs(whole, a, names))

    def _placed(self, device_mesh: Any, rng: random.Random) -> list[Any]:
        generator = torch.Generator().manual_seed(self.case.seed)
        written = self._written()
        tensors: list[Any] = []
        for i, full in enumerate(flat_operands(self.op, self.values)):
            if full is None:
                tensors.append(None)
                continue
            kinds = ("sum",) if i not in written and can_be_partial("sum", full.dtype) else ()
            placed = _placements(full.ndim, device_mesh.ndim, kinds, rng)
            if i in written and self.case.write_whole:
                placed = (REPLICATE,) * device_mesh.ndim
            spec = TensorSpec(device_mesh, placed, TensorMeta.of(full))
            local = place(full.detach(), spec, generator)[spec.coordinate()]
            tensors.append(MeshTensor(local, spec))
        self.outcome.placements = ", ".join("-" if t is None else show_all(t.placements) for t in tensors)
        shown = ["-" if t is None else str(t.spec.tensor_meta) for t in tensors]
        self.outcome.shown = ", ".join(shown)
        return tensors

    def _step(
        self, direction: str, work: Callable[[], _Answer], pairs: Callable[[_Answer], list[_Pair]]
    ) -> _Answer | None:
        """Run one part on this rank and compare; ``None`` when it failed on some rank, and the outcome says how.

        Every rank says what became of it before the next collective, so that none waits for one that has raised.
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
        except Exception as error:  # noqa: BLE001  whatever a rank raises is evidence
            wrong = f"it raised {type(error).__name__}: {error}"
        if not self._all_is_well(wrong, refused):
            return None
        if not self._all_is_well(next((d for p in compared if (d := p.difference(self._tolerance(p.wanted)))), "")):
            return None
        for pair in compared:
            self.outcome.gradients += pair.is_gradient
            self.outcome.results += not pair.is_gradient
        return answer

    def _all_is_well(self, wrong: str, refused: str = "") -> bool:
        """Whether every rank reports success; the outcome has the first report of a fault or a refusal."""
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, (wrong, refused))
        self.outcome.wrong = next((f"on rank {r} {w}" for r, (w, _) in enumerate(reports) if w), "")
        self.outcome.refused = next((f for _, f in reports if f), "")
        if self.outcome.refused and not all(f for _, f in reports):
            self.outcome.wrong = self.outcome.wrong or f"some ranks refuse it and some do not: {self.outcome.refused}"
        return not (self.outcome.wrong or self.outcome.refused)

    # -- comparing --
    def _forward_pairs(self, whole: _Answer, answer: _Answer, names: Sequence[str]) -> list[_Pair]:
        if len(whole.tensors) != len(answer.tensors) or whole.others != answer.others:
            shown = f"{len(answer.tensors)} tensors and {answer.others}"
            raise AssertionError(f"it answers {shown}, one device {len(whole.tensors)} tensors and {whole.others}")
        pairs = [_Pair(f"result {i}", *pair) for i, pair in enumerate(zip(whole.tensors, answer.tensors, strict=True))]
        pairs += [
            _Pair(f"the written operand {names[i]!r}", whole.operands[i], answer.operands[i])
            for i in sorted(self._written())
        ]
        return [pair for pair in pairs if pair.is_there]

    def _tolerance(self, wanted: Tensor | None) -> float:
        tensors = [t for t in (*flat_operands(self.op, self.values), wanted) if t is not None]
        return max(TOLERANCE.get(t.dtype, 0.0) for t in tensors)

    def _names(self) -> list[str]:
        names: list[str] = []
        for arg, value in zip(signature(self.op).args, self.values, strict=True):
            count = flat_operands_of(arg, value)
            listed = isinstance(value, (list, tuple))
            names += [f"{arg.name}[{i}]" if listed else arg.name for i in range(count)]
        return names

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
    """One tensor on one device, and the same tensor on the mesh."""

    what: str
    wanted: Tensor | None
    found: Any
    is_gradient: bool = False

    @property
    def is_there(self) -> bool:
        return self.wanted is not None or self.found is not None

    def local_fault(self) -> str:
        """What is wrong about the form of the tensor on this rank, so that its parts must not be put together."""
        wanted, found = self.wanted, self.found
        if wanted is None or found is None:
            mine, whole = ("there is none" if t is None else "there is one" for t in (found, wanted))
            return f"{mine} and on one device {whole}"
        if not isinstance(found, MeshTensor):
            return f"it is a plain {type(found).__name__}"
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            return f"it is {found.spec.tensor_meta}, on one device {TensorMeta.of(wanted)}"
        local, expected = tuple(found.to_local().shape), found.spec.local_shape()
        return "" if local == expected else f"under {found.spec} its local tensor has shape {local}, not {expected}"

    def difference(self, tolerance: float) -> str:
        """How the whole tensor differs from that of one device; it communicates."""
        assert self.wanted is not None
        with torch.no_grad():
            full = self.found.detach().full_tensor()
        spec = TensorSpec(AbstractMesh(()), (), TensorMeta.of(self.wanted))
        wrong = difference({(): full}, spec, self.wanted.detach(), tolerance)
        return f"{self.what}, {self.found.spec}: {wrong}" if wrong else ""


def _gradient_pairs(whole: _Answer, answer: _Answer, names: Sequence[str]) -> list[_Pair]:
    pairs = zip(names, whole.gradients, answer.gradients, strict=True)
    compared = [_Pair(f"the gradient of {name!r}", wanted, got, is_gradient=True) for name, wanted, got in pairs]
    return [pair for pair in compared if pair.is_there]


def flat_operands_of(arg: Any, value: Any) -> int:
    """How many tensor operands an argument stands for."""
    if arg.kind.name == "TENSOR":
        return 1
    return len(value or ()) if arg.kind.name == "TENSORS" else 0


def _flows(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _spread(full: Tensor, device_mesh: Any, rng: random.Random) -> MeshTensor:
    spec = TensorSpec(device_mesh, _placements(full.ndim, device_mesh.ndim, (), rng), TensorMeta.of(full))
    return MeshTensor(scatter_local(full, spec), spec)


def _placements(ndim: int, mesh_ndim: int, kinds: Sequence[str], rng: random.Random) -> tuple[Placement, ...]:
    choices = [REPLICATE, *map(shard, range(ndim)), *map(partial, kinds)]
    return tuple(rng.choice(choices) for _ in range(mesh_ndim))
