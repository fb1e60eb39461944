"""The source of the hot path: one straight-line handler per op, number of positional arguments and keyword names.

``handler_source`` returns text that a person can read::

    >>> print(handler_source(torch.ops.aten.mm.default, 2, ()))

The text is compiled once per call shape, as attrs and dataclasses do for their methods. Names in it: ``MT`` the tensor
class, ``new`` its constructor, ``plans`` the op's plans by key, ``PLAIN`` the types of numbers and of None, ``other``
what to do with an argument that is none of these, ``miss`` the slow path, ``symbolic`` the way of what has no hash,
``guard`` a check of what moves, ``reseat`` what makes a tensor another view of itself, ``elsewhere`` the way to the
handler of another call shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import frozen

from shardwise.kernel.schema import RuntimeSchemaInfo
from shardwise.kernel.signature import Arg, Kind, Op, Result, op_name, signature

__all__ = ["handler_source"]


@frozen
class _Given:
    """A schema argument with the variable that holds it; ``passed`` says whether the caller gave it."""

    arg: Arg
    var: str
    passed: bool

    @property
    def is_tensor(self) -> bool:
        return self.arg.kind in (Kind.TENSOR, Kind.TENSORS)


def handler_source(op: Op, positional: int, keywords: Sequence[str], info: RuntimeSchemaInfo | None = None) -> str:
    """The source of ``handle`` for one call shape; it takes what torch gives to a ``__torch_dispatch__`` rule."""
    info = RuntimeSchemaInfo.of(op) if info is None else info
    given = [
        _Given(a, f"a{i}", (i < positional and not a.kwarg_only) or a.name in keywords)
        for i, a in enumerate(signature(op).args)
    ]
    lines = [
        f"# {op_name(op)}, {positional} positional, keywords {tuple(keywords)}",
        "def handle(cls, op, types, args=(), kwargs=None):",
    ]
    lines += _indented(_unpack(given, positional, len(keywords)))
    lines += _indented(line for g in given if g.passed for line in _read(g))
    lines += _indented(_find_plan(given, info))
    lines += _indented(_call(given, info))
    lines += _indented(_answer(signature(op).results, given))
    return "\n".join(lines) + "\n"


def _indented(lines: Iterable[str], by: int = 1) -> list[str]:
    return ["    " * by + line for line in lines]


def _unpack(given: Sequence[_Given], positional: int, keywords: int) -> list[str]:
    """Arguments into variables; a call of another shape goes elsewhere."""
    taken = []
    if positional:
        taken.append(", ".join(g.var for g in given[:positional]) + ", = args")
    taken += [f"{g.var} = kwargs[{g.arg.name!r}]" for g in given[positional:] if g.passed]
    strange = f"not kwargs or len(kwargs) != {keywords}" if keywords else "kwargs"
    return [
        f"if {strange}:",
        "    return elsewhere(args, kwargs)",
        "try:",
        *_indented(taken or ["() = args"]),
        f"except {'(ValueError, KeyError)' if keywords else 'ValueError'}:",
        "    return elsewhere(args, kwargs)",
    ]


def _read(g: _Given) -> list[str]:
    """Key part and local tensor of one argument."""
    n = g.var[1:]
    if g.arg.kind is Kind.TENSOR:
        return [
            f"if type({g.var}) is MT:",
            f"    k{n} = {g.var}._spec; l{n} = {g.var}._local_tensor",
            f"elif type({g.var}) in PLAIN:",
            f"    k{n} = type({g.var}); l{n} = {g.var}",
            "else:",
            f"    k{n}, l{n} = other({g.arg.name!r}, {g.var})",
        ]
    if g.arg.kind is Kind.TENSORS:
        name = g.arg.name
        return [
            f"if {g.var} is None:",
            f"    k{n} = l{n} = None",
            "else:",
            "    try:",
            f"        k{n} = tuple(map(spec_of, {g.var})); l{n} = list(map(local_of, {g.var}))",
            "    except AttributeError:",
            f"        pairs = [(t._spec, t._local_tensor) if type(t) is MT else other({name!r}, t) for t in {g.var}]",
            f"        k{n} = tuple([p[0] for p in pairs]); l{n} = [p[1] for p in pairs]",
        ]
    return []


def _key_part(g: _Given, info: RuntimeSchemaInfo) -> str:
    n = g.var[1:]
    if g.is_tensor:
        return f"k{n}"
    if g.arg.name in info.by_type:
        return f"type({g.var})"
    # torch hands over lists; anything else that stands for one takes the slow way.
    value = f"tuple({g.var}) if type({g.var}) is list else freeze({g.var})" if g.arg.is_list else g.var
    if g.arg.kind is Kind.BY_TYPE:
        # 1, 1.0 and True are one key in a dict but not one call: the type decides the result's dtype.
        return f"type({g.var}), {f'freeze({g.var})' if g.arg.is_list else g.var}"
    return value


def _find_plan(given: Sequence[_Given], info: RuntimeSchemaInfo) -> list[str]:
    parts = [_key_part(g, info) for g in given if g.passed]
    key = parts[0] if len(parts) == 1 and "," not in parts[0] else f"({', '.join(parts)},)"
    return [
        f"key = {key}",
        "try:",
        "    plan = plans[key]",
        "except KeyError:",
        "    plan = miss(key, args, kwargs)",
        "except TypeError:",
        "    plan = symbolic(args, kwargs)",
    ]


def _call(given: Sequence[_Given], info: RuntimeSchemaInfo) -> list[str]:
    """The local call: as it is, the usual case, or with operands moved and arguments replaced first."""
    return [
        "call = plan.direct",
        "if call is not None:",
        f"    out = call({_arguments([g for g in given if g.passed])})",
        "else:",
        *_indented(_move(given)),
        *_indented(_call_replaced(given, info)),
    ]


def _move(given: Sequence[_Given]) -> list[str]:
    tensors = [g for g in given if g.is_tensor]
    if not tensors:
        return []
    lines = [
        "if plan.redistributes is not None:",
        "    guard(plan)",
        "    " + ", ".join(f"m{g.var[1:]}" for g in tensors) + ", = plan.redistributes",
    ]
    for g in tensors:
        n = g.var[1:]
        if not g.passed:
            continue
        lines.append(f"    if m{n} is not None:")
        if g.arg.kind is Kind.TENSOR:
            lines.append(f"        l{n} = m{n}(l{n})")
        else:
            lines.append(f"        for i, move in m{n}: l{n}[i] = move(l{n}[i])")
    return lines


def _call_replaced(given: Sequence[_Given], info: RuntimeSchemaInfo) -> list[str]:
    keyed = [g for g in given if g.arg.name in info.by_value]
    passed = [g for g in given if g.passed]
    if len(passed) == len(given) and not keyed:
        return [f"out = plan.call({_arguments(given)})"]
    lines = ["if plan.full:"]
    lines += [f"    {g.var} = d{g.var[1:]}" for g in given if not g.passed and not g.is_tensor]
    if keyed:
        lines += ["    if plan.static is not None:", f"        {', '.join(g.var for g in keyed)}, = plan.static"]
    lines.append(f"    out = plan.call({_arguments(given)})")
    lines += ["else:", f"    out = plan.call({_arguments(passed)})"]
    return lines


def _arguments(given: Sequence[_Given]) -> str:
    shown = []
    for i, g in enumerate(given):
        value = (f"l{g.var[1:]}" if g.passed else f"d{g.var[1:]}") if g.is_tensor else g.var
        by_name = g.arg.kwarg_only or i != int(g.var[1:])
        shown.append(f"{g.arg.name}={value}" if by_name else value)
    return ", ".join(shown)


def _answer(results: Sequence[Result], given: Sequence[_Given]) -> list[str]:
    """Wrap what the local op returned. ``outs`` is empty of specs only for shapes that data decides."""
    if not results:
        return ["return None"]
    if len(results) == 1 and results[0].is_list:
        make = "new" if results[0].alias is None else _view_maker(results[0], given)
        return [f"make = {make}", "return [make(MT, o, s, False) for o, s in zip(out, plan.outs)]"]
    if len(results) == 1:
        return [f"return {_one(results[0], 'out', given)}"]
    if any(r.is_list for r in results):
        return ["return wrap_results(plan, out)"]
    lines = [", ".join(f"r{i}" for i in range(len(results))) + ", = out"]
    tensors = [i for i, r in enumerate(results) if r.is_tensor]
    lines.append(", ".join(f"s{i}" for i in tensors) + ", = plan.outs")
    lines.append(f"return ({', '.join(_one(r, f'r{i}', given, f's{i}') for i, r in enumerate(results))},)")
    return lines


def _one(result: Result, var: str, given: Sequence[_Given], spec: str = "plan.out") -> str:
    if result.reseats and result.alias is not None:
        return f"reseat({given[result.alias].var}, {var}, {spec})"
    if result.written and result.alias is not None and not result.is_list:
        return given[result.alias].var
    make = "new" if result.alias is None else f"({_view_maker(result, given)})"
    if result.is_tensor:
        return f"{make}(MT, {var}, {spec}, False) if {spec} is not None else wrap_unknown(plan, {var})"
    return var


def _view_maker(result: Result, given: Sequence[_Given]) -> str:
    assert result.alias is not None
    return f"new if not inference() else new_view_of({given[result.alias].var})"


def defaults(op: Op) -> dict[str, Any]:
    """Names in a handler's source for the default of each schema argument: ``d0``, ``d1`` ..."""
    return {f"d{i}": a.default for i, a in enumerate(signature(op).args)}
