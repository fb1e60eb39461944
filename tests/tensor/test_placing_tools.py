"""Torch's tools that place or send tensors themselves, on what is on a mesh: each works, or is one error on all ranks.

The tools run on worker processes: one that ends the interpreter is a failed test, not the end of the run.
"""

from __future__ import annotations

import warnings
from inspect import signature
from types import FunctionType

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm import events
from shardwise.errors import GatheredWholeWarning, LayoutError, NoRuleError, TorchToolError
from shardwise.testing import mesh

WHOLE = torch.arange(16.0).reshape(4, 4)


def on(placement=Shard(0)):  # noqa: B008  # placements are values
    return sw.distribute_tensor(WHOLE, mesh((4,)), [placement])


def placed():
    torch.manual_seed(0)
    return sw.distribute_module(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), mesh((4,)), {"0.weight": [Shard(0)]}
    )


def loose():
    """A module of which one parameter is on a mesh, and which nobody has distributed."""
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(on())
    return module


# -- modules -----------------------------------------------------------------------------------------------------------


def fully_shard(module):
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=mesh((4,)))


def fully_shard_a_part(module):
    from torch.distributed.fsdp import fully_shard

    fully_shard(next(module.children(), module))


def fsdp(module, **options):
    from torch.distributed.fsdp import FullyShardedDataParallel

    FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


def replicate_by_fsdp(module):
    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate
    except ImportError:  # in torch from 2.12 on
        from torch.distributed._composable import replicate
    replicate(module)


def parallelize(module):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    parallelize_module(
        module, mesh((4,)), ColwiseParallel() if isinstance(module, nn.Linear) else {"0": ColwiseParallel()}
    )


def torchs_distribute_module(module):
    torch.distributed.tensor.distribute_module(module, mesh((4,)))


def zero(module):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW)


def pipeline_stage(module):
    from torch.distributed.pipelining import PipelineStage

    PipelineStage(module, dist.get_rank(), 4, torch.device("cpu"))


MODULE_TOOLS = {
    "fully_shard": fully_shard,
    "fully_shard of a part": fully_shard_a_part,
    "FullyShardedDataParallel": fsdp,
    "FullyShardedDataParallel with use_orig_params": lambda m: fsdp(m, use_orig_params=True),
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "replicate of FSDP": replicate_by_fsdp,
    "parallelize_module": parallelize,
    "distribute_module of torch": torchs_distribute_module,
    "ZeroRedundancyOptimizer": zero,
    "PipelineStage": pipeline_stage,
}


def is_refused(tool, make):
    module = make()
    sent = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with events.observe(sent.append), pytest.raises(TorchToolError, match="is on a mesh already") as refused:
            tool(module)
    assert not sent
    assert refused.value.tool
    module(on()).sum().backward()  # the module is as it was
    assert all(isinstance(p.grad, sw.MeshTensor) == isinstance(p, sw.MeshTensor) for p in module.parameters())


@pytest.mark.parametrize("make", [placed, loose], ids=["a placed module", "a module with a parameter on a mesh"])
@pytest.mark.parametrize("tool", MODULE_TOOLS.values(), ids=MODULE_TOOLS.keys())
def test_tools_that_place_modules_are_refused(tool, make, pool):
    pool.run(is_refused, tool, make)


def is_refused_at_its_first_forward():
    from torch.distributed._composable.replicate import replicate

    module = replicate(placed())
    with pytest.raises(TorchToolError, match="DistributedDataParallel"):
        module(on())


def test_replicate_is_refused_where_it_begins(pool):
    pool.run(is_refused_at_its_first_forward)


def pipeline_stages():
    """A stage on a mesh of its own ranks is torch's to run."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    grid = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage = grid.get_local_rank("pp")
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    expected = layers[1](layers[0](WHOLE))

    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = sw.distribute_module(layers[stage], grid["tp"], {"weight": [Shard(0)]})

        def forward(self, x):
            return self.layer(sw.distribute_tensor(x, grid["tp"], [Replicate()], src_data_rank=None)).full_tensor()

    with torch.no_grad():
        pipeline = ScheduleGPipe(PipelineStage(Stage(), stage, 2, torch.device("cpu"), group=grid.get_group("pp")), 2)
        result = pipeline.step(WHOLE) if stage == 0 else pipeline.step()
    if stage == 1:
        torch.testing.assert_close(result, expected)


def test_stages_of_a_pipeline_have_meshes_of_their_own(pool):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pool.run(pipeline_stages)


def data_parallel():
    module = placed()
    result = nn.DataParallel(module)(on())
    torch.testing.assert_close(result.full_tensor(), module(on()).full_tensor())
    # A module of plain parameters may have a batch on a mesh: each rank's gradients are those of the whole batch.
    torch.manual_seed(0)
    plain = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    plain(on()).sum().backward()
    torch.testing.assert_close(plain.module.weight.grad, WHOLE.sum(0).expand(4, 4))


def test_data_parallel_on_cpus_and_a_plain_module_with_a_batch_on_a_mesh(pool):
    pool.run(data_parallel)


# -- tensors -----------------------------------------------------------------------------------------------------------


def group():
    return dist.group.WORLD


def rank():
    return dist.get_rank()


def _context_parallel(x):
    from torch.distributed.tensor.experimental import context_parallel

    with context_parallel(mesh((4,)), buffers=[x.repeat(2, 1)], buffer_seq_dims=[0]):
        pass


def _averaged(x):
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    averager = PeriodicModelAverager(period=1, warmup_steps=0)
    parameter = nn.Parameter(x)
    parameter.grad = x
    averager.average_parameters([parameter])


def _objects(x):
    dist.all_gather_object([None] * 4, x)


def _sends_object(x):
    received = [x]
    dist.broadcast_object_list(received, 0)
    if rank() == 0:  # what it sent is its own part
        raise LayoutError(asked="", found="", do="")


def plain(*shape):
    return torch.full(shape or (4, 4), float(rank()))


TENSOR_TOOLS = {
    "distribute_tensor of torch": (
        lambda x: torch.distributed.tensor.distribute_tensor(x, mesh((4,)), [torch.distributed.tensor.Shard(0)]),
        TorchToolError,
    ),
    "distribute_tensor of torch without a source": (
        lambda x: torch.distributed.tensor.distribute_tensor(x, mesh((4,)), src_data_rank=None),
        TorchToolError,
    ),
    "DTensor.from_local": (lambda x: torch.distributed.tensor.DTensor.from_local(x, mesh((4,))), TorchToolError),
    "context_parallel": (_context_parallel, TorchToolError),
    "PeriodicModelAverager": (_averaged, NoRuleError),
    "all_reduce": (dist.all_reduce, NoRuleError),
    "all_reduce later": (lambda x: dist.all_reduce(x, async_op=True), NoRuleError),
    "all_reduce_coalesced": (lambda x: dist.all_reduce_coalesced([x]), NoRuleError),
    "reduce": (lambda x: dist.reduce(x, 0), NoRuleError),
    "broadcast": (lambda x: dist.broadcast(x, 0), NoRuleError),
    "all_gather": (lambda x: dist.all_gather([plain() for _ in range(4)], x), NoRuleError),
    "all_gather into": (lambda x: dist.all_gather([x.clone() for _ in range(4)], plain()), NoRuleError),
    "all_gather_into_tensor": (lambda x: dist.all_gather_into_tensor(plain(16, 4), x), NoRuleError),
    "all_gather_into_tensor into": (lambda x: dist.all_gather_into_tensor(x, plain(1, 4)), NoRuleError),
    "all_gather_coalesced": (
        lambda x: dist.all_gather_coalesced([[plain()] for _ in range(4)], [x]),
        NoRuleError,
    ),
    "reduce_scatter": (lambda x: dist.reduce_scatter(plain(), [x] * 4), NoRuleError),
    "reduce_scatter into": (lambda x: dist.reduce_scatter(x, [plain()] * 4), NoRuleError),
    "reduce_scatter_tensor": (lambda x: dist.reduce_scatter_tensor(plain(1, 4), x), NoRuleError),
    "reduce_scatter_single": (  # from torch 2.13 on
        lambda x: getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(plain(1, 4), x),
        NoRuleError,
    ),
    "all_to_all_single": (lambda x: dist.all_to_all_single(plain(), x), NoRuleError),
    "all_to_all": (lambda x: dist.all_to_all([plain() for _ in range(4)], [x] * 4), NoRuleError),
    "gather": (lambda x: dist.gather(x, [plain() for _ in range(4)] if rank() == 0 else None), NoRuleError),
    "scatter": (lambda x: dist.scatter(x, [x] * 4 if rank() == 0 else None), NoRuleError),
    "scatter of a list": (
        # Only the source has the list, so the others are not asked.
        lambda x: group().scatter([plain()], [[x] * 4], torch._C._distributed_c10d.ScatterOptions()),
        NoRuleError,
    ),
    "send and recv": (lambda x: dist.send(x, rank() + 1) if rank() % 2 == 0 else dist.recv(x, rank() - 1), NoRuleError),
    "isend and irecv": (
        lambda x: dist.isend(x, rank() + 1) if rank() % 2 == 0 else dist.irecv(x, rank() - 1),
        NoRuleError,
    ),
    "batch_isend_irecv": (
        lambda x: dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, rank() ^ 1), dist.P2POp(dist.irecv, x, rank() ^ 1)]
        ),
        NoRuleError,
    ),
    "a method of a group": (lambda x: group().allreduce([x]), NoRuleError),
    "all_gather_object": (_objects, LayoutError),
    "broadcast_object_list": (_sends_object, LayoutError),
    "functional all_reduce": (lambda x: functional.all_reduce(x, "sum", group()), NoRuleError),
    "functional all_gather_tensor": (lambda x: functional.all_gather_tensor(x, 0, group()), NoRuleError),
    "functional reduce_scatter_tensor": (lambda x: functional.reduce_scatter_tensor(x, "sum", 0, group()), NoRuleError),
    "functional all_to_all_single": (lambda x: functional.all_to_all_single(x, None, None, group()), NoRuleError),
    "functional broadcast": (lambda x: functional.broadcast(x, 0, group()), NoRuleError),
    "functional permute_tensor": (lambda x: functional.permute_tensor(x, [1, 2, 3, 0], group()), NoRuleError),
    "functional all_gather_tensor with autograd": (
        lambda x: functional.all_gather_tensor_autograd(x, 0, group()),
        NoRuleError,
    ),
    "functional wait_tensor": (functional.wait_tensor, NoRuleError),
    "torch.distributed.nn all_reduce": (torch.distributed.nn.functional.all_reduce, NoRuleError),
    "torch.distributed.nn all_gather": (torch.distributed.nn.functional.all_gather, NoRuleError),
}


def refuses_tensor(tool, error, placement):
    x = on(placement)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(error) as refused:
            tool(x)
    assert type(refused.value) is error
    torch.testing.assert_close(x.full_tensor(), WHOLE)  # nothing was written, and no rank waits


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["sharded", "replicated"])
@pytest.mark.parametrize(("tool", "error"), TENSOR_TOOLS.values(), ids=TENSOR_TOOLS.keys())
def test_tools_that_send_tensors_are_refused(tool, error, placement, pool):
    pool.run(refuses_tensor, tool, error, placement)


def test_collectives_of_torch_are_in_the_table():
    """Each public function of ``torch.distributed`` that is given tensors."""
    given = {"tensor", "tensors", "tensor_list", "input", "input_list"}
    named = {
        name
        for name, function in vars(dist).items()
        if type(function) is FunctionType and not name.startswith("_") and given & {*signature(function).parameters}
    }
    words = {word for name in TENSOR_TOOLS for word in name.split()}
    assert len(named) > 10
    assert named <= words


def gathered(values):
    every = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(every, values)
    return sum(every)


def counts_on_every_rank():
    on_four = mesh((2, 2))
    x = sw.distribute_tensor(torch.arange(8.0), on_four, [Shard(0), Replicate()])
    count, own = torch.zeros(()), torch.ones(())
    x + own  # compared, and not written
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gathered(own) == 4
        own += 1
        assert gathered(own) == 8
    count += x.sum()
    assert count == 28
    with sw.plain("compare"):  # looks at each use
        assert (x + count).sum() == 28 + 8 * 28  # reading it changes nothing
    with pytest.warns(GatheredWholeWarning, match="sync_on_compute"):
        assert gathered(count) == 4 * 28
    parts = [torch.empty(()) for _ in range(4)] if dist.get_rank() == 0 else None
    with pytest.warns(GatheredWholeWarning, match="gather"):
        dist.gather(count, parts)
    count += 1  # the program's own write, which may differ
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gathered(count) == 4 * 29


def test_what_was_counted_on_every_rank_is_gathered_with_a_warning(pool):
    pool.run(counts_on_every_rank)
