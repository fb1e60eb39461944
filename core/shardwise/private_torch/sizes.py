"""Sizes that are symbols: their numbers, what is known of them, and their formulas in a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch.fx.experimental import symbolic_shapes

from shardwise.errors import TorchPartError
from shardwise.private_torch.imports import when_imported
from shardwise.private_torch.modes import tracer_now
from shardwise.private_torch.parts import find_part, torch_part

__all__ = [
    "NoNumberError",
    "guess_of",
    "hint_of",
    "is_known",
    "is_open",
    "let_vary",
    "make_known",
    "same_symbol",
    "settled",
    "varies",
    "write_formulas",
]


def hint_of(size: torch.SymInt) -> int:
    """The number that a symbolic size had when tracing began. Reading it adds no guard to the graph."""
    # torch 2.13 has the function, earlier releases the method.
    ask = getattr(symbolic_shapes, "guarding_hint_or_throw", None)
    return int(ask(size) if ask else size.node.require_hint())


def guess_of(size: torch.SymInt) -> int:
    """:func:`hint_of`; for a size that data decides a guess, the same wherever its symbol is. No guard rests on it."""
    try:
        return hint_of(size)
    except NoNumberError:
        # torch 2.13 has the function, earlier releases a method for sizes that are known.
        guess = getattr(symbolic_shapes, "optimization_hint", None)
        if guess is not None:
            return int(guess(size))
        formula = size.node.expr
        guessed = dict.fromkeys(symbolic_shapes.free_unbacked_symbols(formula), _GUESS)
        return int(size.node.shape_env.size_hint(formula.subs(guessed)))


_GUESS = 8192  # as torch's compiler takes for a size that data decides


NoNumberError = symbolic_shapes.GuardOnDataDependentSymNode
"""What torch raises where code needs the number of a size that data decides."""


def settled(size: torch.SymInt) -> int | torch.SymInt:
    """The integer that a symbol is, if guards leave only one; else the symbol."""
    value = size.node.maybe_as_int()
    return size if value is None else int(value)


def same_symbol(one: Any, other: Any) -> bool:
    """Whether two sizes are known to be the same, without adding a guard."""
    if not isinstance(one, torch.SymInt) or not isinstance(other, torch.SymInt):
        return type(one) is type(other) and bool(one == other)
    return bool(one.node.expr == other.node.expr)


def is_known(condition: Any) -> bool:
    """Whether a condition on sizes is known to hold, without adding a guard."""
    return condition is True or bool(symbolic_shapes.statically_known_true(condition))


def let_vary(part: torch.Tensor, dims: Iterable[int]) -> None:
    """Tell dynamo not to guard graphs by some sizes of a tensor inside another tensor.

    This mark has precedence over other marks. Those stay, because torch guards graphs by them. The public API would
    mark the outer tensor, too.
    """
    part._dynamo_unbacked_indices = set(dims)  # type: ignore[attr-defined]


def varies(part: torch.Tensor) -> bool:
    """Whether a tensor has the mark of :func:`let_vary`."""
    return hasattr(part, "_dynamo_unbacked_indices")


def is_open(size: Any) -> bool:
    """Whether a size is a symbol that stands for no number; see :func:`let_vary`. No public function says so."""
    return isinstance(size, torch.SymInt) and symbolic_shapes.has_free_unbacked_symbols(size)


def make_known(sizes: Iterable[Any]) -> None:
    """Add the formulas of sizes that were computed outside the graph to the graph that is being made.

    Torch does so by itself for the arguments of an op. But if it computes with a size before it has written the size's
    formula, it takes the size for a result of its own.
    """
    tracer = tracer_now()
    if tracer is None:
        return
    # Imported here, because loading it takes time.
    from torch.fx.experimental.proxy_tensor import get_proxy_slot, set_proxy_slot

    for size in sizes:
        if isinstance(size, torch.SymInt):
            try:
                slot = get_proxy_slot(size, tracer, None)
            except TorchPartError:
                raise
            except Exception:  # noqa: BLE001, S112  # torch reports a formula that it cannot write where the size is used
                continue
            if slot is not None:
                set_proxy_slot(size, tracer, slot)


def write_formulas() -> None:
    """Have torch write formulas of several sizes as calls with two operands, and powers as products.

    It writes the product of three sizes as one call of ``operator.mul`` (torch 2.11 to 2.13). Inductor refuses that,
    and the code of a graph reads the first two: a wrong size. For the largest it writes a function that Inductor does
    not know. Powers it does not write at all: ``s0**2``, which equal sizes come to. Without the part of torch nothing
    is changed.
    """
    when_imported("torch.fx.experimental.proxy_tensor", _write_formulas)


def _write_formulas(module: Any) -> None:
    write = find_part("torch.fx.experimental.proxy_tensor._build_proxy_for_sym_expr")
    if write is None:
        return

    def write_formula(tracer: Any, formula: Any, out: Any = None) -> Any:
        join, parts = _in_pairs(formula)
        if join is None or formula in tracer.sympy_expr_tracker:
            return write(tracer, formula, out)
        operands = [write_formula(tracer, part) for part in parts]
        if any(operand is None for operand in operands):
            return None
        *front, last = operands
        return _noted(tracer, join, reduce(partial(_noted, tracer, join), front), last, out=out)

    module._build_proxy_for_sym_expr = write_formula


# By class of formula: the function of two operands that a formula of more is made of.
_JOINS = {"Add": operator.add, "Mul": operator.mul, "Max": torch.sym_max, "Min": torch.sym_min}


def _in_pairs(formula: Any) -> tuple[Any, Sequence[Any]]:
    """The function of two operands that a formula is made of, and the operands; without a function where torch is to
    write the formula.
    """
    name = type(formula).__name__
    if name == "Pow" and formula.exp.is_Integer and formula.exp > 1:
        return operator.mul, [formula.base] * int(formula.exp)
    return _JOINS.get(name), getattr(formula, "args", ())


def _noted(tracer: Any, function: Callable[..., Any], *operands: Any, out: Any = None) -> Any:
    """Compute with sizes, and note in the graph how; or note it for a size that is there, ``out``."""
    result = function(*operands) if out is None else out
    note = torch_part("torch.fx.experimental.proxy_tensor._sym_register", "write the size of a shard into a graph")
    note(tracer, function, operands, result)
    return result
