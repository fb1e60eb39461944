"""The group of a rehearsal: it reports collectives and sends nothing."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.futures import Future

from shardwise.comm.async_result import SendReceive
from shardwise.comm.group import REDUCE_OP_OF, Group

__all__ = ["SilentGroup"]


class _Done:
    """The work of a collective that is not carried out."""

    def wait(self) -> None:
        """At once."""

    def get_future(self) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(None)
        return future


class _NoProcessGroup:
    """A process group whose collectives do nothing: results keep whatever their memory holds."""

    def __getattr__(self, name: str) -> Callable[..., _Done]:
        return lambda *_, **__: _Done()


class SilentGroup(Group):
    """A group of a rehearsal: it emits the events of collectives and issues none."""

    def __init__(self, size: int, position: int, mesh_dims: tuple[int, ...]) -> None:
        super().__init__(None, size, position, mesh_dims, "", None)
        self.process_group = _NoProcessGroup()
        self._gather = self.process_group.all_gather
        self._sum_options = dict.fromkeys(REDUCE_OP_OF)
        self._sums_options = self._scatter_options = dict.fromkeys(REDUCE_OP_OF)

    def _send_receive(self, sent: Tensor, there: int, received: Tensor, before: int) -> SendReceive:  # noqa: ARG002  # nobody
        return SendReceive([])
