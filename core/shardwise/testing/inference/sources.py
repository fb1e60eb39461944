"""Rules as source text: one notation, a function of the arguments, or one case per group of samples."""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from shardwise.kernel.placements import Partial, Placement, Shard
from shardwise.kernel.rule import Row, Rule
from shardwise.kernel.signature import Kind, Op, op_name, signature
from shardwise.testing.inference.naming import Named

__all__ = ["Source", "Case", "by_case", "einop_call", "from_function", "plain", "rows_call"]

_WIDTH = 100


@frozen
class Source:
    """The text of a rule, imports included, and the rule that it makes."""

    text: str
    rule: Rule

    @classmethod
    def of(cls, name: str, imports: Sequence[str], body: str) -> Source:
        """Run the text. Raises what it raises."""
        gap = ["", ""] if body.startswith("@") else [""]
        text = "\n".join(("import torch", *imports, *gap, body))
        scope: dict[str, Any] = {}
        exec(compile(text, "<inferred rule>", "exec"), scope)  # noqa: S102  the text was made here
        rule: Rule = scope[name]
        return cls(text, rule)


@frozen
class Case:
    """A value of what the cases differ in, what to return for it, and the samples that it was found for."""

    value: Any
    returned: str
    samples: tuple[int, ...]


def constant_name(op: Op) -> str:
    """``SUM_DIM_INTLIST`` for ``aten.sum.dim_IntList``, ``MM`` for ``aten.mm.default``."""
    _, base, overload = op_name(op).split(".")
    words = [base.strip("_"), *([] if overload == "default" else [overload])]
    name = "_".join(words).upper()
    return f"{name}_" if keyword.iskeyword(name.lower()) or not name.isidentifier() else name


def plain(op: Op, named: Named, *, zipped: bool) -> Source:
    """``NAME = rule(op, notation, ...)``."""
    options = [*_options(named), *(["zip_lists=True"] if zipped else [])]
    name = constant_name(op)
    lines = "".join(f"    {line},\n" for line in (_op_text(op), _quoted(named.text), *options))
    return Source.of(name, ["from shardwise.rule import rule"], f"{name} = rule(\n{lines})")


def einop_call(named: Named) -> str:
    """The expression ``einop(notation, ...)``."""
    parts = [_quoted(named.text), *_options(named)]
    short = f"einop({', '.join(parts)})"
    if len(short) < _WIDTH and "\n" not in short:
        return short
    return "einop(\n" + "".join(f"    {part},\n" for part in parts) + ")"


def rows_call(rows: Sequence[Row], outs: int) -> str:
    """The expression ``Rows((Row(...), ...))``; ``out=`` operands lie as the results."""
    shown = []
    for row in rows:
        nonempty = f", nonempty={row.nonempty!r}" if row.nonempty else ""
        inputs, outputs = _placements((*row.inputs, *row.outputs[:outs])), _placements(row.outputs)
        shown.append(f"        Row({inputs}, {outputs}{nonempty}),\n")
    return f"Rows(\n    (\n{''.join(shown)}    )\n)"


def _placements(placements: Sequence[Placement | None]) -> str:
    words = [_placement(p) for p in placements]
    return f"({', '.join(words)}{',' if len(words) == 1 else ''})"


def _placement(placement: Placement | None) -> str:
    if isinstance(placement, Shard):
        return f"shard({placement.dim})"
    if isinstance(placement, Partial):
        return f'partial("{placement.reduce_op}")'
    return "None" if placement is None else "REPLICATE"


def from_function(op: Op, uses: Sequence[str], lines: Sequence[str], summary: str, *, zipped: bool = False) -> Source:
    """``@rule_from(op) def NAME(...)`` with these lines in it; ``uses`` names the arguments that they read."""
    name = constant_name(op)
    body = "\n".join(f"    {line}" if line else "" for line in lines)
    return Source.of(
        name,
        _imports(body),
        f"@rule_from({', '.join((_op_text(op), *_keyed(op, uses, zipped=zipped)))})\n"
        f'def {name}({_parameters(op, uses)}):\n    """{summary}"""\n{body}',
    )


def by_case(op: Op, feature: str, uses: Sequence[str], cases: Sequence[Case], *, zipped: bool) -> Source:
    """A function that looks up what the cases differ in; calls like none of the samples stay whole."""
    lines = [f"asked = {feature}"]
    for case in cases:
        which = f"sample{'s' * (len(case.samples) > 1)} {', '.join(map(str, case.samples))}"
        returned = f"return {case.returned}".splitlines()
        lines += [f"if asked == {case.value!r}:  # {which}", *(f"    {line}" for line in returned)]
    lines.append('return einop("R -> R")  # nothing is known of other calls: they stay whole')
    return from_function(op, uses, lines, "Inferred case by case, for review.", zipped=zipped)


def _imports(body: str) -> list[str]:
    names = [n for n in ("Flow", "Row", "Rows", "einop", "like", "partial", "rule_from", "shard") if _has(body, n)]
    constants = ["REPLICATE"] if "REPLICATE" in body else []
    names = sorted({*names, "rule_from"}, key=lambda n: (not n[0].isupper(), n))
    return [f"from shardwise.rule import {', '.join([*constants, *names])}"]


def _has(body: str, name: str) -> bool:
    return f"{name}(" in body


def _keyed(op: Op, uses: Sequence[str], *, zipped: bool) -> list[str]:
    by_type = [a.name for a in signature(op).args if a.kind is Kind.BY_TYPE and a.name in uses]
    static = [f"static=({', '.join(map(_quoted, by_type))},)"] if by_type else []
    return [*static, *(["zip_lists=True"] if zipped else [])]


def _parameters(op: Op, uses: Sequence[str]) -> str:
    args = [a for a in signature(op).args if not a.is_out]
    positional = [a.name for a in args if not a.kwarg_only]
    last = max((i for i, name in enumerate(positional) if name in uses), default=-1)
    named = [a.name for a in args if a.kwarg_only and a.name in uses]
    shown = [f"{n}_" if keyword.iskeyword(n) else n for n in positional[: last + 1]]
    return ", ".join([*shown, *(["*", *named] if named else [])])


def _options(named: Named) -> list[str]:
    options = []
    if named.reduce:
        options.append(f"reduce={_mapping(named.reduce)}")
    if named.replicate:
        options.append(f"replicate={_listed(named.replicate)}")
    if named.nonempty:
        options.append(f"nonempty={_listed(named.nonempty)}")
    if named.partial:
        line = f"partial={_listed(named.partial)}"
        if len(line) < _WIDTH:
            options.append(line)
        else:
            rows = "".join(f"        {_quoted(text)},\n" for text in named.partial)
            options.append(f"partial=[\n{rows}    ]")
    return options


def _mapping(names: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{_quoted(k)}: {_quoted(v)}" for k, v in names.items()) + "}"


def _listed(texts: Sequence[str]) -> str:
    return f"[{', '.join(map(_quoted, texts))}]"


def _quoted(text: str) -> str:
    return f'"{text}"'


def _op_text(op: Op) -> str:
    return f"torch.ops.{op_name(op)}"
