"""An explanation as text: tables and sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.cli.output import print_parts
from shardwise.engine.traffic import Collective
from shardwise.kernel.placements import Placement, show
from shardwise.kernel.precedence import Entry
from shardwise.kernel.signature import op_name
from shardwise.kernel.spec import TensorSpec
from shardwise.tools.explain import Decision, Explanation, Redistribution

__all__ = ["print_explanation"]

MOST_OPERANDS = 4
"""Beyond this number, only the operands that some strategy redistributes have a column."""


def print_explanation(explanation: Explanation, figures: str) -> None:
    """Print for a terminal or a pipe; ``figures`` describes the figures behind the costs."""
    if explanation.parts:
        print_parts([_call_part(explanation, figures), *_parts_of(explanation)])
        return
    parts = [_call_part(explanation, figures)]
    parts += [_decision_part(decision, alone=len(explanation.decisions) == 1) for decision in explanation.decisions]
    print_parts([*parts, _issued_part(explanation)])


# -- the call --------------------------------------------------------------------------------------------------------


def _call_part(explanation: Explanation, figures: str) -> RenderableType:
    schema = explanation.schema
    mesh = "x".join(map(str, schema.mesh.shape))
    title = Text.assemble((op_name(schema.op), "bold"), f" on mesh {mesh} ({schema.mesh.device_type})")
    facts = Table.grid(padding=(0, 2))
    for name, spec in zip(schema.operand_names, schema.specs, strict=True):
        facts.add_row(Text(name), Text("-" if spec is None else f"{spec.tensor_meta} {_spec_placements(spec)}"))
    tensors = {a.name for a in schema.signature.tensor_args}
    for arg, value in schema.args.items():
        if arg not in tensors and value is not None:
            facts.add_row(Text(arg), Text(str(value)))
    facts.add_row(Text("rule"), Text(explanation.entry.rule.text))
    facts.add_row(Text("from"), Text(_source_text(explanation.entry)))
    for entry in explanation.others:
        facts.add_row(Text("not"), Text(_source_text(entry)))
    facts.add_row(Text("costs"), Text(figures))
    return Group(title, Padding(facts, (0, 0, 0, 2)))


def _spec_placements(spec: TensorSpec | None) -> str:
    return "-" if spec is None else _placements_text(spec.placements)


def _placements_text(placements: Iterable[Placement]) -> str:
    """Placements as they are written on the command line."""
    return ",".join(map(show, placements))


def _source_text(entry: Entry) -> str:
    path, _, line = entry.rule.source.rpartition(":")
    here = Path.cwd()
    in_reach = Path(path).is_relative_to(here)
    return f"{entry.origin}, {f'{Path(path).relative_to(here)}:{line}' if in_reach else entry.rule.source}"


def _parts_of(explanation: Explanation) -> Iterator[RenderableType]:
    """The calls that an op without a rule is decomposed into."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True, show_edge=False)
    for heading in ("part", "operands", "-> result", "rows", "moves µs"):
        table.add_column(heading)
    for part in explanation.parts:
        operands = ", ".join(_spec_placements(spec) for spec in part.schema.specs if spec is not None)
        results = ", ".join(map(_spec_placements, part.results))
        rows = "; ".join(" | ".join(d.chosen.names) for d in part.decisions) or part.entry.rule.text
        paid = ", ".join(f"{r.operand} {_microseconds(r.path.cost)}" for r in part.redistributions)
        table.add_row(*map(Text, (op_name(part.schema.op), operands, results, rows, paid)))
    yield Group(
        Text("runs as these calls, in this order (explain one by itself for its rivals):"), Padding(table, (1, 0, 0, 0))
    )
    issued = explanation.collectives
    if issued:
        lines = (Text(f"{i}  {collective}") for i, collective in enumerate(issued, 1))
        yield Group(Text("collectives, in this order:"), Text(""), *lines)
    else:
        yield Text("nothing is communicated")


# -- one decision ----------------------------------------------------------------------------------------------------


def _decision_part(decision: Decision, *, alone: bool) -> RenderableType:
    parts: list[RenderableType] = []
    if not alone:
        # ``0-3, 7`` for 0, 1, 2, 3, 7.
        runs = (list(run) for _, run in groupby(enumerate(decision.positions), lambda pair: pair[1] - pair[0]))
        ends = ((run[0][1], run[-1][1]) for run in runs)
        ranges = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ends)
        parts.append(Text(f"list position {ranges}", style="bold"))
    legal = f"{decision.legal:,}" if decision.counted else f"more than {decision.legal:,}"
    shown = len(decision.ranked)
    listed = "cheapest first" if shown == decision.legal else f"the {shown} cheapest (--top lists more)"
    noun = "strategy" if decision.legal == 1 else "strategies"
    parts += [
        Text(f"{legal} legal {noun} among {decision.combinations:,} combinations of rows, {listed}:"),
        Padding(_strategy_table(decision), (1, 0, 0, 0)),
    ]
    if decision.exclusions:
        parts.append(Text("\nnot considered:"))
        least = "" if decision.counted else "at least "
        for excluded in decision.exclusions:
            if excluded.mesh_dim is not None:
                what = f"{'; '.join(excluded.rows)} on mesh dim {excluded.mesh_dim}"
            else:
                example = f", such as {' | '.join(excluded.rows)}" if excluded.rows else ""
                noun = "combination" if excluded.count == 1 else "combinations"
                what = f"{least}{excluded.count:,} {noun}{example}"
            parts.append(Padding(Text(f"{what}: {excluded.reason}"), (0, 0, 0, 2)))
    return Group(*parts)


def _strategy_table(decision: Decision) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True, show_edge=False)
    table.add_column("")
    table.add_column("rows", overflow="fold")
    shown = [i for i in range(len(decision.operands)) if decision.chosen.input_specs[i] is not None]
    if len(shown) > MOST_OPERANDS:
        shown = [i for i in shown if any(one.strategy.redistribute_cost[i] for one in decision.ranked)]
    for i in shown:
        table.add_column(decision.operands[i], no_wrap=True)
    for name in decision.results:
        table.add_column(f"-> {name}", no_wrap=True)
    table.add_column("moves µs")
    table.add_column("µs", justify="right")
    table.add_column("why not")
    for i, one in enumerate(decision.ranked):
        strategy = one.strategy
        cells = [Text("" if i else ">"), Text(" | ".join(strategy.names))]
        for operand in shown:
            style = "yellow" if strategy.redistribute_cost[operand] else ""
            cells.append(Text(_spec_placements(strategy.input_specs[operand]), style=style))
        cells += [Text(_spec_placements(spec)) for spec in strategy.output_specs]
        costs = zip(decision.operands, strategy.redistribute_cost, strict=True)
        cells.append(Text(", ".join(f"{name} {_microseconds(cost)}" for name, cost in costs if cost)))
        cells.append(Text(_microseconds(strategy.cost)))
        cells.append(Text(one.reason, style="dim") if i else Text("taken", style="green"))
        table.add_row(*cells, style="" if i else "bold")
    return table


def _microseconds(seconds: float) -> str:
    return "no path" if math.isinf(seconds) else f"{seconds * 1e6:,.1f}"


# -- what is issued --------------------------------------------------------------------------------------------------


def _add_steps(table: Table, number: int, redistributions: Iterable[Redistribution]) -> int:
    """Add each step, with the collective that it issues; returns the number of the last collective."""
    for redistribution in redistributions:
        collectives = list(redistribution.collectives)
        for step in redistribution.path.steps:
            places = (_placements_text(step.source), _placements_text(step.target), _microseconds(step.cost))
            if collectives and (step.kind, step.mesh_dims) == (collectives[0].kind, collectives[0].mesh_dims):
                number += 1
                _, *wire = _collective_cells(collectives.pop(0))
                table.add_row(str(number), redistribution.operand, step.kind, *wire, *places)
            else:
                table.add_row("", redistribution.operand, f"{step.kind} (local)", "", "", "", *places)
    return number


def _issued_part(explanation: Explanation) -> RenderableType:
    inside = explanation.lowering
    in_lowering = inside.collectives if inside else ()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True, show_edge=False)
    for heading in ("", "of", "step", "mesh dims", "ranks", "bytes a rank", "from", "to", "µs"):
        table.add_column(heading, justify="right" if heading in ("ranks", "bytes a rank", "µs") else "left")
    number = _add_steps(table, 0, explanation.redistributions)
    for collective in in_lowering:
        number += 1
        kind, *wire = _collective_cells(collective)
        table.add_row(str(number), "lowering", kind, *wire)
    _add_steps(table, number, explanation.after)
    parts: list[RenderableType] = []
    if table.row_count:
        parts += [Text("collectives and local steps, in this order:"), Padding(table, (1, 0, 0, 0))]
    elif inside is None or inside.complete:
        parts.append(Text("nothing moves and nothing is communicated"))
    if inside is not None and not inside.complete:
        parts.append(Text("the rule's lowering may communicate more: that depends on data"))
    return Group(*parts)


def _collective_cells(collective: Collective) -> tuple[str, str, str, str]:
    return collective.kind, ", ".join(map(str, collective.mesh_dims)), str(collective.ranks), f"{collective.nbytes:,}"
