"""Decompositions: an op without a rule, as other ops that have one.

Torch has formulas that compute many an op by others. Once per call signature a formula is tried on the meta device:
each op that it calls is looked up, and one without a rule is decomposed in its turn. Its results are compared with
those of the op itself: shapes and dtypes, which results share memory with which operands, and which operands are
written. Then the formula runs on MeshTensors, and every part is dispatched as if the program had called it.
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
    """A formula that works for one call signature: it runs ``parts``, all of which have a rule.

    ``makes`` says that it makes tensors from no operand. ``metas`` are those of the op's own results; None when the op
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
    """Why no formula works: the parts of the first one that have no rule, and one sentence of each on what is wrong."""

    op: Op
    parts: tuple[Op, ...] = ()
    missing: tuple[Op, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The formulas that were tried and what is wrong with each; empty where torch has none."""
        if draws(self.op) and not is_composite(self.op):
            return "it draws random numbers, so it is not decomposed"
        return "; ".join(self.faults)


def formulas(op: Op) -> Iterator[Formula]:
    """Torch's formulas of an op by others, in order of preference; none for an op that draws random numbers."""
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
        inputs = [v for a, v in zip(declared, values, strict=True) if not (a.written and a.kwarg_only)]
        positional, named = signature(functional).unbind(inputs)
        written = list(tensors_in([v for a, v in zip(declared, values, strict=True) if a.written]))
        for target, result in zip(written, tensors_in(functional(*positional, **named)), strict=True):
            target.copy_(result)

    return run


# -- whether one goes ------------------------------------------------------------------------------------------------


def find(registry: Registry, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Decomposition | Failed:
    """The first formula that works for a call of tensors on the meta device.

    Raises what torch raises for a call that it refuses.
    """
    with outside_modes(), torch.no_grad(), torch.device("meta"):
        for tensor in tensors_in([args, kwargs]):
            _mark_on_mesh(tensor)
        return _find(registry, op, args, kwargs, ())[0]


def stand_ins(value: Any, known: dict[int, Any]) -> Any:
    """The same arguments with tensors on the meta device: one global tensor per MeshTensor, and one for each spec."""
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
    """The first formula that works, and what it returned."""
    own = _run_itself(op, args, kwargs)
    failed = Failed(op)
    for formula in formulas(op):
        trial = _Trial(registry, (*above, op))
        try:
            with trial.watching():
                result = answered(op, args, kwargs, formula.run(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # somebody's Python: it may raise anything
            failed = _with_fault(
                failed, trial, f"{formula.name} does not run without data ({type(error).__name__}: {error})"
            )
            continue
        fault = trial.fault() or own.differs(op, args, kwargs, result, trial)
        if not fault:
            return Decomposition(op, formula, tuple(trial.parts), trial.makes, own.metas), result
        failed = _with_fault(failed, trial, f"{formula.name} {fault}")
    return failed, None


def _with_fault(failed: Failed, trial: _Trial, fault: str) -> Failed:
    shown = " ".join(fault.split())[:300]
    parts, missing = (failed.parts, failed.missing) if failed.missing else (tuple(trial.parts), tuple(trial.missing))
    return Failed(failed.op, parts, missing, (*failed.faults, shown))


class _Trial:
    """Runs a formula on the meta device and notes what it calls."""

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
        if not any(map(_is_on_mesh, tensors_in([args, kwargs]))):
            return self._make(op, args, kwargs)
        self.written.update(map(memory_of, _written(op, args, kwargs)))
        self.parts[op] = None
        if op in self.registry:
            return _put_on_mesh(op(*args, **kwargs))
        del self.parts[op]
        inner, result = (Failed(op), None) if op in self.above else _find(self.registry, op, args, kwargs, self.above)
        if isinstance(inner, Failed):
            self.missing.update(dict.fromkeys(inner.missing or (op,)))
            self.parts.update(dict.fromkeys((*inner.parts, op)))
            return _put_on_mesh(op(*args, **kwargs))
        self.parts.update(dict.fromkeys(inner.parts))
        return result

    def _make(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a factory: an op on no operand that lies on the mesh. Its results are the same on every rank."""
        result = op(*args, **kwargs)
        if draws(op):
            self.missing[op] = self.parts[op] = None
        for tensor in tensors_in(result):
            if tensor.dim():
                self.makes = True
                _mark_on_mesh(tensor)
        return result


def _mark_on_mesh(tensor: torch.Tensor) -> None:
    """Mark what stands for a MeshTensor. The mark lasts for as long as anything in torch holds the tensor."""
    tensor.shardwise_on_mesh = True  # type: ignore[attr-defined]


def _is_on_mesh(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "shardwise_on_mesh")


def _put_on_mesh(result: Any) -> Any:
    for tensor in tensors_in(result):
        _mark_on_mesh(tensor)
    return result


# -- what the op itself does -----------------------------------------------------------------------------------------


@define
class _Own:
    """The results of the op itself on the meta device: their metas, and which operands each shares memory with.

    ``metas`` is None when the op does not run there.
    """

    metas: tuple[TensorMeta | None, ...] | None = None
    shared: list[list[int]] = field(factory=list)

    def differs(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, trial: _Trial) -> str:
        """What a formula does that the op does not, or the reverse, in words; empty where they do the same."""
        operands = list(tensors_in([args, kwargs]))
        required = {memory_of(t) for t in _returned_writes(op, args, kwargs)}
        allowed = {memory_of(t) for t in _written(op, args, kwargs)}
        passed = {memory_of(t) for t in operands}
        if not required <= trial.written:
            return "does not write what the op writes"
        if trial.written & passed - allowed:
            return "writes an operand that the op leaves alone"
        if any(t.dim() and not _is_on_mesh(t) for t in tensors_in(result)):
            return "returns a tensor that torch made without an op"
        return self._differing_results(result, operands)

    def _differing_results(self, result: Any, operands: Sequence[torch.Tensor]) -> str:
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
    """The written tensors that the op also returns. An op that returns nothing surely writes all its written ones."""
    declared = signature(op)
    if not declared.results:
        return _written(op, args, kwargs)
    returned = {r.alias for r in declared.results if r.written}
    values = signature(op).bind(args, kwargs)
    return list(tensors_in([value for i, value in enumerate(values) if i in returned]))


def answered(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    """The op's results, from those of a formula: a written operand is itself a result, and lists are lists.

    Raises :class:`ValueError` when the formula returned another number of results.
    """
    values = signature(op).bind(args, kwargs)
    declared = signature(op).results
    if not declared:
        return None
    if all(r.written and r.alias is not None for r in declared):
        results = [values[r.alias] for r in declared if r.alias is not None]
    elif len(declared) == 1:
        results = [list(result) if declared[0].is_list else result]
    else:
        results = []
        for r, part in zip(declared, result, strict=True):
            if r.written and r.alias is not None:
                results.append(values[r.alias])
            else:
                results.append(list(part) if r.is_list else part)
    return results[0] if len(declared) == 1 else tuple(results)
