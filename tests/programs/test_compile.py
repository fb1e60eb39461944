"""Whole programs under ``torch.compile`` on gloo ranks, against the same in eager mode and on one device."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard
from shardwise.comm import events
from shardwise.errors import PlainTensorError, TracingError, ViewError
from shardwise.kernel import dispatcher
from shardwise.testing import mesh

TIGHT = {"rtol": 1e-9, "atol": 1e-11}
STEPS = 3
SAMPLE = [pytest.mark.slow, pytest.mark.sample]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def attend(self, x):
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Ids ``(batch, time)`` in, scores ``(batch, vocabulary, time)`` out."""

    def __init__(self, layers=2, width=8, heads=4, vocabulary=12, context=6):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(context, width))
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.positions[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(12, 6), nn.Linear(6, 16), nn.Linear(16, 12)

    def forward(self, ids):
        return self.down(torch.relu(self.up(self.embed(ids)))).transpose(1, 2)


def loss_of(model, ids, target):
    return functional.cross_entropy(model(ids), target)


def train(model, ids, target, loss=loss_of):
    """Losses, then gradients and parameters after the last step."""
    steps = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=True)
    losses = []
    for _ in range(STEPS):
        steps.zero_grad()
        result = loss(model, ids, target)
        result.backward()
        steps.step()
        losses.append(result.detach())
    return losses, [p.grad for p in model.parameters()], [p.detach() for p in model.parameters()]


def whole(found):
    return [[t.full_tensor() if isinstance(t, MeshTensor) else t for t in tensors] for tensors in found]


def compare(make, mesh_of, partition, data, backend, batch, hook=None, dtype=torch.float64):
    """Train on one device, on the mesh, and compiled on the mesh: all must be equal."""
    torch._dynamo.reset()
    m = mesh(*mesh_of)
    torch.manual_seed(0)
    reference = make().to(dtype)
    ids, target = torch.randint(12, (2, batch, 6), generator=torch.Generator().manual_seed(1)).unbind()
    expected = train(copy.deepcopy(reference), ids, target)
    eager, spread = (sw.distribute_module(copy.deepcopy(reference), m, partition) for _ in range(2))
    for model in (eager, spread):
        if hook is not None:
            hook(model)
    operands = [sw.distribute_tensor(t, m, data) for t in (ids, target)]
    seen = train(eager, *operands)
    issued = []
    compiled = torch.compile(loss_of, backend=backend, fullgraph=True, dynamic=False)
    with events.observe(issued.append):
        losses = train(spread, *operands, compiled)
    # AdamW moves nothing, so every collective of the step lies in a graph.
    assert issued == []
    tolerance = TIGHT if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(whole(losses), whole(expected), **tolerance)
    for one, other in zip(seen, losses, strict=True):
        assert [t.spec for t in one] == [t.spec for t in other]
        torch.testing.assert_close([t.to_local() for t in one], [t.to_local() for t in other], **tolerance)


DP_TP = ((2, 2), ("dp", "tp"))
ONE = ((4,), ("all",))
TENSOR = {
    "layers.*.w[qkv].weight": {"tp": Shard(0)},
    "layers.*.wo.weight": {"tp": Shard(1)},
    "layers.*.up.*": {"tp": Shard(0)},
    "layers.*.down.weight": {"tp": Shard(1)},
    "embed.weight": {"tp": Shard(0)},
    "head.weight": {"tp": Shard(0)},
}
BOTH = {
    "layers.*.w[qkv].weight": [Shard(0), Shard(0)],
    "layers.*.wo.weight": [Shard(0), Shard(1)],
    "layers.*.up.*": [Shard(0), Shard(0)],
    "layers.*.down.weight": [Shard(0), Shard(1)],
    "*weight": {"dp": Shard(0)},
}
flat = {k: list(v.values()) for k, v in TENSOR.items()}


def sequence_parallel(model):
    """Norms and residuals run on shards of the sequence; the linear layers see it whole."""

    def gathered(_, inputs):
        return (inputs[0].redistribute(placements=[inputs[0].placements[0], Replicate()]),)

    def sharded(_, __, output):
        return output.redistribute(placements=[output.placements[0], Shard(1)])

    model.embed.register_forward_hook(sharded)
    for layer in model.layers:
        for name in ("wq", "wk", "wv", "up"):
            getattr(layer, name).register_forward_pre_hook(gathered)
        for name in ("wo", "down"):
            getattr(layer, name).register_forward_hook(sharded)
    model.head.register_forward_pre_hook(gathered)


CASES = {
    "tensor (4,)": (ONE, flat, [Replicate()], 4, None),
    "data and tensor 2x2, uneven": (DP_TP, TENSOR, [Shard(0), Replicate()], 7, None),
    "parameters over data, tensor and sequence 2x2": (DP_TP, BOTH, [Shard(0), Replicate()], 4, sequence_parallel),
}


def one_layer():
    return Transformer(layers=1)


def test_a_compiled_layer_trains_as_in_eager_mode(two_ranks):
    two_ranks.run(compare, one_layer, ((2,), ("all",)), flat, [Replicate()], "aot_eager", 3, None, timeout=240)


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_transformer_trains_as_in_eager_mode(pool, case):
    mesh_of, partition, data, batch, hook = CASES[case]
    pool.run(compare, Transformer, mesh_of, partition, data, "aot_eager", batch, hook, timeout=240)


@pytest.mark.slow
@pytest.mark.sample
def test_inductor_trains_an_mlp_as_in_eager_mode(pool):
    partition = {"up.*": [Shard(0)], "down.weight": [Shard(1)]}
    pool.run(compare, MLP, ONE, partition, [Replicate()], "inductor", 4, None, torch.float32, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_inductor_trains_a_transformer_as_in_eager_mode(pool, case):
    mesh_of, partition, data, batch, hook = CASES[case]
    pool.run(compare, Transformer, mesh_of, partition, data, "inductor", batch, hook, timeout=280)


# -- what user code may call --------------------------------------------------------------------------------------


def redistributed(x, w):
    return (x @ w).redistribute(placements=[Shard(1)]).relu()


def partial_out(x, w):
    return x.redistribute(placements=[Shard(1)]) @ w.redistribute(placements=[Shard(0)])


def local_part(x, w):
    return (x @ w).to_local().relu()


def gathered_whole(x, w):
    return (x @ w).full_tensor().sum(0)


def in_and_out(x, w):
    y = x @ w
    return MeshTensor.from_local(2 * y.to_local(), y.device_mesh, y.placements, shape=y.shape, stride=y.stride())


def by_layout(x, w):
    y = x @ w
    return y * 2 if y.placements == (Shard(0),) else y * 3


def made_inside(x, w):
    m = x.device_mesh
    result = sw.zeros(7, 12, device_mesh=m, placements=[Shard(0)]) + sw.full((7, 12), 2.5, device_mesh=m)
    return x @ w + result + sw.distribute_tensor(torch.ones(7, 12), m, [Shard(0)], src_data_rank=None)


def viewed(x, w):
    return (x @ w).view(7, 3, 4).transpose(1, 2)[:, 1:3].sum(-1)


def split_in_two(x, w):
    _, used = (x @ w).split(6, 1)
    return torch.cat([used, used.flip(0)], 0)


def reduced(x, w):
    y = (x @ w).redistribute(placements=[Shard(1)])
    return y.amax(1), torch.softmax(y, 1), y.logsumexp(0), y.prod(1), y.std(0), y.norm()


def in_place(x, w):
    y = x @ w
    y.add_(1)
    y[:, 2:4].mul_(3)
    return y


def with_numbers(x, w):
    return (x @ w) * torch.tensor(2.0) / x.shape[0] + x.numel()


def of_input(x, w):
    return x.t(), x[1:], w


PROGRAMS = [
    redistributed, partial_out, local_part, gathered_whole, in_and_out, by_layout, made_inside, viewed, split_in_two,
    reduced, in_place, with_numbers, of_input,
]  # fmt: skip
# Dynamo of torch 2.11 gives a mesh to no function of a graph.
OF_NO_MESH_IN_GRAPHS = (in_and_out, made_inside) if torch.__version__ < "2.12" else ()


def one_dim():
    return mesh((dist.get_world_size(),))


def operands(m, requires_grad=True):
    torch.manual_seed(0)
    x = sw.distribute_tensor(torch.randn(7, 16), m, [Shard(0)])
    return x, sw.distribute_tensor(torch.randn(16, 12), m, [Replicate()]).requires_grad_(requires_grad)


def outcome(program, x, w):
    """Results and the gradient of ``w``, each with its spec."""
    result = program(x, w)
    result = result if isinstance(result, tuple) else (result,)
    total = sum(t.square().sum() for t in result if t.requires_grad)
    (total.full_tensor() if isinstance(total, MeshTensor) else total).backward()
    parts = [t.detach() for t in result] + [w.grad]
    return [(getattr(t, "spec", None), t.to_local() if isinstance(t, MeshTensor) else t) for t in parts]


def run_both(program, backend):
    torch._dynamo.reset()
    m = one_dim()
    expected = outcome(program, *operands(m))
    result = outcome(torch.compile(program, backend=backend, fullgraph=True), *operands(m))
    assert [spec for spec, _ in result] == [spec for spec, _ in expected]
    torch.testing.assert_close([t for _, t in result], [t for _, t in expected])


# Every day without those whose parts other programs have, too.
OF_THE_SAMPLE = partial_out, local_part, split_in_two, with_numbers


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(f, id=f.__name__, marks=SAMPLE if f in OF_THE_SAMPLE else ())
        for f in PROGRAMS
        if f not in OF_NO_MESH_IN_GRAPHS
    ],
)
def test_a_compiled_program_gives_what_it_gives_in_eager_mode(ranks, program):
    ranks.run(run_both, program, "aot_eager", timeout=120)


def plans_of(program, x, w):
    seen = []
    with dispatcher.observe(lambda plan: seen.append(plan.strategies)):
        program(x, w)
    return seen


def plans_while_tracing_and_after():
    torch._dynamo.reset()
    dispatcher.clear_plans()
    m = one_dim()
    traced = plans_of(torch.compile(viewed, backend="eager", fullgraph=True), *operands(m, requires_grad=False))
    dispatcher.clear_plans()
    eager = plans_of(viewed, *operands(m, requires_grad=False))
    assert traced[: len(eager)] == eager
    assert len(eager) > 3


def test_plans_made_while_tracing_are_those_of_eager_mode(ranks):
    ranks.run(plans_while_tracing_and_after)


# -- when a graph is made again -----------------------------------------------------------------------------------


def graphs_for(dynamic, *layouts):
    """How many graphs one compiled function needs for inputs of these shapes and placements."""
    torch._dynamo.reset()
    m = one_dim()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x.relu() * 2, backend=backend, fullgraph=True, dynamic=dynamic)
    for shape, placements in layouts:
        x = sw.distribute_tensor(torch.arange(float(torch.Size(shape).numel())).view(shape), m, placements)
        torch.testing.assert_close(compiled(x).full_tensor(), x.full_tensor().relu() * 2)
    return len(graphs)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_graph_is_used_again_for_the_same_layout_and_no_other(ranks, dynamic):
    rows, columns = ((8, 4), [Shard(0)]), ((8, 4), [Shard(1)])
    assert ranks.run(graphs_for, dynamic, rows, rows, rows) == [1] * ranks.world_size
    assert ranks.run(graphs_for, dynamic, rows, columns, rows, columns) == [2] * ranks.world_size


def test_a_graph_is_used_again_for_other_sizes_where_sizes_are_dynamic(ranks):
    sizes = [((n, 4), [Shard(0)]) for n in (8, 12, 16, 8)]
    assert ranks.run(graphs_for, False, *sizes) == [3] * ranks.world_size
    assert ranks.run(graphs_for, None, *sizes) == [2] * ranks.world_size
    assert ranks.run(graphs_for, True, *sizes) == [1] * ranks.world_size


def joined_sizes(target):
    """A marked size stays a symbol through cat, a redistribution and the gradients of both."""
    torch._dynamo.reset()
    rows = sw.distribute_tensor(torch.ones(5, 2), one_dim(), [Shard(0)])

    def program(x):
        return torch.cat([x, rows]).redistribute(placements=[target]) * 2

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    for size in (7, 9):
        grads = []
        for run in (compiled, program):
            x = sw.distribute_tensor(torch.arange(2.0 * size).view(size, 2), one_dim(), [Shard(0)]).requires_grad_()
            torch._dynamo.mark_dynamic(x, 0)
            y = run(x)
            y.pow(2).sum().backward()
            grads.append([y, x.grad])
        torch.testing.assert_close(*whole(grads))


@pytest.mark.slow
@pytest.mark.sample
def test_a_marked_size_stays_dynamic_through_cat(two_ranks):
    two_ranks.run(joined_sizes, Shard(1))


# -- several results ---------------------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    """Gives its scores and a loss, as other people's models do; a training step uses the loss alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x, target):
        scores = self.layer(x)
        return {"scores": scores, "loss": functional.cross_entropy(scores, target)}


def train_with_loss(layout, weight):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x, target = WithLoss(), torch.randn(8, 4), torch.arange(8) % 6
    model(x, target)["loss"].backward()
    ours = sw.distribute_module(copy.deepcopy(model), one_dim(), {"layer.weight": [weight]})
    batch = sw.distribute_tensor(x, one_dim(), [layout])
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    ours.zero_grad()
    compiled(batch, sw.distribute_tensor(target, one_dim(), [Replicate()]))["loss"].backward()
    torch.testing.assert_close(ours.layer.weight.grad.full_tensor(), model.layer.weight.grad)


def test_a_result_without_a_gradient(ranks):
    ranks.run(train_with_loss, Shard(0), Shard(0))


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize(("layout", "weight"), [(Shard(1), Shard(1)), (Replicate(), Replicate())])
def test_results_of_other_layouts_without_a_gradient(two_ranks, layout, weight):
    two_ranks.run(train_with_loss, layout, weight)


def normalise():
    """Channels and batch are sharded, and the running statistics are whole."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, grid = torch.randn(8, 5), mesh((2, 2))
    results = []
    for norm in (nn.BatchNorm1d(5), sw.distribute_module(nn.BatchNorm1d(5), grid)):
        data = x.clone() if not results else sw.distribute_tensor(x, grid, [Shard(0), Shard(1)])
        data.requires_grad_()
        run = norm if not results else torch.compile(norm, backend="aot_eager", fullgraph=True)
        y = run(data)
        y.pow(3).sum().backward()
        results.append([y, data.grad, norm.running_mean, norm.running_var, norm.weight.grad])
    torch.testing.assert_close(*whole(results))


@pytest.mark.slow
@pytest.mark.sample
def test_compiled_batch_norm_of_sharded_channels(pool):
    pool.run(normalise)


# -- refusals -----------------------------------------------------------------------------------------------------


def refused(program, error):
    torch._dynamo.reset()
    with pytest.raises(error) as caught:
        torch.compile(program, backend="aot_eager", fullgraph=True)(*operands(one_dim()))
    return str(caught.value)


def refuse_to_move():
    with sw.sharing_views():
        return refused(lambda x, w: (x @ w).view(-1, 2, 6).view(84), ViewError)


def test_a_view_that_needs_data_from_elsewhere_is_refused_in_compiled_code_too(ranks):
    said = ranks.run(refuse_to_move)
    assert all("redistribute the tensor first" in text for text in said)


def refuse_plain():
    with sw.plain("refuse"):
        return refused(lambda x, w: x @ w + torch.ones(7, 12), PlainTensorError)


def test_a_plain_tensor_is_refused_in_compiled_code_too(ranks):
    assert all("distribute_tensor" in text for text in ranks.run(refuse_plain))


def draw_by_mask(x, w):
    y = x @ w
    return torch.nn.functional.dropout(y[y > 0]).sum()  # as many numbers as the mask has true elements


def refuse_to_draw():
    return refused(draw_by_mask, TracingError)


def test_what_a_mask_selects_does_not_decide_how_much_is_drawn(ranks):
    assert all("torch.where(mask, new, old)" in text for text in ranks.run(refuse_to_draw))


def plain_compiled(backend, dynamic):
    """Plain tensors in a graph: made there, an input, and an input that ranks do not have in common."""
    torch._dynamo.reset()
    here = one_dim()
    whole_x, plain = torch.linspace(-1, 1, 48).view(8, 6), torch.arange(6.0)
    x = sw.distribute_tensor(whole_x, here, [Shard(0)])

    def program(x, p):
        return ((x + p) * torch.arange(6.0)).sum(0) + torch.ones(6, 6).triu().sum(1)

    compiled = torch.compile(program, backend=backend, fullgraph=True, dynamic=dynamic)
    for p in (plain, plain + 1):
        torch.testing.assert_close(compiled(x, p).full_tensor(), program(whole_x, p))
    weight, wanted = plain.clone().requires_grad_(), plain.clone().requires_grad_()
    compiled(x, weight).square().sum().backward()
    program(whole_x, wanted).square().sum().backward()
    assert type(weight.grad) is torch.Tensor
    torch.testing.assert_close(weight.grad, wanted.grad)
    with pytest.raises(RuntimeError, match=r"test_compile\.py:\d+.*'other'.*ranks do not have the same"):
        compiled(x, plain + here.get_local_rank())


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=SAMPLE), True])
def test_plain_tensors_in_compiled_code_are_compared_when_it_runs(ranks, dynamic):
    ranks.run(plain_compiled, "aot_eager", dynamic)


def complex_number_compiled():
    """Autograd keeps the number for the backward pass, as a tensor of the graph that torch has not made functional."""
    torch._dynamo.reset()
    whole = torch.linspace(-1, 1, 48).view(8, 6).requires_grad_()
    x = sw.distribute_tensor(whole.detach(), one_dim(), [Shard(0)]).requires_grad_()

    def program(x):
        return torch.view_as_real(torch.complex(x, x.cos()) * 2j).sin().sum()

    torch.compile(program, backend="aot_eager", fullgraph=True)(x).backward()
    program(whole).backward()
    torch.testing.assert_close(x.grad.full_tensor(), whole.grad)


def test_a_complex_number_in_compiled_code(ranks):
    ranks.run(complex_number_compiled)


class TwosBehind(torch.autograd.Function):
    """Gives a plain tensor for a gradient, which is neither zeros nor ones."""

    @staticmethod
    def forward(_, x):
        return x * 1

    @staticmethod
    def backward(_, grad):
        return torch.full(grad.shape, 2.0)


def plain_gradient(backend):
    torch._dynamo.reset()
    program = torch.compile(lambda x, w: TwosBehind.apply(x @ w).sum(), backend=backend, fullgraph=True)
    x, w = operands(one_dim())
    program(x, w).backward()
    whole_x, whole_w = x.full_tensor().detach(), w.full_tensor().detach().requires_grad_()
    TwosBehind.apply(whole_x @ whole_w).sum().backward()
    torch.testing.assert_close(w.grad.full_tensor(), whole_w.grad)


def test_a_plain_gradient_counts_as_whole_in_compiled_code_too(ranks):
    ranks.run(plain_gradient, "aot_eager")


# -- optimizer steps ---------------------------------------------------------------------------------------------------


def step_compiled(name, sizes=(5, 3)):
    """An optimizer's compiled steps on a shard and a whole parameter, beside the same compiled on one device."""
    torch._dynamo.reset()
    start = torch.linspace(-1, 1, sizes[0] * sizes[1]).view(sizes)
    results = []
    for layouts in (None, ([Shard(0)], [Replicate()])):
        tensors = [start.clone(), start[0].clone()]
        if layouts is not None:
            tensors = [sw.distribute_tensor(t, one_dim(), layout) for t, layout in zip(tensors, layouts, strict=True)]
        parameters = list(map(nn.Parameter, tensors))
        optimizer = getattr(torch.optim, name)(parameters, lr=0.1)
        step = torch.compile(optimizer.step, backend="aot_eager")
        for i in range(STEPS):
            for p in parameters:
                p.grad = p.detach() * (i + 1)
            step()
        results.append([p.detach() for p in parameters])
    for actual, expected in zip(*reversed(whole(results)), strict=True):
        torch.testing.assert_close(actual, expected)


def test_a_compiled_optimizer_step(ranks):
    ranks.run(step_compiled, "SGD")


def test_a_compiled_step_whose_states_have_one_row_on_each_rank(two_ranks):
    """The states were in a graph as MeshTensors, and their parts are then in one by themselves."""
    two_ranks.run(step_compiled, "AdamW", (2, 8))


def counted_step(make, bias):
    """How often a step is compiled, after a backward pass whose reductions are under way, on one device and here."""
    compilations, results = [], []
    for layouts in (None, {"weight": [Shard(0)], "bias": [bias]}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer = nn.Linear(4, 6)
        if layouts is not None:
            sw.distribute_module(layer, one_dim(), layouts)
        optimizer = make(layer.parameters())
        compiled = []

        def backend(graph, inputs, compiled=compiled):
            compiled.append({type(value) for value in inputs})
            return graph

        step = torch.compile(optimizer.step, backend=backend)
        for i in range(6):
            x = torch.linspace(-1, i, 32).view(8, 4)
            x = x if layouts is None else sw.distribute_tensor(x, one_dim(), [Shard(0)])
            layer(x).square().mean().backward()
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                step()
            optimizer.zero_grad()
        compilations.append(compiled)
        results.append([p.detach() for p in layer.parameters()])
    for actual, expected in zip(*reversed(whole(results)), strict=True):
        torch.testing.assert_close(actual, expected)
    alone, here = compilations
    assert len(here) == len(alone), compilations
    return {kind.__name__ for kinds in here for kind in kinds} <= {"Tensor", "Parameter"}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam_with_a_tensor(parameters):
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.01))


@pytest.mark.parametrize("make", [sgd, adam_with_a_tensor], ids=["SGD", "AdamW, lr is a tensor"])
def test_a_compiled_step_is_compiled_as_often_as_on_one_device_and_on_parts(two_ranks, make):
    assert two_ranks.run(counted_step, make, Replicate()) == [True] * 2


class OfAProgram(torch.optim.SGD):
    """No plugin knows it, so it steps op by op."""


def of_a_program(parameters):
    return OfAProgram(parameters, lr=0.1, momentum=0.9)


def test_a_compiled_step_op_by_op_is_compiled_as_often_as_on_one_device(two_ranks):
    assert two_ranks.run(counted_step, of_a_program, Shard(0)) == [False] * 2


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD"])
def test_every_compiled_optimizer_step(two_ranks, name):
    two_ranks.run(step_compiled, name)


def with_backward(model, x):
    model(x).pow(2).sum().backward()
    return [p.grad for p in model.parameters()]


def with_grad(model, x):
    return torch.autograd.grad(model(x).pow(2).sum(), [*model.parameters()])


def of_an_input(model, x):
    return torch.autograd.grad(model(x).pow(2).sum(), x)


def one_layer_split(name, module, m):
    module.weight = nn.Parameter(sw.distribute_tensor(module.weight.detach(), m, [Shard(0)]))


def breaks_its_graph(program):
    m = one_dim()
    torch.manual_seed(0)
    whole_model, whole_x = nn.Linear(8, 4).double(), torch.randn(6, 8, dtype=torch.float64)
    outcomes = []
    for function in (program, torch.compile(program, backend="aot_eager")):
        model = sw.distribute_module(copy.deepcopy(whole_model), m, one_layer_split)
        x = sw.distribute_tensor(whole_x, m, [Shard(0)]).requires_grad_()
        outcomes.append([(g.placements, g.full_tensor()) for g in function(model, x)])
    for (eager_layout, eager), (layout, compiled) in zip(*outcomes, strict=True):
        assert layout == eager_layout
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("program", [with_backward, *(pytest.param(p, marks=SAMPLE) for p in (with_grad, of_an_input))])
def test_a_backward_pass_inside_a_compiled_function(two_ranks, program):
    """Torch makes several graphs of it, and runs some of our functions between them under dynamo's eyes."""
    two_ranks.run(breaks_its_graph, program)


def parts_of_larger_memory():
    device_mesh = mesh((2,))
    memory = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(0))
    part = memory[device_mesh.get_rank()]
    expected = memory.sum(0)

    def largest(x):
        return x.amax(0).sum() + torch.dist(x, x * 0.5, float("inf")) + x.median()

    gradients = []
    for run in (largest, torch.compile(largest, backend="aot_eager", fullgraph=True)):
        x = MeshTensor.from_local(part, device_mesh, [Partial()]).requires_grad_()
        run(x).backward()
        gradients.append(x.grad.full_tensor())
    whole = expected.requires_grad_()
    largest(whole).backward()
    for gradient in gradients:
        torch.testing.assert_close(gradient, whole.grad)


def test_a_part_with_a_storage_offset_compiles(two_ranks):
    # Torch gave its stand-in the offset by a method that MeshTensor refuses. The op's partial operand is reduced once.
    two_ranks.run(parts_of_larger_memory)


ROWS = (torch.arange(8.0).reshape(4, 2), torch.arange(8.0).reshape(4, 2) - 3, -torch.ones(4, 2))


def selected(layout):
    """A program whose result's size data decides, with two masks of one graph."""
    from torch._dynamo.backends.common import aot_autograd

    m, graphs = mesh((dist.get_world_size(),)), []

    def seen(graph, _inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: x[x[:, 0] > 1], backend=aot_autograd(fw_compiler=seen), fullgraph=True)
    results = []
    for x in ROWS:
        result = compiled(sw.distribute_tensor(x, m, [layout]))
        assert type(result.to_local()) is torch.Tensor
        results.append(result.full_tensor())
    return results, len(graphs)


@pytest.mark.parametrize("layout", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_a_compiled_program_returns_what_a_mask_selects(ranks, layout):
    for results, graphs in ranks.run(selected, layout):
        for x, result in zip(ROWS, results, strict=True):
            assert torch.equal(result, x[x[:, 0] > 1])
        assert graphs == 1


def scored(x, w, y):
    logits, known = x @ w, y != -100
    return nn.functional.cross_entropy(logits[known], y[known]) + logits[known].square().mean()


def clipped(x, w, _y):
    z = x @ w
    return (torch.relu(z[z > 0]) * 2 + 1).sum()


def written(x, w, _y):
    z = (x @ w).clone()
    z[z > 0] = z.mean()  # whose gradient is as long as the mask has true elements
    return z.sum()


def routed(x, w, y):
    out = torch.zeros_like(x)
    for expert in range(2):
        (rows,) = torch.where(y.clamp(min=0) % 2 == expert)
        out = out.index_add(0, rows, torch.tanh(x[rows] @ w) * (expert + 1))
    return out.square().sum()


def gathered(x, w, y):
    scores, known = (x @ w).log_softmax(-1), y >= 0
    return -scores[known].gather(1, y[known][:, None]).squeeze(1).mean()


def of_selected(program, layouts):
    """Loss and gradients of a program in one graph, for targets of which the data selects more and fewer."""
    m = mesh((dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((6, 3), (3, 3)))
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    for known in (4, 6, 1):
        y = torch.where(torch.arange(6) < known, torch.tensor([0, 1, 2, 0, 1, 1]), -100)
        x_alone, w_alone = (t.clone().requires_grad_() for t in (x, w))
        expected = program(x_alone, w_alone, y)
        expected.backward()
        x_here, w_here = (
            sw.distribute_tensor(t, m, [p]).requires_grad_() for t, p in zip((x, w), layouts, strict=True)
        )
        actual = compiled(x_here, w_here, sw.distribute_tensor(y, m, [layouts[0]]))
        actual.backward()
        for one, other in ((actual, expected), (x_here.grad, x_alone.grad), (w_here.grad, w_alone.grad)):
            torch.testing.assert_close(one.full_tensor(), other.detach())


BY_ROWS, BY_PRODUCTS = (Shard(0), Shard(1)), (Replicate(), Shard(0))
NOT_YET = pytest.mark.skipif(torch.__version__ < "2.12", reason="cross_entropy guards by sizes that data decides")
# Every day the two programs that compile soonest have a product whose sums are pending, too.
OF_SELECTED = [
    pytest.param(scored, BY_ROWS, marks=NOT_YET),
    *((program, BY_ROWS) for program in (clipped, written, routed, gathered)),
    *((program, BY_PRODUCTS) for program in (clipped, written)),
    pytest.param(scored, BY_PRODUCTS, marks=[*SAMPLE, NOT_YET]),
    *(pytest.param(program, BY_PRODUCTS, marks=SAMPLE) for program in (routed, gathered)),
]


@pytest.mark.parametrize(("program", "layouts"), OF_SELECTED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_graph_goes_on_with_what_data_selects(ranks, program, layouts):
    ranks.run(of_selected, program, layouts, timeout=180)


def scaled_by_an_item(values):
    place = values.argmax().item()
    torch._check(place >= 0)
    return values * place


def by_a_number_of_data():
    x = torch.linspace(0, 1, 24, dtype=torch.float64).view(6, 4)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(scaled_by_an_item, backend="aot_eager", fullgraph=True)
        for values in (x, x.flip(0)):
            on_mesh = sw.distribute_tensor(values, mesh((dist.get_world_size(),)), [Shard(0)])
            assert torch.equal(compiled(on_mesh).full_tensor(), scaled_by_an_item(values))


def test_a_graph_goes_on_with_a_number_of_a_tensor(ranks):
    ranks.run(by_a_number_of_data)


def differentiated_inside():
    """A compiled function that asks for a gradient: torch ends the graph there, and dynamo sees the hooks of leaves."""
    torch._dynamo.reset()

    def f(x, w):
        y = (x @ w).tanh().sum()
        return torch.autograd.grad(y, w)[0] * 2, y

    torch.manual_seed(0)
    x, w = torch.randn(8, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    expected = f(x, w.clone().requires_grad_())
    placed = [sw.distribute_tensor(x, mesh((2,)), [Shard(0)]), sw.distribute_tensor(w, mesh((2,)), [Replicate()])]
    placed[1].requires_grad_()
    with sw.learn():  # which looks at gradients as they come
        results = torch.compile(f, backend="aot_eager")(*placed)
    for found, value in zip(results, expected, strict=True):
        torch.testing.assert_close(found.detach().full_tensor(), value.detach())


def test_a_compiled_function_may_ask_for_a_gradient(two_ranks):
    two_ranks.run(differentiated_inside)
