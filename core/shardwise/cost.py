"""What moving data costs: the alpha-beta model, in seconds, of every kind of step that changes a layout.

A collective over ``n`` ranks costs a start, a latency per doubling of the group, and the bytes that a rank receives
over the bandwidth of the slowest link in the group. Local work costs a start and its bytes over the memory's bandwidth.
Every step costs more than nothing, so leaving a tensor alone always wins. The figures depend on the mesh alone, never
on the rank or the moment: all ranks compute the same floats.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from attrs import field, frozen
from attrs.validators import gt

from shardwise.spec import Mesh

__all__ = ["Link", "Links", "StepCosts", "default_links", "links_of", "step_costs", "use_links"]


@frozen
class Link:
    """One mesh dim's connection: ``start`` and ``latency`` in seconds, ``bandwidth`` in bytes per second and rank."""

    start: float = field(validator=gt(0))
    latency: float = field(validator=gt(0))
    bandwidth: float = field(validator=gt(0))


@frozen(cache_hash=True)
class Links:
    """A mesh's connections, one per mesh dim, and its local memory: start in seconds, bytes per second."""

    mesh_dims: tuple[Link, ...]
    local_start: float = field(validator=gt(0))
    memory_bandwidth: float = field(validator=gt(0))


# Orders of magnitude, not measurements of one machine: gloo over loopback or Ethernet, NCCL over NVLink.
_CPU = Link(start=3e-5, latency=3e-5, bandwidth=1.5e9)
_CPU_LOCAL = (2e-6, 8e9)
_ACCELERATOR = Link(start=1.2e-5, latency=4e-6, bandwidth=1.5e11)
_ACCELERATOR_LOCAL = (4e-6, 1.2e12)

_chosen: dict[Mesh, Links] = {}


@lru_cache
def _defaults(device_type: str, mesh_ndim: int) -> Links:
    on_cpu = device_type == "cpu"
    link, local = (_CPU, _CPU_LOCAL) if on_cpu else (_ACCELERATOR, _ACCELERATOR_LOCAL)
    return Links((link,) * mesh_ndim, *local)


def default_links(mesh: Mesh) -> Links:
    """The written defaults for the mesh's device type, alike on every mesh dim."""
    return _defaults(mesh.device_type, mesh.ndim)


def links_of(mesh: Mesh) -> Links:
    """The figures in use for a mesh: what :func:`use_links` set, else the defaults."""
    return (_chosen and _chosen.get(mesh)) or default_links(mesh)


def use_links(mesh: Mesh, links: Links | None) -> None:
    """Cost moves on ``mesh`` by ``links`` (``None``: by the defaults again).

    Every rank must set the same figures at the same point of the program. Plans that were made before stay as they are:
    set links before the first op on the mesh.
    """
    if links is None:
        _chosen.pop(mesh, None)
    else:
        _chosen[mesh] = links


@frozen(eq=False)
class StepCosts:
    """The cost of each kind of step on one mesh, in seconds; ``dims`` are the mesh dims of the group."""

    sizes: tuple[int, ...]
    links: Links
    _groups: dict[tuple[int, ...], tuple[int, float, float, float]] = field(factory=dict, init=False)

    def all_gather(self, dims: tuple[int, ...], shard_bytes: int) -> float:
        """Each rank gives ``shard_bytes`` and receives those of all others."""
        n, start, latency, seconds_per_byte = self._group(dims)
        return start + latency + (n - 1) * shard_bytes * seconds_per_byte

    # The mirror image: each rank receives the others' pieces of its own shard.
    reduce_scatter = all_gather

    def all_reduce(self, dims: tuple[int, ...], nbytes: int) -> float:
        """A reduce-scatter and an all-gather of ``nbytes``, started once."""
        n, start, latency, seconds_per_byte = self._group(dims)
        return start + 2 * latency + 2 * (n - 1) / n * nbytes * seconds_per_byte

    def all_to_all(self, dims: tuple[int, ...], piece_bytes: int) -> float:
        """Each rank sends a piece of ``piece_bytes`` to every other."""
        n, start, latency, seconds_per_byte = self._group(dims)
        return start + latency + (n - 1) * piece_bytes * seconds_per_byte

    def copy(self, nbytes: float) -> float:
        """A local kernel that writes ``nbytes``: a slice, a fill, a rearrangement."""
        return self.links.local_start + nbytes / self.links.memory_bandwidth

    def alone(self, mesh_dim: int) -> tuple[int, float, float, float]:
        """Group size, start, latency and seconds per byte of a collective over one mesh dim alone.

        A collective over several mesh dims starts no faster than over any one of them, is no faster per byte, and has
        at least the sum of their latencies.
        """
        return self._group((mesh_dim,))

    def _group(self, dims: tuple[int, ...]) -> tuple[int, float, float, float]:
        known = self._groups.get(dims)
        if known is None:
            known = self._groups[dims] = _group_figures(self.sizes, self.links, dims)
        return known


def _group_figures(sizes: tuple[int, ...], links: Links, dims: Iterable[int]) -> tuple[int, float, float, float]:
    """Group size, start, latency, and seconds per byte."""
    n = 1
    doublings = 0
    for m in dims:
        n *= sizes[m]
        doublings += (sizes[m] - 1).bit_length()
    used = [links.mesh_dims[m] for m in dims]
    start = max(link.start for link in used)
    latency = doublings * max(link.latency for link in used)
    return n, start, latency, 1 / min(link.bandwidth for link in used)


@lru_cache(maxsize=256)
def step_costs(mesh_shape: tuple[int, ...], links: Links) -> StepCosts:
    """The costs of steps on meshes of a shape, by these links."""
    return StepCosts(mesh_shape, links)
