"""Calling a function that was written for DTensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.errors import NoStrategyError, ShardingError
from shardwise.rule import OpSchema

__all__ = ["refuse", "run_classic"]


def run_classic(function: Callable[..., Any], schema: OpSchema, *args: Any) -> Any:
    """The function's answer. An exception that it raises becomes a :class:`NoStrategyError` of the call."""
    try:
        return function(*args)
    except ShardingError:
        raise
    except Exception as error:
        raise refuse(schema, f"its classic rule raises {type(error).__name__}: {error}") from error


def refuse(schema: OpSchema, found: str) -> NoStrategyError:
    """The error for a call that a classic rule does not answer."""
    return NoStrategyError(
        asked=f"run {schema}",
        found=found,
        do="Redistribute the operands to Replicate(), or extend the rule.",
        op=str(schema.op),
    )
