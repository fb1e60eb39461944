"""The functions of a call of flex attention: a rule describes tensors and numbers, so they go beside the op's call.

They come to the op's lowering by a context variable. What they capture, and the tensors of the block mask, are lists of
the op's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from attrs import evolve, field, frozen
from torch import SymInt, Tensor

from shardwise_matmul.flex_masks import FUNCTION, block_of_queries, unmasked

__all__ = ["Functions", "Parts", "Place", "filled", "functions_in_force", "using"]


@frozen
class Place:
    """Stands for a tensor of a list: what is no tensor stays in its place."""

    index: int


@frozen(eq=False)
class Functions:
    """What a call has besides tensors and numbers. ``score`` and ``mask`` take indices and then captured values.

    ``joint`` is the gradient of ``score``, in a backward. Tensors among the captured values and in the block mask are
    places in the op's lists.
    """

    score: Callable[..., Any]
    joint: Callable[..., Any] | None
    mask: tuple[Any, ...]
    score_captured: tuple[Any, ...] = ()
    mask_captured: tuple[Any, ...] = ()
    options: dict[str, Any] = field(factory=dict)

    @property
    def score_places(self) -> list[int | None]:
        """Where the values that ``score`` captures are among the captured tensors; ``None`` for what is no tensor."""
        return [value.index if isinstance(value, Place) else None for value in self.score_captured]

    def at(self, first: Sequence[Any]) -> Functions:
        """The functions of a shard of the queries that starts there: batch, head, position."""
        if not any(isinstance(n, SymInt) or n for n in first):
            return self
        mask = (*self.mask[:FUNCTION], _shifted(self.mask[FUNCTION], 0, first))
        joint = None if self.joint is None else _shifted(self.joint, 1, first)
        return evolve(self, score=_shifted(self.score, 1, first), joint=joint, mask=mask)


def _shifted(function: Callable[..., Any], before: int, first: Sequence[Any]) -> Callable[..., Any]:
    """The function of global indices, called with those of a shard; ``before`` arguments come first."""

    def of_shard(*args: Any) -> Any:
        indices = args[before : before + len(first)]
        return function(
            *args[:before], *(i + n for i, n in zip(indices, first, strict=True)), *args[before + len(first) :]
        )

    return of_shard


@frozen
class Parts:
    """One call of an operator as an op's arguments."""

    functions: Functions
    captured: list[Tensor]
    blocks: list[Tensor]
    block: int | None

    @classmethod
    def of(
        cls,
        score: Callable[..., Any],
        joint: Callable[..., Any] | None,
        mask: tuple[Any, ...],
        options: dict[str, Any],
        score_captured: Sequence[Any],
        mask_captured: Sequence[Any],
    ) -> Parts:
        captured: list[Tensor] = []
        blocks: list[Tensor] = []
        functions = Functions(
            score,
            joint,
            (*_taken(mask[:FUNCTION], blocks), mask[FUNCTION]),
            _taken(score_captured, captured),
            _taken(mask_captured, captured),
            options,
        )
        return cls(functions, captured, blocks, block_of_queries(mask))


def _same_score(score: Any, *_: Any) -> Any:
    return score


_functions: ContextVar[Functions | None] = ContextVar("functions of flex attention", default=None)


@contextmanager
def using(functions: Functions) -> Iterator[None]:
    """Have the calls of the plugin's ops meanwhile run with these functions."""
    token = _functions.set(functions)
    try:
        yield
    finally:
        _functions.reset(token)


def functions_in_force(query: Tensor, key: Tensor) -> Functions:
    """The functions of this call; of an op that is called by itself, those that change nothing."""
    functions = _functions.get()
    return Functions(_same_score, None, unmasked(query.shape[2], key.shape[2])) if functions is None else functions


def filled(values: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The values with the tensors of a list in their places."""
    return tuple(tensors[v.index] if isinstance(v, Place) else v for v in values)


def _taken(values: Sequence[Any], tensors: list[Tensor]) -> tuple[Any, ...]:
    """The values with places for their tensors, which go to the end of a list."""
    left: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            left.append(Place(len(tensors)))
            tensors.append(value)
        else:
            left.append(value)
    return tuple(left)
