"""Which of several rules for one op holds, and why the others do not.

An ``override()`` of this process goes first, then the ``prefer`` setting, then a rule that declares that it replaces
the rules of the other plugins, then the only rule. The order of installing or loading plugins plays no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from shardwise.kernel.first_party import PROJECT, is_first_party
from shardwise.kernel.rule import AnyRule
from shardwise.kernel.signature import Op, op_name
from shardwise.settings import normalised, preferred

__all__ = ["Entry", "Origin", "Resolution", "resolve"]


@frozen
class Origin:
    """A plugin and its distribution."""

    plugin: str
    distribution: str = "this process"
    version: str = "-"

    def __str__(self) -> str:
        if self.plugin == self.distribution:
            return f"{self.plugin} {self.version}"
        return f"{self.plugin} ({self.distribution} {self.version})"

    @property
    def first_party(self) -> bool:
        """Whether it ships with shardwise."""
        return is_first_party(normalised(self.distribution))

    def is_called(self, name: str) -> bool:
        """Whether ``name`` is the plugin's name or its distribution's; ``shardwise`` means all that ships with it."""
        name = normalised(name)
        is_own = name in (normalised(self.plugin), normalised(self.distribution))
        return is_own or (name == PROJECT and self.first_party)


@frozen(eq=False)
class Entry:
    """One rule for one op, with its origin; it replaces the rule of the plugin or distribution ``replaces``."""

    op: Op
    rule: AnyRule
    origin: Origin
    replaces: str | None = None

    def __str__(self) -> str:
        return f"{self.origin} at {self.rule.source}"

    def is_replaced_by(self, other: Entry) -> bool:
        """Whether the other rule declares that it replaces this one."""
        return other is not self and other.replaces is not None and self.origin.is_called(other.replaces)


@frozen(eq=False)
class Resolution:
    """Which rule holds for an op and why, and why each of the others does not; no ``winner`` where rules conflict."""

    op: Op
    winner: Entry | None
    reason: str
    losers: tuple[tuple[Entry, str], ...] = ()

    @property
    def rivals(self) -> tuple[Entry, ...]:
        """All entries, the winner first."""
        first = () if self.winner is None else (self.winner,)
        return (*first, *(entry for entry, _ in self.losers))


def resolve(
    op: Op, overrides: Sequence[Entry], entries: Sequence[Entry], prefer: Sequence[tuple[str, str]] = ()
) -> Resolution:
    """Find the entry that holds for an op; ``overrides`` come oldest first."""
    known = sorted(entries, key=lambda e: (e.origin.plugin, e.origin.distribution))
    if overrides:
        *earlier, last = overrides
        losers = [(e, "a later override of this process") for e in reversed(earlier)]
        losers += [(e, "an override of this process goes before every plugin") for e in known]
        return Resolution(op, last, "override of this process", tuple(losers))
    if not known:
        return Resolution(op, None, "no plugin has a rule for it")
    return _by_setting(op, known, prefer) or _by_declaration(op, known)


def _by_setting(op: Op, known: Sequence[Entry], prefer: Sequence[tuple[str, str]]) -> Resolution | None:
    """What the ``prefer`` setting says about an op; None where it says nothing."""
    pair = preferred(prefer, op_name(op))
    if pair is None:
        return None
    setting = f"the setting prefer {pair[0]}={pair[1]}"
    named = [e for e in known if e.origin.is_called(pair[1])]
    if len(named) == 1:
        losers = tuple((e, setting) for e in known if e is not named[0])
        return Resolution(op, named[0], setting, losers)
    if named:
        return _conflict(op, known, f"{setting} names several plugins; name one by its entry point")
    # A pattern means the ops that the plugin has; an op named in full must be there.
    if pair[0] in (op_name(op), op_name(op).rpartition(".")[0]):
        return _conflict(op, known, f"{setting} names a plugin that has no rule for it")
    return None


def _by_declaration(op: Op, known: Sequence[Entry]) -> Resolution:
    """The only rule, or the only one that no other rule replaces."""
    if len(known) == 1:
        return Resolution(op, known[0], "the only rule")
    if circle := _circle(known):
        return _conflict(op, known, f"{', '.join(e.origin.plugin for e in circle)} replace each other in a circle")
    standing = [e for e in known if not any(e.is_replaced_by(other) for other in known)]
    if len(standing) != 1:
        return _conflict(op, known, "nothing says which one holds")
    winner = standing[0]
    losers = []
    for entry in known:
        if entry is not winner:
            replacers = ", ".join(str(other.origin) for other in known if entry.is_replaced_by(other))
            losers.append((entry, f"replaced by {replacers}"))
    return Resolution(op, winner, f"it declares replaces={winner.replaces!r}", tuple(losers))


def _circle(known: Sequence[Entry]) -> Sequence[Entry]:
    """The entries of which each is replaced by one of them and replaces one of them."""
    while True:
        both = [e for e in known if any(e.is_replaced_by(o) for o in known) and any(o.is_replaced_by(e) for o in known)]
        if len(both) == len(known):
            return both
        known = both


def _conflict(op: Op, known: Sequence[Entry], reason: str) -> Resolution:
    return Resolution(op, None, reason, tuple((e, "conflict") for e in known))


def prefer_settings(op: Op, entry: Entry) -> dict[str, Any]:
    """The settings that make an entry's plugin win, as a person types them."""
    name = entry.origin.plugin
    return {
        "environment": f'SHARDWISE_PREFER="{op_name(op)}={name}"',
        "pyproject": f'[tool.shardwise.prefer]\n"{op_name(op)}" = "{name}"',
    }
