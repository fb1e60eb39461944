"""Facts about an op by the names of its operands: linear, affine, monotone. They become rows with partial operands.

Each word says which reductions commute with the op in that operand. Whoever states a fact states mathematics; which
position the operand has, and how many rows that makes, follows from the schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Final, TypedDict

from attrs import frozen

from shardwise.errors import RuleArgumentError
from shardwise.kernel.arguments import kind_of
from shardwise.kernel.reductions import REDUCE_OPS
from shardwise.kernel.signature import Call, Kind, Op, op_name, signature
from shardwise.kernel.tensor_meta import TensorMeta

__all__ = ["PASSED", "Fact", "FactWords", "Facts", "affine", "decreasing", "linear", "monotone", "moves", "stated"]

# Word -> reduction of the operands -> reduction of the results.
PASSED: Final[Mapping[str, Mapping[str, str]]] = {
    "linear": {"sum": "sum", "avg": "avg"},
    "affine": {"avg": "avg"},
    "monotone": {"max": "max", "min": "min"},
    "decreasing": {"max": "min", "min": "max"},
    "moves": {kind: kind for kind in REDUCE_OPS},
}


# Of the functions that take facts as keywords: what a slip in a word may have meant.
_OPTIONS: Final = [
    "reduce",
    "replicate",
    "partial",
    "static",
    "zip_lists",
    "lowering",
    "lowered",
    "local_args",
    "nonempty",
    "scattered",
    "replaces",
    "work",
]


class FactWords(TypedDict, total=False):
    """The facts that ``rule``, ``like``, ``einop`` and ``Flow`` take as keyword arguments.

    Each takes operands by name: ``"self"``, or several as in ``("self", "mat2")``, one partial at a time. Names in one
    string are partial together: ``"self other"``. Where the ops of a rule call one operand by different names, ``|``
    stands between them: ``"grad_output|grad_out"``.
    """

    linear: str | Iterable[str]
    affine: str | Iterable[str]
    monotone: str | Iterable[str]
    decreasing: str | Iterable[str]
    moves: str | Iterable[str]


@frozen(cache_hash=True)
class Fact:
    """One word about operands that are partial together; every other operand is whole.

    ``results`` are the indices of the results that are then partial: all of them when it is ``None``. The others do
    not depend on these operands.
    """

    word: str
    operands: tuple[str, ...]
    results: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.word} in {' with '.join(self.operands)}"


@frozen(cache_hash=True)
class Facts:
    """Facts that give their rows together: by reduction, and for one reduction in the order in which they stand.

    ``linear("self", "mat2")`` is linear in each of the two while the other is whole; ``linear("self other")`` in both
    together. Facts are put together by ``+``.
    """

    facts: tuple[Fact, ...]

    def __add__(self, other: Facts) -> Facts:
        return Facts((*self.facts, *other.facts))

    def __str__(self) -> str:
        return ", ".join(map(str, self.facts))

    def check(self, op: Op) -> None:
        """Raise :class:`RuleArgumentError` for an operand that the op lacks."""
        for fact in self.facts:
            for name in fact.operands:
                if _argument(op, name) is None:
                    tensors = ", ".join(repr(a.name) for a in signature(op).tensor_args if not a.is_out)
                    raise RuleArgumentError(
                        asked=f"make a rule for {op_name(op)} that is {fact}",
                        found=f"the op has no operand {name!r}; its tensor arguments are {tensors}",
                        do=f"Correct the name in {fact.word}=.",
                        op=op_name(op),
                        argument=name,
                    )

    def rows(self, call: Call) -> tuple[str, ...]:
        """The facts as explicit rows for one call.

        An absent optional operand drops out. A number in place of a tensor is whole on every rank, so a fact that has
        it partial says nothing of this call.
        """
        # All that the texts depend on. It has no size, so most calls of one op have the same key.
        types = tuple(map(type, call.args.values()))
        key: tuple[Any, ...] = (self, call.op, call.is_position, len(call.outputs), types)
        if tuple in types:
            key += (call.operand_names, tuple(map(type, call.operands)))
        rows = _written.get(key)
        if rows is None:
            self.check(call.op)
            positions = [_positions(call, fact.operands) for fact in self.facts]
            texts: list[str] = []
            for kind in REDUCE_OPS:
                for fact, partial in zip(self.facts, positions, strict=True):
                    passed = PASSED[fact.word].get(kind)
                    if passed is None or not partial:
                        continue
                    left = [kind if i in partial else "R" for i in range(len(call.operands))]
                    count = len(call.outputs)
                    right = [passed if fact.results is None or i in fact.results else "R" for i in range(count)]
                    texts.append(f"{_shortened(left)} -> {_shortened(right)}".rstrip())
            if len(_written) >= _MAX_WRITTEN:
                _written.clear()
            rows = _written[key] = tuple(texts)
        return rows


# Rows of facts by all that they depend on. A full table is emptied.
_written: dict[tuple[Any, ...], tuple[str, ...]] = {}
_MAX_WRITTEN: Final = 4096


def linear(*operands: str, results: Iterable[int] | None = None) -> Facts:
    """Sums and averages pass: ``f(a + b) = f(a) + f(b)``."""
    return _facts("linear", operands, results)


def affine(*operands: str, results: Iterable[int] | None = None) -> Facts:
    """Averages pass: linear but for something added."""
    return _facts("affine", operands, results)


def monotone(*operands: str, results: Iterable[int] | None = None) -> Facts:
    """Maxima and minima pass: no result falls where the operand rises. It must hold for NaN too."""
    return _facts("monotone", operands, results)


def decreasing(*operands: str, results: Iterable[int] | None = None) -> Facts:
    """Maxima become minima and minima maxima: no result rises where the operand does."""
    return _facts("decreasing", operands, results)


def moves(*operands: str, results: Iterable[int] | None = None) -> Facts:
    """Every reduction passes: each element of a result is an element of these operands, whatever their values."""
    return _facts("moves", operands, results)


def stated(words: FactWords) -> tuple[Facts, ...]:
    """Keyword arguments as facts, in the order in which they are written; empty without them."""
    if not words:
        return ()
    operands_of: Mapping[str, Any] = words
    return _stated(tuple([(w, n if isinstance(n, str) else _operand_names(w, n)) for w, n in operands_of.items()]))


def _operand_names(word: str, operands: Any) -> tuple[str, ...]:
    names = tuple(operands) if isinstance(operands, Iterable) else (operands,)
    for name in names:
        if not isinstance(name, str):
            raise RuleArgumentError(
                asked=f"make a rule that is {word} in {operands!r}",
                found=f"{name!r} is {kind_of(name)}, and not the name of an operand",
                do=f'Write names, as in {word}="self" or {word}=("self", "mat2").',
                argument=word,
            )
    return names


@lru_cache(maxsize=1024)  # functions of a call state their facts anew for each call
def _stated(words: tuple[tuple[str, str | tuple[str, ...]], ...]) -> tuple[Facts, ...]:
    unknown = [word for word, _ in words if word not in PASSED]
    if unknown:
        near = get_close_matches(unknown[0], [*PASSED, *_OPTIONS], n=1)
        nearest = f"; the nearest is {near[0]}" if near else ""
        raise TypeError(
            f"{unknown[0]!r} is not a fact or another option of a rule{nearest}; facts are {', '.join(PASSED)}"
        )
    facts = [
        fact
        for word, operands in words
        for fact in _facts(word, (operands,) if isinstance(operands, str) else operands, None).facts
    ]
    return (Facts(tuple(facts)),) if facts else ()


def _facts(word: str, operands: Sequence[str], results: Iterable[int] | None) -> Facts:
    which = None if results is None else tuple(results)
    return Facts(tuple(Fact(word, tuple(names.split()), which) for names in _operand_names(word, operands)))


def _positions(call: Call, operands: Sequence[str]) -> set[int]:
    """Where the operands stand among the call's tensors; nowhere where a number stands in place of one."""
    positions: set[int] = set()
    for name in (_argument(call.op, names) for names in operands):
        assert name is not None
        at = [
            i
            for i, (operand, meta) in enumerate(zip(call.operand_names, call.operands, strict=True))
            if isinstance(meta, TensorMeta) and operand.partition("[")[0] == name
        ]
        value = call.args[name]
        if not at and value is not None and not _is_of_tensors(value):
            return set()
        positions.update(at)
    return positions


def _argument(op: Op, names: str) -> str | None:
    """The operand of an op that goes by one of these names, with ``|`` between them; a number may stand for one."""
    operands = {a.name for a in signature(op).args if a.kind is not Kind.BY_VALUE and not a.is_out}
    return next((name for name in names.split("|") if name in operands), None)


def _is_of_tensors(value: Any) -> bool:
    return isinstance(value, TensorMeta) or (
        isinstance(value, tuple) and all(_is_of_tensors(v) for v in value if v is not None)
    )


_LONG: Final = 3


def _shortened(words: Sequence[str]) -> str:
    """Entries of a row; three or more that end it and are the same are written once, with ``...`` behind."""
    run = next((i for i, word in enumerate(reversed(words)) if word != words[-1]), len(words))
    shown = [*words[: len(words) - run + 1], "..."] if run >= _LONG else words
    return ", ".join(shown)
