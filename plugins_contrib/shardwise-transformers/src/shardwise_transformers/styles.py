"""What each parallel style of transformers says of a parameter: where it lies on the one mesh dim that the plan is for.

The styles are those of ``transformers.distributed``, release 5.23. A style there does two things: it places the
parameters of a module, and it moves activations before and after the module's forward pass. Here an op moves what it
needs by itself, and gradients are summed by themselves, so that only the placements are left to read. Styles that are
about activations or gradients alone leave the parameters whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from shardwise import Placement, Replicate, Shard
from shardwise.kernel.placements import strided_shard

__all__ = ["COLWISE", "PLACES", "ROWWISE", "Place", "replicated"]

Place = Callable[[str, int], Placement]
"""The placement of a parameter by its name in its module and its number of dims."""

PACKED = 2
"""Packed weights hold two matrices, gate and up, one behind the other."""


def _output_dim(ndim: int) -> int:
    """``nn.Linear`` keeps [out, in], experts [expert, out, in], and a bias or a sink per head is [out]."""
    return max(ndim - 2, 0)


def _colwise(_name: str, ndim: int) -> Placement:
    return Shard(_output_dim(ndim))


def _rowwise(name: str, ndim: int) -> Placement:
    return Replicate() if name == "bias" else Shard(ndim - 1)


def _packed_colwise(_name: str, ndim: int) -> Placement:
    return strided_shard(_output_dim(ndim), PACKED)


def _packed_rowwise(_name: str, ndim: int) -> Placement:
    """Experts that keep [expert, in, out] say rowwise and mean their last dim, the outputs."""
    return Replicate() if ndim == 1 else strided_shard(ndim - 1, PACKED)


def _dim(dim: int) -> Place:
    return lambda _name, _ndim: Shard(dim)


def replicated(_name: str, _ndim: int) -> Placement:
    """Whole on every rank."""
    return Replicate()


COLWISE = ("colwise", "colwise_gather_output", "colwise_rep")
ROWWISE = ("rowwise", "rowwise_split_input", "rowwise_rep")

PLACES: Mapping[str, Place] = MappingProxyType(
    {
        **dict.fromkeys(COLWISE, _colwise),
        **dict.fromkeys(ROWWISE, _rowwise),
        "packed_colwise": _packed_colwise,
        "packed_rowwise": _packed_rowwise,
        "embedding_rowwise": _dim(0),
        "embedding_colwise": _dim(1),
        "grouped_gemm": _dim(0),
        "replicate": replicated,
        # Parameters are whole; what these do to activations and gradients happens by itself.
        "sequence_parallel": replicated,
        "replicated_with_grad_allreduce": replicated,
        "mla_kv_a_proj": replicated,
        # On a module whose parameters have entries of their own.
        "moe_tp_experts": replicated,
        "moe_identity_expert": replicated,
        "ep_dispatch_experts": replicated,
        "all_reduce": replicated,
        "local_params": replicated,
    }
)
"""The styles that are known. A style registered by a program is given as ``styles={"name": place}``."""
