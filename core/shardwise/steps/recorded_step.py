"""A rehearsal that records the step as well: its calls, and how what the program gives it lies."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from attrs import define, field, frozen
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.errors import PlanError
from shardwise.kernel.plurals import counted
from shardwise.program.plan_file import Layout, layout_text
from shardwise.program.step_graph import StepGraph
from shardwise.steps.recording import Recording
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.names import name_of
from shardwise.tools.rehearse import RankWatch

__all__ = ["RecordedStep", "RecordingWatch"]


@frozen(eq=False)
class RecordedStep:
    """A recorded step, and how what the program gives it lies."""

    graph: StepGraph
    parameters: Mapping[str, Layout]
    inputs: Mapping[str, Layout]


@define(eq=False)
class RecordingWatch(RankWatch):
    """A rehearsal's watch that records the step as well, up to its first optimizer step."""

    recording: Recording = field(factory=Recording)
    _open: ExitStack = field(factory=ExitStack)
    _inputs: dict[str, Layout] = field(factory=dict)
    _placed: dict[str, Layout] = field(factory=dict)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record what runs while the context lasts."""
        hook = register_optimizer_step_pre_hook(lambda *_: self._stop())
        self._open.enter_context(self.recording.running())
        try:
            yield
        finally:
            hook.remove()
            self._stop()

    def begins(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A step that the program returned begins: what came before is not part of it."""
        RankWatch.begins(self, model, args, kwargs)
        self._open.close()
        self.recording = Recording()
        self.recording.name_modules(model)
        self._open = ExitStack()
        self._open.enter_context(self.recording.running())
        for tensor in (*model.parameters(), *model.buffers()):
            self._note(tensor)
        for name, value in _named_inputs(model, args, kwargs):
            if isinstance(value, MeshTensor):
                self._inputs[name] = _layout(value)

    def graph(self, asked: str) -> StepGraph:
        """The calls that were recorded. Raises :class:`PlanError`, with what was asked, if nothing can be decided."""
        recording = self.recording
        if not recording.calls:
            raise PlanError(
                asked=asked,
                found="the program ran no op on a mesh",
                do="Place the model and its inputs on the mesh that the program gets, and run a step or return one.",
            )
        if len(recording.meshes) > 1:
            raise PlanError(
                asked=asked,
                found=f"the program uses {counted(len(recording.meshes), 'mesh')}",
                do="Run a step that uses the mesh that the program gets, and no submesh of it.",
            )
        return recording.graph()

    def step(self) -> RecordedStep:
        """What was recorded, to plan it: :class:`PlanError` also where two tensors of one name lie differently."""
        graph = self.graph("plan a step")
        for leaf in self.recording.leaves:
            self._note(leaf)
        return RecordedStep(graph, self._placed, self._inputs)

    def backward_ended(self, parameters: Sequence[nn.Parameter]) -> None:
        RankWatch.backward_ended(self, parameters)
        self._stop()

    def _stop(self) -> None:
        self._open.close()

    def _note(self, tensor: Any) -> None:
        name = name_of(tensor) if isinstance(tensor, MeshTensor) else ""
        if not name:
            return
        layout = _layout(tensor)
        if self._placed.setdefault(name, layout) != layout:
            raise PlanError(
                asked="plan a step",
                found=f"two tensors are called {name!r}, and they lie differently: {self._placed[name]} and {layout}",
                do="Place the modules together, as children of one module, so that their names differ.",
            )


def _layout(tensor: MeshTensor) -> Layout:
    return layout_text(tensor.device_mesh.mesh_dim_names or (), tensor.placements)


def _named_inputs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    try:
        given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        given = {**{f"arg{i}": value for i, value in enumerate(args)}, **kwargs}
    for name, value in given.items():
        if isinstance(value, (tuple, list)):
            yield from ((f"{name}.{i}", part) for i, part in enumerate(value))
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", part) for key, part in value.items())
        else:
            yield name, value
