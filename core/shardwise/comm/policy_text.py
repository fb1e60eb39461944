"""A policy on communication as a value, and how settings write it: ``"forbid over tp,dp kinds all_gather"``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from attrs import field, frozen

from shardwise.errors import SettingsError
from shardwise.kernel.plurals import counted

__all__ = ["ACTIONS", "KINDS", "PHASES", "Policy", "checked_policy", "parse_policies"]

ACTIONS = ("allow", "warn", "forbid")
KINDS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "shift")
PHASES = ("forward", "backward", "optimizer", "gradients")
_USUAL_PHASES = PHASES[:3]


@frozen
class Policy:
    """What becomes of the implicit collectives that it covers: all, or those that every condition fits.

    ``over`` are mesh dims by name or number, one of which the collective runs over. ``kinds`` are kinds of collectives,
    ``above`` the bytes that a rank may hand in (0: it may issue none, not even an empty one), and ``phases`` parts of a
    training step. ``of_backward`` is the number of the backward pass in which the policy was entered, -1 for none.
    """

    action: str
    over: tuple[str | int, ...] | None = None
    kinds: tuple[str, ...] | None = None
    above: int = 0
    phases: tuple[str, ...] = _USUAL_PHASES
    of_backward: int = field(default=-1, eq=False, kw_only=True)

    def covers(self, phase: str, kind: str | None, dims: Collection[str | int], nbytes: int | None) -> bool:
        """Whether it is about a collective. ``None`` for a kind or a number of bytes that only data decides."""
        return (
            phase in self.phases
            and (self.over is None or any(dim in dims for dim in self.over))
            and (self.kinds is None or kind is None or kind in self.kinds)
            and (nbytes is None or not self.above or nbytes > self.above)
        )

    def __str__(self) -> str:
        words = [self.action]
        words += [] if self.over is None else ["over", ",".join(map(str, self.over))]
        words += [] if self.kinds is None else ["kinds", ",".join(self.kinds)]
        words += [] if not self.above else ["above", str(self.above)]
        words += [] if self.phases == _USUAL_PHASES else ["phases", ",".join(self.phases)]
        return " ".join(words)


def checked_policy(
    action: str,
    over: Sequence[str | int] | str | int | None,
    kinds: Sequence[str] | str | None,
    above: Any,
    phases: Sequence[str] | str | None,
    where: str,
) -> Policy:
    """A policy of values that were given, or of a text that has all of them in the place of the action.

    Raises :class:`SettingsError` for one that it cannot have.
    """
    if re.search(r"\S\s+\S", str(action)):
        if (over, kinds, above, phases) != (None, None, 0, None):
            found = f"the text {action!r} has conditions of its own, and more are given beside it"
            raise _refused(where, found, "Give all of them in the text, or all as arguments.")
        return _of_text(str(action), where)

    def words(name: str, value: Any, allowed: Sequence[str]) -> tuple[Any, ...]:
        listed = tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else (value,)
        for word in listed:
            is_word = isinstance(word, str) if allowed else isinstance(word, (str, int)) and not isinstance(word, bool)
            if not is_word or (allowed and word not in allowed):
                takes = ", ".join(allowed) if allowed else "names and numbers of mesh dims"
                raise _refused(where, f"{name} has {word!r}", f"It takes {takes}.")
        if not listed:
            raise _refused(where, f"{name} is empty, so the policy is about nothing", f"Leave {name} out, or fill it.")
        return listed

    if action not in ACTIONS:
        raise _refused(where, f"{action!r} is not what a policy does", f"Write {', '.join(ACTIONS)}.")
    if isinstance(above, bool) or not isinstance(above, int) or above < 0:
        raise _refused(where, f"above is {above!r}", "Give a number of bytes, such as 1 << 20.")
    return Policy(
        action,
        None if over is None else words("over", over, ()),
        None if kinds is None else tuple(sorted(set(words("kinds", kinds, KINDS)))),
        above,
        _USUAL_PHASES if phases is None else words("phases", phases, PHASES),
    )


def _refused(where: str, found: str, do: str) -> SettingsError:
    return SettingsError(asked=where, found=found, do=do, setting="communication")


# -- text ------------------------------------------------------------------------------------------------------------

_UNITS = {"": 0, "B": 0, "KiB": 10, "MiB": 20, "GiB": 30}


def parse_policies(texts: Sequence[str], where: str) -> tuple[Policy, ...]:
    """Policies as settings write them: ``"forbid over tp,dp kinds all_gather above 1MiB phases forward"``.

    A text may hold several, separated by semicolons; the last that covers a collective holds. Raises
    :class:`SettingsError`.
    """
    parts = (re.sub(r"\s*,\s*", ",", part) for text in texts for part in text.split(";"))
    return tuple(_parsed(part.split(), where) for part in parts if part.strip())


def _of_text(text: str, where: str) -> Policy:
    policies = parse_policies([text], where)
    if len(policies) != 1:
        do = "Write one, and enter a context for each further one; the innermost that is about a collective holds."
        raise _refused(where, f"the text {text!r} has {counted(len(policies), 'policy')}, and a context is one", do)
    return policies[0]


def _parsed(words: Sequence[str], where: str) -> Policy:
    action, *rest = words
    given: dict[str, Any] = {}
    for i in range(0, len(rest), 2):
        name, value = rest[i], rest[i + 1] if i + 1 < len(rest) else None
        if name not in ("over", "kinds", "above", "phases") or value is None or name in given:
            do = 'Write it as "forbid over tp,dp kinds all_gather above 1MiB phases forward".'
            raise _refused(where, f"{' '.join(words)!r} is not a policy", do)
        given[name] = _bytes(value, where) if name == "above" else [w for w in value.split(",") if w]
    over = given.get("over")
    numbered = None if over is None else [int(w) if w.isdecimal() else w for w in over]
    return checked_policy(action, numbered, given.get("kinds"), given.get("above", 0), given.get("phases"), where)


def _bytes(text: str, where: str) -> int:
    parts = re.fullmatch(r"(\d+)([KMG]iB|B)?", text)
    if parts is None:
        raise _refused(
            where, f"{text!r} is not a number of bytes", "Write a whole number, or one with KiB, MiB or GiB."
        )
    return int(parts[1]) << _UNITS[parts[2] or ""]
