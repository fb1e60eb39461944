"""Ops by the names that people type: ``aten.mm.default``, ``aten.mm``, ``mm``, ``acme::kernel``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches

import torch

from shardwise.errors import CallError
from shardwise.kernel.registry import Registry
from shardwise.kernel.signature import Op, op_name
from shardwise.private_torch.ops import OpOverloadPacket, schema_of

__all__ = ["find_ops", "one_of", "ops_named"]


# -- the overloads of a name -----------------------------------------------------------------------------------------


def ops_named(name: str, registry: Registry) -> list[Op]:
    """The overloads that a name stands for; without a namespace it is looked for in aten, then in those with rules.

    Raises :class:`CallError` with close names when torch knows no such op.
    """
    others = sorted({entry.op.namespace for entry in registry.ops()} - {"aten"})
    ops = find_ops(name, ("aten", *others))
    if not ops:
        text = ".".join(_words(name))
        packet, _, overload = text.rpartition(".")
        overloads = find_ops(packet)
        owners = [origin.plugin for full, origin in registry.later() if full in (text, f"{text}.default")]
        if owners:
            found = f"{' and '.join(owners)} has a rule for it, and no library that is imported has the op"
        elif overloads:
            found = f"{packet} has no overload {overload!r}, but {', '.join(map(op_name, overloads))}"
        else:
            # Names of ops with rules that a person may have meant, as far written out as the name.
            names: set[str] = set()
            for full in (op_name(entry.op) for entry in registry.ops()):
                without_overload = full.rpartition(".")[0]
                names.update((full, without_overload) if "." in text else (without_overload.partition(".")[2],))
            near = get_close_matches(text, sorted(names), 4)
            hint = f"; close to it, with rules: {', '.join(near)}" if near else ""
            found = f"torch knows no such op{hint}"
        do = "`shardwise rules` lists the ops with rules; --import MODULE_OR_FILE imports what defines an op."
        raise CallError(asked=f"find the op {name!r}", found=found, do=do, op=name)
    return ops


def find_ops(name: str, namespaces: Sequence[str] = ("aten",)) -> list[Op]:
    """The overloads that a name stands for, by name; none when torch knows no such op.

    A name without a namespace (``mm``, ``add.Tensor``) is looked for in ``namespaces``; the first that has it counts.
    """
    for namespace, packet, overload in _readings(_words(name), namespaces):
        overloads = {op_name(op).split(".", 2)[2]: op for op in _overloads(namespace, packet)}
        chosen = sorted(overloads) if overload is None else [overload]
        if overloads and chosen[0] in overloads:
            return [overloads[each] for each in chosen]
    return []


def _words(name: str) -> list[str]:
    text = name.removeprefix("torch.ops.").replace("::", ".")
    if text.startswith("torch."):  # a function of torch: its last word is most often the name of its op
        text = text.rpartition(".")[2]
    return text.split(".")


def _readings(words: Sequence[str], namespaces: Sequence[str]) -> Iterator[tuple[str, str, str | None]]:
    """Namespace, op and overload (None: all) that the words of a name may be."""
    match words:
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


# -- one of them -----------------------------------------------------------------------------------------------------


def one_of(name: str, ops: Sequence[Op], fits: Callable[[Op], bool]) -> Op:
    """The overload that a call means: the only one, the only one that it fits, else the default one.

    Raises :class:`CallError`, which lists them with their schemas, where several could be meant.
    """
    if len(ops) == 1:
        return ops[0]
    fitting = [op for op in ops if fits(op)]
    left = fitting or list(ops)
    default = [op for op in left if op_name(op).endswith(".default")]
    if len(fitting) == 1 or default:
        return fitting[0] if len(fitting) == 1 else default[0]
    shown = "".join(f"\n  {op_name(op)}: {schema_of(op)}" for op in left)
    raise CallError(
        asked=f"find the overload of {name} that is meant",
        found="several of its overloads fit the call" if fitting else "none of its overloads fits the call",
        do=f"Name one of them:{shown}",
        op=name,
        overloads=tuple(map(op_name, left)),
    )
