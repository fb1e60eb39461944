"""What a program does once it is learned, without a mesh: its first step is rehearsed and decided for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.comm.policy import no_policies
from shardwise.engine.decided import in_force, use_decisions
from shardwise.private_torch.absent_card import as_on
from shardwise.private_torch.fake import fake_tensors
from shardwise.program.collection import no_collection
from shardwise.steps.recorded_step import RecordingWatch
from shardwise.steps.step_decision import Learned, decide_step
from shardwise.tools.rehearse import check_program, fake_ranks, follow, refuse_in_a_group

__all__ = ["learned_step"]


def learned_step(
    program: Callable[[DeviceMesh], Any],
    mesh_shape: Sequence[int],
    mesh_names: Sequence[str] | None = None,
    *,
    device: str = "cpu",
    tell: Callable[[str, int], None] | None = None,
) -> Learned:
    """Decide for the step of ``program(mesh)`` as the ranks of a run do after their first step, in this one process.

    The program is as for :func:`shardwise.tools.rehearse.rehearse`, which takes the decisions:
    ``rehearse(program, mesh_shape, decisions=learned_step(program, mesh_shape).decisions)`` is a later step. There is
    no limit on memory, as for a run on CPUs. What has not asked to be learned goes by the decisions if
    :func:`shardwise.steps.automatic.is_worth_it` says so.

    Raises what the program raises, :class:`PlanError` for a step that cannot be decided for, and
    :class:`MeshMismatchError` where this process has a process group already.
    """
    asked = "learn a step"
    check_program(asked, program, mesh_shape, mesh_names, device, tell)
    refuse_in_a_group(asked)
    names = tuple(mesh_names) if mesh_names else tuple(f"dim{i}" for i in range(len(mesh_shape)))
    before = in_force.now
    watch = RecordingWatch(tell or (lambda _phase, _ops: None))
    try:
        with fake_ranks(math.prod(mesh_shape), 0), no_policies():
            mesh = init_device_mesh(device, tuple(mesh_shape), mesh_dim_names=names)
            use_decisions(None)
            with fake_tensors(), as_on(device):
                with watch.installed(), watch.recorded():
                    follow(program, mesh, watch)
                with no_collection():
                    return decide_step(watch.graph(asked))
    finally:
        use_decisions(*before)
