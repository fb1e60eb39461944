"""The einop notation of rules: ``"m k, k n -> m n"``.

Grammar (blank-separated, operands by comma, one ``->``)::

    operand := "R" | "()" | dim+
    dim     := name | "..." | "1" | "_" | "_*" | "(" name+ ")"

``R`` is a tensor that must be whole, ``()`` one without dims, ``...`` any number of leading broadcast dims, ``(h d)`` a
compound dim, ``1`` a dim of size one, ``_`` a dim that is never sharded and ``_*``, which stands last, any number of
them. Names are lower-case.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from attrs import frozen

from shardwise.errors import NotationError
from shardwise.kernel.plurals import counted

__all__ = ["Dim", "ELLIPSIS", "Notation", "Operand", "TRAILING", "WHOLE", "parse"]

ELLIPSIS: Final = "..."
WHOLE: Final = "_"
TRAILING: Final = "_*"
_TOKEN = re.compile(r"\.\.\.|_\*|\(|\)|->|,|[A-Za-z_][A-Za-z0-9_]*|1|\S")
_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")

Dim = str | tuple[str, ...]


@frozen
class Operand:
    """The dims of one operand; ``dims`` is ``None`` for ``R``."""

    dims: tuple[Dim, ...] | None

    @property
    def names(self) -> tuple[str, ...]:
        """All dim names in order, those in compound dims included."""
        names: list[str] = []
        for dim in self.dims or ():
            names += dim if isinstance(dim, tuple) else [dim] if _NAME.match(dim) else []
        return tuple(names)

    @property
    def has_ellipsis(self) -> bool:
        return self.dims is not None and ELLIPSIS in self.dims

    def __str__(self) -> str:
        if self.dims is None:
            return "R"
        if not self.dims:
            return "()"
        return " ".join(d if isinstance(d, str) else f"({' '.join(d)})" for d in self.dims)


@frozen
class Notation:
    """A parsed notation; ``str`` gives it back in normal form."""

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


@lru_cache(maxsize=1024)
def parse(text: str) -> Notation:
    """Read a notation string; raises :class:`NotationError` with the place of the mistake."""
    tokens = _TOKEN.findall(text)
    if tokens.count("->") != 1:
        raise _error(text, f"'->' stands in it {tokens.count('->')} times", "Write inputs -> outputs with one arrow.")
    arrow = tokens.index("->")
    inputs = _operands(text, tokens[:arrow])
    outputs = _operands(text, tokens[arrow + 1 :])
    if not inputs:
        raise _error(text, "it has no input", "Name the dims of every tensor argument before the arrow.")
    return Notation(inputs, outputs)


def parse_operand(text: str) -> Operand:
    """Read one operand."""
    operands = _operands(text, _TOKEN.findall(text))
    if len(operands) != 1 or "->" in text:
        raise _error(text, f"it is {counted(len(operands), 'operand')}", "Write one operand, such as '... d', R or ().")
    return operands[0]


def _operands(text: str, tokens: list[str]) -> tuple[Operand, ...]:
    if not tokens:
        return ()
    parts: list[list[str]] = [[]]
    for token in tokens:
        if token == ",":
            parts.append([])
        else:
            parts[-1].append(token)
    return tuple(_operand(text, part) for part in parts)


def _operand(text: str, tokens: list[str]) -> Operand:
    if not tokens:
        raise _error(text, "an operand is empty", "Write () for a tensor without dims and R for one that is whole.")
    if tokens == ["R"]:
        return Operand(None)
    if tokens == ["(", ")"]:
        return Operand(())
    operand = Operand(tuple(_dims(text, tokens)))
    repeated = {name for name in operand.names if operand.names.count(name) > 1}
    if repeated:
        raise _error(text, f"{min(repeated)!r} stands twice in one operand", "Use a name once per operand.")
    if sum(d == ELLIPSIS for d in operand.dims or ()) > 1:
        raise _error(text, "one operand has two '...'", "Use '...' once per operand.")
    if TRAILING in (operand.dims or ())[:-1]:
        raise _error(text, "a '_*' is not the last of its operand", "Write it behind all other dims.")
    if TRAILING in (operand.dims or ()) and operand.has_ellipsis:
        raise _error(
            text,
            "one operand has '...' and '_*', so nothing says which dims are whole",
            "Write a function (rule_from) that counts them: like(x, whole=...), or labels(x.ndim, whole=...).",
        )
    return operand


def _dims(text: str, tokens: list[str]) -> list[Dim]:
    dims: list[Dim] = []
    group: list[str] | None = None
    for token in tokens:
        if token == "(":
            if group is not None:
                raise _error(text, "compound dims are nested", "Flatten them: ((a b) c) is (a b c).")
            group = []
        elif token == ")":
            if not group:
                raise _error(text, "a ')' closes nothing", "Write a compound dim as (h d).")
            dims.append(tuple(group))
            group = None
        elif group is not None:
            group.append(_name(text, token))
        else:
            dims.append(token if token in (ELLIPSIS, WHOLE, TRAILING, "1") else _name(text, token))
    if group is not None:
        raise _error(text, "a '(' is not closed", "Write a compound dim as (h d).")
    return dims


def _name(text: str, token: str) -> str:
    if _NAME.match(token):
        return token
    hint = "R must stand alone." if token == "R" else "Dims are lower-case names; R, ..., 1, _, _* are the signs."
    raise _error(text, f"{token!r} is not a dim", hint)


def _error(text: str, found: str, do: str) -> NotationError:
    return NotationError(asked=f"read the notation {text!r}", found=found, do=do, notation=text)
