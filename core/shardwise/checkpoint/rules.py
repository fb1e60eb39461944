"""The rules of a program in its checkpoints, so that a run that goes on with others is told."""

from __future__ import annotations

from shardwise.checkpoint.folder import Checkpoint, rules_of
from shardwise.discovery.process import is_filled, statuses
from shardwise.errors import RulesWarning, warn_user

__all__ = ["rules_in_force", "warn_of_other_rules"]

_SHOWN = 6


def rules_in_force() -> dict[str, str]:
    """By plugin its distribution, version and digest; empty in a process that has looked up no rule."""
    if not is_filled():
        return {}
    from shardwise.discovery.frozen_rules import in_short

    return {status.plugin.origin.plugin: in_short(status) for status in statuses() if status.status == "loaded"}


def warn_of_other_rules(checkpoint: Checkpoint) -> None:
    """Warn where the checkpoint was saved by a program with other rules. The tensors are the same under any rules; what
    the program computes with them need not be.
    """
    saved, here = rules_of(checkpoint), rules_in_force()
    if not saved or not here:
        return
    differ = [name for name in sorted({*saved, *here}) if saved.get(name) != here.get(name)]
    if differ:
        lines = [f"{name}: {saved.get(name, 'none')} then, {here.get(name, 'none')} now" for name in differ[:_SHOWN]]
        rest = f"; and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else ""
        warn_user(
            f"{checkpoint.path} was saved with other rules: {'; '.join(lines)}{rest}. The numbers from here on may "
            "differ from those of a run that was not interrupted; `shardwise plugins freeze` holds rules fast.",
            RulesWarning,
        )
