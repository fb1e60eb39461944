"""Decompositions: an op without a rule, as other ops that have one.

Torch itself can write many an op in terms of others. Whether every part of such a decomposition has a rule is found out
once per call signature, on the meta device: the decomposition runs there, each op that it calls is looked up, and one
that has no rule is decomposed in its turn. What it returns is compared with what the op itself returns there: shapes
and dtypes, which results share memory with which operands, and which operands were written. Then the decomposition
runs on MeshTensors, and every part is dispatched as if the program had called it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field, frozen

from shardwise.kernel.nested import tensors_in
from shardwise.kernel.registry import Registry
from shardwise.kernel.signature import Op, op_name, signature
from shardwise.kernel.spec import TensorMeta, TensorSpec
from shardwise.planning.results import flat_metas
from shardwise.private_torch.dispatch import memory_of, watching
from shardwise.private_torch.ops import (
    composite_kernel,
    draws,
    functional_of,
    is_composite,
    is_view_in_place,
    python_decomposition,
)
from shardwise.private_torch.tracing import outside_modes

__all__ = ["Decomposition", "Failed", "Formula", "answered", "find", "stand_ins", "formulas"]


@frozen
class Formula:
    """A function of an op's arguments that computes the op by others; ``name`` says whose it is."""

    name: str
    run: Callable[..., Any]


@frozen
class Decomposition:
    """A way that goes for one call signature: the ops that it runs, all of which have a rule.

    ``makes`` says that it makes tensors of no operand. ``metas`` are those of the op's own results; None when the op
    itself does not run on the meta device.
    """

    op: Op
    formula: Formula
    parts: tuple[Op, ...]
    makes: bool
    metas: tuple[TensorMeta | None, ...] | None

    @property
    def text(self) -> str:
        """``decomposed into aten.a.default, aten.b.default (torch's decomposition)``."""
        return f"decomposed into {', '.join(map(op_name, self.parts)) or 'nothing'} ({self.formula.name})"


@frozen
class Failed:
    """Why no way goes: the ops of the first one that have no rule, and what is wrong with each way, in sentences."""

    op: Op
    parts: tuple[Op, ...] = ()
    missing: tuple[Op, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What was tried, or nothing where torch has no decomposition."""
        if draws(self.op) and not is_composite(self.op):
            return "it draws random numbers, so it is not decomposed"
        return "; ".join(self.faults)


def formulas(op: Op) -> Iterator[Formula]:
    """The ways in which torch computes an op by others, the preferred one first; none for one that draws numbers."""
    if is_composite(op):
        yield Formula("torch runs it so", op.decompose)
        return
    if draws(op):
        # A decomposition draws other numbers than the op does on one device.
        return
    table = python_decomposition(op)
    if table is not None:
        yield Formula("torch's decomposition", table)
    kernel = composite_kernel(op)
    if kernel is not None:
        yield Formula("torch's composite kernel", kernel)
    functional = functional_of(op)
    # A view in place leaves the memory alone; a copy would do the reverse.
    if functional is not None and not is_view_in_place(op):
        yield Formula(f"{op_name(functional)} and a copy", _written_from(op, functional))


def _written_from(op: Op, functional: Op) -> Callable[..., Any]:
    """Run the functional form and copy its results over what the op writes."""
    declared = signature(op).args

    def run(*args: Any, **kwargs: Any) -> None:
        values = signature(op).bind(args, kwargs)
        taken = [v for a, v in zip(declared, values, strict=True) if not (a.written and a.kwarg_only)]
        positional, named = signature(functional).unbind(taken)
        written = list(tensors_in([v for a, v in zip(declared, values, strict=True) if a.written]))
        for target, found in zip(written, tensors_in(functional(*positional, **named)), strict=True):
            target.copy_(found)

    return run


# -- whether one goes ------------------------------------------------------------------------------------------------


def find(registry: Registry, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Decomposition | Failed:
    """The first way that goes for a call, with tensors on the meta device in place of all others.

    Raises what torch raises for a call that it refuses.
    """
    with outside_modes(), torch.no_grad(), torch.device("meta"):
        for tensor in tensors_in([args, kwargs]):
            _place(tensor)
        return _find(registry, op, args, kwargs, ())[0]


def stand_ins(value: Any, known: dict[int, Any]) -> Any:
    """The same arguments with tensors on the meta device: global ones for MeshTensors, one per tensor; and for each
    spec one of its own.
    """
    if isinstance(value, TensorSpec):
        return value.tensor_meta.to_meta_tensor()
    if isinstance(value, torch.Tensor):
        if id(value) not in known:
            spec = getattr(value, "_spec", None)
            meta = TensorMeta.of(value) if spec is None else spec.tensor_meta
            known[id(value)] = meta.to_meta_tensor()
        return known[id(value)]
    if isinstance(value, Mapping):
        return {name: stand_ins(part, known) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [stand_ins(part, known) for part in value]
    return torch.device("meta") if isinstance(value, torch.device) else value


def _find(
    registry: Registry, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], above: tuple[Op, ...]
) -> tuple[Decomposition | Failed, Any]:
    """The first way that goes, and what it returned."""
    own = _run_itself(op, args, kwargs)
    failed = Failed(op)
    for formula in formulas(op):
        trial = _Trial(registry, (*above, op))
        try:
            with trial.watching():
                result = answered(op, args, kwargs, formula.run(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # somebody's Python: it may raise anything
            failed = _also(failed, trial, f"{formula.name} does not run without data ({type(error).__name__}: {error})")
            continue
        fault = trial.fault() or own.differs(op, args, kwargs, result, trial)
        if not fault:
            return Decomposition(op, formula, tuple(trial.parts), trial.makes, own.metas), result
        failed = _also(failed, trial, f"{formula.name} {fault}")
    return failed, None


def _also(failed: Failed, trial: _Trial, fault: str) -> Failed:
    shown = " ".join(fault.split())[:300]
    parts, missing = (failed.parts, failed.missing) if failed.missing else (tuple(trial.parts), tuple(trial.missing))
    return Failed(failed.op, parts, missing, (*failed.faults, shown))


class _Trial:
    """Runs a decomposition on the meta device and notes what it calls."""

    def __init__(self, registry: Registry, above: tuple[Op, ...]) -> None:
        self.registry = registry
        self.above = above
        self.parts: dict[Op, None] = {}
        self.missing: dict[Op, None] = {}
        self.written: set[int] = set()
        self.makes = False

    def watching(self) -> Any:
        """A context whose ops are noted."""
        return watching(self._run, lambda _: False)

    def fault(self) -> str:
        """What is missing, in words."""
        if not self.missing:
            return ""
        if self.above[-1] in self.missing:
            return "ends in the op itself"
        rest = f"is {', '.join(map(op_name, self.parts))}, and " if self.parts else "has a part without a rule: "
        return f"{rest}there is no rule for {', '.join(map(op_name, self.missing))}"

    def _run(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not any(map(_is_placed, tensors_in([args, kwargs]))):
            return self._make(op, args, kwargs)
        self.written.update(map(memory_of, _written(op, args, kwargs)))
        self.parts[op] = None
        if op in self.registry:
            return _placed(op(*args, **kwargs))
        del self.parts[op]
        found, result = (Failed(op), None) if op in self.above else _find(self.registry, op, args, kwargs, self.above)
        if isinstance(found, Failed):
            self.missing.update(dict.fromkeys(found.missing or (op,)))
            self.parts.update(dict.fromkeys((*found.parts, op)))
            return _placed(op(*args, **kwargs))
        self.parts.update(dict.fromkeys(found.parts))
        return result

    def _make(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a factory: an op on no operand that lies on the mesh, whose results are alike on all ranks."""
        result = op(*args, **kwargs)
        if draws(op):
            self.missing[op] = self.parts[op] = None
        for tensor in tensors_in(result):
            if tensor.dim():
                self.makes = True
                _place(tensor)
        return result


def _place(tensor: torch.Tensor) -> None:
    # The tensor keeps it for as long as anything in torch holds it.
    tensor.shardwise_placed = True  # type: ignore[attr-defined]


def _is_placed(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "shardwise_placed")


def _placed(result: Any) -> Any:
    for tensor in tensors_in(result):
        _place(tensor)
    return result


# -- what the op itself does -----------------------------------------------------------------------------------------


@define
class _Own:
    """What the op itself returns on the meta device: the metas of its results, and which operands each shares memory
    with; ``metas`` is None when it does not run there.
    """

    metas: tuple[TensorMeta | None, ...] | None = None
    shared: list[list[int]] = field(factory=list)

    def differs(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, trial: _Trial) -> str:
        """What a decomposition does otherwise than the op, if anything."""
        operands = list(tensors_in([args, kwargs]))
        wanted = {memory_of(t) for t in _returned_writes(op, args, kwargs)}
        allowed = {memory_of(t) for t in _written(op, args, kwargs)}
        passed = {memory_of(t) for t in operands}
        if not wanted <= trial.written:
            return "does not write what the op writes"
        if trial.written & passed - allowed:
            return "writes an operand that the op leaves alone"
        if any(t.dim() and not _is_placed(t) for t in tensors_in(result)):
            return "returns a tensor that torch made unseen"
        return self._returns_otherwise(result, operands)

    def _returns_otherwise(self, result: Any, operands: Sequence[torch.Tensor]) -> str:
        if self.metas is None:
            return ""
        metas = flat_metas(result)
        if [_form(m) for m in metas] != [_form(m) for m in self.metas]:
            return f"returns {_shown(metas)} and the op {_shown(self.metas)}"
        shared = _shared(result, operands)
        if shared != self.shared:
            return "returns views where the op returns new tensors, or the reverse"
        views = [m for m, where in zip(self.metas, shared, strict=True) if where]
        if views != [m for m, where in zip(metas, shared, strict=True) if where]:
            return "returns views with other strides than the op"
        return ""


def _form(meta: TensorMeta | None) -> Any:
    return None if meta is None else (tuple(meta.shape), meta.dtype)


def _shown(metas: Sequence[TensorMeta | None]) -> str:
    return ", ".join(map(str, metas)) or "nothing"


def _run_itself(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Own:
    """Run the op on copies: one that resizes its operand must leave those of the decomposition alone."""
    copies: dict[int, torch.Tensor] = {}
    args, kwargs = _copied(args, copies), _copied(kwargs, copies)
    try:
        result = op(*args, **kwargs)
    except NotImplementedError:
        return _Own()
    metas = flat_metas(result)
    return _Own(tuple(metas), _shared(result, list(tensors_in([args, kwargs]))))


def _copied(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in copies:
            copies[id(value)] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return copies[id(value)]
    if isinstance(value, Mapping):
        return {name: _copied(part, copies) for name, part in value.items()}
    return [_copied(part, copies) for part in value] if isinstance(value, (tuple, list)) else value


def _shared(result: Any, operands: Sequence[torch.Tensor]) -> list[list[int]]:
    """Per tensor result, the operands whose memory it shares."""
    where = [memory_of(t) for t in operands]
    return [[i for i, s in enumerate(where) if s == memory_of(t)] if t is not None else [] for t in _flat(result)]


def _flat(result: Any) -> Iterator[torch.Tensor | None]:
    if result is None or isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from _flat(part)


def _written(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that the op's schema says it writes."""
    values = zip(signature(op).args, signature(op).bind(args, kwargs), strict=True)
    return list(tensors_in([value for arg, value in values if arg.written]))


def _returned_writes(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The written tensors that the op also returns, and those of an op that returns nothing: it surely writes them."""
    described = signature(op)
    if not described.results:
        return _written(op, args, kwargs)
    returned = {r.alias for r in described.results if r.written}
    values = signature(op).bind(args, kwargs)
    return list(tensors_in([value for i, value in enumerate(values) if i in returned]))


def answered(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    """What the op returns, from what a decomposition returned: a written operand itself, and lists where it has them.

    Raises :class:`ValueError` when it returned another number of results.
    """
    described = signature(op)
    values = signature(op).bind(args, kwargs)
    results = described.results
    if not results:
        return None
    if all(r.written and r.alias is not None for r in results):
        found = [values[r.alias] for r in results if r.alias is not None]
    elif len(results) == 1:
        found = [list(result) if results[0].is_list else result]
    else:
        found = [list(part) if r.is_list else part for r, part in zip(results, result, strict=True)]
        found = [
            values[r.alias] if r.written and r.alias is not None else f for r, f in zip(results, found, strict=True)
        ]
    return found[0] if len(results) == 1 else tuple(found)
