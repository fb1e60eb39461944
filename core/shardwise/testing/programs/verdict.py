"""The verdict on a program: compare the values of the ranks after each line with those of one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import define, evolve, field
from torch import Tensor

from shardwise.errors import WorkerError
from shardwise.kernel.mesh import AbstractMesh, coordinates
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta, memory_order
from shardwise.tensor.shards import assemble
from shardwise.testing.judge import difference
from shardwise.testing.pool import WorkerPool
from shardwise.testing.programs.machine import After, call_on, decided_by_chance, quietly, reference, run_alone
from shardwise.testing.programs.program import Assign, Call, Leaf, Line, Move, Program, op_called, operands_of
from shardwise.testing.programs.replay import BACKWARD, Held, LineOutcome, replay

__all__ = ["Verdict", "check_program"]

TIMEOUT = 45.0
"""Seconds for one program, which takes milliseconds. A rank that waits for another one forever would hang."""

# The relative change of the leaves with which :meth:`_Judge._is_steep` tests a gradient.
_NUDGE = 1e-6


_NUDGES = 16
"""Roundings that are tried, to see which elements of a result they change."""

# The reductions that add the parts.
_ADDED = {"sum", "avg"}
_HALF = {torch.float16, torch.bfloat16}


@define(eq=False)
class Verdict:
    """The result of a program. ``wrong`` says what is wrong, or is empty. ``at`` is the number of that line, or
    ``backward``.

    ``counts`` has the numbers of calls that ran, that were refused (by the type of the refusal) and that were left out
    because they needed a refused value, and the numbers of values and gradients that were compared.
    """

    wrong: str = ""
    at: int | str = ""
    counts: Counter[str] = field(factory=Counter)
    ran: list[str] = field(factory=list)


def check_program(
    program: Program,
    pool: WorkerPool,
    run: Callable[[Program, Sequence[Sequence[int]]], list[LineOutcome]] = replay,
) -> Verdict:
    """Run a program on the ranks of a pool and on one device, and compare after each line.

    The pool has as many ranks as the mesh. A refusal (no rule, no strategy) is not a failure if all ranks refuse.
    ``run`` is what each rank does, :func:`replay` itself or something around it.
    """
    after, gradients = reference(program)
    verdict = Verdict()
    try:
        by_rank = pool.run(run, program, [list(a.values) for a in after], timeout=TIMEOUT)
    except WorkerError as error:
        verdict.wrong = str(error)
        texts = [f"{line}: " for line in program.lines]
        verdict.at = next((i for i, text in enumerate(texts) if text in verdict.wrong), BACKWARD)
        return verdict
    _Judge(program, after, gradients, by_rank, verdict).all()
    return verdict


@define(eq=False)
class _Judge:
    """Compares a program's outcomes, line by line. ``outcomes`` has one list of them per rank."""

    program: Program
    after: Sequence[After]
    gradients: Mapping[int, Tensor | None]
    outcomes: Sequence[Sequence[LineOutcome]]
    verdict: Verdict
    held: dict[int, Tensor] = field(factory=dict)
    unsteady: bool = False
    turned: set[int] = field(factory=set)
    pending: set[int] = field(factory=set)
    #: Of pending values, the largest number in a rank's part: what their sum is rounded by.
    scales: dict[int, float] = field(factory=dict)
    metas: dict[int, TensorMeta] = field(factory=dict)

    def all(self) -> None:
        """Judge line by line until one is wrong or the ranks stopped."""
        lengths = {len(outcomes) for outcomes in self.outcomes}
        if len(lengths) != 1:
            self.verdict.wrong, self.verdict.at = f"ranks stop at different lines: {sorted(lengths)}", min(lengths) - 1
            return
        for i in range(lengths.pop()):
            is_line = i < len(self.program.lines)
            here = [outcomes[i] for outcomes in self.outcomes]
            wrong = self._line(i, here) if is_line else self._backward(here)
            if wrong:
                self.verdict.wrong, self.verdict.at = wrong, i if is_line else BACKWARD
                return

    def _state(self, here: Sequence[LineOutcome], what: str) -> str:
        """Count the state of the ranks; returns what is wrong if they differ."""
        states = {(o.state, o.why.partition(":")[0]) for o in here}
        if len(states) != 1:
            return f"the ranks do not do the same: {sorted(states)}"
        state, why = states.pop()
        self.verdict.counts[f"{what} {state}{f' ({why})' if why else ''}"] += 1
        return ""

    def _line(self, i: int, here: Sequence[LineOutcome]) -> str:
        line, after = self.program.lines[i], self.after[i]
        if not isinstance(line, (Leaf, Move)):
            wrong = self._state(here, "call" if isinstance(line, Call) else "copy")
            if wrong:
                return wrong
        if here[0].state != "ran":
            return ""
        if isinstance(line, Call):
            self.verdict.ran.append(line.op)
        wrong = ""
        by_chance = after.loose or (isinstance(line, Call) and decided_by_chance(op_called(line.op)))
        for rank, outcome in enumerate(here if not (self.unsteady or by_chance) else ()):
            if str(outcome.others) != str(after.others):
                wrong = wrong or f"rank {rank} answers {outcome.others}, one device {after.others}"
        wrong = wrong or self._compare_values(line, after, here)
        if wrong and self.pending.intersection(operands_of(line) if isinstance(line, Call) else ()):
            # Parts of both signs times an infinite factor add up to NaN (docs/rules.md).
            wrong = self._compare_values(line, after, here, infinities=False)
            self.unsteady = self.unsteady or not wrong
            self.verdict.counts["infinities"] += not wrong
        if wrong and self._is_unsteady(line, here):
            self.verdict.counts["unsteady"] += 1
            self.unsteady, wrong = True, ""
        for name in () if wrong else here[0].values:
            held = [outcome.values[name] for outcome in here]
            first = held[0]
            self.held[name] = self._whole(held)
            if first.meta is not None:
                spec = TensorSpec(AbstractMesh(self.program.mesh_shape), first.placements, first.meta)
                (self.pending.add if _ADDED & {*spec.reductions.values()} else self.pending.discard)(name)
                self.scales[name] = max(_largest(part.local) for part in held)
        return wrong

    def _compare_values(self, line: Line, after: After, here: Sequence[LineOutcome], *, infinities: bool = True) -> str:
        for name, expected in after.values.items():
            if not all(name in o.values for o in here):
                if any(name in o.values for o in here) or name in self.held or name in line.names:
                    return f"value {name} is missing on some rank"
                continue  # the result of a call that was refused
            loose = self.unsteady or name in after.loose
            held = [o.values[name] for o in here]
            wrong = self._difference(held, expected, after.tolerance, loose=loose, infinities=infinities)
            wrong = wrong or self._compare_order(line, name, here[0].values[name], expected)
            if wrong:
                return f"value {name}: {wrong}"
        return ""

    def _difference(
        self, held: Sequence[Held], expected: Tensor, tolerance: float, *, loose: bool, infinities: bool = True
    ) -> str:
        """How the ranks' parts of one value differ from one device's; empty if they do not. Counts the comparison."""
        first = held[0]
        if first.meta is None:
            return f"it is a plain {first.plain}"
        if any(h.placements != first.placements or h.meta != first.meta for h in held):
            return "the ranks have different placements or metas for it"
        meta = first.meta
        if meta.shape != expected.shape or meta.dtype != expected.dtype:
            return f"it is {meta}, on one device {TensorMeta.of(expected)}"
        spec = TensorSpec(AbstractMesh(self.program.mesh_shape), first.placements, meta)
        locals_ = {at: h.local for at, h in zip(self._coordinates(), held, strict=True)}
        wrong = difference(locals_, spec, expected, tolerance, values=not loose, infinities=infinities)
        self.verdict.counts["values compared"] += not loose
        return f"{spec}: {wrong}" if wrong else ""

    def _compare_order(self, line: Line, name: int, held: Held, expected: Tensor) -> str:
        """What is wrong with the order of the strides; empty if nothing is.

        Torch's meta kernels and its kernels may disagree about it. Then both orders are right, and so are the orders
        of later values that are computed from this one.
        """
        assert held.meta is not None
        self.metas[name] = held.meta
        before = [line.source] if isinstance(line, Assign) else operands_of(line)
        if self.turned.intersection(before) or _order_of(held.meta) == _order_of(TensorMeta.of(expected)):
            if self.turned.intersection(before):
                self.turned.add(name)
            return ""
        self.turned.add(name)
        if not isinstance(line, Call) or name not in line.names:
            return f"its strides are {held.meta.stride}, on one device {expected.stride()}"
        try:
            tensors, _ = call_on(line, {n: self.metas[n].to_meta_tensor() for n in line.operands if n in self.metas})
        except Exception:  # noqa: BLE001  there is no meta kernel
            return ""
        on_meta = tensors[line.names.index(name)]
        if on_meta is not None and _order_of(TensorMeta.of(on_meta)) == _order_of(held.meta):
            return ""
        return f"its strides are {held.meta.stride}, and neither one device nor torch without data has that order"

    def _coordinates(self) -> list[tuple[int, ...]]:
        return coordinates(self.program.mesh_shape)

    # -- differences that rounding makes --
    def _is_unsteady(self, line: Line, here: Sequence[LineOutcome]) -> bool:
        """Whether the call magnified a rounding: one device with the ranks' operands gives the ranks' results, as it is
        or in float64. Kernels for half precision may round within, where the ranks do not.
        """
        if not isinstance(line, Call) or not all(name in self.held for name in line.operands):
            return False
        own = {name: self.held[name] for name in line.operands}
        wide = {name: t.double() if t.dtype in _HALF else t for name, t in own.items()}
        ways = [own] if all(wide[name] is own[name] for name in own) else [own, wide]
        return any(self._gives(line, operands, here) for operands in ways) or self._is_steep_call(line, own, here)

    def _is_steep_call(self, line: Call, own: Mapping[int, Tensor], here: Sequence[LineOutcome]) -> bool:
        """Whether all that the ranks have otherwise also changes where pending operands are rounded otherwise: they add
        their parts in an order of their own. A matrix without full rank may have any pivots then, for example.
        """
        generator = torch.Generator().manual_seed(0)
        try:
            with quietly():
                values, _ = run_alone(line, own)
                nudged = [run_alone(line, self._nudged(own, generator))[0] for _ in range(_NUDGES)]
        except Exception:  # noqa: BLE001  # it refuses one of them
            return False
        is_apart = False
        for name in (n for n in values if n in here[0].values):
            others = [of_nudge[name] for of_nudge in nudged]
            ranks = self._whole([o.values[name] for o in here])
            if any(other.shape != values[name].shape for other in (ranks, *others)):
                return False
            apart = _apart(values[name], ranks)
            is_apart = is_apart or bool(apart.any())
            if bool((apart & ~torch.stack([_apart(values[name], other) for other in others]).any(0)).any()):
                return False
        return is_apart

    def _nudged(self, own: Mapping[int, Tensor], generator: torch.Generator) -> dict[int, Tensor]:
        """Operands with each pending one changed by what the sum of its parts is rounded by."""
        nudged = dict(own)
        for name in self.pending.intersection(own):
            value = own[name]
            if value.is_floating_point():
                noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).clamp(-1, 1)
                nudged[name] = value + (noise * torch.finfo(value.dtype).eps * self.scales[name]).to(value.dtype)
        return nudged

    def _whole(self, held: Sequence[Held]) -> Tensor:
        """The whole value of which each rank holds a part."""
        first = held[0]
        if first.meta is None:
            return first.local
        spec = TensorSpec(AbstractMesh(self.program.mesh_shape), first.placements, first.meta)
        return assemble({at: h.local for at, h in zip(self._coordinates(), held, strict=True)}, spec)

    def _gives(self, line: Call, operands: Mapping[int, Tensor], here: Sequence[LineOutcome]) -> bool:
        """Whether one device gives the ranks' results of a call from operands, in the dtypes of the ranks' results."""
        try:
            with quietly():
                values, others = run_alone(line, operands)
        except Exception:  # noqa: BLE001  # what one device refuses, the ranks should have refused
            return False
        if any(str(o.others) != str(others) for o in here):
            return False
        tolerance = max(self.after[self.program.lines.index(line)].tolerance, 0.0)
        for name in (n for n in values if n in here[0].values):
            held = [o.values[name] for o in here]
            dtype = values[name].dtype if held[0].meta is None else held[0].meta.dtype
            if self._difference(held, values[name].to(dtype), tolerance, loose=False):
                return False
        return True

    def _backward(self, here: Sequence[LineOutcome]) -> str:
        wrong = self._state(here, "backward")
        if wrong or here[0].state != "ran":
            return wrong
        tolerance = max((a.tolerance for a in self.after), default=0.0)
        for name, expected in self.gradients.items():
            if expected is None:
                # The mesh may have zeros where one device has no gradient.
                continue
            if not all(name in o.values for o in here):
                return f"leaf {name} has no gradient on some rank"
            loose = self.unsteady or any(a.loose for a in self.after)
            held = [o.values[name] for o in here]
            wrong = self._difference(held, expected, tolerance * 10, loose=loose)
            if wrong and not self._is_steep(name, expected):
                return f"the gradient of {name}: {wrong}"
            self.verdict.counts["gradients compared"] += not loose and not wrong
        return ""

    def _is_steep(self, name: int, expected: Tensor) -> bool:
        """Whether a tiny change of the leaves changes the gradient much. Then a small difference shows nothing."""
        generator = torch.Generator().manual_seed(0)
        lines: list[Line] = []
        for line in self.program.lines:
            if isinstance(line, Leaf) and line.value.is_floating_point():
                noise = torch.randn(line.value.shape, generator=generator, dtype=torch.float64)
                lines.append(evolve(line, value=line.value * (1 + _NUDGE * noise).to(line.value.dtype)))
            else:
                lines.append(line)
        _, gradients = reference(evolve(self.program, lines=tuple(lines)))
        nudged = gradients[name]
        if nudged is None or not bool(expected.isfinite().all() and nudged.isfinite().all()):
            return True
        return bool((nudged - expected).abs().max() > 1e-3 * max(1.0, float(expected.abs().max())))


def _largest(value: Tensor) -> float:
    """The largest finite number of a tensor."""
    if not value.is_floating_point() or not value.numel():
        return 0.0
    return float(value.double().abs().nan_to_num(0.0, 0.0, 0.0).amax())


def _apart(value: Tensor, other: Tensor) -> Tensor:
    """Where two results differ by much more than a rounding: half of the digits."""
    near = torch.finfo(value.dtype).eps ** 0.5 if value.is_floating_point() or value.is_complex() else 0.0
    return ~torch.isclose(value.to(torch.complex128), other.to(torch.complex128), near, near, equal_nan=True)


def _order_of(meta: TensorMeta) -> list[int]:
    """The dims of several elements, from the outermost in memory to the innermost."""
    return [d for d in memory_order(meta) if meta.shape[d] > 1] if 0 not in meta.shape else []
