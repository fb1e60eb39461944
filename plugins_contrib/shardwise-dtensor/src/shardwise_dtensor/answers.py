"""The strategies of shardwise from the answer of a classic rule.

A strategy that shardwise cannot express or run is dropped, as DTensor drops those that it cannot shard: one with a
masked placement, one that moves an operand that the op writes, one whose reductions do not
commute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from attrs import frozen

from shardwise.errors import PlacementError, RuleError
from shardwise.planning.strategies import result_metas, strategy
from shardwise.rule import (
    OpSchema,
    OpStrategy,
    Partial,
    Placement,
    PlacementStrategy,
    TensorMeta,
    TensorSpec,
    check_placements,
)
from shardwise_dtensor import torch_private
from shardwise_dtensor.running import refuse
from shardwise_dtensor.torch_private import DTensorSpec, OpSpec, TupleStrategy

__all__ = ["from_op_strategy", "from_output_sharding"]

Places = tuple[Placement, ...] | None
Outputs = DTensorSpec | Sequence[DTensorSpec | None] | None
_COMMUTING = {"sum", "avg"}


def from_op_strategy(schema: OpSchema, answer: Any) -> OpStrategy:
    """The choices of a strategy function; for a ``TupleStrategy``, the cheapest choice of each list position.

    Raises :class:`NoStrategyError` when no choice is left, :class:`RuleError` for an answer of another kind.
    """
    call = _Call.of(schema)
    if isinstance(answer, torch_private.OpStrategy):
        return _checked(schema, [s for choice in answer.strategies if (s := call.strategy(choice)) is not None])
    if isinstance(answer, TupleStrategy):
        return _checked(schema, [call.zipped(answer)])
    raise RuleError(
        asked=f"read the answer of a classic rule to {schema}",
        found=f"it is a {type(answer).__name__}",
        do="Return an OpStrategy or a TupleStrategy.",
    )


def from_output_sharding(schema: OpSchema, question: torch_private.OpSchema, ask: Callable[..., Any]) -> OpStrategy:
    """The one choice of a propagation rule. For a suggestion without an output the rule is called again, as by torch.

    Raises :class:`NoStrategyError` when there is no choice, :class:`RuleError` when the rule replaces other arguments.
    """
    call = _Call.of(schema)
    answer = ask(question)
    output, suggested = answer.output_spec, answer.redistribute_schema
    if output is None and call.metas:
        if suggested is None:
            raise refuse(schema, "its classic rule gives neither an output nor a suggestion")
        output = ask(suggested).output_spec
        if output is None:
            raise refuse(schema, "its classic rule gives no output for its own suggestion")
    if answer.use_val_from_redistribute_schema and suggested is not None and _others(suggested) != _others(question):
        raise RuleError(
            asked=f"run {schema}",
            found="its classic rule replaces arguments that are not tensors by local ones",
            do="Write it as a shardwise rule with local_args=.",
        )
    choice = call.from_specs(list(_specs(suggested or question)), output)
    return _checked(schema, [] if choice is None else [choice])


def _checked(schema: OpSchema, choices: Sequence[PlacementStrategy]) -> OpStrategy:
    if not choices:
        raise refuse(schema, "its classic rule gives no strategy that can be run here")
    return OpStrategy(tuple(dict.fromkeys(choices)))


# -- one call ----------------------------------------------------------------------------------------------------


@frozen(eq=False)
class _Call:
    """A call whose answer is read: its schema, the metas of its results, and the operands that must not move."""

    schema: OpSchema
    metas: tuple[TensorMeta | None, ...]
    fixed: frozenset[int]
    same: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, schema: OpSchema) -> _Call:
        names = schema.operand_names
        args = schema.signature.args
        results = [r for r in schema.signature.results if r.is_tensor]
        same = tuple(
            (names.index(args[r.alias].name), o)
            for o, r in enumerate(results)
            if r.written and r.alias is not None and args[r.alias].name in names
        )
        return cls(schema, result_metas(schema), frozenset((*schema.written, *schema.fixed)), same)

    def strategy(self, choice: OpSpec) -> PlacementStrategy | None:
        """One choice for the whole call; ``None`` when it is dropped."""
        count = sum(spec is not None for spec in self.schema.specs)
        specs: Sequence[Any] = [choice.output_spec] * count if choice.input_specs is None else choice.input_specs
        return self.from_specs([spec for spec in specs if spec is not None], choice.output_specs)

    def from_specs(self, operands: Sequence[Any], outputs: Outputs) -> PlacementStrategy | None:
        """A strategy from the specs of the present operands and of the results; ``None`` when it is dropped."""
        try:
            inputs = self._inputs(operands)
            results = self._results(outputs)
        except PlacementError:
            return None
        return self.checked(inputs, results)

    def checked(self, inputs: Sequence[Places], results: Sequence[Places]) -> PlacementStrategy | None:
        """A strategy from placements; ``None`` when shardwise cannot run it."""
        specs = self.schema.specs
        moved = any(inputs[i] != _places(specs[i]) for i in self.fixed)
        parted = any(inputs[i] != results[o] for i, o in self.same)
        if moved or parted or not all(map(_commutes, (*inputs, *results))):
            return None
        return strategy(self.schema, inputs, results, self.metas)

    def _inputs(self, answered: Sequence[DTensorSpec]) -> list[Places]:
        """Placements per operand. Torch never moves keyword-only tensors, so an answer may omit them."""
        specs = self.schema.specs
        present = [i for i, spec in enumerate(specs) if spec is not None]
        keyword = {a.name for a in self.schema.signature.tensor_args if a.kwarg_only}
        movable = [i for i in present if self.schema.operand_names[i].partition("[")[0] not in keyword]
        if len(answered) not in (len(present), len(movable)):
            raise self._wrong(f"specs for {len(answered)} operands of {len(present)}")
        inputs: list[Places] = [_places(spec) for spec in specs]
        for i, spec in zip(present if len(answered) == len(present) else movable, answered, strict=True):
            meta = specs[i]
            inputs[i] = check_placements(spec.placements, self.schema.mesh.ndim, 0 if meta is None else meta.ndim)
        return inputs

    def _results(self, outputs: Outputs) -> list[Places]:
        """Placements per result; one spec serves them all."""
        if outputs is None and self.metas:
            raise self._wrong("no spec for its results")
        several = [outputs] * len(self.metas) if isinstance(outputs, DTensorSpec) else list(outputs or ())
        if len(several) != len(self.metas):
            raise self._wrong(f"specs for {len(several)} results of {len(self.metas)}")
        return [self._result(spec, meta) for spec, meta in zip(several, self.metas, strict=True)]

    def _result(self, spec: DTensorSpec | None, meta: TensorMeta | None) -> Places:
        if meta is None:
            return None
        if spec is None:
            raise self._wrong("no spec for a result that is a tensor")
        return check_placements(spec.placements, self.schema.mesh.ndim, meta.ndim)

    def _wrong(self, found: str) -> RuleError:
        return RuleError(
            asked=f"read the answer of a classic rule to {self.schema}",
            found=f"it gives {found}",
            do="Give a DTensorSpec for every tensor operand and every tensor result.",
        )

    # -- lists whose positions choose for themselves --
    def zipped(self, answer: TupleStrategy) -> PlacementStrategy:
        """The cheapest choice of every list position, put together."""
        inputs: list[Places] = [_places(s) for s in self.schema.specs]
        results: list[Places] = [None] * len(self.metas)
        for i, child in enumerate(answer.children):
            at = self._position(i)
            outputs = range(i, len(self.metas), len(answer.children))
            if not isinstance(child, torch_private.OpStrategy):
                raise self._wrong("a TupleStrategy whose children are not all OpStrategy")
            choices = [self._choice(choice, at, outputs) for choice in child.strategies]
            legal = [c for c in choices if c is not None]
            if not legal:
                raise refuse(self.schema, f"its classic rule gives no strategy that can be run at list position {i}")
            cheapest = min(legal, key=lambda pair: self._cost(at, pair[0]))
            for j, places in zip(at, cheapest[0], strict=True):
                inputs[j] = places
            for o, places in zip(outputs, cheapest[1], strict=True):
                results[o] = places
        choice = self.checked(inputs, results)
        if choice is None:
            raise refuse(self.schema, "its classic rule moves what the op writes")
        return choice

    def _position(self, i: int) -> list[int]:
        """The operands of one list position: the element there of each list, and every tensor that is not in a list."""
        names = self.schema.operand_names
        lists = {a.name for a in self.schema.signature.tensor_args if a.is_list}
        return [k for k, n in enumerate(names) if n.rpartition("[")[0] not in lists or n.endswith(f"[{i}]")]

    def _choice(self, choice: OpSpec, at: Sequence[int], outputs: range) -> tuple[list[Places], list[Places]] | None:
        specs = [self.schema.specs[k] for k in at]
        answered = [choice.output_spec] * len(at) if choice.input_specs is None else list(choice.input_specs)
        if len(answered) != len(at):
            raise self._wrong(f"specs for {len(answered)} operands of {len(at)} at one list position")
        ndim = self.schema.mesh.ndim
        try:
            inputs: list[Places] = [
                None if s is None else check_placements(a.placements, ndim, s.ndim)
                for s, a in zip(specs, answered, strict=True)
            ]
            results = [self._result(choice.output_spec, self.metas[o]) for o in outputs]
        except PlacementError:
            return None
        stays = all(
            s is None or p == s.placements for k, s, p in zip(at, specs, inputs, strict=True) if k in self.fixed
        )
        return (inputs, results) if stays and all(map(_commutes, (*inputs, *results))) else None

    def _cost(self, at: Sequence[int], position: Sequence[Places]) -> float:
        inputs: list[Places] = [_places(s) for s in self.schema.specs]
        for k, places in zip(at, position, strict=True):
            inputs[k] = places
        return strategy(self.schema, inputs, [None] * len(self.metas), self.metas).cost


def _places(spec: TensorSpec | None) -> Places:
    return None if spec is None else spec.placements


def _commutes(places: Places) -> bool:
    kinds = {p.reduce_op for p in places or () if isinstance(p, Partial)}
    return len(kinds) <= 1 or kinds <= _COMMUTING


# -- torch's op schemas ------------------------------------------------------------------------------------------


def _leaves(schema: torch_private.OpSchema) -> Iterator[Any]:
    """All values of the arguments, lists flattened, positional ones first."""

    def walk(value: Any) -> Iterator[Any]:
        if isinstance(value, (list, tuple)) and not isinstance(value, DTensorSpec):
            for part in value:
                yield from walk(part)
        else:
            yield value

    yield from walk(schema.args_schema)
    yield from walk(tuple(schema.kwargs_schema.values()))


def _specs(schema: torch_private.OpSchema) -> Iterator[DTensorSpec]:
    return (leaf for leaf in _leaves(schema) if isinstance(leaf, DTensorSpec))


def _others(schema: torch_private.OpSchema) -> list[Any]:
    return [leaf for leaf in _leaves(schema) if not isinstance(leaf, DTensorSpec)]
