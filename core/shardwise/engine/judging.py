"""Judging calls by the policies in force, before they send anything."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from shardwise.comm.policy import Stack, check_mesh_dims, in_force, policies_now
from shardwise.comm.policy_text import Policy
from shardwise.engine.call_site import is_in_optimizer_step, users_line
from shardwise.engine.remedies import to_move, to_send_nothing_in_lowering
from shardwise.engine.sends import Moved, Sends, move_of
from shardwise.engine.shared_moves import held_moves
from shardwise.engine.traffic import Collective
from shardwise.errors import CommunicationError, CommunicationWarning
from shardwise.kernel.engine import tensor_class
from shardwise.kernel.placements import Placement, show_all
from shardwise.kernel.plan import Plan
from shardwise.kernel.precedence import Entry
from shardwise.kernel.signature import Kind, op_name
from shardwise.kernel.spec import TensorSpec
from shardwise.private_torch.dispatch import name_of_running_node

__all__ = ["judge", "judge_move"]


def judge(plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    """Judge a call of a plan that sends something, or may.

    Raises :class:`CommunicationError` for the first collective that a policy forbids, and warns of those of which one
    warns. Every rank judges alike: only specs and policies decide.
    """
    sends: Sends = plan.sends
    stack, is_backward = policies_now()
    if not stack or sends.is_explicit:
        return
    if plan.kept is not None and plan.kept.arguments(args, kwargs) is not None:
        return  # it runs as another call, which is judged
    phase = "backward" if is_backward else "optimizer" if is_in_optimizer_step() else "forward"
    judged = _Judged(op_name(plan.schema.op), phase, stack, plan.entry)
    for move, one in sends.collectives(_kept(plan, sends, args, kwargs)):
        judged.collective(move, one, sends)
    if not sends.lowering.complete:
        judged.unknown(sends)


def judge_move(op: str, name: str, src: TensorSpec, placements: Sequence[Placement], phase: str = "") -> None:
    """Judge a move that no plan has; ``op`` and ``name`` say what it is for. See :func:`judge`."""
    if not in_force.is_on:
        return
    stack, is_backward = policies_now()
    move = move_of(name, src, src.with_placements(placements)) if stack else None
    if move is None:
        return
    judged = _Judged(op, phase or ("backward" if is_backward else "forward"), stack)
    for one in move.collectives:
        judged.collective(move, one, None)


def _kept(plan: Plan, sends: Sends, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> set[int]:
    """The places of operands that an earlier call has moved to where this one needs them."""
    places = {move.place: move for move in sends.moves if move.place is not None}
    if not places:
        return set()
    described = plan.schema.signature
    values = zip(described.args, described.bind(args, kwargs or {}), strict=True)
    operands = [t for a, v in values if a.kind in _TENSORS for t in (v or () if a.kind is Kind.TENSORS else (v,))]
    kept = set()
    for i, tensor in enumerate(operands):
        held = held_moves(tensor) if i in places and isinstance(tensor, tensor_class()) else None
        if held and places[i].dst in held:
            kept.add(i)
    return kept


@frozen
class _Judged:
    """One call, or another occasion to send something, and the policies that hold for it."""

    op: str
    phase: str
    stack: Stack
    entry: Entry | None = None

    def collective(self, move: Moved | None, one: Collective, sends: Sends | None) -> None:
        """Judge one collective."""
        mesh = move.src.mesh if move is not None else sends.schema.mesh  # type: ignore[union-attr]
        policy = self._policy(mesh, one.kind, one.mesh_dims, one.nbytes)
        if policy is None or policy.action == "allow":
            return
        names = [_name(mesh, m) for m in one.mesh_dims]
        what = f"{one.kind} over {', '.join(names)} ({one.ranks} ranks), {one.nbytes:,} bytes of a rank"
        if move is not None:
            why = f"{move.name} lies as {show_all(move.src.placements)}, and it is needed as "
            why += show_all(move.dst.placements)
            do = to_move(move, self.phase)
            details = {"operand": move.name, "source": str(move.src), "target": str(move.dst)}
        else:
            assert sends is not None
            assert self.entry is not None
            why = "the rule's own lowering sends it"
            do = to_send_nothing_in_lowering(sends, self.entry, one.mesh_dims, self.phase)
            details = {"operand": "", "source": "", "target": ""}
        self._apply(policy, what, why, do, kind=one.kind, mesh_dims=tuple(names), nbytes=one.nbytes, **details)

    def unknown(self, sends: Sends) -> None:
        """Judge a lowering of which only data say what it sends."""
        dims = tuple(m for m in range(sends.schema.mesh.ndim) if sends.schema.mesh.size(m) > 1)
        policy = self._policy(sends.schema.mesh, None, dims, None)
        if policy is None or policy.action == "allow":
            return
        names = tuple(_name(sends.schema.mesh, m) for m in dims)
        what = f"something over {', '.join(names)}: data decide how much, and whether at all"
        assert self.entry is not None
        do = to_send_nothing_in_lowering(sends, self.entry, dims, self.phase)
        details = {"operand": "", "source": "", "target": "", "kind": "", "mesh_dims": names, "nbytes": -1}
        self._apply(policy, what, "the rule's own lowering sends it", do, **details)

    def _policy(self, mesh: Any, kind: str | None, mesh_dims: Iterable[int], nbytes: int | None) -> Policy | None:
        """The policy that holds for a collective: the innermost that is about it."""
        dims: set[str | int] = set(mesh_dims)
        dims |= {_name(mesh, m) for m in mesh_dims}
        for policy in reversed(self.stack):
            check_mesh_dims(policy, "follow")
            if policy.covers(self.phase, kind, dims, nbytes):
                return policy
        return None

    def _apply(self, policy: Policy, what: str, why: str, do: str, **details: Any) -> None:
        file, line = users_line()
        node = name_of_running_node() if self.phase == "backward" else ""
        place = f" in the backward pass of {node}" if node else f" in the {self.phase} pass" * (self.phase != "forward")
        asked = f"run {self.op}{place} at {Path(file).name}:{line} under the policy {str(policy)!r}"
        if policy.action == "forbid":
            raise CommunicationError(
                asked=asked,
                found=f"it needs {what}: {why}",
                do=do,
                op=self.op,
                phase=self.phase,
                policy=str(policy),
                site=(file, line),
                **details,
            )
        site = self.op, details["operand"], details["kind"], file, line
        if site not in _warned:
            _warned.add(site)
            warnings.warn_explicit(f"{asked}: it needs {what}: {why}. {do}", CommunicationWarning, file, line)


_TENSORS = (Kind.TENSOR, Kind.TENSORS)
_warned: set[tuple[Any, ...]] = set()


def _name(mesh: Any, mesh_dim: int) -> str:
    names = getattr(mesh, "mesh_dim_names", None)
    return names[mesh_dim] if names else f"mesh dim {mesh_dim}"
