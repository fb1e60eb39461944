"""Rule inference: every row that holds for an op, found by running it on shards, and the rule that says so.

The op is a black box: it is run on whole samples and on the pieces of simulated ranks, never read. The rows hold for
the samples. A person must review whether they hold for every legal call, and the oracle tests them further.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from attrs import field, frozen

from shardwise.kernel.arguments import refuse_argument
from shardwise.kernel.rule import Row, Rule
from shardwise.kernel.signature import Op, as_op, op_name
from shardwise.private_torch.ops import is_composite
from shardwise.testing.inference.draws import (
    Draws,
    InferenceError,
    check_can_be_probed,
    check_deterministic,
    draw,
    is_zipped,
    positions,
)
from shardwise.testing.inference.fitting import Fit, fit
from shardwise.testing.inference.search import SampleSearch, Tell, search
from shardwise.testing.inference.verdicts import Finding, findings, grouped, rule_rows, static_args
from shardwise.testing.oracle import check_rule, quietly
from shardwise.testing.report import Report
from shardwise.testing.samples import samples_of
from shardwise.testing.trial import Illegal, Trial
from shardwise.testing.values import Sample

__all__ = ["Finding", "InferenceError", "Inferred", "infer", "rule_rows"]

_CASES = 400
_PER_SAMPLE = 1000


@frozen(eq=False)
class Inferred:
    """The result of an inference.

    ``findings`` are all rows that held for some sample. ``text`` is the source code of the rule, ``rule`` its value.
    ``unsaid`` are rows that the rule leaves out although they hold for all samples of a form. ``notes`` tell a reviewer
    what to look at. ``report`` is the oracle's, for the rule and all samples.
    """

    op: Op
    samples: tuple[str, ...]
    findings: tuple[Finding, ...]
    text: str
    rule: Rule
    unsaid: tuple[Row, ...]
    notes: tuple[str, ...]
    report: Report = field(repr=False)

    @property
    def accepted(self) -> bool:
        """Whether the oracle found nothing wrong with the rule."""
        return not self.report.refuted


def infer(op: Op, samples: Sequence[Sample] | None = None, *, seed: int = 0, tell: Tell | None = None) -> Inferred:
    """Find every row that holds for an op on meshes of one dim of 2, 3 and 4 ranks, and write the rule.

    ``samples`` are ``(args, kwargs)`` of whole CPU tensors; by default they are made from the schema. Sizes should
    differ from dim to dim and be at least 4, and values should have both signs. The search draws new values several
    times; new integers stay in the range of the old ones. ``tell(done, total)`` is called with the progress.

    Raises :class:`InferenceError` if the op refuses every sample, gives different answers to equal calls, or gives
    results whose shapes depend on data.
    """
    if as_op(op) is None:
        refuse_argument("infer a rule", "op", op, "Name one overload, as in torch.ops.aten.mm.default.")
    check_can_be_probed(op)
    calls = list(samples_of(op, {}) if samples is None else samples)
    with torch.random.fork_rng(devices=[]), quietly():
        generator = torch.Generator().manual_seed(seed)
        draws, legal, notes = _draw_samples(op, calls, generator)
        check_deterministic(draws[0].first)
        searches = []
        for k, one in enumerate(draws):

            def on_sample(done: int, total: int, k: int = k) -> None:
                if tell is not None:
                    tell(k * _PER_SAMPLE + done * _PER_SAMPLE // max(total, 1), len(draws) * _PER_SAMPLE)

            searches.append(search(one, generator, on_sample))
        fitted = fit(op, grouped(searches), zipped=is_zipped(op))
        trust = _lacks_meta(draws[0].first)
        report = check_rule(fitted.source.rule, legal, cases=_CASES, seed=seed, keep_going=True, trust_results=trust)
    return Inferred(
        op,
        tuple(one.name for one in draws),
        findings(searches),
        fitted.source.text,
        fitted.source.rule,
        tuple(dict.fromkeys(row for _, rows in fitted.unsaid for row in sorted(rows, key=str))),
        (*notes, *_notes(op, searches, fitted)),
        report,
    )


def _draw_samples(
    op: Op, samples: Sequence[Sample], generator: torch.Generator
) -> tuple[list[Draws], list[Sample], list[str]]:
    """The samples to search, the samples for the oracle, and notes on the others."""
    draws: list[Draws] = []
    legal: list[Sample] = []
    refused: list[str] = []
    empty = 0
    for sample in samples:
        parts = positions(op, sample) if is_zipped(op) else [sample]
        try:
            of_sample = [draw(op, len(draws) + i, part, generator) for i, part in enumerate(parts)]
        except Illegal as error:
            refused.append(str(error).strip().splitlines()[0] if str(error).strip() else "no reason given")
            continue
        legal.append(sample)
        if any(m is not None and m.numel == 0 for one in of_sample for m in one.operands):
            empty += 1
        else:
            draws += of_sample
    if not draws:
        found = "every sample is empty" if samples else "it has no sample, and its schema is not enough to make one"
        raise InferenceError(
            asked=f"infer a rule for {op_name(op)}",
            found=f"the op refuses every sample, the last with: {refused[-1]}" if refused else found,
            do="Give sample calls of it, with tensors that are not empty: infer(op, [(args, kwargs)]), or --sample.",
            op=op_name(op),
        )
    notes = [f"The op refuses {len(refused)} of {len(samples)} samples; the first: {refused[0]}"] if refused else []
    return draws, legal, notes + ([f"{empty} empty samples went to the oracle only."] if empty else [])


def _lacks_meta(trial: Trial) -> bool:
    """Whether the op cannot be run on the meta device; see :meth:`Trial.of`."""
    unknown = all(meta is None for meta in trial.planned) and any(t is not None for t in trial.expected.tensors)
    return unknown or (trial.disagreement or "").startswith("on the meta device it raises")


# -- what a reviewer must know -----------------------------------------------------------------------------------


def _notes(op: Op, searches: Sequence[SampleSearch], fitted: Fit) -> Iterator[str]:
    if is_composite(op):
        yield (
            f"torch always runs {op_name(op)} as other ops, before shardwise sees it: a rule for it is never asked. "
            "Its parts need the rules; shardwise coverage lists them for a program."
        )
    if _lacks_meta(searches[0].draws.first):
        yield (
            "The op has no meta kernel, so no call of it on a mesh can be planned: give it one with "
            "torch.library.register_fake. The oracle took the shapes of the results from data."
        )
    if len({tuple(None if m is None else m.ndim for m in one.draws.operands) for one in searches}) == 1:
        yield "All samples have the same numbers of dims; other calls are untried."
    values = [static_args(one.draws) for one in searches]
    same = {n: v for n, v in values[0].items() if all(repr(other[n]) == repr(v) for other in values) and v is not None}
    if same:
        shown = ", ".join(f"{name}={value}" for name, value in same.items())
        yield f"Static arguments had one value in all samples ({shown}); for others the rule is unproved."
    sizes = [name for name in values[0] if any(_is_shape(one, name) for one in searches)]
    if sizes:
        yield (
            f"{', '.join(sizes)} holds a shape: rows that need a local one do not hold for the op on shards as it is. "
            "See local_args in docs/lowerings.md."
        )
    if any(one.cut for one in searches):
        yield "There are too many ways to place the operands; only those of which rows are usually made were tried."
    if any(len(one.draws.trials) == 1 for one in searches):
        yield "The op refuses other values for some samples: a row may hold by accident of the values."
    dtypes = ([m.dtype for m in one.draws.operands if m is not None] for one in searches)
    if any(len({d.is_floating_point or d.is_complex for d in of_sample}) > 1 for of_sample in dtypes):
        yield "Integers and bools beside floats were taken for indices and masks and never made partial."
    # A row that failed only for empty shards, and that was never tried on uneven shards with elements.
    uncertain = [finding for finding in findings(searches) if finding.verdict == "even shards only"]
    evidence = [[one.rows.get(f.row) for one in searches if one.draws.number in f.fails_for] for f in uncertain]
    if any(all(e is not None and e.failed <= e.empty for e in of_row) for of_row in evidence):
        yield "Some rows held for even shards and failed for empty ones, with none between: give sizes as 5, 7 and 8."
    if fitted.unsaid:
        yield "The rule does not say all rows that were found; those that are left out are listed."


def _is_shape(one: SampleSearch, name: str) -> bool:
    """Whether the value of an argument is the shape of a result, where -1 stands for any size."""
    value = static_args(one.draws)[name]
    shapes = [tuple(m.shape) for m in one.draws.outputs if m is not None]
    if not isinstance(value, tuple) or len(value) < 2:  # noqa: PLR2004  one number is more often a size
        return False
    same_ndim = [shape for shape in shapes if len(shape) == len(value)]
    return any(all(v in (-1, n) for v, n in zip(value, shape, strict=True)) for shape in same_ndim)
