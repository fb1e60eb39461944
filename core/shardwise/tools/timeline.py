"""``with shardwise.timeline("step.json"):`` writes what each collective cost, where it came from, and who waited."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from attrs import define, field
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import record_function

from shardwise.comm.events import Event, observe
from shardwise.comm.rank_failures import tell
from shardwise.errors import CallError, ShardingError, TimelineFileError
from shardwise.kernel.arguments import check_path
from shardwise.kernel.nested import tensors_in
from shardwise.kernel.plurals import counted
from shardwise.kernel.whole_files import write_whole
from shardwise.planning.cost import links_of, step_costs
from shardwise.private_torch.autograd_nodes import at_end_of_backward, backward_number
from shardwise.private_torch.fake import is_rehearsing
from shardwise.tools.sites import Site, Sites
from shardwise.tools.trace_file import Flight, Slice, WaitedFor, exposures, slice_name, trace_of

__all__ = ["Timeline", "predicted_seconds", "timeline"]

_MARK = "shardwise_timeline"


def _file_of(path: str | Path, ranks: Any) -> Path:
    """The file, which can be written as far as can be seen before the block."""
    check_path("write a timeline", path, "path")
    file = Path(path)
    if not file.parent.is_dir():
        raise TimelineFileError(
            asked=f"write a timeline to {file}",
            found=f"there is no folder {file.parent}",
            do="Make the folder first, on every host.",
            path=str(file),
        )
    if file.is_dir():
        raise TimelineFileError(
            asked=f"write a timeline to {file}",
            found="it is a folder",
            do=f"Name a file in it: {file / 'step.json'}.",
            path=str(file),
        )
    asked: Any = ranks
    is_list = isinstance(asked, Iterable) and not isinstance(asked, str)
    if asked != "all" and not (is_list and all(isinstance(r, int) for r in asked)):
        raise CallError(
            asked=f"write a timeline of the ranks {ranks!r}", found="it is not a list", do='Pass "all" or (0,).'
        )
    return file


@contextmanager
def timeline(path: str | Path, *, ranks: Sequence[int] | Literal["all"] = (0,)) -> Iterator[Timeline]:
    """Write a trace of what runs in the block, for Perfetto or Chrome, and for ``shardwise timeline``.

    Each collective stands on the track of its mesh dims, with its module, line and reason, its seconds by the cost
    model and as measured, and those that the program waited for it. Modules, optimizers and waits stand on the track of
    the program. While the block runs, torch's profiler shows the waits under the same names.

    The ranks in ``ranks`` record and write. One rank writes ``path``; of several, rank 3 writes ``step.rank3.json``.
    The other ranks run as they would without it. The file is written also where the block raises. Raises
    :class:`TimelineFileError` before the block if there is no such folder, and :class:`CallError` for other ranks than
    numbers or ``"all"``.
    """
    try:
        file = _file_of(path, ranks)
    except ShardingError as error:
        tell(error, "timeline")  # the ranks that go on would wait for this one
        raise
    has_group = dist.is_available() and dist.is_initialized()
    rank, count = (dist.get_rank(), dist.get_world_size()) if has_group else (0, 1)
    absent = [] if ranks == "all" else [r for r in ranks if not 0 <= r < count]
    if absent:
        raise CallError(
            asked=f"write a timeline of the ranks {list(ranks)}",
            found=f"there is no rank {absent[0]}: this program has {counted(count, 'rank')}",
            do='Pass "all" or ranks that there are.',
        )
    recorder = Timeline(rank)
    if ranks != "all" and rank not in ranks:
        yield recorder
        return
    is_one = ranks != "all" and len(ranks) == 1
    target = file if is_one else file.with_name(f"{file.stem}.rank{rank}{file.suffix}")
    try:
        with recorder.recording():
            yield recorder
    except BaseException as error:
        try:
            _write(target, recorder)
        except TimelineFileError as failure:
            error.add_note(f"And {type(failure).__name__}: {failure}")
        raise
    _write(target, recorder)


def _write(file: Path, recorder: Timeline) -> None:
    try:
        write_whole(file, json.dumps(recorder.trace()))
    except OSError as error:
        raise TimelineFileError(
            asked=f"write a timeline to {file}",
            found=f"it cannot be written: {error.strerror}",
            do="Name a file in a folder that can be written.",
            path=str(file),
        ) from error


@define(eq=False, repr=False)
class Timeline:
    """What one rank records; it has nothing on a rank that does not record."""

    rank: int = 0
    flights: list[Flight] = field(factory=list)
    slices: list[Slice] = field(factory=list)
    is_rehearsal: bool = False
    _sites: Sites = field(factory=Sites)
    _by_number: dict[int, Flight] = field(factory=dict)
    _finished: dict[int, float] = field(factory=dict)
    _waiting: dict[int, tuple[float, Any]] = field(factory=dict)
    _open: list[tuple[str, float]] = field(factory=list)
    _backward: int = -1
    _segment: tuple[str, float] | None = None
    _zero: float = 0.0
    _thread: int = field(factory=threading.get_ident)

    def __repr__(self) -> str:
        kind = "rehearsed" if self.is_rehearsal else "recorded"
        flights, slices = counted(len(self.flights), "collective"), counted(len(self.slices), "slice")
        return f"<Timeline of rank {self.rank}: {flights} and {slices} of the program {kind}>"

    def exposures(self) -> list[WaitedFor]:
        """What the program waited for, site by site, the longest waits first: the rows of ``shardwise timeline``."""
        return exposures([e["args"] for e in self._collectives()])

    def trace(self) -> dict[str, Any]:
        """The trace as an object of JSON."""
        for flight in self.flights:
            mesh, finished = flight.site.mesh, self._finished.get(flight.site.number)
            # On other devices than CPUs the backend says so when the work is queued.
            if finished is not None and (mesh is None or mesh.device_type == "cpu"):
                flight.finished = finished
        return trace_of(self.flights, self.slices, self.rank, is_rehearsal=self.is_rehearsal)

    def _collectives(self) -> list[dict[str, Any]]:
        known = {e["args"]["number"]: e for e in self.trace()["traceEvents"] if e.get("cat") == "collective"}
        return list(known.values())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs while the context lasts."""
        self.is_rehearsal = is_rehearsing()
        # A fake group is done at once.
        phases = ("issued", "waiting", "waited") if self.is_rehearsal else ("issued", "finished", "waiting", "waited")
        self._zero = time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(self._sites.phases.followed())
            stack.enter_context(self._sites.following())
            stack.callback(register_module_forward_pre_hook(self._module_begins).remove)
            stack.callback(register_module_forward_hook(self._module_ends, always_call=True).remove)
            stack.callback(register_optimizer_step_pre_hook(self._optimizer_begins).remove)
            stack.callback(register_optimizer_step_post_hook(self._optimizer_ends).remove)
            stack.enter_context(observe(self._saw, phases=phases, in_graphs=True))
            yield
        self._end_of_segment()

    def _now(self) -> float:
        return time.perf_counter() - self._zero

    # -- collectives ---------------------------------------------------------------------------------------------

    def _saw(self, event: Event) -> None:
        now = self._now()
        if event.phase == "issued":
            site = self._sites.of(event)
            flight = Flight(site, event.at - self._zero, predicted_seconds(site))
            self._by_number[event.number] = flight
            self.flights.append(flight)
            return
        if event.phase == "finished":
            self._finished[event.number] = now
            return
        known = self._by_number.get(event.number)
        if known is None:  # issued before the block
            return
        if event.phase == "waiting":
            shown: Any = None if self.is_rehearsal else record_function(slice_name(known.site))
            if shown is not None:
                shown.__enter__()
            self._waiting[event.number] = now, shown
        elif event.number in self._waiting:
            begin, shown = self._waiting.pop(event.number)
            if shown is not None:
                shown.__exit__(None, None, None)
            known.waits.append((begin, now))

    # -- modules and optimizers ----------------------------------------------------------------------------------

    def _module_begins(self, _module: nn.Module, _inputs: Any) -> None:
        if not torch.compiler.is_compiling() and threading.get_ident() == self._thread:
            self._open.append((self._sites.module, self._now()))

    def _module_ends(self, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread or not self._open:
            return
        name, begin = self._open.pop()
        self.slices.append(Slice(name, "module", begin, self._now()))
        node: Any = next((t.grad_fn for t in tensors_in(outputs) if t.grad_fn is not None), None)
        if node is not None and _MARK not in node.metadata:
            node.metadata[_MARK] = name
            node.register_prehook(lambda _grads: self._backward_of(name))

    def _backward_of(self, module: str) -> None:
        """In a backward pass: the gradient of a module's result is there, so its backward begins."""
        if backward_number() != self._backward:
            self._backward = backward_number()
            at_end_of_backward(self._end_of_segment)
        self._end_of_segment()
        self._segment = module, self._now()

    def _end_of_segment(self) -> None:
        if self._segment is not None:
            name, begin = self._segment
            self.slices.append(Slice(f"backward of {name}", "backward", begin, self._now()))
            self._segment = None

    def _optimizer_begins(self, *_: Any) -> None:
        self._open.append(("optimizer", self._now()))

    def _optimizer_ends(self, *_: Any) -> None:
        if self._open and self._open[-1][0] == "optimizer":
            name, begin = self._open.pop()
            self.slices.append(Slice(name, "optimizer", begin, self._now()))


def predicted_seconds(site: Site) -> float | None:
    """What the cost model says that a collective takes, with the figures in use; None where it has none."""
    if site.mesh is None:
        return None
    costs = step_costs(tuple(site.mesh.shape), links_of(site.mesh))
    by_kind: dict[str, Callable[[], float]] = {
        "all_gather": lambda: costs.all_gather(site.dims, site.nbytes),
        "reduce_scatter": lambda: costs.reduce_scatter(site.dims, site.nbytes // site.ranks),
        "all_reduce": lambda: costs.all_reduce(site.dims, site.nbytes),
        "all_to_all": lambda: costs.all_to_all(site.dims, site.nbytes // site.ranks),
    }
    predict = by_kind.get(site.kind)
    return None if predict is None else predict()
