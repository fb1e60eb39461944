"""What the ops of a rule do on a mesh of a device type, without data: for the comparison of CPU and CUDA."""

import oracle_rules
import torch
from attrs import frozen
from torch.utils._pytree import tree_map_only

from shardwise import MeshTensor, Replicate, Shard
from shardwise.comm.events import observe
from shardwise.errors import ShardingError
from shardwise.kernel.nested import tensors_in
from shardwise.testing import on_device
from shardwise.testing.samples import samples_of
from shardwise.tools.rehearse import rehearse


@frozen
class Outcome:
    """One call: what it returned or raised, what it sent, and where it left the device."""

    result: tuple
    sent: tuple
    waits: tuple = ()


def layouts(mesh):
    """Whole everywhere, and sharded where there are dims."""
    whole = [Replicate()] * mesh.ndim
    return (lambda _: whole), (lambda t: [Shard(0), *whole[1:]] if t.dim() and t.shape[0] else whole)


def outcomes(rules, device, samples, placed, shape=(8,)):
    """By op, number of the sample and layout: the outcome of each call of the rules."""
    found = {}

    def program(mesh):
        for op in (op for _, rule in rules for op in rule.ops):
            for number, sample in enumerate(_calls[op][:samples]):
                for place in placed:
                    found[op, number, place] = outcome(op, sample, mesh, layouts(mesh)[place], device)

    rehearse(program, shape, device=device)
    return found


_calls = {}


def gather_samples(rules):
    """Make the samples, outside of a rehearsal."""
    for plugin, rule in rules:
        for op in rule.ops:
            if op not in _calls:
                _calls[op] = samples_of(op, oracle_rules.declared(plugin, "SAMPLES"))


def outcome(op, sample, mesh, placements, device):
    """Run one call on MeshTensors without data."""

    def laid(tensor):
        local = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        where = placements(tensor)
        whole = MeshTensor.from_local(local, mesh, [Replicate()] * mesh.ndim)
        return whole if where == whole.placements else whole.redistribute(placements=where)

    args, kwargs = tree_map_only(torch.Tensor, laid, sample)
    kwargs = {name: torch.device(device) if isinstance(v, torch.device) else v for name, v in kwargs.items()}
    sent = []
    with torch.device("cpu"), observe(lambda event: sent.append((event.kind, event.nbytes))), torch.no_grad():
        try:
            op(*args, **kwargs)  # a first call has agreements between ranks
            sent.clear()
            with on_device(device, raises=False) as waits:
                result = op(*args, **kwargs)
        except (
            ShardingError,
            RuntimeError,
            TypeError,
            ValueError,
            IndexError,
            AssertionError,
            NotImplementedError,
            AttributeError,
            UserWarning,  # an op without shapes that reads memory
        ) as error:
            return Outcome((type(error).__name__, str(error)[:200]), tuple(sent))
    described = tuple(
        (str(t.dtype), tuple(t.shape), str(getattr(t, "placements", "")), is_held(t, mesh, device))
        for t in tensors_in(result)
    )
    return Outcome(described, tuple(sent), tuple(sorted({f"{w.op} {w.does}" for w in waits})))


def is_held(tensor, mesh, device):
    """Whether a result's part is on the device, and is what its spec says."""
    if not isinstance(tensor, MeshTensor):
        return tensor.device.type == device or not tensor.dim()
    local = tensor.to_local()
    held = local.shape, local.dtype, local.device.type
    return held == (tensor._spec.local_shape(tuple(mesh.get_coordinate())), tensor.dtype, device)
