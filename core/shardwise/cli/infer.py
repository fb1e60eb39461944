"""``shardwise infer``: every row that holds for an op, found by running it, and the rule that says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click
from torch import Tensor

from shardwise.cli.completion import offer_ops, offer_programs
from shardwise.cli.modules import import_option, load_function
from shardwise.cli.ops import one_of, ops_named
from shardwise.cli.output import json_option, print_json, print_rows, print_text, progress
from shardwise.cli.plugin_states import plugin_states
from shardwise.cli.program_errors import check_takes, program_errors
from shardwise.cli.sample_text import read_sample
from shardwise.engine.decomposition import formulas
from shardwise.errors import CallError
from shardwise.kernel.arguments import kind_of
from shardwise.kernel.placements import show_all
from shardwise.kernel.registry import Registry
from shardwise.kernel.signature import Kind, Op, op_name, signature
from shardwise.private_torch.ops import is_composite
from shardwise.testing.inference import Inferred
from shardwise.testing.inference import infer as infer_rule
from shardwise.testing.values import Sample
from shardwise.tools.call_binding import bind_call

__all__ = ["infer"]

COLUMNS = ("operands", "row", "verdict")


@click.command()
@click.argument("op", shell_complete=offer_ops)
@click.option("--sample", "samples", multiple=True, help='A call: "f32[8,6], i64[5] < 8, 1, keepdim=True". Repeatable.')
@click.option(
    "--samples",
    "function",
    metavar="FILE.py:FUNCTION",
    shell_complete=offer_programs,
    help="Returns a list of (args, kwargs).",
)
@import_option
@click.option("--seed", default=0, show_default=True, help="Of the values that are drawn.")
@json_option
def infer(*, op: str, samples: tuple[str, ...], function: str | None, seed: int, as_json: bool) -> None:
    """Find by numeric search every row that holds for OP and print the rule, for a person to review.

    OP is written mm, aten.mm, aten.sum.dim_IntList or acme::gate. Without samples they are made from its schema, where
    that is enough. The op is run as it is: on whole CPU tensors, and on the pieces that simulated ranks would hold.
    """
    calls: list[Sample] = [read_sample(text, seed + i) for i, text in enumerate(samples)]
    calls += _returned_samples(function) if function else []
    registry = plugin_states().registry
    overload = one_of(op, ops_named(op, registry), lambda each: _takes_samples(each, calls))
    with progress("searching") as tell:
        inferred = infer_rule(overload, calls or None, seed=seed, tell=tell)
    if as_json:
        print_json([_json_inferred(inferred, registry)])
    else:
        for name in inferred.samples:
            click.echo(f"sample {name}")
        rows: list[dict[str, object]] = []
        for finding in inferred.findings:
            meshes, holds, fails = map(_numbers_text, (finding.meshes, finding.holds_for, finding.fails_for))
            verdict = {
                "all samples": "all samples",
                "even shards only": f"even shards only: {meshes} ranks",
                "some meshes": f"some meshes only: {meshes} ranks",
                "some samples": f"some samples: {holds}; not {fails}",
            }[finding.verdict]
            rows.append({"operands": finding.form, "row": str(finding), "verdict": verdict})
        print_rows(rows, COLUMNS)
        print_text(f"\n{inferred.text}")
        for row in inferred.unsaid:
            print_text(f"left out: {show_all(row.inputs)} -> {show_all(row.outputs)}")
        for note in (*inferred.notes, *_decomposed(overload, registry)):
            print_text(f"note: {note}")
        if inferred.accepted:
            print_text(f"the oracle accepts: {inferred.report.cases} cases of {inferred.report.rows} rows")
    if not inferred.accepted:
        raise click.ClickException(f"the oracle refutes the rule: {inferred.report.refuted[0]}")


def _decomposed(op: Op, registry: Registry) -> Iterator[str]:
    """What becomes of an op that has no rule yet: torch's formulas may make one unnecessary."""
    if op in registry or is_composite(op):  # of a composite op the notes say it
        return
    if names := [formula.name for formula in formulas(op) if formula.may_run(registry)]:
        yield (
            f"Without a rule the op runs decomposed ({', '.join(names)}) where every part has a rule; a rule may do "
            "better: shardwise explain shows the parts."
        )


def _takes_samples(op: Op, samples: Sequence[Sample]) -> bool:
    """Whether an overload works on tensors, has no ``out=``, and takes the samples."""
    tensors = signature(op).tensor_args
    if not tensors or any(arg.is_out for arg in tensors):
        return False
    try:
        calls = [bind_call(op, args, kwargs) for args, kwargs in samples]
    except CallError:
        return False
    values = [pair for call in calls for pair in zip(signature(op).args, call, strict=True)]
    return all(arg.kind is Kind.TENSOR or not isinstance(value, Tensor) for arg, value in values)


# -- what is printed -------------------------------------------------------------------------------------------------


def _numbers_text(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _json_inferred(inferred: Inferred, registry: Registry) -> dict[str, object]:
    return {
        "op": op_name(inferred.op),
        "samples": list(inferred.samples),
        "rows": [
            {
                "row": str(f),
                "inputs": show_all(f.row.inputs),
                "outputs": show_all(f.row.outputs),
                "operands": f.form,
                "verdict": f.verdict,
                "holds_for": list(f.holds_for),
                "fails_for": list(f.fails_for),
                "ranks": list(f.meshes),
            }
            for f in inferred.findings
        ],
        "rule": inferred.text,
        "unsaid": [f"{show_all(row.inputs)} -> {show_all(row.outputs)}" for row in inferred.unsaid],
        "notes": [*inferred.notes, *_decomposed(inferred.op, registry)],
        "accepted": inferred.accepted,
        "cases": inferred.report.cases,
        "refuted": [str(error) for error in inferred.report.refuted],
    }


def _returned_samples(function: str) -> list[Sample]:
    """The sample calls that a function of the user returns."""
    with program_errors(function):
        samples = load_function(function)
        check_takes(function, samples, do="Write `def samples():`, which returns the calls.")
        returned = samples()
    is_call = [isinstance(call, tuple) and len(call) == len(("args", "kwargs")) for call in _listed(returned)]
    if not (is_call and all(is_call)):
        raise click.ClickException(
            f"{function} returned {kind_of(returned)}, and samples are a list of calls: [((x, y), {{}}), ...]"
        )
    return list(returned)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()
