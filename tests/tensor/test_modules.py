"""Modules on a mesh as people write it: placements, patterns, optimizers and state dicts in any order."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.distributed import tensor as dtensor

import shardwise as sw
from shardwise import MeshTensor, Replicate, Shard
from shardwise.errors import LayoutError, PlacementCountError, PlacementError, PlainTensorError
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.places import per_mesh_dim
from shardwise.tensor.patterns import check_patterns
from shardwise.testing import mesh

R = Replicate()
TIGHT = {"rtol": 1e-9, "atol": 1e-11}


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6, dtype=torch.float64), nn.ReLU(), nn.Linear(6, 2, dtype=torch.float64))


PATTERNS = {"0.*": Shard(0), "2.weight": {"tp": Shard(1)}}


def on_two():
    return mesh((2,), ("tp",))


# -- placements ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([Shard(0), R], [Shard(0), R]),
        ({"tp": Shard(1)}, [R, Shard(1)]),
        ({}, [R, R]),
        ((p for p in (R, Shard(0))), (R, Shard(0))),
    ],
    ids=["list", "name", "nothing", "generator"],
)
def test_placements_by_list_and_by_name(places, expected):
    assert per_mesh_dim(places, AbstractMesh((2, 2), mesh_dim_names=("dp", "tp"))) == expected


@pytest.mark.parametrize(
    ("places", "error", "match"),
    [
        (Shard(0), PlacementCountError, r'\[Shard\(dim=0\), Replicate\(\)\], or \{"dp": Shard\(dim=0\)\}'),
        ({"ddp": Shard(0)}, PlacementCountError, "mesh dim 'ddp': the mesh has the dims dp, tp"),
        ("S(0)", PlacementError, "it is a str, and not a placement"),
        (0, PlacementError, "it is an int, and not a placement"),
    ],
    ids=["one", "name", "text", "number"],
)
def test_what_is_no_list_of_placements_says_what_to_write(places, error, match):
    with pytest.raises(error, match=match):
        per_mesh_dim(places, AbstractMesh((2, 2), mesh_dim_names=("dp", "tp")))


def everywhere():
    on, whole = on_two(), torch.arange(16.0).view(4, 4)
    for places in (Shard(0), {"tp": Shard(0)}, [Shard(0)]):
        x = sw.distribute_tensor(whole, on, places)
        assert x.placements == (Shard(0),)
        assert sw.zeros((4, 4), device_mesh=on, placements=places).placements == (Shard(0),)
        assert MeshTensor.from_local(x.to_local(), on, places).shape == (4, 4)
        assert sw.distribute_tensor(whole, on).redistribute(placements=places).placements == (Shard(0),)
        leaf = sw.distribute_tensor(whole, on).requires_grad_()
        leaf.to_local(grad_placements={"tp": R}).sum().backward()
        assert leaf.grad.placements == (R,)


def test_every_function_takes_them(two_ranks):
    two_ranks.run(everywhere)


# -- patterns --------------------------------------------------------------------------------------------------------


def patterns():
    on = on_two()
    with pytest.raises(PlacementError, match=r"'0.bias' of shape \(6,\) by the pattern '0\.\*': .* there is no dim 1"):
        sw.distribute_module(small(), on, {"0.*": [Shard(1)]})
    with pytest.raises(PlacementError, match=r"earlier ones take all that this one fits: '\*' takes '0.weight'"):
        sw.distribute_module(small(), on, {"*": [Shard(0)], "0.weight": [Shard(1)]})
    model = sw.distribute_module(small(), on, PATTERNS)
    assert sw.distribute_module(model, on, PATTERNS) is model  # the same again changes nothing
    with pytest.raises(PlacementError, match=r"as \[S\(1\)\]: it lies as \[S\(0\)\] already, from an earlier call"):
        sw.distribute_module(model, on, {"0.weight": [Shard(1)]})
    with pytest.raises(PlacementError, match="it has no parameters and no buffers"):
        sw.distribute_module(nn.ReLU(), on, PATTERNS)

    def tied():
        model = small()
        model[0].weight = nn.Parameter(torch.ones(6, 6, dtype=torch.float64))
        model.register_parameter("again", model[0].weight)
        return model

    with pytest.raises(
        PlacementError, match=r"'0.weight' and 'again' are one tensor \(tied\), and the pattern 'again'"
    ):
        sw.distribute_module(tied(), on, {"0.weight": [Shard(0)], "again": [Shard(1)]})
    # In the last, the first name decides, and the pattern that fits the other has an effect elsewhere.
    for by_one_name in ({"0.weight": [Shard(1)]}, {"again": [Shard(1)]}, {"again": [Shard(1)], "*": [Shard(0)]}):
        model = tied()
        sw.distribute_module(model, on, by_one_name)
        assert model.again is model[0].weight
        assert model.again.placements == (Shard(1),)


def test_patterns_that_have_no_effect_are_errors(two_ranks):
    two_ranks.run(patterns)


def test_of_many_names_the_nearest_to_a_pattern_are_named():
    names = [f"layers.{i}.{part}.weight" for i in range(20) for part in ("q_proj", "k_proj", "up", "down", "norm")]
    with pytest.raises(PlacementError) as refused:
        check_patterns("Model", {"layers.*.q_prj.weight": [Shard(0)]}, names)
    found = refused.value.found
    assert found.startswith(
        "no parameter or buffer has such a name; of its 100 the nearest are layers.*.q_proj.weight, "
    )
    assert found.count("weight") <= 5
    with pytest.raises(PlacementError, match=r"there are weight, bias\. Correct"):
        check_patterns("Linear", {"wieght": [Shard(0)]}, ["weight", "bias"])


def made_on_the_mesh():
    """Parameters that a model makes under ``on`` are placed as the patterns say, and trained as any."""
    on = on_two()
    with sw.on(on):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6))
        model[1].weight = model[0].weight  # tied
        by_hand = nn.Parameter(sw.distribute_tensor(torch.ones(4, 4), on, [Shard(0)]))
    assert isinstance(model[0].weight, MeshTensor)
    whole = model[0].weight.full_tensor().detach()
    sw.distribute_module(model, on, {"0.weight": [Shard(0)], "2.running_mean": [Shard(0)]})
    assert model[0].weight.placements == model[2].running_mean.placements == (Shard(0),)
    assert model[1].weight is model[0].weight
    assert isinstance(model[0].weight, nn.Parameter)
    assert model[0].weight.requires_grad
    assert model[0].bias.placements == (R,)
    assert torch.equal(model[0].weight.full_tensor(), whole)
    model(sw.distribute_tensor(torch.rand(4, 6), on)).sum().backward()
    assert model[0].weight.grad.placements == (Shard(0),)
    for pattern in ("0.weight", "0.bias"):  # placed by now, and a replicated one too
        with pytest.raises(PlacementError, match=r"already, from an earlier call"):
            sw.distribute_module(model, on, {pattern: [Shard(0)] if pattern == "0.bias" else [R]})
    other = nn.Module()
    other.weight = by_hand
    with pytest.raises(PlacementError, match=r"it lies as \[S\(0\)\] already"):
        sw.distribute_module(other, on, {"weight": [Shard(1)]})


def test_parameters_that_were_made_on_the_mesh_are_placed(two_ranks):
    two_ranks.run(made_on_the_mesh)


class Computed(nn.Module):
    """Parameters and a buffer that are results of ops."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(0.02 * torch.randn(6, 4))
        self.q = nn.Parameter(torch.linalg.qr(torch.randn(4, 4))[0])
        self.register_buffer("decay", 1 / 10 ** (torch.arange(4) / 4))

    def forward(self, x):
        return x @ self.w @ self.q * self.decay


def computed_on_the_mesh():
    """Parameters that are computed under ``on``, converted or copied are placed as those that were made so."""
    on = on_two()
    patterns = {"w": [Shard(0)], "q": [Shard(1)], "decay": [Shard(0)]}
    with sw.on(on):
        model = Computed()
        converted, copied = Computed().double(), copy.deepcopy(model)
    for placed in (model, converted, copied):
        whole = {name: t.full_tensor().detach() for name, t in placed.state_dict().items()}
        sw.distribute_module(placed, on, patterns)
        for name, tensor in placed.state_dict(keep_vars=True).items():
            assert list(tensor.placements) == patterns[name]
            assert torch.equal(tensor.full_tensor(), whole[name])
        assert all(p.is_leaf and p.requires_grad for p in placed.parameters())
        placed(sw.distribute_tensor(torch.rand(3, 6, dtype=placed.w.dtype), on)).sum().backward()
        assert placed.w.grad.placements == (Shard(0),)
        with pytest.raises(PlacementError, match="already, from an earlier call"):
            sw.distribute_module(placed, on, {"w": [R]})
    for said in (
        sw.distribute_tensor(torch.ones(4, 4), on, [R]),
        sw.distribute_tensor(torch.ones(4, 4), on, [Shard(0)]).redistribute(placements=[R]),
        MeshTensor.from_local(torch.ones(4, 4), on, [R]),
        sw.ones(4, 4, device_mesh=on, placements=[R]),
        sw.rand(4, 4, device_mesh=on, placements=[R]),
    ):
        by_hand = nn.Module()
        by_hand.weight = nn.Parameter(said)
        with pytest.raises(PlacementError, match="already, from an earlier call"):
            sw.distribute_module(by_hand, on, {"weight": [Shard(1)]})


def test_parameters_that_were_computed_on_the_mesh_are_placed(two_ranks):
    two_ranks.run(computed_on_the_mesh)


class WithSparseBuffers(nn.Module):
    """Lists of places as sparse masks, which the forward pass does not read, or reads dense."""

    def __init__(self):
        super().__init__()
        self.inner = small()
        self.register_buffer("heads", torch.eye(3).bool().to_sparse(), persistent=False)
        self.inner.register_buffer("rows", torch.eye(4, dtype=torch.float64).to_sparse_csr())

    def forward(self, x):
        return self.inner(x @ self.inner.rows.to_dense())


def sparse_buffers_stay_plain():
    on = on_two()
    heads = torch.eye(3).bool()
    for patterns in ({}, {"inner.0.*": Shard(0)}, {"*": [Shard(0)]}, {"inner.*": [Shard(0)], "heads*": [R]}):
        model, alone = WithSparseBuffers(), WithSparseBuffers()
        sw.distribute_module(model, on, patterns)
        assert torch.equal(model.heads.to_dense(), heads)
        assert (type(model.heads), model.heads.layout) == (torch.Tensor, torch.sparse_coo)
        assert (type(model.inner.rows), model.inner.rows.layout) == (torch.Tensor, torch.sparse_csr)
        assert "heads" not in model.state_dict()
        assert all(isinstance(p, MeshTensor) for p in model.parameters())
        x = torch.arange(8, dtype=torch.float64).reshape(2, 4)
        out = model(sw.distribute_tensor(x, on, [Shard(0)]))
        out.sum().backward()
        alone(x).sum().backward()
        torch.testing.assert_close(out.full_tensor(), alone(x), **TIGHT)
        for one, whole in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), whole.grad, **TIGHT)
    with pytest.raises(LayoutError, match="sparse_coo"):
        sw.distribute_module(WithSparseBuffers(), on, {"heads": [R]})
    by_hand = nn.Module()
    by_hand.weight = nn.Parameter(torch.eye(4).to_sparse())
    with pytest.raises(LayoutError, match="sparse_coo"):
        sw.distribute_module(by_hand, on)


def test_sparse_buffers_stay_plain(two_ranks):
    two_ranks.run(sparse_buffers_stay_plain)


def dtensors():
    on, whole = on_two(), torch.arange(16.0).view(4, 4)
    theirs = dtensor.distribute_tensor(whole, on, [Shard(0)])
    with pytest.raises(LayoutError, match=r"it is a DTensor .*: MeshTensor\.from_dtensor\(t\)"):
        sw.distribute_tensor(theirs, on, [Shard(0)])
    with pytest.raises(PlainTensorError, match=r": MeshTensor\.from_dtensor\(t\)"):
        sw.distribute_tensor(whole, on) + theirs
    torch.testing.assert_close(sw.MeshTensor.from_dtensor(theirs).full_tensor(), whole)
    model = dtensor.distribute_module(small(), on)
    advice = re.escape("module.weight = nn.Parameter(MeshTensor.from_dtensor(t.detach()))")
    with pytest.raises(LayoutError, match=f"place .0.weight.: it is a DTensor .*{advice}"):
        sw.distribute_module(model, on)
    _follow(model)
    sw.distribute_module(model, on)


def _follow(model):
    """What the message says."""
    for layer in model.modules():
        for name, parameter in list(layer.named_parameters(recurse=False)):
            setattr(layer, name, nn.Parameter(sw.MeshTensor.from_dtensor(parameter.detach())))


def test_dtensors_are_told_what_to_do(two_ranks):
    two_ranks.run(dtensors)


class Scaled(torch.Tensor):
    """As quantised weights are: a tensor made of values and a scale."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)

    def __init__(self, values, scale):
        self.values_, self.scale = values, scale

    def __tensor_flatten__(self):
        return ["values_", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func is torch.ops.aten.detach.default
        return cls(args[0].values_, args[0].scale)


def quantised_weight():
    layer = nn.Linear(4, 6)
    weight = Scaled(torch.ones(6, 4, dtype=torch.int8), torch.ones(6, 1))
    layer.weight = nn.Parameter(weight, requires_grad=False)
    match = (
        r"place 'weight' of shape \(6, 4\): it is a Scaled, which is made of other tensors \(values_, scale\).*torchao"
    )
    with pytest.raises(LayoutError, match=match):
        sw.distribute_module(layer, on_two(), {"weight": Shard(0)})


def test_a_weight_that_is_made_of_other_tensors_is_refused(two_ranks):
    two_ranks.run(quantised_weight)


def lazy_layers():
    model = nn.Sequential(nn.Linear(4, 6), nn.LazyLinear(2))
    with pytest.raises(LayoutError, match=r"place '1.weight': it belongs to a lazy module.*Run the module once"):
        sw.distribute_module(model, on_two())
    assert type(model[0].weight) is nn.Parameter, "nothing is placed by halves"
    model(torch.ones(1, 4))
    sw.distribute_module(model, on_two())
    assert isinstance(model[1].weight, MeshTensor)


def test_a_lazy_module_runs_once_before_it_is_placed(two_ranks):
    two_ranks.run(lazy_layers)


# -- what a program has attached to a parameter ------------------------------------------------------------------------


def three_times(parameter):
    parameter.grad.mul_(3)


def attached():
    """A model whose parameters have hooks and attributes, as adapters and optimizers of others give them."""
    model = small()
    first, last = model[0].weight, model[2].weight
    first.register_hook(lambda grad: grad - grad.mean(0))
    handle = first.register_hook(lambda grad: grad * 2)
    first.register_hook(lambda _: None)
    last.register_post_accumulate_grad_hook(three_times)
    model[0].bias.register_hook(lambda grad: grad * 5)
    model[0].bias.requires_grad_(False)
    last._no_weight_decay = True
    return model, handle


def with_attachments():
    inputs = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (one, handle_of_one), (model, handle) = attached(), attached()
    sw.distribute_module(model, on_two(), PATTERNS)
    x = sw.distribute_tensor(inputs, on_two(), [R])

    def compare():
        one(inputs).square().sum().backward()
        model(x).square().sum().backward()
        for (name, expected), parameter in zip(one.named_parameters(), model.parameters(), strict=True):
            assert (expected.grad is None) == (parameter.grad is None), name
            if expected.grad is not None:
                torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, **TIGHT)

    compare()
    handle_of_one.remove()
    handle.remove()
    one[0].bias.requires_grad_()
    model[0].bias.requires_grad_()
    compare()
    assert [hasattr(p, "_no_weight_decay") for p in model.parameters()] == [False, False, True, False]


def test_hooks_and_attributes_stay_with_a_parameter(two_ranks):
    two_ranks.run(with_attachments)


def made_on_the_mesh_with_attachments():
    mesh = on_two()
    with sw.on(mesh):
        layer = nn.Linear(4, 6, dtype=torch.float64)
    layer.weight.register_hook(lambda grad: grad * 2)
    layer.weight.kept = "here"
    sw.distribute_module(layer, mesh, {"weight": Shard(0)})
    layer(sw.distribute_tensor(torch.ones(3, 4, dtype=torch.float64), mesh, [R])).sum().backward()
    assert layer.weight.kept == "here"
    assert layer.weight.placements == (Shard(0),)
    torch.testing.assert_close(layer.weight.grad.full_tensor(), torch.full((6, 4), 6.0, dtype=torch.float64))


def test_those_of_parameters_made_on_the_mesh_stay_as_well(two_ranks):
    two_ranks.run(made_on_the_mesh_with_attachments)


class KeptTwice(nn.Module):
    """Keeps its parameters in lists, dicts and attributes beside where torch finds them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        self.weights = [self.first.weight, (self.last.weight, "text")]
        self.by_name = {"first": {"bias": self.first.bias}}
        vars(self)["bias"] = self.last.bias

    def forward(self, x):
        first, (last, _) = self.weights
        return torch.relu(x @ first.t() + self.by_name["first"]["bias"]) @ last.t() + self.bias


def kept_twice():
    inputs = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    one = KeptTwice()
    model = copy.deepcopy(one)
    weights = model.weights
    sw.distribute_module(model, on_two(), {"first.weight": Shard(0), "last.weight": Shard(1)})
    assert model.weights is weights
    for module, x in ((one, inputs), (model, sw.distribute_tensor(inputs, on_two(), [R]))):
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
    for expected, parameter in zip(one.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), expected, **TIGHT)


def test_parameters_that_a_module_keeps_twice_are_the_new_ones(two_ranks):
    two_ranks.run(kept_twice)


def tied_over_modules():
    mesh = on_two()
    first, second = small(), small()
    second[0].weight = first[0].weight
    sw.distribute_module(first, mesh, PATTERNS)
    sw.distribute_module(second, mesh, PATTERNS)
    assert second[0].weight is first[0].weight
    assert second[2].weight is not first[2].weight
    third = small()
    kept = third[0].weight
    sw.distribute_module(third, mesh, PATTERNS)
    fourth = small()
    fourth[0].weight = kept
    with pytest.raises(PlacementError, match="already, from an earlier call"):
        sw.distribute_module(fourth, mesh, {"0.*": Shard(1)})


def test_a_parameter_of_two_modules_is_one_after_both_are_placed(two_ranks):
    two_ranks.run(tied_over_modules)


# -- optimizers and state dicts --------------------------------------------------------------------------------------


def made_before(kind, steps_before):
    inputs = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    one = small()
    model = copy.deepcopy(one)
    options = {"lr": 0.1, "momentum": 0.9} if kind is torch.optim.SGD else {"lr": 0.1}
    of_one, of_model = kind(one.parameters(), **options), kind(model.parameters(), **options)

    def step(module, optimizer, x):
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()

    for _ in range(steps_before):
        step(one, of_one, inputs)
        step(model, of_model, inputs)
    sw.distribute_module(model, on_two(), PATTERNS)
    for _ in range(3):
        step(one, of_one, inputs)
        step(model, of_model, sw.distribute_tensor(inputs, on_two(), [R]))
    for expected, parameter in zip(one.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), expected, **TIGHT)
    assert all(a is b for a, b in zip(of_model.param_groups[0]["params"], model.parameters(), strict=True))
    assert set(of_model.state) <= set(model.parameters())


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_made_before_trains_the_model(two_ranks, kind, steps_before):
    two_ranks.run(made_before, kind, steps_before)


def assigned():
    on, other = on_two(), small()
    for tensor in other.parameters():
        tensor.data.add_(1)
    for assign in (False, True):
        model = sw.distribute_module(small(), on, PATTERNS)
        placements = [p.placements for p in model.parameters()]
        model.load_state_dict(other.state_dict(), assign=assign)
        assert [p.placements for p in model.parameters()] == placements
        for expected, parameter in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(parameter.full_tensor(), expected)
        model(sw.distribute_tensor(torch.ones(3, 4, dtype=torch.float64), on, [R])).sum().backward()
        assert [p.grad.placements for p in model.parameters()] == placements


def test_whole_state_dicts_are_placed(two_ranks):
    two_ranks.run(assigned)


def without_values():
    class WithTable(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.table = nn.Linear(4, 6), torch.arange(6.0)

        def forward(self, x):
            return torch.cat([self.layer(x) + self.table, self.table[None]])

    with torch.device("meta"):
        model = sw.distribute_module(WithTable(), on_two(), {"layer.weight": [Shard(0)]})
        assert model(torch.empty(3, 4)).shape == (4, 6)
        assert model(sw.distribute_tensor(torch.empty(3, 4), on_two(), [R])).shape == (4, 6)


def test_a_model_without_values_gives_shapes_of_plain_tensors_without_values(two_ranks):
    two_ranks.run(without_values)
