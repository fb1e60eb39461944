"""Ops by the names that people type: ``aten.mm.default``, ``aten.mm``, ``mm``, ``acme::kernel``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

import click
import torch
from torch._ops import OpOverloadPacket

from shardwise.registry import Registry
from shardwise.signature import Op, op_name

__all__ = ["close_names", "find_ops", "import_named"]


def find_ops(name: str, namespaces: Sequence[str] = ("aten",)) -> list[Op]:
    """The overloads that a name stands for, by name; none when torch knows no such op.

    A name without a namespace (``mm``, ``add.Tensor``) is looked for in ``namespaces``; the first that has it counts.
    """
    parts = name.removeprefix("torch.ops.").replace("::", ".").split(".")
    for namespace, packet, overload in _readings(parts, namespaces):
        overloads = {op_name(op).split(".", 2)[2]: op for op in _overloads(namespace, packet)}
        chosen = sorted(overloads) if overload is None else [overload]
        if overloads and chosen[0] in overloads:
            return [overloads[each] for each in chosen]
    return []


def _readings(parts: Sequence[str], namespaces: Sequence[str]) -> Iterator[tuple[str, str, str | None]]:
    """Namespace, op and overload (None: all) that the parts of a name may be."""
    match parts:
        case [packet]:
            yield from ((namespace, packet, None) for namespace in namespaces)
        case [first, second]:
            yield first, second, None
            yield from ((namespace, first, second) for namespace in namespaces)
        case [namespace, packet, overload]:
            yield namespace, packet, overload


def _overloads(namespace: str, name: str) -> list[Op]:
    # torch.ops makes up a namespace for every word that it is asked for, and raises for an op.
    if not (namespace.isidentifier() and name.isidentifier()):
        return []
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if not isinstance(packet, OpOverloadPacket):
        return []
    names: list[str] = packet.overloads()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return [getattr(packet, each) for each in names]


def close_names(name: str, registry: Registry) -> list[str]:
    """Names of ops with rules that a person may have meant, as far written out as the name given."""
    wanted = name.removeprefix("torch.ops.").replace("::", ".")
    names: set[str] = set()
    for entry in registry.ops():
        full = op_name(entry.op)
        packet = full.rpartition(".")[0]
        names.update((full, packet) if "." in wanted else (packet.partition(".")[2],))
    return get_close_matches(wanted, sorted(names), 4)


def import_named(modules: Sequence[str]) -> None:
    """Import modules that define ops; the current folder is on the path, as under ``python -m``.

    Raises ``click.ClickException`` for one that cannot be imported.
    """
    here = str(Path.cwd())
    if modules and here not in sys.path:
        sys.path.insert(0, here)
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise click.ClickException(f"cannot import {module}: {type(error).__name__}: {error}") from error
