"""Decompositions: an op without a rule becomes other ops that have one.

Torch has formulas that compute many ops by others. Once per call signature a formula is tried on the meta device. Each
op that it calls is looked up, and one without a rule is decomposed, too. The formula's results are compared with those
of the op itself: shapes and dtypes, which results share memory with which operands, and which operands are written.
Then the formula runs on MeshTensors, and every part is dispatched as if the program had called it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field, frozen

from shardwise.engine.first_run import refuse_other_layout
from shardwise.kernel.nested import tensors_in
from shardwise.kernel.registry import Registry
from shardwise.kernel.signature import Op, op_name, signature
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.results import flat_metas
from shardwise.private_torch.dispatch import memory_of, watching
from shardwise.private_torch.fake import shape_needs_data
from shardwise.private_torch.modes import outside_modes
from shardwise.private_torch.ops import (
    composite_kernel,
    draws,
    functional_of,
    is_composite,
    is_view_in_place,
    python_decomposition,
)

__all__ = ["Decomposition", "Failed", "Formula", "answered", "decompose", "stand_ins", "formulas"]


@frozen
class Formula:
    """A function of an op's arguments that computes the op by others; ``name`` names its source.

    ``needs`` is the op that it surely calls, where that is known without a trial.
    """

    name: str
    run: Callable[..., Any]
    needs: Op | None = None

    def may_run(self, registry: Registry) -> bool:
        """False where the op that it needs has no rule and no formula: no call can run by it."""
        return self.needs is None or self.needs in registry or any(f.may_run(registry) for f in formulas(self.needs))


@frozen
class Decomposition:
    """A formula that works for one call signature. It runs ``parts``, all of which have a rule.

    ``makes`` says that it makes tensors from no operand. ``metas`` are those of the op's own results, None when the op
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
    """Why no formula works: the parts of the first one, those of them without a rule, and a sentence per formula."""

    op: Op
    parts: tuple[Op, ...] = ()
    missing: tuple[Op, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The formulas and the fault of each; empty if torch has none."""
        if draws(self.op) and not is_composite(self.op) and not self.faults:
            return "it draws random numbers, so it is not decomposed"
        return "; ".join(self.faults)


def formulas(op: Op) -> Iterator[Formula]:
    """Torch's formulas for an op, in order of preference.

    A decomposition draws other random numbers than the op does on one device. The composite kernel of an ``out=`` form
    is what one device runs: it draws by the functional form.
    """
    if is_composite(op):
        yield Formula("torch runs it so", op.decompose)
        return
    table, kernel = python_decomposition(op), composite_kernel(op)
    if draws(op):
        if kernel is not None and signature(op).has_outs:
            yield Formula("torch's composite kernel", kernel)
        return
    if table is not None:
        yield Formula("torch's decomposition", table)
    if kernel is not None:
        yield Formula("torch's composite kernel", kernel)
    functional = functional_of(op)
    # A view in place changes sizes and strides and no memory; a copy would change the memory.
    if functional is None or is_view_in_place(op):
        return

    def run_and_copy(*args: Any, **kwargs: Any) -> None:
        declared, values = signature(op).args, signature(op).bind(args, kwargs)
        inputs = [v for a, v in zip(declared, values, strict=True) if not (a.written and a.kwarg_only)]
        positional, named = signature(functional).unbind(inputs)
        written = list(tensors_in([v for a, v in zip(declared, values, strict=True) if a.written]))
        for target, result in zip(written, tensors_in(functional(*positional, **named)), strict=True):
            target.copy_(result)

    yield Formula(f"{op_name(functional)} and a copy", run_and_copy, functional)


# -- the trial of a formula ------------------------------------------------------------------------------------------


def decompose(registry: Registry, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Decomposition | Failed:
    """The first formula that works for a call of tensors on the meta device.

    Raises what torch raises for a call that it refuses.
    """
    with outside_modes(), torch.no_grad(), torch.device("meta"):
        _put_on_mesh([args, kwargs])
        return _find(registry, op, args, kwargs, ())[0]


def stand_ins(value: Any, known: dict[int, Any]) -> Any:
    """The same arguments with a global tensor on the meta device for each MeshTensor and each spec.

    ``known`` has the stand-ins by the id of the tensor, so that a tensor that comes twice has one.
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
    """The first formula that works, and the results that it returned."""
    own = _OwnResults.of(op, args, kwargs)
    faults: list[str] = []
    parts: tuple[Op, ...] = ()
    missing: tuple[Op, ...] = ()
    for formula in formulas(op):
        trial = _Trial(registry, (*above, op))
        try:
            with trial.watching():
                result = answered(op, args, kwargs, formula.run(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # a formula is anyone's Python and may raise anything
            result, fault = None, f"does not run without data ({type(error).__name__}: {error})"
        else:
            fault = trial.fault() or own.differs(op, args, kwargs, result, trial)
        if not fault:
            return Decomposition(op, formula, tuple(trial.parts), trial.makes, own.metas), result
        faults.append(" ".join(f"{formula.name} {fault}".split())[:300])
        if not missing:
            parts, missing = tuple(trial.parts), tuple(trial.missing)
    return Failed(op, parts, missing, tuple(faults)), None


class _Trial:
    """Runs a formula on the meta device and records the ops that it calls."""

    def __init__(self, registry: Registry, above: tuple[Op, ...]) -> None:
        self.registry = registry
        self.above = above
        self.parts: dict[Op, None] = {}
        self.missing: dict[Op, None] = {}
        self.written: set[int] = set()
        self.makes = False

    def watching(self) -> Any:
        """A context whose ops are recorded."""
        return watching(self._run, lambda _: False)

    def fault(self) -> str:
        """The missing rules as the end of a sentence; empty if none is missing."""
        if not self.missing:
            return ""
        if self.above[-1] in self.missing:
            return "ends in the op itself"
        rest = f"is {', '.join(map(op_name, self.parts))}, and " if self.parts else "has a part without a rule: "
        return f"{rest}there is no rule for {', '.join(map(op_name, self.missing))}"

    def _run(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not any(map(_is_on_mesh, tensors_in([args, kwargs]))):
            # A factory: its results come from no operand, so they are the same on every rank unless they are random.
            result = op(*args, **kwargs)
            if draws(op):
                self.missing[op] = self.parts[op] = None
            new = [tensor for tensor in tensors_in(result) if tensor.dim()]
            self.makes |= bool(new)
            _put_on_mesh(new)
            return result
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


def _is_on_mesh(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "shardwise_on_mesh")


def _put_on_mesh(result: Any) -> Any:
    """Mark tensors as stand-ins for MeshTensors. A mark lasts as long as torch refers to the tensor."""
    for tensor in tensors_in(result):
        tensor.shardwise_on_mesh = True  # type: ignore[attr-defined]
    return result


# -- the op itself ---------------------------------------------------------------------------------------------------


@define
class _OwnResults:
    """The results of the op itself on the meta device: their metas, and the operands with which each shares memory.

    ``metas`` is None when the op does not run there, or a shape depends on data.
    """

    metas: tuple[TensorMeta | None, ...] | None = None
    shared: list[list[int]] = field(factory=list)

    @classmethod
    def of(cls, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _OwnResults:
        """Run the op on copies: an op that resizes an operand must not resize those of the formulas."""
        copies: dict[int, torch.Tensor] = {}
        args, kwargs = _copied(args, copies), _copied(kwargs, copies)
        try:
            result = op(*args, **kwargs)
        except NotImplementedError:
            return cls()
        except RuntimeError as error:
            if "INTERNAL ASSERT FAILED" not in str(error) and not shape_needs_data(error):
                raise  # what the program passed is at fault
            return cls()
        for tensor in tensors_in(result):
            refuse_other_layout(op, tensor)
        return cls(tuple(flat_metas(result)), _shared(result, list(tensors_in([args, kwargs]))))

    def differs(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, trial: _Trial) -> str:
        """How a formula differs from the op, as the end of a sentence; empty if it does not."""
        declared, values = signature(op), signature(op).bind(args, kwargs)
        operands = list(tensors_in([args, kwargs]))
        allowed = {memory_of(t) for t in _written(op, args, kwargs)}
        # A written operand that the op also returns must be written; an op that returns nothing writes all of them.
        returned = {r.alias for r in declared.results if r.written}
        required = {memory_of(t) for t in tensors_in([v for i, v in enumerate(values) if i in returned])}
        if not (required if declared.results else allowed) <= trial.written:
            return "does not write what the op writes"
        if trial.written & {memory_of(t) for t in operands} - allowed:
            return "writes an operand that the op leaves alone"
        if any(t.dim() and not _is_on_mesh(t) for t in tensors_in(result)):
            return "returns a tensor that torch made without an op"
        return self._differing_results(result, operands)

    def _differing_results(self, result: Any, operands: Sequence[torch.Tensor]) -> str:
        if self.metas is None:
            return ""
        metas = flat_metas(result)
        if [_shape_and_dtype(m) for m in metas] != [_shape_and_dtype(m) for m in self.metas]:
            theirs, own = (", ".join(map(str, one)) or "nothing" for one in (metas, self.metas))
            return f"returns {theirs} and the op {own}"
        shared = _shared(result, operands)
        if shared != self.shared:
            return "returns views where the op returns new tensors, or the reverse"
        if any(o != m for o, m, operands_ in zip(self.metas, metas, shared, strict=True) if operands_):
            return "returns views with other strides than the op"
        return ""


def _shape_and_dtype(meta: TensorMeta | None) -> Any:
    return None if meta is None else (tuple(meta.shape), meta.dtype)


def _copied(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in copies:
            copies[id(value)] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return copies[id(value)]
    if isinstance(value, Mapping):
        return {name: _copied(part, copies) for name, part in value.items()}
    return [_copied(part, copies) for part in value] if isinstance(value, (tuple, list)) else value


def _shared(result: Any, operands: Sequence[torch.Tensor]) -> list[list[int]]:
    """Per tensor result, the operands with which it shares memory."""
    memories = [memory_of(t) for t in operands]
    return [[i for i, m in enumerate(memories) if m == memory_of(t)] if t is not None else [] for t in _flat(result)]


def _flat(result: Any) -> Iterator[torch.Tensor | None]:
    if result is None or isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from _flat(part)


def _written(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that the op writes, by its schema."""
    values = zip(signature(op).args, signature(op).bind(args, kwargs), strict=True)
    return list(tensors_in([value for arg, value in values if arg.written]))


def answered(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    """The op's results, from those of a formula: the written operands themselves, and lists as lists.

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
