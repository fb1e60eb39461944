"""Parts of torch by their names, for what a torch may lack.

``tests/private_torch/taken_away.py`` lists every part that is not public, with what happens where it is gone: another
way to the same numbers, or a :class:`TorchPartError`, at import where nothing works without the part, else where it is
needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any, NoReturn

import torch

from shardwise.errors import TorchPartError

__all__ = ["ALSO_RUN", "TESTED_TORCH", "find_part", "missing_parts", "refuse", "require", "torch_part"]

TESTED_TORCH = ("2.11", "2.13")
"""The oldest and the newest release of torch that the tests run with."""
ALSO_RUN = ("2.14", "2.15")
"""Newer releases that the everyday tests were run with once."""

TO_DO = f"Use a newer shardwise, or torch {TESTED_TORCH[0]} to {ALSO_RUN[-1]}."


def find_part(name: str) -> Any | None:
    """The module, function or attribute of a dotted name, such as ``torch._ops.OpOverload``; None if it is missing."""
    first, *rest = name.split(".")
    found: Any = import_module(first)
    path = first
    for attribute in rest:
        path = f"{path}.{attribute}"
        if not hasattr(found, attribute):
            try:
                found = import_module(path)
                continue
            except ImportError:
                return None
        found = getattr(found, attribute)
    return found


def torch_part(name: str, to: str) -> Any:
    """The part of a dotted name. If this torch lacks it, a function that raises :class:`TorchPartError` when it is
    called; ``to`` says what it is needed for.
    """
    found = find_part(name)
    return found if found is not None else lambda *_, **__: refuse(name, to)


def refuse(name: str, to: str, do: str = TO_DO) -> NoReturn:
    """Raise :class:`TorchPartError` for a part that is not there."""
    raise TorchPartError(
        asked=to, found=f"torch {torch.__version__} has no {name}", do=do, part=name, torch=str(torch.__version__)
    )


def missing_parts(names: Iterable[str]) -> list[str]:
    """Those of some parts that this torch lacks."""
    return [name for name in names if find_part(name) is None]


def require(names: Iterable[str], to: str, do: str = TO_DO) -> None:
    """Raise :class:`TorchPartError` for the first part that this torch lacks."""
    for name in missing_parts(names):
        refuse(name, to, do)
