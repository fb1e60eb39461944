"""Collectives that the graphs of ``torch.compile`` issue: recorded, compared, observed and waited for as all others.

A graph calls the functional collectives of torch, forward and backward, whichever backend made it. Each of these ops is
wrapped once in a process (:func:`shardwise.private_torch.distributed.wrap_graph_collectives`), so nothing is added to a
graph and nothing has to be known of it. A call over a process group of no mesh, or one that is traced, passes through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from shardwise.comm.collective_log import call_code
from shardwise.comm.events import Event, emit, new_event, observers
from shardwise.comm.group import Group
from shardwise.comm.rank_failures import go_on
from shardwise.comm.waiting_ranks import failure_behind
from shardwise.private_torch.distributed import GraphOp, wrap_graph_collectives
from shardwise.private_torch.modes import is_run_now

__all__ = ["follow_graphs", "forget_graphs"]

_MOST = 1 << 12  # results that are not waited for yet; a program that never waits for them fills no memory


class _GraphGroup:
    """A process group that graphs may use, by the first group that issues its collectives in eager mode.

    Events say that they run over ``mesh_dims`` of ``mesh``: of several meshes that share it, one with names.
    """

    __slots__ = ("codes", "group", "mesh", "mesh_dims")

    def __init__(self, group: Group, mesh: Any) -> None:
        self.group = group
        self.show_as(group, mesh)
        self.codes: dict[tuple[str, str], int] = {}

    def show_as(self, group: Group, mesh: Any) -> None:
        """Have events say that they run over the mesh dims of a group."""
        self.mesh, self.mesh_dims = mesh, group.mesh_dims

    def code(self, kind: str, reduction: str) -> int:
        """The number that stands for a kind of collective in the log."""
        key = kind, reduction
        if key not in self.codes:
            self.codes[key] = call_code(f"{kind} {reduction}" if reduction else kind, self.group.mesh_dims)
        return self.codes[key]


_by_name: dict[str, _GraphGroup] = {}
_under_way: dict[int, _GraphCall] = {}  # by the address of a result


def follow_graphs(process_group: Any, group: Group, mesh: Any) -> None:
    """Take notice of what graphs send over a process group from now on."""
    known = _by_name.setdefault(str(process_group.group_name), _GraphGroup(group, mesh))
    if not known.mesh.mesh_dim_names:
        known.show_as(group, mesh)
    _wrap_once()


def forget_graphs() -> None:
    """Take no notice any more: the process groups are gone."""
    _by_name.clear()
    _under_way.clear()


@cache
def _wrap_once() -> None:
    wrap_graph_collectives(_issuing, _waiting)


class _GraphCall:
    """A collective of a graph that is under way. The thread that looks for failures finds it on the stack."""

    __slots__ = ("__weakref__", "event", "log", "number", "process_group", "work")

    def __init__(self, group: Group, event: Event | None) -> None:
        self.process_group = group.process_group
        self.log = group.log
        self.number = group.log.count
        self.event = event
        self.work = None  # the op that waits has it

    def wait(self, op: Callable[[Tensor], Tensor], result: Tensor) -> Tensor:
        """The result. Raises as :meth:`shardwise.comm.async_result.AsyncResult.wait` does."""
        if self.event is not None:
            emit(self.event, "waiting")
        try:
            out = op(result)
        except RuntimeError as error:
            failure = failure_behind(error, self.process_group)
            if failure is None:
                raise
            raise failure from error
        if self.event is not None:
            emit(self.event, "waited")
            emit(self.event, "finished")  # or before: the op says no more
        return out


def _issuing(op: GraphOp) -> Callable[..., Any]:
    """What runs in place of an op that issues a collective."""
    run, place = op.run, op.place_of_group

    def issue(*args: Any, **kwargs: Any) -> Any:
        if not is_run_now():
            return run(*args, **kwargs)
        name = args[place] if len(args) > place else kwargs.get("group_name")
        known = _by_name.get(name if type(name) is str else getattr(name, "group_name", ""))
        sent = args[0]
        is_several = type(sent) is list
        if known is None or type(sent[0] if is_several else sent) is not Tensor:
            return run(*args, **kwargs)
        return _issue(known, op, sent if is_several else (sent,), args, kwargs)

    return issue


def _issue(known: _GraphGroup, op: GraphOp, sent: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    group = known.group
    if group.held is not None:
        go_on()
    nbytes = sum([tensor.nbytes for tensor in sent])
    code = known.code(op.kind, "" if op.place_of_reduction is None else args[op.place_of_reduction])
    if op.is_uneven:
        group.log.record_uneven(code, nbytes)
    else:
        group.log.record(code, nbytes)
    result = op.run(*args, **kwargs)
    call = _GraphCall(group, _emitted(known, op, nbytes, known.mesh) if observers else None)
    if len(_under_way) >= _MOST:
        _under_way.clear()
    for tensor in (result,) if isinstance(result, Tensor) else result:
        _under_way[tensor.data_ptr()] = call
    return result


def _emitted(known: _GraphGroup, op: GraphOp, nbytes: int, mesh: Any) -> Event:  # noqa: ARG001  # read from the stack
    """The event of a collective that was issued."""
    kind = "all_to_all" if op.is_uneven else op.kind
    event = new_event(kind, nbytes, known.group.size, known.mesh_dims, in_graph=True)
    emit(event, "issued")
    return event


def _waiting(wait: Callable[..., Any]) -> Callable[..., Any]:
    """What runs in place of the op that waits for a collective."""

    def wait_for(*args: Any, **kwargs: Any) -> Any:
        if not (_under_way and args and type(args[0]) is Tensor and is_run_now()):
            return wait(*args, **kwargs)
        call = _under_way.pop(args[0].data_ptr(), None)
        return wait(*args) if call is None else call.wait(wait, args[0])

    return wait_for
