"""Timelines as files: the trace format that Chrome and Perfetto read, and the table of what a program waits for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from shardwise.errors import TimelineFileError
from shardwise.kernel.foreign_files import read_bytes, reason, short
from shardwise.program.amounts import size_text
from shardwise.program.lock_patterns import collapsed
from shardwise.program.plan_file import starred
from shardwise.tools.purposes import OF_GRAPH
from shardwise.tools.sites import Site

__all__ = ["Flight", "Slice", "Trace", "WaitedFor", "exposures", "read_trace", "slice_name", "trace_of"]

VERSION = 1
_PROGRAM = 1  # the thread of modules, optimizer and waits; the mesh dims follow
_MICRO = 1e6


@frozen
class Slice:
    """A module's forward, what runs of its backward, or an optimizer's step; from ``begin`` to ``end`` in seconds."""

    name: str
    category: str
    begin: float
    end: float


@define
class Flight:
    """One collective on its way: issued, finished by the backend (None where that is not known), waited for.

    ``waits`` are the times from the beginning to the end of each wait of the program. ``predicted`` are the seconds of
    the cost model, None where it has no figures. Times are in seconds.
    """

    site: Site
    issued: float
    predicted: float | None
    finished: float | None = None
    waits: list[tuple[float, float]] = field(factory=list)

    @property
    def end(self) -> float:
        """When it was over, as far as the program knows."""
        last = max((end for _, end in self.waits), default=self.issued)
        return last if self.finished is None else self.finished

    @property
    def measured(self) -> float | None:
        """Seconds from when it was issued until the backend was done with it."""
        return None if self.finished is None else self.finished - self.issued

    @property
    def exposed(self) -> float:
        """Seconds that the program waited for it."""
        return sum(end - begin for begin, end in self.waits)


def slice_name(site: Site) -> str:
    """What a collective is called in a timeline and in torch's profiler:
    ``all_reduce tp 2.00 MiB | blocks.3.attention.wo | implicit: aten.add.Tensor, operand `other` is moved ...``.
    """
    dims = ", ".join(site.mesh_dims)
    return f"{site.kind} {dims} {size_text(site.nbytes)} | {site.module or '(no module)'} | {_cause(site)}"


def _cause(site: Site) -> str:
    """Why it is sent. Of a compiled graph's collective nobody knows any more whether an op or the program asked."""
    if site.op == OF_GRAPH:
        return site.why
    return f"implicit: {site.op}, {site.why}" if site.implicit else f"explicit: {site.why}"


# -- writing ---------------------------------------------------------------------------------------------------------


def trace_of(flights: Sequence[Flight], slices: Sequence[Slice], rank: int, *, is_rehearsal: bool) -> dict[str, Any]:
    """The trace as an object of JSON: a thread for the program, and one for each mesh dim, with more where collectives
    overlap. A collective over several mesh dims stands on each of them.
    """
    placed = list(_on_tracks(flights))
    threads = {track: _PROGRAM + 1 + i for i, track in enumerate(sorted({track for _, track in placed}))}
    events = [_complete(rank, _PROGRAM, one.name, one.category, one.begin, one.end) for one in slices]
    for flight in flights:
        args = {"number": flight.site.number}
        name = f"waits: {slice_name(flight.site)}"
        events += [_complete(rank, _PROGRAM, name, "wait", begin, end, args) for begin, end in flight.waits]
    for flight, track in placed:
        name, args = slice_name(flight.site), _arguments(flight)
        events.append(_complete(rank, threads[track], name, "collective", flight.issued, flight.end, args))
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    names = {_PROGRAM: "program", **{at: f"{dim} ({n + 1})" if n else dim for (dim, n), at in threads.items()}}
    head = [_metadata(rank, 0, "process_name", {"name": f"rank {rank}"})]
    for thread, name in names.items():
        head.append(_metadata(rank, thread, "thread_name", {"name": name}))
        head.append(_metadata(rank, thread, "thread_sort_index", {"sort_index": thread}))
    about = {"shardwise_timeline": VERSION, "rank": rank, "rehearsal": is_rehearsal}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": [*head, *events]}


def _on_tracks(flights: Sequence[Flight]) -> Iterator[tuple[Flight, tuple[str, int]]]:
    """Each collective with its tracks: a mesh dim, and a number from 0 on where collectives of the dim overlap."""
    free: dict[str, list[float]] = {}
    for flight in sorted(flights, key=lambda flight: flight.issued):
        for dim in flight.site.mesh_dims:
            lanes = free.setdefault(dim, [])
            lane = next((i for i, end in enumerate(lanes) if end <= flight.issued), len(lanes))
            lanes[lane : lane + 1] = [flight.end]
            yield flight, (dim, lane)


def _complete(
    rank: int, thread: int, name: str, category: str, begin: float, end: float, args: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    times = {"ts": round(begin * _MICRO, 3), "dur": round((end - begin) * _MICRO, 3)}
    return {"ph": "X", "pid": rank, "tid": thread, "name": name, "cat": category, **times, "args": dict(args or {})}


def _metadata(rank: int, thread: int, name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": name, "args": dict(args)}


def _arguments(flight: Flight) -> dict[str, Any]:
    site = flight.site
    return {
        "number": site.number,
        "phase": site.phase,
        "module": site.module,
        "op": site.op,
        "kind": site.kind,
        "mesh_dims": list(site.mesh_dims),
        "ranks": site.ranks,
        "bytes": site.nbytes,
        "why": site.why,
        "implicit": site.implicit,
        "line": str(site.line) if site.line.number else "",
        "predicted_s": flight.predicted,
        "measured_s": flight.measured,
        "exposed_s": flight.exposed,
    }


# -- reading ---------------------------------------------------------------------------------------------------------

_NUMBER = (int, float)
_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "number": (int,),
    "phase": (str,),
    "module": (str,),
    "op": (str,),
    "kind": (str,),
    "mesh_dims": (list,),
    "ranks": (int,),
    "bytes": (int,),
    "why": (str,),
    "implicit": (bool,),
    "line": (str,),
    "predicted_s": (*_NUMBER, type(None)),
    "measured_s": (*_NUMBER, type(None)),
    "exposed_s": _NUMBER,
}
_SLICE: dict[str, tuple[type, ...]] = {"name": (str,), "cat": (str,), "tid": (int,), "ts": _NUMBER, "dur": _NUMBER}


@frozen
class Trace:
    """A timeline that was read: what it says of each collective, its slices, and the names of its tracks."""

    collectives: Sequence[Mapping[str, Any]]
    slices: Sequence[Mapping[str, Any]]
    tracks: Mapping[int, str]


def read_trace(path: Path) -> Trace:
    """The timeline of a file. Raises :class:`TimelineFileError` for a file that is not one."""
    try:
        data = read_bytes(path)
    except (OSError, ValueError) as error:
        raise _wrong(path, reason(error)) from error
    try:
        content = json.loads(data.decode())
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise _wrong(path, f"it is not JSON, or cut short: {short(error) or type(error).__name__}") from error
    about = content.get("otherData") if isinstance(content, dict) else None
    version = about.get("shardwise_timeline") if isinstance(about, dict) else None
    if version is None:
        raise _wrong(path, "it is not a timeline of shardwise")
    if version != VERSION:
        raise _wrong(path, f"it is of version {short(version)}, and this release reads version {VERSION}")
    events = content.get("traceEvents")
    if not isinstance(events, list):
        raise _wrong(path, "it has no list of events")
    found: dict[int, dict[str, Any]] = {}
    slices, tracks = [], {}
    for i, event in enumerate(events):
        if not isinstance(event, dict):
            raise _wrong(path, f"event {i} is not an object")
        if event.get("cat") == "collective":
            args = _checked(path, i, event.get("args"), _ARGUMENTS)
            found.setdefault(args["number"], args)
        if event.get("ph") == "X":
            slices.append(_checked(path, i, event, _SLICE))
        elif event.get("name") == "thread_name":
            args = _checked(path, i, event.get("args"), {"name": (str,)})
            tracks[_checked(path, i, event, {"tid": (int,)})["tid"]] = args["name"]
    if any(one["tid"] not in tracks for one in slices):
        raise _wrong(path, "a slice is on a track without a name")
    return Trace(list(found.values()), slices, tracks)


def _checked(path: Path, i: int, values: Any, expected: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise _wrong(path, f"event {i} says nothing")
    for name, kinds in expected.items():
        if name not in values:
            raise _wrong(path, f"event {i} has no {name!r}")
        value = values[name]
        is_right = isinstance(value, kinds) and isinstance(value, bool) == (bool in kinds)
        if not is_right or (isinstance(value, (int, float)) and not 0 <= value < float("inf")):
            raise _wrong(path, f"event {i} has {str(value)[:60]!r} as {name!r}")
        if isinstance(value, list) and not all(isinstance(part, str) for part in value):
            raise _wrong(path, f"event {i} has {str(value)[:60]} as {name!r}")
    return values


def _wrong(path: Path, found: str) -> TimelineFileError:
    return TimelineFileError(
        asked=f"read the timeline {path}",
        found=found,
        do='Write one by `with shardwise.timeline("step.json"):`.',
        path=str(path),
    )


# -- what a program waits for ----------------------------------------------------------------------------------------


@frozen
class WaitedFor:
    """What a program waits for at one site, repeated layers together; times are sums, in seconds.

    ``predicted`` and ``measured`` are None where one of the collectives has no figure.
    """

    phase: str
    modules: Sequence[str]
    op: str
    kind: str
    mesh_dims: tuple[str, ...]
    why: str
    implicit: bool
    lines: Sequence[str]
    times: int
    nbytes: int
    exposed: float
    measured: float | None
    predicted: float | None


def exposures(collectives: Sequence[Mapping[str, Any]]) -> list[WaitedFor]:
    """The sites of a timeline, the longest waits first."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for one in collectives:
        dims = tuple(one["mesh_dims"])
        key = (one["phase"], starred(one["module"]), one["op"], one["kind"], dims, one["why"], one["implicit"])
        groups.setdefault(key, []).append(one)
    rows = (_of_group(key, group) for key, group in groups.items())
    return sorted(rows, key=lambda row: (-row.exposed, -(row.measured or 0), -row.nbytes, row.phase, row.modules))


def _of_group(key: tuple[Any, ...], group: Sequence[Mapping[str, Any]]) -> WaitedFor:
    phase, _, op, kind, dims, why, implicit = key
    return WaitedFor(
        phase=phase,
        modules=collapsed({one["module"] for one in group}),
        op=op,
        kind=kind,
        mesh_dims=dims,
        why=why,
        implicit=implicit,
        lines=sorted({one["line"] for one in group if one["line"]}),
        times=len(group),
        nbytes=sum(one["bytes"] for one in group),
        exposed=sum(one["exposed_s"] for one in group),
        measured=_sum(one["measured_s"] for one in group),
        predicted=_sum(one["predicted_s"] for one in group),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total
