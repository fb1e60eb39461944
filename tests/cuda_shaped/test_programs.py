"""Whole programs as on a mesh of CUDA devices, without one: which kernels run, in which dtypes, what is sent, and that
a warm step never leaves the device.
"""

from contextlib import nullcontext

import pytest
import torch
from functorch.compile import make_boxed_func
from shaped_programs import PROGRAMS, Experts, Language, distributed, ids, rows, sharded, training
from torch._dynamo.backends.common import aot_autograd
from torch.autograd.graph import save_on_cpu
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm.events import observe
from shardwise.errors import CommunicationError, DeviceMismatchError
from shardwise.private_torch.absent_card import as_on
from shardwise.private_torch.dispatch import watching
from shardwise.private_torch.fake import fake_tensors
from shardwise.steps.planning import plan
from shardwise.testing import on_device
from shardwise.tools.rehearse import fake_ranks, rehearse

ATTENTION = "aten._scaled_dot_product_cudnn_attention"
EVERY_DAY = ("language scaled", "convolutions")
# By program: ops that a card's choice makes, and ops that must not run in their place.
KERNELS = {
    "language": ("efficient_attention", "math for_cpu flash cudnn"),
    "language bfloat16": ("cudnn_attention", "math for_cpu efficient"),
    "language autocast": ("cudnn_attention", "math for_cpu efficient"),
    "language scaled": ("cudnn_attention _amp_foreach _fused_adamw_", "math for_cpu efficient"),
    "language scaled foreach": ("cudnn_attention _amp_foreach _foreach_lerp_", "math _fused_adamw_"),
    "language dropout": ("efficient_attention native_dropout", "math for_cpu"),
    "language recomputed": ("efficient_attention native_dropout", "math for_cpu"),
    "language foreach": ("_foreach_addcdiv_", "_fused_adamw_"),
    "language capturable": ("_foreach_addcdiv_", "_fused_adamw_"),
    "language sgd": ("_foreach_add_", "_fused_sgd_"),
    "language sgd fused": ("_fused_sgd_", "_foreach_add_"),
    "convolutions": ("cudnn_batch_norm cudnn_batch_norm_backward convolution_backward", "native_batch_norm"),
    "experts": ("topk bmm", ""),
    "sampled": ("grid_sampler_2d grid_sampler_2d_backward", "cudnn_grid_sampler"),
    "recurrent": ("addmm", "_cudnn_rnn mkldnn"),
    "lstm": ("_thnn_fused_lstm_cell", "_cudnn_rnn mkldnn"),
    "gru": ("_thnn_fused_gru_cell", "_cudnn_rnn mkldnn"),
}


def trained(name, shape):
    waits = []
    return rehearse(training(name, waits), shape, device="cuda"), waits


def check(name, shape):
    rehearsal, waits = trained(name, shape)
    wanted, unwanted = KERNELS[name]
    for word in wanted.split():
        assert any(word in op for op in rehearsal.ops), f"{word} does not run, but {sorted(rehearsal.ops)}"
    for word in unwanted.split():
        assert not any(word in op for op in rehearsal.ops), f"{word} runs"
    assert not waits, "\n".join(map(str, waits))
    assert {use.kind for use in rehearsal.counts} <= {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}


@pytest.mark.parametrize("name", EVERY_DAY)
def test_a_program_runs_with_the_kernels_of_a_card_and_stays_on_it(name):
    check(name, (8,))


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in EVERY_DAY])
def test_every_program_runs_with_the_kernels_of_a_card_and_stays_on_it(name):
    check(name, (8, 128))


def issued(name, shape, rank):
    """The collectives that one rank issues, in order, and their bytes."""
    events = []

    def program(mesh):
        with observe(events.append):
            training(name)(mesh)

    rehearse(program, shape, rank=rank, device="cuda")
    calls = [(event.phase, event.kind, event.mesh_dims, event.group_size, event.reason) for event in events]
    return calls, [event.nbytes for event in events]


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_ranks_issue_the_same_collectives_in_the_same_order(name):
    (calls, nbytes), *others = (issued(name, (4, 2), rank) for rank in range(8))
    assert calls
    assert all(other == (calls, nbytes) for other in others)
    # 16 rows on 6 ranks: the last one has a single row, and sends less.
    (calls, nbytes), *others = (issued(name, (6,), rank) for rank in range(6))
    assert all(other[0] == calls for other in others)
    assert all(a <= b for other in others for a, b in zip(other[1], nbytes, strict=True))


def test_a_warm_step_runs_in_the_dtype_of_autocast():
    dtypes = set()

    def note(op, args, kwargs):
        if "mm" in str(op) and not any(isinstance(a, sw.MeshTensor) for a in args):
            dtypes.update(a.dtype for a in args if isinstance(a, torch.Tensor))
        return NotImplemented if any(isinstance(a, sw.MeshTensor) for a in args) else op(*args, **kwargs)

    def program(mesh):
        model, x = distributed(Language(), mesh), ids(mesh)
        with watching(note, lambda _: False), torch.autocast("cuda", torch.bfloat16):
            model(x)

    rehearse(program, (8,), device="cuda")
    assert dtypes == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.sample
def test_cpu_and_cuda_send_the_same_for_a_step_whose_layouts_are_given():
    """Where only the batch is sharded, no choice depends on how fast the links are."""
    sent = {}
    for device in ("cpu", "cuda"):
        events = sent[device] = []

        def program(mesh, events=events):
            model, x = distributed(Language(), mesh), ids(mesh)
            with observe(lambda event: events.append((event.kind, event.mesh_dims, event.nbytes))):
                model(x).backward()

        rehearse(program, (8,), device=device)
    assert sent["cpu"] == sent["cuda"]
    assert sent["cuda"]


@pytest.mark.slow
@pytest.mark.sample
def test_a_step_is_planned_with_the_kernels_of_a_card():
    def program(mesh):
        return distributed(Experts(), mesh), rows(mesh)

    def attends(mesh):
        return distributed(Language(key_heads=2).bfloat16(), mesh), ids(mesh)

    assert plan(program, (2, 4), ("dp", "tp"), device="cuda").rehearsal.ops["aten._fused_adamw_.default"] == 1
    assert plan(attends, (8,), ("dp",), device="cuda").rehearsal.ops[f"{ATTENTION}_backward.default"] == 2


@pytest.mark.slow
@pytest.mark.sample
def test_a_compiled_function_is_traced_to_the_kernels_of_a_card():
    """A rehearsal watches by a mode, under which torch compiles nothing. So the ranks are made without one."""
    graphs = []

    def keep(graph, _inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    with fake_ranks(8, 0):
        mesh = init_device_mesh("cuda", (8,))
        with fake_tensors(), as_on("cuda"):
            model, x = distributed(Language(), mesh), ids(mesh)
            torch.compile(model, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(x).backward()
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert any("_scaled_dot_product_efficient_attention_backward" in name for name in names)
    assert not any("_safe_softmax" in name for name in names)


def test_a_batch_from_pinned_memory_comes_on_a_stream_of_its_own():
    """Prefetching as many programs have it. Memory that is not pinned is a wait, as on a card."""
    waits, pins = [], []

    def program(mesh):
        stream = torch.cuda.Stream()
        with torch.device("cpu"):
            batch = torch.zeros(16, 16)
        for pinned in (True, False):
            host = batch.pin_memory() if pinned else batch
            pins.append((host.is_pinned(), host[2:].is_pinned()))
            with on_device(raises=False) as found, torch.cuda.stream(stream):
                there = host.to("cuda", non_blocking=True)
            torch.cuda.current_stream().wait_stream(stream)
            there.record_stream(torch.cuda.current_stream())
            rows_of = sharded(there, mesh)
            rows_of.record_stream(stream)
            waits.append([wait.does for wait in found])

    rehearse(program, (8,), device="cuda")
    assert pins == [(True, True), (False, False)]
    assert waits == [[], ["copies from memory of the host that is not pinned"]]
    assert "pin_memory" not in vars(torch.Tensor)
    assert "record_stream" not in vars(torch.Tensor)


def test_a_loader_pins_its_batches():
    shapes = []

    def program(mesh):
        rows = torch.utils.data.TensorDataset(torch.zeros(48, 16, device="cpu"))
        for (batch,) in torch.utils.data.DataLoader(rows, batch_size=16, pin_memory=True):
            shapes.append((batch.is_pinned(), sharded(batch.to("cuda", non_blocking=True), mesh).to_local().shape))

    rehearse(program, (8,), device="cuda")
    assert shapes == [(True, (2, 16))] * 3


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_state_is_staged_on_the_host_before_it_is_saved():
    """As ``torch.distributed.checkpoint.async_save`` does, of which no file can be had without data."""
    staged = {}

    def program(mesh):
        model = distributed(Experts(), mesh, {"up": [Shard(0)]})
        staged.update(StateDictStager(False, False).stage(model.state_dict()))
        staged["itself"] = model.state_dict()["up"]

    rehearse(program, (8,), device="cuda")
    itself, up = staged.pop("itself"), staged["up"]
    # The copy of a fake part keeps its device: torch copies the attribute that says so.
    assert all(isinstance(t, sw.MeshTensor) and t.device.type == "cpu" for t in staged.values())
    assert (up.spec, up.to_local().shape) == (itself.spec, itself.to_local().shape)
    assert up.to_local() is not itself.to_local()
    assert itself.device.type == "cuda"


def test_an_offloaded_state_has_its_parts_on_the_host():
    states, devices = {}, set()

    def program(mesh):
        model = distributed(Experts(), mesh, {"up": [Shard(0)]})
        options = StateDictOptions(cpu_offload=True)
        states["offloaded"], states["itself"] = get_model_state_dict(model, options=options), model.state_dict()
        devices.update((t.device.type, t.to_local().device.type) for t in states["offloaded"].values())
        set_model_state_dict(model, states["offloaded"])
        assert model.up.device.type == model.up.to_local().device.type == "cuda"

    rehearse(program, (8,), device="cuda")
    assert devices == {("cpu", "cpu")}
    assert {n: t.spec for n, t in states["offloaded"].items()} == {n: t.spec for n, t in states["itself"].items()}


def numbers_on_the_host(mesh):
    whole = [Replicate()] * (mesh.ndim - 1)
    model = distributed(Experts(), mesh, {"up": [*whole, Shard(0)]})
    x = sharded(torch.rand(16, 8), mesh)
    weight = torch.rand(8, 4, requires_grad=True)
    scores = x @ sw.distribute_tensor(weight, mesh, [*whole, Shard(1)], src_data_rank=None)
    for whole in (scores.cpu(), scores.to("cpu"), scores.detach().to("cpu", torch.float64, non_blocking=True)):
        assert not isinstance(whole, sw.MeshTensor)
        assert (whole.device.type, whole.shape) == ("cpu", scores.shape)
    assert isinstance(scores.to(torch.float64), sw.MeshTensor)
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    assert {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in model.state_dict().items()}
    weight = model.up
    weight.cpu().square().sum().backward()
    assert (weight.grad.placements, weight.grad.device.type) == (weight.placements, "cuda")
    with pytest.raises(DeviceMismatchError, match="mesh of cuda devices"):
        model.cpu()
    with sw.communication("forbid"), pytest.raises(CommunicationError, match="copy to the host"):
        scores.cpu()
    with save_on_cpu():
        loss = (x * weight.sum()).square().mean()
    loss.backward()


@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_a_program_reads_numbers_on_the_host(shape):
    """As one device: the whole tensor, plain, with its gradient; a module is not made whole by that."""
    rehearse(numbers_on_the_host, shape, device="cuda")


def test_saved_tensors_go_to_the_host_by_their_parts():
    sent = {}

    def program(mesh):
        weight = sw.distribute_tensor(torch.rand(16, 8, requires_grad=True), mesh, [Shard(0)], src_data_rank=None)
        for name, saving in (("host", save_on_cpu()), ("device", nullcontext())):
            sent[name] = []
            with observe(sent[name].append):
                with saving:
                    loss = weight.exp().square().mean()
                loss.backward()

    rehearse(program, (8,), device="cuda")
    assert [(e.kind, e.nbytes) for e in sent["host"]] == [(e.kind, e.nbytes) for e in sent["device"]]


def test_a_tensor_that_a_program_asks_for_on_the_host_is_refused():
    with pytest.raises(DeviceMismatchError, match="mesh of cuda devices"):
        rehearse(lambda mesh: rows(mesh).new_empty(4, device="cpu"), (8,), device="cuda")


# -- tensors of the host -----------------------------------------------------------------------------------------


def host_tensors(mesh):
    with torch.device("cpu"):
        batch, rows, model = torch.ones(8, 6), torch.tensor([0, 2]), torch.nn.Linear(6, 4)
    x = sw.distribute_tensor(batch, mesh, [Shard(0)])
    assert x.to_local().device.type == "cuda"
    assert {t.device.type for t in (x[rows], x[:, rows], x[rows, rows])} == {"cuda"}
    parameter = sw.distribute_tensor(model.weight, mesh, [Shard(1)], src_data_rank=None)
    assert (type(parameter).__name__, parameter.to_local().device.type) == ("MeshTensor", "cuda")
    assert parameter.requires_grad
    sw.distribute_module(model, mesh, {"weight": [Shard(0)]})
    assert {p.to_local().device.type for p in model.parameters()} == {"cuda"}
    model(x).sum().backward()
    with pytest.raises(DeviceMismatchError, match="Move it first"):
        sw.MeshTensor.from_local(batch, mesh, [Shard(0)])


def test_whole_tensors_and_indices_of_the_host_are_brought_to_the_devices():
    """As distribute_tensor of torch does, and as torch does for indices."""
    rehearse(host_tensors, (4,), device="cuda")


def test_saved_statistics_are_sharded_like_the_channels_without_training():
    """On a card the kernels keep them without training, too, and the backward reads them."""

    def program(mesh):
        def on(*shape, places):
            return sw.distribute_tensor(torch.ones(shape), mesh, [places], src_data_rank=None)

        x = on(3, 8, 3, 4, places=Shard(1)).requires_grad_()
        weight, bias = (on(8, places=Shard(0)).requires_grad_() for _ in range(2))
        mean, variance = (on(8, places=Shard(0)) for _ in range(2))
        out = torch.ops.aten._native_batch_norm_legit(x, weight, bias, mean, variance, False, 0.1, 1e-5)[0]
        out.backward(torch.ones_like(out))
        assert x.grad.placements == (Shard(1),)

    sent = rehearse(program, (4,), device="cuda").counts
    assert not [use for use in sent if "batch_norm" in use.op]
