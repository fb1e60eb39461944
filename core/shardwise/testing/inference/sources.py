"""Rules as source text: one notation, a function of the arguments, or one case per group of samples."""

from __future__ import annotations

import keyword
from collections.abc import Sequence
from itertools import product
from typing import Any

from attrs import frozen

from shardwise.kernel.placements import Partial, Placement, Shard
from shardwise.kernel.reductions import REDUCE_OPS
from shardwise.kernel.rule import Row, Rule
from shardwise.kernel.signature import Kind, Op, op_name, signature
from shardwise.rule.facts import PASSED
from shardwise.rule.flow import split_row
from shardwise.testing.inference.naming import Named

__all__ = ["Source", "Case", "by_case", "einop_call", "from_function", "partial_options", "plain", "rows_call"]

_WIDTH = 100


@frozen
class Source:
    """The text of a rule, imports included, and the rule that it makes."""

    text: str
    rule: Rule

    @classmethod
    def of(cls, name: str, imports: Sequence[str], body: str) -> Source:
        """The source with this text, which is run. Raises whatever the text raises."""
        gap = ["", ""] if body.startswith("@") else [""]
        text = "\n".join(("import torch", *imports, *gap, body))
        scope: dict[str, Any] = {}
        exec(compile(text, "<inferred rule>", "exec"), scope)  # noqa: S102  this module wrote the text
        rule: Rule = scope[name]
        return cls(text, rule)


@frozen
class Case:
    """One value of the feature in which cases differ, the expression to return for it, and the samples that have it."""

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
    options = [*_options(op, named), *(["zip_lists=True"] if zipped else [])]
    name = constant_name(op)
    lines = "".join(f"    {line},\n" for line in (_op_text(op), _quoted(named.text), *options))
    return Source.of(name, ["from shardwise.rule import rule"], f"{name} = rule(\n{lines})")


def einop_call(op: Op, named: Named) -> str:
    """The expression ``einop(notation, ...)``."""
    parts = [_quoted(named.text), *_options(op, named)]
    short = f"einop({', '.join(parts)})"
    if len(short) < _WIDTH and "\n" not in short:
        return short
    return "einop(\n" + "".join(f"    {part},\n" for part in parts) + ")"


def rows_call(rows: Sequence[Row], outs: int) -> str:
    """The expression ``Rows((Row(...), ...))``. Each ``out=`` operand has the placement of its result."""
    shown = []
    for row in rows:
        nonempty = f", nonempty={row.nonempty!r}" if row.nonempty else ""
        inputs, outputs = _placements((*row.inputs, *row.outputs[:outs])), _placements(row.outputs)
        shown.append(f"        Row({inputs}, {outputs}{nonempty}),\n")
    return f"Rows(\n    (\n{''.join(shown)}    )\n)"


def _placements(placements: Sequence[Placement | None]) -> str:
    words = []
    for placement in placements:
        if isinstance(placement, Shard):
            words.append(f"shard({placement.dim})")
        elif isinstance(placement, Partial):
            words.append(f'partial("{placement.reduce_op}")')
        else:
            words.append("None" if placement is None else "REPLICATE")
    return f"({', '.join(words)}{',' if len(words) == 1 else ''})"


def from_function(op: Op, uses: Sequence[str], lines: Sequence[str], summary: str, *, zipped: bool = False) -> Source:
    """``@rule_from(op) def NAME(...)`` with these lines as its body. ``uses`` names the arguments that they read."""
    name = constant_name(op)
    body = "\n".join(f"    {line}" if line else "" for line in lines)
    names = [n for n in ("Flow", "Row", "Rows", "einop", "like", "partial", "rule_from", "shard") if f"{n}(" in body]
    names = sorted({*names, "rule_from"}, key=lambda n: (not n[0].isupper(), n))
    imports = ", ".join([*(["REPLICATE"] if "REPLICATE" in body else []), *names])
    by_type = [a.name for a in signature(op).args if a.kind is Kind.BY_TYPE and a.name in uses]
    options = [f"static=({', '.join(map(_quoted, by_type))},)"] if by_type else []
    options += ["zip_lists=True"] if zipped else []
    args = [a for a in signature(op).args if not a.is_out]
    positional = [a.name for a in args if not a.kwarg_only]
    last = max((i for i, arg in enumerate(positional) if arg in uses), default=-1)
    by_keyword = [a.name for a in args if a.kwarg_only and a.name in uses]
    shown = [f"{n}_" if keyword.iskeyword(n) else n for n in positional[: last + 1]]
    parameters = ", ".join([*shown, *(["*", *by_keyword] if by_keyword else [])])
    head = f"@rule_from({', '.join((_op_text(op), *options))})\ndef {name}({parameters}):"
    return Source.of(name, [f"from shardwise.rule import {imports}"], f'{head}\n    """{summary}"""\n{body}')


def by_case(op: Op, feature: str, uses: Sequence[str], cases: Sequence[Case], *, zipped: bool) -> Source:
    """A function with a branch for each value of the feature. For other calls, all tensors stay whole."""
    lines = [f"asked = {feature}"]
    for case in cases:
        which = f"sample{'s' * (len(case.samples) > 1)} {', '.join(map(str, case.samples))}"
        returned = f"return {case.returned}".splitlines()
        lines += [f"if asked == {case.value!r}:  # {which}", *(f"    {line}" for line in returned)]
    lines.append('return einop("R -> R")  # nothing is known of other calls: they stay whole')
    return from_function(op, uses, lines, "Inferred case by case, for review.", zipped=zipped)


def partial_options(op: Op, rows: Sequence[str]) -> list[str]:
    """The options that state these partial rows: facts by operand name, then the rows that no fact states."""
    passed: dict[str, dict[str, str]] = {}  # operands -> their reduction -> that of the results
    texts: dict[tuple[str, str], str] = {}
    for text in rows:
        operands, results = _passes(op, text)
        passed.setdefault(operands, {}).update(results)
        texts |= {(operands, kind): text for kind in results}
    options = []
    for word, passes in sorted(PASSED.items(), key=lambda pair: -len(pair[1])):
        stated = [operands for operands, results in passed.items() if passes.items() <= results.items()]
        for operands, kind in product(stated, passes):
            del passed[operands][kind], texts[operands, kind]
        if stated:
            names = ", ".join(map(_quoted, stated))
            options.append(f"{word}={names}" if len(stated) == 1 else f"{word}=({names})")
    rest = [text for text in rows if text in texts.values() or not _passes(op, text)[1]]
    line = f"partial={_list_text(rest)}"
    if len(line) >= _WIDTH:
        line = "partial=[\n" + "".join(f"        {_quoted(text)},\n" for text in rest) + "    ]"
    return [*options, line] if rest else options


def _passes(op: Op, text: str) -> tuple[str, dict[str, str]]:
    """The operands that are partial in a row, and the result's reduction by theirs; empty if no fact can state it."""
    names = [a.name for a in signature(op).tensor_args if not a.is_out]
    left, right = split_row(text)
    left = left[:1] if len(names) == 1 and left[1:] == ["..."] else left
    kinds, results = set(left) - {"R"}, set(right) - {"..."}
    operands = " ".join(name for name, word in zip(names, left, strict=False) if word != "R")
    if len(left) != len(names) or len(kinds) != 1 or len(results) != 1:
        return operands, {}
    kind, result = *kinds, *results
    if kind == result == "*":
        return operands, dict(PASSED["moves"])
    return operands, {kind: result} if {kind, result} <= {*REDUCE_OPS} else {}


def _options(op: Op, named: Named) -> list[str]:
    options = []
    if named.reduce:
        entries = ", ".join(f"{_quoted(k)}: {_quoted(v)}" for k, v in named.reduce.items())
        options.append(f"reduce={{{entries}}}")
    if named.replicate:
        options.append(f"replicate={_list_text(named.replicate)}")
    if named.nonempty:
        options.append(f"nonempty={_list_text(named.nonempty)}")
    return [*options, *partial_options(op, named.partial)]


def _list_text(texts: Sequence[str]) -> str:
    return f"[{', '.join(map(_quoted, texts))}]"


def _quoted(text: str) -> str:
    return f'"{text}"'


def _op_text(op: Op) -> str:
    return f"torch.ops.{op_name(op)}"
