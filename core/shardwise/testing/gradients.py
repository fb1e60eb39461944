"""One op on real ranks, forward and backward, compared with one device.

The oracle judges each rule by itself on simulated ranks, below autograd. It cannot see how a registered backward and
the rules of its ops work together on MeshTensors. Autograd on MeshTensors needs a process group, so this needs a pool.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import asdict, frozen

from shardwise.kernel.plurals import counted
from shardwise.kernel.signature import Op, op_name, signature
from shardwise.private_torch.ops import OpLike
from shardwise.testing.on_ranks import CaseOutcome, RealCase, run_cases
from shardwise.testing.pool import WorkerPool
from shardwise.testing.report import RuleRefuted
from shardwise.testing.samples import Samples, by_op, samples_of, without_complex
from shardwise.testing.schema_samples import samples_from_schema
from shardwise.testing.subject import Plugin, subject_of
from shardwise.testing.values import Sample, one_op

__all__ = ["GradientRefuted", "RanksReport", "check_gradients"]


class GradientRefuted(RuleRefuted):
    """An op gives other results or other gradients on real ranks than on one device, or raises there.

    Fields: those of :class:`RuleRefuted` for the op itself, and ``ran``: what ran, forward and backward, with the rows
    and the source of each rule.
    """


@frozen
class RanksReport:
    """Counts of what was run on real ranks: cases, those that the rules refused, results and gradients compared."""

    ops: int = 0
    cases: int = 0
    refused: int = 0
    results: int = 0
    gradients: int = 0

    def __add__(self, other: RanksReport) -> RanksReport:
        mine, theirs = asdict(self), asdict(other)
        return RanksReport(**{name: mine[name] + theirs[name] for name in mine})

    def __str__(self) -> str:
        return (
            f"{self.ops} ops, {self.cases} cases on real ranks ({self.refused} refused); "
            f"{self.results} results and {self.gradients} gradients are those of one device"
        )


def check_gradients(
    op: OpLike,
    samples: Sequence[Sample] | Samples | None = None,
    *,
    pool: WorkerPool,
    rules: Plugin = (),
    meshes: Sequence[Sequence[int]] | None = None,
    cases: int = 24,
    seed: int = 0,
    timeout: float = 120.0,
) -> RanksReport:
    """Run an op and its backward on the ranks of a pool, on random placements, and compare with one device.

    ``samples`` are ``(args, kwargs)`` of whole CPU tensors, or a mapping from ops to them; by default they are made
    from the schema. In each of the ``cases`` each operand is replicated, sharded on a random dim (evenly or not) or a
    partial sum on each mesh dim. Floating operands that the op does not write require gradients. ``rules`` (a plugin
    that is not installed, or rules) override the installed ones. ``meshes`` must have as many ranks as the pool.
    ``timeout`` is in seconds.

    Raises :class:`GradientRefuted` with the first result or gradient that is wrong, for a rank that raises, and if the
    rules refuse every case. A call that a rule refuses (an in-place op that would redistribute its operand) is not an
    error; the report counts it.
    """
    overload = one_op(op, "check gradients")
    ranks = pool.world_size
    halves = [(2, ranks // 2)] if ranks > 2 and ranks % 2 == 0 else []  # noqa: PLR2004
    shapes = [(ranks,), *halves] if meshes is None else [tuple(shape) for shape in meshes]
    sent = subject_of(rules).loose_rules
    for calls in _sample_lists(overload, samples):
        rng = random.Random(seed)  # noqa: S311  chance, no secret
        # Every sample in turn, each round on the next mesh.
        tried = [
            RealCase(i % len(calls), shapes[(i + i // len(calls)) % len(shapes)], rng.randrange(1 << 30), i % 2 == 0)
            for i in range(cases if calls else 0)
        ]
        outcomes = pool.run(run_cases, overload, sent, calls, tried, timeout=timeout)[0]
        for case, outcome in zip(tried, outcomes, strict=False):
            if outcome.wrong:
                raise _refutation(overload, calls[case.sample], case, outcome, outcome.wrong)
        legal = [outcome for outcome in outcomes if not outcome.illegal]
        if any(not outcome.refused for outcome in legal):
            refused = sum(bool(outcome.refused) for outcome in legal)
            results, gradients = sum(o.results for o in legal), sum(o.gradients for o in legal)
            return RanksReport(1, len(legal), refused, results, gradients)
    raise _nothing_ran(overload, calls, tried, outcomes)


def _sample_lists(op: Op, samples: Sequence[Sample] | Samples | None) -> Iterator[list[Sample]]:
    """Lists of samples to try, until one has a call that runs.

    Guessed tensors have one shape at first: an op may broadcast by accident, and then its backward does not. They are
    real: a backward that was written for real numbers has no conjugates, and is right where it is used.
    """
    if samples is not None and not isinstance(samples, Mapping):
        yield list(samples)
        return
    by_overload = by_op(samples or {})
    if op not in by_overload:
        yield without_complex(samples_from_schema(op, one_shape=True))
    yield samples_of(op, by_overload, guess_complex=False)


def _refutation(op: Op, sample: Sample, case: RealCase, outcome: CaseOutcome, found: str) -> GradientRefuted:
    mesh = "x".join(map(str, case.mesh_shape))
    ran = "; ".join(outcome.ran)
    arguments = zip(signature(op).args, signature(op).bind(*sample), strict=True)
    shown = "(" + ", ".join(f"{arg.name}={_value_text(value)}" for arg, value in arguments) + ")"
    return GradientRefuted(
        asked=f"run {op_name(op)} and its backward on {shown} on a {mesh} mesh with {outcome.placements}",
        found=found + (f". What ran: {ran}" if ran else ""),
        do="Judge the rule of each op that ran by itself (check_rule); where all are right, correct the registered "
        "backward.",
        op=op_name(op),
        source=outcome.source,
        rows=outcome.rows,
        mesh=mesh,
        sample=shown,
        placements=outcome.placements,
        ran=tuple(outcome.ran),
    )


def _nothing_ran(op: Op, samples: Sequence[Sample], cases: Sequence[RealCase], outcomes: Sequence[CaseOutcome]) -> Any:
    refused = next((i for i, o in enumerate(outcomes) if o.refused), None)
    if refused is not None:
        case, outcome = cases[refused], outcomes[refused]
        found = f"its rule refuses every case, as {outcome.refused}"
        return _refutation(op, samples[case.sample], case, outcome, found)
    return GradientRefuted(
        asked=f"run {op_name(op)} and its backward on {counted(len(samples), 'sample')}",
        found="the op takes none of them on one device" if samples else "none could be made from its schema",
        do="Give samples: a list of (args, kwargs) that the op takes.",
        op=op_name(op),
        source="",
        rows=(),
        mesh="-",
        sample="-",
        placements="-",
        ran=(),
    )


def _value_text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value_text, value)) + "]"
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"{value.dtype}".removeprefix("torch.") + str(list(shape))
