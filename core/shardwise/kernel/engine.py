"""What the kernel asks of the package ``engine``, which stands above it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from shardwise.kernel.mesh import Mesh
from shardwise.kernel.plan import Plan
from shardwise.kernel.precedence import Entry
from shardwise.kernel.registry import Registry
from shardwise.kernel.schema import RuntimeSchemaInfo
from shardwise.kernel.signature import Op

__all__ = ["Engine", "Handler", "start", "started", "tensor_class"]

Handler = Callable[..., Any]
"""What runs the calls of an op; it has the arguments of ``__torch_dispatch__``."""


class Engine(Protocol):
    """Makes the plans that the dispatcher does not have yet. There is one: :mod:`shardwise.engine`."""

    def registry(self) -> Registry:
        """The registry in force."""

    def meet(self, mesh: Mesh) -> None:
        """Have the ranks of a mesh agree on their rules, once."""

    def plan(
        self, entry: Entry, info: RuntimeSchemaInfo, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Plan | None:
        """The plan of one call. None if its ``out=`` tensors were resized to the shape of the results."""

    def plan_symbolic(
        self, entry: Entry, info: RuntimeSchemaInfo, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Plan:
        """The plan of one call with symbols for sizes."""

    def plain_operands(
        self,
        op: Op,
        operands: Mapping[str, torch.Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        written: bool,
    ) -> Sequence[Any]:
        """The key parts of plain tensors among the operands of a call."""

    def without_rule(self, op: Op) -> Handler:
        """The handler of an op for which no plugin has a rule."""

    def link(self, plan: Plan, results: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        """Take note of what the results of a view op are copies of."""

    def on_kept(self, run: Handler, arguments: Any) -> Any:
        """Run a call on tensors that earlier calls have moved."""

    def judge(self, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        """Raise, or warn, where the policies in force do not allow what a call would send."""

    def after_write(self, tensors: Sequence[Any]) -> None:
        """Bring what an op has written to the bases of copies."""

    def raised(self, op: Op, error: Exception) -> None:
        """Take note of what a call raised."""

    def forget(self) -> None:
        """Drop what was made by earlier rules: some rule changed."""


class _Started:
    """The tensor class and the engine of this process; both are there once ``shardwise.tensor`` is imported."""

    tensor_class: type
    engine: Engine


started = _Started()


def start(tensor_class: type, engine: Engine) -> None:
    """Dispatch ops on a tensor class by the plans of an engine; ``shardwise.tensor`` calls this once."""
    started.tensor_class, started.engine = tensor_class, engine


def tensor_class() -> Any:
    """The class of tensors that lie on a mesh."""
    return started.tensor_class
