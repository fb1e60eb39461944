"""Plans: the strategy of one call signature, ready to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from attrs import frozen

from shardwise.kernel.precedence import Entry
from shardwise.kernel.schema import OpSchema, PlacementStrategy
from shardwise.kernel.signature import op_name
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.view_copies import fresh_operand

__all__ = ["Plan", "ResultMove"]


@frozen
class ResultMove:
    """Where a result rests that does not stay where its row leaves it.

    ``steps`` are those of its path (:class:`shardwise.planning.path.Step`), ``reason`` says whose decision it is.
    """

    made: TensorSpec
    rests: TensorSpec
    steps: tuple[Any, ...]
    reason: str


class Kept(Protocol):
    """Knows what earlier calls have moved the operands of a call to."""

    def arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
        """The arguments with kept tensors in place of some; None where the plan is the cheapest as it is."""


class Plan:
    """How calls of one signature run.

    ``call`` runs the op on local tensors. ``redistributes`` is ``None`` when no operand is redistributed, the usual
    case. Otherwise it has an entry per tensor argument: ``None``, a function that redistributes it, or for a list pairs
    of position and function. A function takes the local tensor and its wrapper, and returns a local tensor.
    ``static`` replaces the by-value arguments, in schema order, unless it is ``None``. ``full`` says that ``call``
    takes all schema arguments (a lowering, or replaced arguments). ``direct`` is ``call`` where no operand is
    redistributed and ``call`` takes the arguments as they were passed, else ``None``. ``outs`` holds the specs of the
    tensor results, flat, and ``out`` the spec of a single one. ``links`` says that a result is a view's copy or a view
    of one; ``writes_copy`` that the op writes one. ``after`` has an entry per tensor result that says how ``call``
    moves it, or is ``None`` when it moves none, the usual case. It is for those who look at plans. ``kept`` is asked
    first where an operand is redistributed: the call may be cheaper on what was moved before. ``sends`` says what calls
    send by themselves, once policies are about it; such calls are judged each time.
    """

    __slots__ = (
        "after",
        "call",
        "direct",
        "entry",
        "full",
        "kept",
        "links",
        "out",
        "outs",
        "redistributes",
        "schema",
        "sends",
        "static",
        "strategies",
        "writes_copy",
    )

    def __init__(
        self,
        schema: OpSchema,
        entry: Entry,
        strategies: Sequence[PlacementStrategy],
        redistributes: tuple[Any, ...] | None,
        static: tuple[Any, ...] | None,
        call: Callable[..., Any],
        full: bool,
        outs: tuple[TensorSpec | None, ...],
    ) -> None:
        self.schema = schema
        self.entry = entry
        self.strategies = tuple(strategies)
        self.redistributes = redistributes
        self.static = static
        self.call = call
        self.full = full
        self.direct = call if redistributes is None and not full else None
        self.outs = outs
        self.kept: Kept | None = None
        self.after: tuple[ResultMove | None, ...] | None = None
        self.sends: Any = None
        self.out = outs[0] if len(outs) == 1 else None
        declared = [r for r in schema.signature.results if r.is_tensor]
        is_view = any(r.alias is not None and not r.written for r in declared)
        self.links = is_view and any(spec is not None and spec.is_copy for spec in outs)
        self.writes_copy = any((spec := schema.specs[i]) is not None and spec.is_copy for i in schema.written)

    def run_by(self, call: Callable[..., Any]) -> None:
        """Run the local op by another callable that takes the same arguments."""
        self.call = call
        self.direct = None if self.direct is None else call

    @property
    def copies(self) -> bool:
        """Whether a result is a view's copy because an operand is redistributed."""
        # A copy that is only brought up to date stays where it is, and so does a view of it.
        moves = any(move is not None and move is not fresh_operand for move in self.redistributes or ())
        return moves and any(spec is not None and spec.is_copy for spec in self.outs)

    @property
    def follows_default_dtype(self) -> bool:
        """Whether torch's default dtype decides the dtype of a result: no tensor operand decides it."""
        fixed = self.schema.fixed
        for i, spec in enumerate(self.schema.specs):
            if _is_inexact(spec) and i not in fixed:
                return False
        return any(map(_is_inexact, self.outs))

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the row of each mesh dim; for zipped lists those of the first position."""
        return self.strategies[0].names if self.strategies else ()

    def __repr__(self) -> str:
        chosen = "; ".join(sorted({str(s) for s in self.strategies}))
        rests = "".join(f"; {move.reason}" for move in self.after or () if move is not None)
        return f"Plan({op_name(self.schema.op)}: {chosen}{rests}, by {self.entry.origin})"


def _is_inexact(spec: TensorSpec | None) -> bool:
    return spec is not None and (spec.dtype.is_floating_point or spec.dtype.is_complex)
