"""Torch's styles on MeshTensors: beside one device, and beside DTensor under the same plan."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import parallel as torch_parallel
from torch.nn import functional

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard
from shardwise.comm import events
from shardwise.errors import PlacementCountError
from shardwise.testing import mesh
from shardwise_dtensor import parallel

WIDTH, ROWS = 8, 12


class Feed(nn.Module):
    """Two linear layers with a norm before them."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, WIDTH))

    def forward(self, x, *, by):
        return x * self.weight.sum() * by


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(x), x


def sequence(p):
    """A block whose activations between the layers are sharded over the sequence."""
    return {
        "norm": p.SequenceParallel(),
        "up": p.ColwiseParallel(input_layouts=Shard(1)),
        "down": p.RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }


def whole_block(p):
    return {
        "": p.PrepareModuleInputOutput(
            input_layouts=Shard(0),
            desired_input_layouts=Replicate(),
            output_layouts=Replicate(),
            desired_output_layouts=Shard(0),
        ),
        "norm": p.SequenceParallel(sequence_dim=0, use_local_output=False),
        "up": p.ColwiseParallel(use_local_output=False),
        "down": p.RowwiseParallel(use_local_output=False),
    }


# Module, plan, shape of the input (None: token numbers), its layout, layout of the output, parameters -> placements.
PLANS = {
    "colwise": (
        lambda: nn.Linear(WIDTH, 16),
        lambda p: p.ColwiseParallel(),
        (ROWS, WIDTH),
        Replicate(),
        Shard(1),
        {"weight": Shard(0), "bias": Shard(0)},
    ),
    "colwise of a sharded input": (
        lambda: nn.Linear(WIDTH, 16),
        lambda p: p.ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        (ROWS, WIDTH),
        Shard(0),
        Replicate(),
        {"weight": Shard(0), "bias": Shard(0)},
    ),
    "rowwise": (
        lambda: nn.Linear(WIDTH, 16),
        lambda p: p.RowwiseParallel(),
        (ROWS, WIDTH),
        Shard(1),
        Replicate(),
        {"weight": Shard(1), "bias": Replicate()},
    ),
    "rowwise to a sharded output": (
        lambda: nn.Linear(WIDTH, 16),
        lambda p: p.RowwiseParallel(output_layouts=Shard(0)),
        (ROWS, WIDTH),
        Shard(1),
        Shard(0),
        {"weight": Shard(1), "bias": Replicate()},
    ),
    "colwise embedding": (
        lambda: nn.Embedding(20, WIDTH),
        lambda p: p.ColwiseParallel(),
        None,
        Replicate(),
        Shard(2),
        {"weight": Shard(1)},
    ),
    "rowwise embedding": (
        lambda: nn.Embedding(20, WIDTH),
        lambda p: p.RowwiseParallel(input_layouts=Replicate()),
        None,
        Replicate(),
        Replicate(),
        {"weight": Shard(0)},
    ),
    "feed": (
        Feed,
        lambda p: {"up": p.ColwiseParallel(), "down": p.RowwiseParallel()},
        (ROWS, WIDTH),
        Replicate(),
        Replicate(),
        {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1), "down.bias": Replicate()},
    ),
    "patterns": (
        lambda: nn.Sequential(Feed(), Feed()),
        lambda p: {"*.up": p.ColwiseParallel(), "*.d*": p.RowwiseParallel()},
        (ROWS, WIDTH),
        Replicate(),
        Replicate(),
        {"0.up.weight": Shard(0), "1.up.weight": Shard(0), "1.down.weight": Shard(1)},
    ),
    "sequence": (
        Feed,
        sequence,
        (3, ROWS, WIDTH),
        Shard(1),
        Shard(1),
        {"norm.weight": Replicate(), "up.weight": Shard(0), "down.weight": Shard(1)},
    ),
    "prepared input and output": (
        Feed,
        whole_block,
        (ROWS, WIDTH),
        Shard(0),
        Shard(0),
        {"norm.bias": Replicate(), "up.weight": Shard(0), "down.weight": Shard(1)},
    ),
}


def local_of(whole, layout, on):
    """This rank's part, plain and with a memory of its own."""
    part = sw.distribute_tensor(whole, on, [layout]).to_local()
    return part.detach().clone()


def whole_of(tensor):
    return tensor.full_tensor() if isinstance(tensor, (MeshTensor, DTensor)) else tensor


def trained(module, feed, coefficients):
    """Outputs of three steps; the gradients are those of the last."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    outputs = []
    for _ in range(3):
        optimizer.zero_grad()
        out = module(feed)
        outputs.append(out)
        local = out.to_local() if isinstance(out, (MeshTensor, DTensor)) else out
        (local * coefficients).sum().backward()
        optimizer.step()
    return outputs


def beside_one_device_and_dtensor(name):
    make, plan, shape, layout, out_layout, placements = PLANS[name]
    on = mesh((4,))
    torch.manual_seed(0)
    one = make().double()
    ours, theirs = copy.deepcopy(one), copy.deepcopy(one)
    ours = parallel.parallelize_module(ours, on, plan(parallel))
    theirs = torch_parallel.parallelize_module(theirs, on, plan(torch_parallel))
    whole = torch.randint(20, (3, 8)) if shape is None else torch.randn(shape, dtype=torch.float64)
    coefficients = torch.randn(one(whole).shape, dtype=torch.float64)

    expected = trained(one, whole, coefficients)
    part = local_of(coefficients, out_layout, on)
    found = trained(ours, local_of(whole, layout, on), part)
    beside = trained(theirs, local_of(whole, layout, on), part)

    for mine, torchs, right in zip(found, beside, expected, strict=True):
        assert isinstance(mine, MeshTensor) == isinstance(torchs, DTensor)
        local = mine.to_local() if isinstance(mine, MeshTensor) else mine
        torch.testing.assert_close(local, torchs.to_local() if isinstance(torchs, DTensor) else torchs)
        torch.testing.assert_close(local, local_of(right.detach(), out_layout, on))
    others = dict(theirs.named_parameters())
    for key, parameter in one.named_parameters():
        mine, torchs = ours.get_parameter(key), others[key]
        assert isinstance(mine, MeshTensor) == isinstance(torchs, DTensor)
        assert isinstance(mine, MeshTensor) or key not in placements
        if isinstance(mine, MeshTensor):
            assert mine.placements == torchs.placements
            assert mine.grad.placements == mine.placements
            torch.testing.assert_close(mine.to_local(), torchs.to_local())
        if key in placements:
            assert mine.placements == (placements[key],)
        # A plain parameter beside placed ones has the gradient of this rank's part, as with DTensor.
        if isinstance(mine, MeshTensor):
            assert parameter.grad.abs().max() > 1e-3
            torch.testing.assert_close(whole_of(mine.grad), parameter.grad)
            torch.testing.assert_close(whole_of(mine), parameter)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_trains_as_on_one_device_and_as_with_dtensor(pool, name):
    pool.run(beside_one_device_and_dtensor, name)


def several_inputs_and_outputs():
    on = mesh((4,))
    rank = on.get_local_rank()
    for p, kind in ((parallel, MeshTensor), (torch_parallel, DTensor)):
        torch.manual_seed(0)
        by, x = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        style = p.PrepareModuleInput(
            input_layouts=(Shard(0),),
            desired_input_layouts=(Replicate(),),
            input_kwarg_layouts={"by": Replicate()},
            desired_input_kwarg_layouts={"by": Shard(0)},
        )
        seen = []
        module = p.parallelize_module(Scaled(), on, style)
        module.weight = nn.Parameter(kind.from_local(module.weight.detach(), on, [Replicate()]))
        module.register_forward_pre_hook(lambda _, a, k, seen=seen: seen.append((*a, k["by"])), with_kwargs=True)
        out = module(x.chunk(4)[rank], by=by)
        assert [type(t) for t in seen[0]] == [kind, kind]
        assert [t.placements for t in seen[0]] == [(Replicate(),), (Shard(0),)]
        torch.testing.assert_close(whole_of(out), x * torch.linspace(1, 2, WIDTH).sum() * by)

        pair = Pair()
        expected = pair.inner(x).detach()
        style = p.PrepareModuleOutput(
            output_layouts=(Replicate(), None), desired_output_layouts=(Shard(0), None), use_local_output=False
        )
        module = p.parallelize_module(pair, on, {"inner": p.ColwiseParallel(output_layouts=Replicate()), "": style})
        first, second = module(x)
        assert type(first) is kind
        assert first.placements == (Shard(0),)
        assert second is x
        torch.testing.assert_close(whole_of(first), expected)


def test_inputs_keyword_inputs_and_several_outputs(pool):
    pool.run(several_inputs_and_outputs)


def on_one_dim_of_a_mesh():
    on = mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    one = Feed().double()
    module = parallel.parallelize_module(
        copy.deepcopy(one), on["tp"], {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    )
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    assert module.up.weight.device_mesh == on["tp"]
    assert module.up.weight.to_local().shape == (8, WIDTH)
    torch.testing.assert_close(module(x), one(x))
    with pytest.raises(PlacementCountError):
        parallel.parallelize_module(copy.deepcopy(one), on, {"up": parallel.ColwiseParallel()})


def test_one_dim_of_a_larger_mesh(pool):
    pool.run(on_one_dim_of_a_mesh)


def a_style_of_ones_own():
    class Doubled(parallel.ParallelStyle):
        def _apply(self, module, device_mesh):
            assert self.src_data_rank is None
            return sw.distribute_module(
                module, device_mesh, {"weight": [Shard(0)]}, output_fn=lambda _, out, on: 2 * out.full_tensor()
            )

    on = mesh((4,))
    torch.manual_seed(0)
    one = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(3, WIDTH)
    module = parallel.parallelize_module(copy.deepcopy(one), on, Doubled(), src_data_rank=None)
    torch.testing.assert_close(module(x), 2 * one(x))


def test_a_style_of_ones_own(pool):
    pool.run(a_style_of_ones_own)


def compiled(name):
    make, plan, shape, layout, out_layout, _ = PLANS[name]
    on = mesh((4,))
    torch.manual_seed(0)
    one = make().double()
    module = parallel.parallelize_module(copy.deepcopy(one), on, plan(parallel))
    whole = torch.randn(shape, dtype=torch.float64)
    expected = one(whole)
    torch.compiler.reset()  # another plan's sizes would make these dynamic
    found = torch.compile(module, backend="aot_eager", fullgraph=True)(local_of(whole, layout, on))
    found = found.to_local() if isinstance(found, MeshTensor) else found
    torch.testing.assert_close(found, local_of(expected.detach(), out_layout, on))
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(module.up.weight.grad.full_tensor(), one.up.weight.grad)


@pytest.mark.parametrize("name", ["feed", "sequence"])
def test_a_plan_compiles_to_one_graph(pool, name):
    pool.run(compiled, name)


# -- the loss --------------------------------------------------------------------------------------------------------


def losses(reduction, mesh_shape, placements):
    on = mesh(mesh_shape)
    torch.manual_seed(0)
    scores, classes = torch.randn(16, 24, dtype=torch.float64), torch.randint(24, (16,))
    classes[3] = -100
    one = scores.clone().requires_grad_()
    expected = functional.cross_entropy(one, classes, reduction=reduction)
    expected.sum().backward()
    sharded = sw.distribute_tensor(scores, on, placements).requires_grad_()
    classes = sw.distribute_tensor(classes, on, [p if p == Shard(0) else Replicate() for p in placements])
    moved = []
    with events.observe(moved.append), parallel.loss_parallel():
        loss = functional.cross_entropy(sharded, classes, reduction=reduction)
    assert all(now == Replicate() for now, of in zip(loss.placements, placements, strict=True) if of == Shard(1))
    torch.testing.assert_close(loss.full_tensor(), expected)
    loss.sum().backward()
    assert sharded.grad.placements == sharded.placements
    torch.testing.assert_close(sharded.grad.full_tensor(), one.grad)
    # Rows of scores and losses are sent, never scores.
    assert moved
    assert {event.kind for event in moved} == {"all_reduce"}
    assert max(event.nbytes for event in moved) <= scores.shape[0] * 8
    return functional.cross_entropy(sharded, classes, reduction=reduction).placements


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("shape", "placements"), [((4,), [Shard(1)]), ((2, 2), [Shard(0), Shard(1)])])
def test_the_loss_of_sharded_classes_is_reduced(pool, reduction, shape, placements):
    outside = pool.run(losses, reduction, shape, placements)[0]
    if reduction != "mean":
        assert Partial() in outside


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"up": torch_parallel.ColwiseParallel()}, r"'up' of a Feed: ColwiseParallel is a style of torch.*Import it"),
        (torch_parallel.RowwiseParallel(), r"RowwiseParallel is a style of torch"),
        ({"up": "colwise"}, r"it is a str\. Import a style"),
        ([parallel.ColwiseParallel()], r"it is a list"),
    ],
)
def test_a_plan_of_something_else_is_refused(plan, words):
    before = Feed()
    with pytest.raises(parallel.StyleError, match=words) as refused:
        parallel.parallelize_module(before, None, plan)
    assert isinstance(refused.value, TypeError)
    assert not any(isinstance(p, MeshTensor) for p in before.parameters())


def module_that_no_style_fits():
    on = mesh((4,))
    with pytest.raises(NotImplementedError, match="ColwiseParallel"):
        parallel.parallelize_module(nn.LayerNorm(4), on, parallel.ColwiseParallel())
    with pytest.warns(UserWarning, match="nothing"):
        parallel.parallelize_module(Feed(), on, {"nothing": parallel.ColwiseParallel()})


def test_what_torchs_styles_refuse(pool):
    pool.run(module_that_no_style_fits)


def test_torchs_own_styles_stay_as_they_are():
    assert torch_parallel.ColwiseParallel is not parallel.ColwiseParallel
    assert torch_parallel.style.DTensor is DTensor


@pytest.mark.parametrize(
    "name", [n for n in parallel.__all__ if n[0].isupper() and n not in ("ParallelStyle", "StyleError")]
)
def test_a_style_can_be_pickled(name):
    style = getattr(parallel, name)
    assert style.__module__ == "shardwise_dtensor.parallel.style"
    assert pickle.loads(pickle.dumps(style)) is style
