"""The verdict on a program: the values of the ranks after each line, compared with those of one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from attrs import define, evolve, field
from torch import Tensor

from shardwise.errors import WorkerError
from shardwise.kernel.spec import AbstractMesh, TensorMeta, TensorSpec, coordinates, memory_order
from shardwise.tensor.shards import assemble
from shardwise.testing.judge import difference
from shardwise.testing.pool import WorkerPool
from shardwise.testing.programs.machine import After, call_on, decided_by_chance, quietly, reference, run_alone
from shardwise.testing.programs.program import Call, Leaf, Line, Move, Program, op_called
from shardwise.testing.programs.replay import BACKWARD, Held, LineOutcome, replay

__all__ = ["Verdict", "check_program"]

TIMEOUT = 45.0
"""Seconds for one program, which takes milliseconds: a rank that waits for another one forever hangs."""

# A gradient that moves this many times as far as its leaves were moved tells nothing of a small difference.
_NUDGE = 1e-6


@define(eq=False)
class Verdict:
    """The result of a program. ``wrong`` is empty if nothing is wrong; ``at`` is the line's number (or ``backward``).

    ``counts`` says how many calls ran, were refused (by the type of the refusal), were left out because they needed
    what was refused, and how many values and gradients were compared.
    """

    wrong: str = ""
    at: int | str = ""
    counts: Counter[str] = field(factory=Counter)
    ran: list[str] = field(factory=list)


def check_program(program: Program, pool: WorkerPool) -> Verdict:
    """Run a program on the ranks of a pool and on one device, and compare after each line.

    The pool has as many ranks as the mesh. A refusal (no rule, no strategy) is not a failure if all ranks refuse.
    """
    after, gradients = reference(program)
    verdict = Verdict()
    try:
        told = pool.run(replay, program, [list(a.values) for a in after], timeout=TIMEOUT)
    except WorkerError as error:
        return _raised(program, error, verdict)
    judged = _Judge(program, after, gradients, told, verdict)
    judged.all()
    return verdict


def _raised(program: Program, error: WorkerError, verdict: Verdict) -> Verdict:
    verdict.wrong = str(error)
    shown = [f"{line}: " for line in program.lines]
    verdict.at = next((i for i, text in enumerate(shown) if text in verdict.wrong), BACKWARD)
    return verdict


@define(eq=False)
class _Judge:
    program: Program
    after: Sequence[After]
    gradients: Mapping[int, Tensor | None]
    told: Sequence[Sequence[LineOutcome]]
    verdict: Verdict
    held: dict[int, Tensor] = field(factory=dict)
    unsteady: bool = False
    turned: set[int] = field(factory=set)
    metas: dict[int, TensorMeta] = field(factory=dict)

    def all(self) -> None:
        """Judge line by line until one is wrong or the ranks stopped."""
        lengths = {len(outcomes) for outcomes in self.told}
        if len(lengths) != 1:
            self.verdict.wrong, self.verdict.at = f"ranks stop at different lines: {sorted(lengths)}", min(lengths) - 1
            return
        for i in range(lengths.pop()):
            is_line = i < len(self.program.lines)
            here = [outcomes[i] for outcomes in self.told]
            wrong = self._line(i, here) if is_line else self._backward(here)
            if wrong:
                self.verdict.wrong, self.verdict.at = wrong, i if is_line else BACKWARD
                return

    def _state(self, here: Sequence[LineOutcome], what: str) -> str:
        """What is wrong with the states of the ranks; counts the states."""
        states = {(o.state, o.why.partition(":")[0]) for o in here}
        if len(states) != 1:
            return f"the ranks do not do alike: {sorted(states)}"
        state, why = states.pop()
        self.verdict.counts[f"{what} {state}{f' ({why})' if why else ''}"] += 1
        return ""

    def _line(self, i: int, here: Sequence[LineOutcome]) -> str:
        line, after = self.program.lines[i], self.after[i]
        if isinstance(line, Call):
            wrong = self._state(here, "call")
            if wrong:
                return wrong
        if here[0].state != "ran":
            return ""
        if isinstance(line, Call):
            self.verdict.ran.append(line.op)
        wrong = self._others(line, after, here) or self._values(i, here)
        if wrong and self._is_unsteady(line, here):
            self.verdict.counts["unsteady"] += 1
            self.unsteady, wrong = True, ""
        for name in () if wrong else here[0].values:
            self.held[name] = self._whole({at: o.values[name] for at, o in zip(self._where(), here, strict=True)})
        return wrong

    def _others(self, line: Line, after: After, here: Sequence[LineOutcome]) -> str:
        if self.unsteady or after.loose or (isinstance(line, Call) and decided_by_chance(op_called(line.op))):
            return ""
        for rank, outcome in enumerate(here):
            if str(outcome.others) != str(after.others):
                return f"rank {rank} answers {outcome.others}, one device {after.others}"
        return ""

    def _values(self, i: int, here: Sequence[LineOutcome]) -> str:
        after = self.after[i]
        for name, wanted in after.values.items():
            if not all(name in o.values for o in here):
                if any(name in o.values for o in here) or name in self.held or name in self.program.lines[i].names:
                    return f"value {name} is missing on some rank"
                continue  # made by a call that was refused
            loose = self.unsteady or name in after.loose
            wrong = self._difference([o.values[name] for o in here], wanted, after.tolerance, loose=loose)
            wrong = wrong or self._order(self.program.lines[i], name, here[0].values[name], wanted)
            if wrong:
                return f"value {name}: {wrong}"
        return ""

    def _difference(self, held: Sequence[Held], wanted: Tensor, tolerance: float, *, loose: bool) -> str:
        first = held[0]
        if first.meta is None:
            return f"it is a plain {first.plain}"
        if any(h.placements != first.placements or h.meta != first.meta for h in held):
            return "the ranks do not agree where it lies"
        meta = first.meta
        if meta.shape != wanted.shape or meta.dtype != wanted.dtype:
            return f"it is {meta}, on one device {TensorMeta.of(wanted)}"
        spec = TensorSpec(AbstractMesh(self.program.mesh_shape), first.placements, meta)
        locals_ = {at: h.local for at, h in zip(self._where(), held, strict=True)}
        wrong = difference(locals_, spec, wanted, tolerance, values=not loose)
        self.verdict.counts["values compared"] += not loose
        return f"{spec}: {wrong}" if wrong else ""

    def _order(self, line: Line, name: int, held: Held, wanted: Tensor) -> str:
        """What is wrong about the order of the strides. What torch says without data may differ from what a kernel
        does: then either is right, and so is what is made of it.
        """
        assert held.meta is not None
        self.metas[name] = held.meta
        before = line.operands if isinstance(line, Call) else [line.source] if isinstance(line, Move) else []
        if self.turned.intersection(before) or _order_of(held.meta) == _order_of(TensorMeta.of(wanted)):
            if self.turned.intersection(before):
                self.turned.add(name)
            return ""
        self.turned.add(name)
        if isinstance(line, Call) and name in line.names:
            return _unlike_on_meta(line, name, held.meta, {n: self.metas[n] for n in line.operands if n in self.metas})
        return f"its strides are {held.meta.stride}, on one device {wanted.stride()}"

    def _where(self) -> list[tuple[int, ...]]:
        return coordinates(self.program.mesh_shape)

    def _whole(self, held: Mapping[tuple[int, ...], Held]) -> Tensor:
        first = next(iter(held.values()))
        if first.meta is None:
            return first.local
        spec = TensorSpec(AbstractMesh(self.program.mesh_shape), first.placements, first.meta)
        return assemble({at: h.local for at, h in held.items()}, spec)

    # -- differences that rounding makes --
    def _is_unsteady(self, line: Line, here: Sequence[LineOutcome]) -> bool:
        """Whether one device, given what the ranks were given, answers as they do: then rounding was blown up."""
        if not isinstance(line, Call) or not all(name in self.held for name in line.operands):
            return False
        try:
            with quietly():
                values, others = run_alone(line, self.held)
        except Exception:  # noqa: BLE001  # what one device refuses, the ranks should have refused
            return False
        if any(str(o.others) != str(others) for o in here):
            return False
        tolerance = max(self.after[self.program.lines.index(line)].tolerance, 0.0)
        made = [n for n in values if n in here[0].values]
        return not any(self._difference([o.values[n] for o in here], values[n], tolerance, loose=False) for n in made)

    def _backward(self, here: Sequence[LineOutcome]) -> str:
        wrong = self._state(here, "backward")
        if wrong or here[0].state != "ran":
            return wrong
        tolerance = max((a.tolerance for a in self.after), default=0.0)
        for name, wanted in self.gradients.items():
            if wanted is None:
                # The mesh may know of zeros what one device knows not to be there.
                continue
            if not all(name in o.values for o in here):
                return f"leaf {name} has no gradient on some rank"
            loose = self.unsteady or any(a.loose for a in self.after)
            held = [o.values[name] for o in here]
            wrong = self._difference(held, wanted, tolerance * 10, loose=loose)
            if wrong and not self._is_steep(name, wanted):
                return f"the gradient of {name}: {wrong}"
            self.verdict.counts["gradients compared"] += not loose and not wrong
        return ""

    def _is_steep(self, name: int, wanted: Tensor) -> bool:
        """Whether the gradient changes at once where the leaves change a little."""
        generator = torch.Generator().manual_seed(0)
        lines = [
            evolve(line, value=_nudged(line.value, generator)) if isinstance(line, Leaf) else line
            for line in self.program.lines
        ]
        _, gradients = reference(evolve(self.program, lines=tuple(lines)))
        moved = gradients[name]
        if moved is None or not bool(wanted.isfinite().all()):
            return True
        return bool((moved - wanted).abs().max() > 1e-3 * max(1.0, float(wanted.abs().max())))


def _nudged(value: Tensor, generator: torch.Generator) -> Tensor:
    if not value.is_floating_point():
        return value
    return value * (1 + _NUDGE * torch.randn(value.shape, generator=generator, dtype=torch.float64)).to(value.dtype)


def _order_of(meta: TensorMeta) -> list[int]:
    """The dims that have an order, from the outermost in memory."""
    return [d for d in memory_order(meta) if meta.shape[d] > 1] if 0 not in meta.shape else []


def _unlike_on_meta(line: Call, name: int, meta: TensorMeta, operands: Mapping[int, TensorMeta]) -> str:
    """What is wrong about strides that are not those of one device: nothing where torch gives them without data."""
    strides = f"its strides are {meta.stride}"
    try:
        tensors, _ = call_on(line, {n: m.to_meta_tensor() for n, m in operands.items()})
    except Exception:  # noqa: BLE001  # no kernel for it
        return ""
    seen = tensors[line.names.index(name)]
    same = seen is not None and _order_of(TensorMeta.of(seen)) == _order_of(meta)
    return "" if same else f"{strides}, and neither one device nor torch without data has that order"
