"""``shardwise infer``: every row that holds for an op, found by running it, and the rule that says so."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from shardwise.cli.output import json_option, print_json, print_rows
from shardwise.cli.sample_text import read_sample
from shardwise.placements import show_all
from shardwise.signature import Op, op_name, signature
from shardwise.testing.inference import Finding, Inferred
from shardwise.testing.inference import infer as infer_rule
from shardwise.testing.inference.search import Tell
from shardwise.testing.samples import Sample

__all__ = ["infer"]

COLUMNS = ("operands", "row", "verdict")


@click.command()
@click.argument("op")
@click.option("--sample", "samples", multiple=True, help='A call: "f32[8,6], i64[5] < 8, 1, keepdim=True". Repeatable.')
@click.option("--samples", "function", help="FILE.py:FUNCTION that returns a list of (args, kwargs).")
@click.option("--import", "modules", multiple=True, help="A module or FILE.py that defines the op. Repeatable.")
@click.option("--seed", default=0, show_default=True, help="Of the values that are drawn.")
@json_option
def infer(
    *, op: str, samples: tuple[str, ...], function: str | None, modules: tuple[str, ...], seed: int, as_json: bool
) -> None:
    """Find by numeric search every row that holds for OP and print the rule, for a person to review.

    OP is written aten.mm, aten.sum.dim_IntList or acme::gate. Without samples they are made from its schema, where that
    is enough. The op is run as it is: on whole CPU tensors, and on the pieces that simulated ranks would hold.
    """
    for module in modules:
        _load(module)
    given: list[Sample] = [read_sample(text, seed + i) for i, text in enumerate(samples)]
    given += _called(function) if function else []
    overload = find_op(op)
    with _bar() as tell:
        found = infer_rule(overload, given or None, seed=seed, tell=tell)
    if as_json:
        print_json([_plain(found)])
    else:
        _print(found)
    if not found.accepted:
        raise click.ClickException(f"the oracle refutes the rule: {found.report.refuted[0]}")


# -- what is asked for -----------------------------------------------------------------------------------------------


def find_op(text: str) -> Op:
    """The op overload that a person names: ``aten.mm``, ``aten::mm.default``, ``acme.gate``."""
    words = text.replace("::", ".").removeprefix("torch.ops.").split(".")
    if len(words) not in (2, 3):
        raise click.BadParameter(f"{text!r} is no op: write aten.mm or acme::gate", param_hint="OP")
    packet = getattr(getattr(torch.ops, words[0]), words[1], None)
    if packet is None:
        raise click.BadParameter(f"there is no op {text!r}; --import the module that defines it", param_hint="OP")
    if len(words) == 3:  # noqa: PLR2004
        named: Op | None = getattr(packet, words[2], None)
        if named is None:
            raise click.BadParameter(f"{text!r} is none of {_shown(packet, packet.overloads())}", param_hint="OP")
        return named
    usual = [o for o in packet.overloads() if _takes_tensors(getattr(packet, o))]
    if "default" not in usual and len(usual) != 1:
        raise click.BadParameter(
            f"{text!r} has several overloads: {_shown(packet, usual or packet.overloads())}", param_hint="OP"
        )
    found: Op = getattr(packet, "default" if "default" in usual else usual[0])
    return found


def _takes_tensors(op: Op) -> bool:
    args = signature(op).tensor_args
    return bool(args) and not any(arg.is_out for arg in args)


def _shown(packet: Any, overloads: Sequence[str]) -> str:
    return ", ".join(op_name(getattr(packet, o)) for o in overloads)


def _load(name: str) -> ModuleType:
    """A module by its name or its file."""
    if not name.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise click.ClickException(f"cannot import {name}: {error}") from error
        finally:
            sys.path.remove(str(Path.cwd()))
    path = Path(name).resolve()
    # An op can be defined once; a file may be asked for twice, for the op and for its samples.
    for known in list(sys.modules.values()):
        if getattr(known, "__file__", None) == str(path):
            return known
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise click.ClickException(f"there is no file {name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _called(function: str) -> Sequence[Sample]:
    file, _, name = function.rpartition(":")
    if not file.endswith(".py"):
        raise click.BadParameter(f"{function!r}: write FILE.py:FUNCTION", param_hint="--samples")
    made = getattr(_load(file), name, None)
    if made is None:
        raise click.BadParameter(f"{file} has no {name}", param_hint="--samples")
    samples: Sequence[Sample] = made()
    return samples


@contextmanager
def _bar() -> Iterator[Tell | None]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("searching")
        yield lambda done, total: bar.update(task, completed=done, total=total)


# -- what is printed -------------------------------------------------------------------------------------------------


def _print(found: Inferred) -> None:
    for name in found.samples:
        click.echo(f"sample {name}")
    rows: list[dict[str, object]] = [
        {"operands": f.form, "row": str(f), "verdict": _verdict(f)} for f in found.findings
    ]
    print_rows(rows, COLUMNS)
    click.echo(f"\n{found.text}")
    for row in found.unsaid:
        click.echo(f"left out: {show_all(row.inputs)} -> {show_all(row.outputs)}")
    for note in found.notes:
        click.echo(f"note: {note}")
    if found.accepted:
        click.echo(f"the oracle accepts: {found.report.cases} cases of {found.report.rows} rows")


def _verdict(finding: Finding) -> str:
    words = {
        "all samples": "all samples",
        "even shards only": f"even shards only: {_listed(finding.meshes)} ranks",
        "some meshes": f"some meshes only: {_listed(finding.meshes)} ranks",
        "some samples": f"some samples: {_listed(finding.holds_for)}; not {_listed(finding.fails_for)}",
    }
    return words[finding.verdict]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _plain(found: Inferred) -> dict[str, object]:
    return {
        "op": op_name(found.op),
        "samples": list(found.samples),
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
            for f in found.findings
        ],
        "rule": found.text,
        "unsaid": [f"{show_all(row.inputs)} -> {show_all(row.outputs)}" for row in found.unsaid],
        "notes": list(found.notes),
        "accepted": found.accepted,
        "cases": found.report.cases,
        "refuted": [str(error) for error in found.report.refuted],
    }
