"""The source of the hot path: one straight-line handler per op, number of positional arguments and keyword names.

``handler_source`` returns text that a person can read::

    >>> print(handler_source(torch.ops.aten.mm.default, 2, ()))

The text is compiled once per call shape, as attrs and dataclasses do for their methods. Names in it:

- ``MT`` the tensor class, ``new`` its constructor, ``plans`` the op's plans by key, ``repeat`` that of ``itertools``
- ``known_tensors`` the plain tensors that are known to be the same on every rank
- ``PLAIN`` the types of numbers and of None, ``other`` the function for any other argument, ``others`` that for a list
  (``other_written`` and ``others_written`` for arguments that the op writes)
- ``miss`` the slow path, ``symbolic`` the path of a key that has no hash
- ``on_kept`` the function that runs a call on tensors that earlier calls have moved
- ``guard`` the check of a view that would be a copy
- ``reseat`` the function that makes a tensor another view of itself, ``reseat_copy`` the one for a view that is a copy
- ``watched`` what is not empty while a copy of a view is alive, ``after_write`` and ``link`` what keep the two equal
- ``elsewhere`` the function that finds the handler of another call shape
- ``on_meta`` the function that runs the op on the meta device
- ``raised`` the function that is told of an error, which other ranks may have to know
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import frozen

from shardwise.kernel.schema import RuntimeSchemaInfo
from shardwise.kernel.signature import Arg, Kind, Op, Result, op_name, signature

__all__ = ["HANDLER_FILE", "handler_source"]

HANDLER_FILE = "<shardwise handler of "
"""How the name of the file of a handler begins, as tracebacks show it; the op and ``>`` follow."""


@frozen
class _Variable:
    """A schema argument with the variable that holds it; ``passed`` says whether the caller passed it."""

    arg: Arg
    var: str
    passed: bool

    @property
    def is_tensor(self) -> bool:
        return self.arg.kind in (Kind.TENSOR, Kind.TENSORS)


def handler_source(op: Op, positional: int, keywords: Sequence[str], info: RuntimeSchemaInfo | None = None) -> str:
    """The source of ``handle`` for one call shape; it has the arguments of ``__torch_dispatch__``."""
    info = RuntimeSchemaInfo.of(op) if info is None else info
    variables = [
        _Variable(a, f"a{i}", (i < positional and not a.kwarg_only) or a.name in keywords)
        for i, a in enumerate(signature(op).args)
    ]
    lines = [
        f"# {op_name(op)}, {positional} positional, keywords {tuple(keywords)}",
        "def handle(cls, op, types, args=(), kwargs=None):",
    ]
    lines += _indented(_unpack(variables, positional, len(keywords)))
    lines += _indented(line for v in variables if v.passed and v.arg.name == "device" for line in _on_meta(v))
    lines += _indented(line for v in variables if v.passed for line in _read(v, info))
    # Nothing is raised on most calls, and then this costs nothing.
    lines += ["    try:", *_indented([*_find_plan(variables, info), *_call(variables, info)], 2)]
    lines += ["    except Exception as error:", "        raised(error)", "        raise"]
    lines += _indented(_after_write(variables, info))
    lines += _indented(_wrap_results(signature(op).results, variables))
    return "\n".join(lines) + "\n"


def _indented(lines: Iterable[str], by: int = 1) -> list[str]:
    return ["    " * by + line for line in lines]


def _unpack(variables: Sequence[_Variable], positional: int, keywords: int) -> list[str]:
    """Assign arguments to variables; a call of another shape goes elsewhere."""
    assignments = []
    if positional:
        assignments.append(", ".join(v.var for v in variables[:positional]) + ", = args")
    assignments += [f"{v.var} = kwargs[{v.arg.name!r}]" for v in variables[positional:] if v.passed]
    is_other_shape = f"not kwargs or len(kwargs) != {keywords}" if keywords else "kwargs"
    return [
        f"if {is_other_shape}:",
        "    return elsewhere(args, kwargs)",
        "try:",
        *_indented(assignments or ["() = args"]),
        f"except {'(ValueError, KeyError)' if keywords else 'ValueError'}:",
        "    return elsewhere(args, kwargs)",
    ]


def _on_meta(v: _Variable) -> list[str]:
    """What is asked for on the meta device has no data, so it is no tensor on a mesh."""
    return [f'if {v.var} is not None and {v.var}.type == "meta":', "    return on_meta(args, kwargs)"]


def _read(v: _Variable, info: RuntimeSchemaInfo) -> list[str]:
    """Key part and local tensor of one argument."""
    n = v.var[1:]
    is_written = _is_written(v.arg, info)
    other, others = ("other_written", "others_written") if is_written else ("other", "others")
    if v.arg.kind is Kind.TENSOR:
        return [
            f"if type({v.var}) is MT:",
            f"    k{n} = {v.var}._spec; l{n} = {v.var}._local_tensor",
            f"elif type({v.var}) in PLAIN:",
            f"    k{n} = type({v.var}); l{n} = {v.var}",
            *([] if is_written else _if_known(v.var)),
            "else:",
            f"    k{n}, l{n} = {other}({v.arg.name!r}, {v.var}, args, kwargs)",
        ]
    if v.arg.kind is Kind.TENSORS:
        name = v.arg.name
        return [
            f"if {v.var} is None:",
            f"    k{n} = l{n} = None",
            "else:",
            "    try:",
            f"        k{n} = tuple(map(spec_of, {v.var})); l{n} = list(map(local_of, {v.var}))",
            "    except AttributeError:",
            f"        k{n}, l{n} = {others}({name!r}, {v.var}, args, kwargs)",
        ]
    return []


def _if_known(var: str) -> list[str]:
    """A plain tensor that is known to be the same on every rank: ``KnownTensor.holds``, written out."""
    n = var[1:]
    is_same = f"known.tensor() is {var} and known.version == {var}._version and known.address == {var}.data_ptr()"
    return [
        f"elif (known := known_tensors.get(id({var}))) is not None and {is_same}:",
        f"    k{n} = known.key; l{n} = {var}",
    ]


def _find_plan(variables: Sequence[_Variable], info: RuntimeSchemaInfo) -> list[str]:
    """Build the key of the arguments and look up the plan."""
    parts = []
    for arg, var in ((v.arg, v.var) for v in variables if v.passed):
        if arg.kind in (Kind.TENSOR, Kind.TENSORS):
            parts.append(f"k{var[1:]}")
        elif arg.name in info.by_type:
            parts.append(f"type({var})")
        elif arg.kind is Kind.BY_TYPE and arg.is_list:
            parts.append(f"type({var}), freeze({var})")
        elif arg.kind is Kind.BY_TYPE:
            # 1, 1.0 and True are one key in a dict but not one call: the type decides the result's dtype. Nor are 0.0
            # and -0.0. NaN is not equal to itself.
            parts.append(f"type({var}), {var} if {var} and {var} == {var} else repr({var})")
        elif arg.is_list:
            # torch passes lists; `freeze` is slower and takes any sequence.
            parts.append(f"tuple({var}) if type({var}) is list else freeze({var})")
        else:
            parts.append(var)
    # A miss may resize the out= tensors: then the call is dispatched anew.
    is_resized = ["    if plan is None:", "        return elsewhere(args, kwargs)"]
    key = parts[0] if len(parts) == 1 and "," not in parts[0] else f"({', '.join(parts)},)"
    return [
        f"key = {key}",
        "try:",
        "    plan = plans[key]",
        "except KeyError:",
        "    plan = miss(key, args, kwargs)",
        *(is_resized if any(v.arg.is_out for v in variables) else ()),
        "except TypeError:",
        "    plan = symbolic(args, kwargs)",
    ]


def _call(variables: Sequence[_Variable], info: RuntimeSchemaInfo) -> list[str]:
    """Call the local op: directly, the usual case, or with operands redistributed and arguments replaced first."""
    passed = [v for v in variables if v.passed]
    tensors = [v for v in variables if v.is_tensor]
    keyed = [v for v in variables if v.arg.name in info.by_value]
    lines = []
    if tensors:
        lines += [
            "if plan.redistributes is not None:",
            "    if plan.kept is not None and (kept := plan.kept.arguments(args, kwargs)) is not None:",
            "        return on_kept(handle, kept)",
            "    guard(plan)",
            "    " + ", ".join(f"m{v.var[1:]}" for v in tensors) + ", = plan.redistributes",
        ]
    for v in tensors:
        n = v.var[1:]
        if v.passed and v.arg.kind is Kind.TENSOR:
            lines += [f"    if m{n} is not None:", f"        l{n} = m{n}(l{n}, {v.var})"]
        elif v.passed:
            lines += [f"    if m{n} is not None:", f"        for i, move in m{n}: l{n}[i] = move(l{n}[i], {v.var}[i])"]
    if len(passed) == len(variables) and not keyed:
        lines.append(f"out = plan.call({_arguments(variables)})")
    else:
        lines.append("if plan.full:")
        lines += [f"    {v.var} = d{v.var[1:]}" for v in variables if not v.passed and not v.is_tensor]
        if keyed:
            lines += ["    if plan.static is not None:", f"        {', '.join(v.var for v in keyed)}, = plan.static"]
        lines.append(f"    out = plan.call({_arguments(variables)})")
        lines += ["else:", f"    out = plan.call({_arguments(passed)})"]
    direct = ["call = plan.direct", "if call is not None:", f"    out = call({_arguments(passed)})"]
    return [*direct, "else:", *_indented(lines)]


def _after_write(variables: Sequence[_Variable], info: RuntimeSchemaInfo) -> list[str]:
    """Tell of a write to a copy of a view, or to what such a copy was made of; most programs have none."""
    written = [v.var for v in variables if v.passed and v.is_tensor and _is_written(v.arg, info)]
    if not written:
        return []
    return ["if plan.writes_copy or watched:", f"    after_write(({', '.join(written)},))"]


def _is_written(arg: Arg, info: RuntimeSchemaInfo) -> bool:
    return arg.written or arg.is_out or arg.name in info.writes


def _arguments(variables: Sequence[_Variable]) -> str:
    """The argument list of a local call: local tensors in place of tensors, defaults for what was not passed."""
    arguments = []
    for i, v in enumerate(variables):
        value = (f"l{v.var[1:]}" if v.passed else f"d{v.var[1:]}") if v.is_tensor else v.var
        by_name = v.arg.kwarg_only or i != int(v.var[1:])
        arguments.append(f"{v.arg.name}={value}" if by_name else value)
    return ", ".join(arguments)


def _wrap_results(results: Sequence[Result], variables: Sequence[_Variable]) -> list[str]:
    """Wrap the results, and link those that are copies in place of views to their base."""
    lines = _wrapped(results, variables)
    if not any(r.alias is not None and not r.written and not r.reseats for r in results):
        return lines
    assert lines[-1].startswith("return ")
    lines[-1] = "wrapped = " + lines[-1].removeprefix("return ")
    return [*lines, "if plan.links:", "    link(plan, wrapped, args, kwargs)", "return wrapped"]


def _wrapped(results: Sequence[Result], variables: Sequence[_Variable]) -> list[str]:
    """Wrap what the local op returned. A spec of ``outs`` is None only for a shape that depends on data."""
    if not results:
        return ["return None"]
    if len(results) == 1 and results[0].is_list:
        make = "new" if results[0].alias is None else _view_maker(results[0], variables)
        # `map` calls it without a frame of Python for each of hundreds of tensors.
        return [f"make = {make}", "return list(map(make, repeat(MT), out, plan.outs, repeat(False)))"]
    if len(results) == 1:
        return [f"return {_wrap_result(results[0], 'out', variables)}"]
    if any(r.is_list for r in results):
        return ["return wrap_results(plan, out)"]
    lines = [", ".join(f"r{i}" for i in range(len(results))) + ", = out"]
    tensors = [i for i, r in enumerate(results) if r.is_tensor]
    lines.append(", ".join(f"s{i}" for i in tensors) + ", = plan.outs")
    lines.append(f"return ({', '.join(_wrap_result(r, f'r{i}', variables, f's{i}') for i, r in enumerate(results))},)")
    return lines


def _wrap_result(result: Result, var: str, variables: Sequence[_Variable], spec: str = "plan.out") -> str:
    if result.reseats and result.alias is not None:
        parts = f"{variables[result.alias].var}, {var}, {spec}"
        return f"(reseat({parts}) if not plan.links else reseat_copy(plan, {parts}, args, kwargs))"
    if result.written and result.alias is not None and not result.is_list:
        return variables[result.alias].var
    make = "new" if result.alias is None else f"({_view_maker(result, variables)})"
    if result.is_tensor:
        return f"{make}(MT, {var}, {spec}, False) if {spec} is not None else wrap_unknown(plan, {var})"
    return var


def _view_maker(result: Result, variables: Sequence[_Variable]) -> str:
    assert result.alias is not None
    return f"new if not inference() else new_view_of({variables[result.alias].var})"


def defaults(op: Op) -> dict[str, Any]:
    """Names in a handler's source for the default of each schema argument: ``d0``, ``d1`` ..."""
    return {f"d{i}": a.default for i, a in enumerate(signature(op).args)}
