"""The cost of moving data: the alpha-beta model, in seconds, of every kind of step that changes a layout.

A collective over ``n`` ranks costs a start, a latency per doubling of the group, and the bytes that a rank receives,
divided by the bandwidth of the slowest mesh dim in the group, or that of the memory they are written to, if that is
slower. Each kind of collective has its own figures per mesh dim. Local work costs a start and its bytes, divided by the
bandwidth of the memory. Every step costs more than nothing, so a
tensor stays where it is if it can.

All ranks of a mesh compute with the same figures: the written defaults, those that
:mod:`shardwise.comm.link_agreement` gave to every rank, or those of :func:`use_links`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from attrs import Attribute, field, frozen

from shardwise.discovery.process import default_registry
from shardwise.errors import LinksFitError, PluginLoadError
from shardwise.kernel.mesh import Mesh
from shardwise.kernel.plurals import counted
from shardwise.kernel.precedence import Origin
from shardwise.kernel.registrar import LinkSupplier
from shardwise.kernel.registry import Registry

__all__ = [
    "Connection",
    "JUST_UNDER",
    "KINDS",
    "Link",
    "Links",
    "StepCosts",
    "Wire",
    "answer_of",
    "default_links",
    "links_of",
    "links_of_wires",
    "step_costs",
    "use_agreed_links",
    "use_links",
]

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
"""The kinds of collective; :class:`Connection` has a field for each."""

Wire = str
"""The connection between the ranks along a mesh dim: a key of ``WIRES``."""


def _positive(_: object, attribute: Attribute[float], value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{attribute.name} must be positive and finite, not {value}")


@frozen
class Link:
    """One kind of collective over one mesh dim: ``start`` and ``latency`` in seconds, ``bandwidth`` in bytes per second
    and rank.
    """

    start: float = field(validator=_positive)
    latency: float = field(validator=_positive)
    bandwidth: float = field(validator=_positive)


@frozen
class Connection:
    """One mesh dim's figures for each kind of collective. They include the local copies and sums of its execution."""

    all_gather: Link
    reduce_scatter: Link
    all_reduce: Link
    all_to_all: Link

    @classmethod
    def same(cls, link: Link) -> Connection:
        """The same figures for every kind."""
        return cls(link, link, link, link)

    def of(self, kind: str) -> Link:
        """The figures of one of ``KINDS``."""
        link: Link = getattr(self, kind)
        return link


def _connections(mesh_dims: Iterable[Connection | Link]) -> tuple[Connection, ...]:
    return tuple(Connection.same(c) if isinstance(c, Link) else c for c in mesh_dims)


@frozen(cache_hash=True)
class Links:
    """A mesh's connections, one per mesh dim, and its local memory: start in seconds, bytes per second.

    A :class:`Link` in place of a :class:`Connection` has the figures of every kind. ``whole`` has the figures of the
    group of all ranks, if they were measured. That group may be slower than its mesh dims, because ranks share cores or
    network adapters. ``flops`` are floating-point operations per second of one rank in a large product. An op reads and
    writes its first ``cache_bytes`` with ``cache_bandwidth``.
    """

    mesh_dims: tuple[Connection, ...] = field(converter=_connections)
    local_start: float = field(validator=_positive)
    memory_bandwidth: float = field(validator=_positive)
    whole: Connection | None = None
    flops: float = field(default=5e10, validator=_positive)
    cache_bytes: int = 0
    cache_bandwidth: float = field(default=5e10, validator=_positive)


# -- defaults --------------------------------------------------------------------------------------------------------

# Orders of magnitude for a mesh that was never calibrated. The source of each:
# - loopback: gloo between processes of one host, which copies through the host's memory. Measured with float32 on two
#   cores: 60-100 us for the smallest collective of two ranks, 1-2 GB/s. A reduce-scatter of gloo is an all-to-all and a
#   local sum, which reads every byte again.
# - ethernet: 10 Gb/s, nine tenths of it for payload; a TCP round trip between hosts takes some 50 us.
# - nvlink: NCCL's own tuning table (src/graph/tuning.cc) has 6.6-8.4 us for any collective and 0.6-4.0 us per hop; the
#   launch of a kernel is not in it; nccl-tests gives 2.3e11 B/s on eight A100 and 4.6e11 on eight H100.
# - infiniband: the same table has 2.7-14 us per hop over the network; HDR carries 200 Gb/s, one adapter per device.
_LOOPBACK = Link(start=3e-5, latency=3e-5, bandwidth=1.5e9)
_NVLINK = Link(start=1.2e-5, latency=4e-6, bandwidth=2e11)
_INFINIBAND = Link(start=1.2e-5, latency=1e-5, bandwidth=2e10)
_ETHERNET = Link(start=5e-5, latency=5e-5, bandwidth=1.1e9)

WIRES: dict[Wire, Connection] = {
    "loopback": Connection(
        all_gather=_LOOPBACK,
        reduce_scatter=Link(_LOOPBACK.start, _LOOPBACK.latency, 1.3e9),
        all_reduce=_LOOPBACK,
        all_to_all=_LOOPBACK,
    ),
    "nvlink": Connection.same(_NVLINK),
    "infiniband": Connection.same(_INFINIBAND),
    "ethernet": Connection.same(_ETHERNET),
}
"""The default figures of each connection."""

# Start and bandwidth of a local kernel: a row-major copy of some MiB on a server core; a kernel launch and the HBM2e of
# an A100, read and written. Operations per second: float32 on one server core, and bfloat16 on an A100, of which a
# large product reaches some two thirds (its data sheet has 3.1e14).
_CPU_LOCAL = (2e-6, 8e9)
_CPU_FLOPS = 5e10
# What one core reads and writes in its caches: sums of float32 tensors of 128 KiB to 8 MiB ran at 5e10 to 8e10 B/s, and
# of 64 MiB, whose memory is new, at 4e9.
_CPU_CACHE = (1 << 24, 5e10)
_ACCELERATOR_LOCAL = (4e-6, 7e11)
_ACCELERATOR_FLOPS = 2e14


@lru_cache
def _defaults(device_type: str, wires: tuple[Wire, ...]) -> Links:
    is_cpu = device_type == "cpu"
    local, flops = (_CPU_LOCAL, _CPU_FLOPS) if is_cpu else (_ACCELERATOR_LOCAL, _ACCELERATOR_FLOPS)
    cache, bandwidth = _CPU_CACHE if is_cpu else (0, local[1])
    mesh_dims = tuple(WIRES[wire] for wire in wires)
    return Links(mesh_dims, *local, flops=flops, cache_bytes=cache, cache_bandwidth=bandwidth)


_supplied: WeakKeyDictionary[Registry, dict[Any, Links | None]] = WeakKeyDictionary()


def _by_plugins(mesh_shape: tuple[int, ...], device_type: str, wires: tuple[Wire, ...]) -> Links | None:
    """The figures of the first plugin, by name, that returns any. Its hook is called once per registry and mesh."""
    registry = default_registry()
    if not registry.links:
        return None
    known, key = _supplied.setdefault(registry, {}), (mesh_shape, device_type, wires)
    if key not in known:
        supplied = (answer_of(origin, supplier, *key) for origin, supplier in registry.links)
        known[key] = next((links for links in supplied if links is not None), None)
    return known[key]


def answer_of(
    origin: Origin, supplier: LinkSupplier, mesh_shape: tuple[int, ...], device_type: str, wires: tuple[Wire, ...]
) -> Links | None:
    """What the hook of one plugin returns. Raises :class:`PluginLoadError` for anything else."""
    cause = None
    try:
        links = supplier(mesh_shape, device_type, wires)
        if links is None or (isinstance(links, Links) and len(links.mesh_dims) == len(mesh_shape)):
            return links
        found = f"answers {links!r}"
    except Exception as error:  # noqa: BLE001  # an author's code may raise anything
        found, cause = f"raised {type(error).__name__}: {error}", error
    raise PluginLoadError(
        asked=f"cost redistributions on a mesh of shape {mesh_shape} by the plugin {origin}",
        found=f"its hook shardwise_links {found}",
        do=f"Return None, or Links with {counted(len(mesh_shape), 'mesh dim')}.",
        plugin=str(origin),
    ) from cause


def default_links(mesh: Mesh, wires: Sequence[Wire] | None = None) -> Links:
    """The figures of a mesh that was not measured: those of a plugin, else the written defaults.

    ``wires`` has the connection of each mesh dim. Its default is that of ranks on one host.
    """
    inside = "loopback" if mesh.device_type == "cpu" else "nvlink"
    per_dim = (inside,) * mesh.ndim if wires is None else tuple(wires)
    return _by_plugins(tuple(mesh.shape), mesh.device_type, per_dim) or _defaults(mesh.device_type, per_dim)


def links_of_wires(mesh: Mesh, wires: Sequence[Wire]) -> Links:
    """The written figures of devices with these connections, one per mesh dim, whatever devices the mesh has here.

    With ``nvlink`` or ``infiniband`` they are those of accelerators. Raises :class:`LinksFitError` for another number
    of connections than mesh dims, and for a connection without figures.
    """
    unknown = [wire for wire in wires if wire not in WIRES]
    if unknown or len(wires) != mesh.ndim:
        raise LinksFitError(
            asked=f"cost redistributions with the connections {', '.join(wires)}",
            found=f"{unknown[0]!r} has no figures" if unknown else f"the mesh has {mesh.ndim} dims",
            do=f"Name one of {', '.join(WIRES)} for each mesh dim.",
        )
    device = "cuda" if any(wire in ("nvlink", "infiniband") for wire in wires) else "cpu"
    return _defaults(device, tuple(wires))


# -- the figures in use ----------------------------------------------------------------------------------------------

_chosen: dict[Mesh, Links] = {}
_agreed: dict[Mesh, Links] = {}


def links_of(mesh: Mesh) -> Links:
    """The figures in use for a mesh: those of :func:`use_links`, else those agreed on, else the defaults."""
    return (_chosen and _chosen.get(mesh)) or (_agreed and _agreed.get(mesh)) or default_links(mesh)


def use_links(mesh: Mesh, links: Links | None) -> None:
    """Use ``links`` for costs on ``mesh``. ``None`` returns to the figures that the ranks agreed on, or the defaults.

    Every rank must set the same figures at the same point of the program. Earlier plans stay as they are, so set links
    before the first op on the mesh.
    """
    _set(_chosen, mesh, links)


def use_agreed_links(mesh: Mesh, links: Links | None) -> None:
    """Use the figures that all ranks of the mesh agreed on, unless the program calls :func:`use_links`."""
    _set(_agreed, mesh, links)


def _set(figures: dict[Mesh, Links], mesh: Mesh, links: Links | None) -> None:
    if links is None:
        figures.pop(mesh, None)
    else:
        figures[mesh] = links


def are_chosen(mesh: Mesh) -> bool:
    """Whether :func:`use_links` has set the mesh's figures."""
    return mesh in _chosen


# -- steps -----------------------------------------------------------------------------------------------------------

JUST_UNDER = 1 - 1e-9
"""A factor against rounding: one step wins over two that do the same, and a bound stays below the true cost."""

# Of one kind over one group: ranks, start, latency of the whole group, seconds per byte.
_Figures = tuple[int, float, float, float]


@frozen(eq=False)
class StepCosts:
    """The cost of each kind of step on one mesh, in seconds; ``dims`` are the mesh dims of the group."""

    sizes: tuple[int, ...]
    links: Links
    # Per group: seconds before the first byte, and seconds per byte of the method's second argument.
    _all_gather: dict[tuple[int, ...], tuple[float, float]] = field(factory=dict, init=False)
    _reduce_scatter: dict[tuple[int, ...], tuple[float, float]] = field(factory=dict, init=False)
    _all_reduce: dict[tuple[int, ...], tuple[float, float]] = field(factory=dict, init=False)
    _all_to_all: dict[tuple[int, ...], tuple[float, float]] = field(factory=dict, init=False)

    def all_gather(self, dims: tuple[int, ...], shard_bytes: int) -> float:
        """Each rank gives ``shard_bytes`` and receives those of all others."""
        figures = self._all_gather.get(dims) or self._compute(self._all_gather, "all_gather", dims)
        return figures[0] + shard_bytes * figures[1]

    def reduce_scatter(self, dims: tuple[int, ...], shard_bytes: int) -> float:
        """Each rank receives the others' pieces of its own shard, ``shard_bytes`` long."""
        figures = self._reduce_scatter.get(dims) or self._compute(self._reduce_scatter, "reduce_scatter", dims)
        return figures[0] + shard_bytes * figures[1]

    def all_reduce(self, dims: tuple[int, ...], nbytes: int) -> float:
        """A reduce-scatter and an all-gather of ``nbytes``, started once."""
        figures = self._all_reduce.get(dims)
        if figures is None:
            n, start, latency, seconds_per_byte = self._figures("all_reduce", dims)
            figures = self._all_reduce[dims] = (start + 2 * latency, 2 * (n - 1) / n * seconds_per_byte)
        return figures[0] + nbytes * figures[1]

    def all_reduce_by_moving(self, dims: tuple[int, ...], nbytes: int) -> float:
        """An all-reduce that no backend has: a reduce-scatter and an all-gather, or one all-gather of a small tensor.

        Never less than an all-reduce with the figures of an all-gather: so the law of :meth:`alone` holds. Never less
        over more mesh dims.
        """
        n, start, latency, seconds_per_byte = self._figures("all_gather", dims)
        least = start + 2 * latency + 2 * (n - 1) / n * nbytes * seconds_per_byte
        whole = self.all_gather(dims, nbytes) + self.copy(nbytes)
        piece = -(-nbytes // n)
        parts = self.reduce_scatter(dims, piece) + self.all_gather(dims, piece)
        return min(max(whole, least), parts * JUST_UNDER)

    def all_to_all(self, dims: tuple[int, ...], piece_bytes: int) -> float:
        """Each rank sends a piece of ``piece_bytes`` to every other."""
        figures = self._all_to_all.get(dims) or self._compute(self._all_to_all, "all_to_all", dims)
        return figures[0] + piece_bytes * figures[1]

    def copy(self, nbytes: float) -> float:
        """A local kernel that writes ``nbytes``: a slice, a fill, a rearrangement."""
        return self.links.local_start + nbytes / self.links.memory_bandwidth

    def work(self, nbytes: float, flops: float) -> float:
        """A local op that reads and writes ``nbytes`` and does ``flops`` operations, whichever takes longer."""
        links = self.links
        cached = min(nbytes, links.cache_bytes)
        moving = cached / links.cache_bandwidth + (nbytes - cached) / links.memory_bandwidth
        return links.local_start + max(moving, flops / links.flops)

    def alone(self, mesh_dim: int) -> _Figures:
        """Group size, start, latency and seconds per byte of a collective over one mesh dim alone. Each figure is the
        least of all kinds.

        The law for a collective over several mesh dims: its start and its seconds per byte are not less than those of
        any of them, and its latency is not less than the sum of theirs.
        """
        each = [self._figures(kind, (mesh_dim,)) for kind in KINDS]
        n, start, latency, seconds_per_byte = (min(column) for column in zip(*each, strict=True))
        return int(n), start, latency, seconds_per_byte

    def _compute(
        self, known: dict[tuple[int, ...], tuple[float, float]], kind: str, dims: tuple[int, ...]
    ) -> tuple[float, float]:
        n, start, latency, seconds_per_byte = self._figures(kind, dims)
        known[dims] = (start + latency, (n - 1) * seconds_per_byte)
        return known[dims]

    def _figures(self, kind: str, dims: tuple[int, ...]) -> _Figures:
        """Group size, start, latency, and seconds per byte that a rank receives."""
        n = 1
        doublings = 0
        for m in dims:
            n *= self.sizes[m]
            doublings += (self.sizes[m] - 1).bit_length()
        used = [self.links.mesh_dims[m].of(kind) for m in dims]
        start = max(link.start for link in used)
        latency = max(link.latency for link in used)
        bandwidth = min(self.links.memory_bandwidth, *(link.bandwidth for link in used))
        if self.links.whole is not None and n == math.prod(self.sizes):
            # Never less than its mesh dims: see alone().
            whole = self.links.whole.of(kind)
            start, latency = max(start, whole.start), max(latency, whole.latency)
            bandwidth = min(bandwidth, whole.bandwidth)
        return n, start, doublings * latency, 1 / bandwidth


@lru_cache(maxsize=256)
def step_costs(mesh_shape: tuple[int, ...], links: Links) -> StepCosts:
    """The costs of steps on meshes of a shape, by these links."""
    return StepCosts(mesh_shape, links)
