"""Torch's own tools on MeshTensors: anomaly detection, distributions, forward mode, and ops that only they call."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm.events import observe
from shardwise.errors import ItemError
from shardwise.testing import mesh

aten = torch.ops.aten
VALUES = torch.linspace(-2, 3, 12).view(6, 2)


def on(tensor, *placements):
    return sw.distribute_tensor(tensor, mesh((4,)), placements or [Shard(0)])


def whole(value):
    if isinstance(value, (list, tuple)):
        return [whole(part) for part in value]
    return value.full_tensor() if isinstance(value, sw.MeshTensor) else value


# -- by torch's composite kernels ------------------------------------------------------------------------------------


def ops_by_composite_kernels():
    """Each op of the founding list and of torch's tools beside the same on one device."""
    x = VALUES
    assert aten._is_all_true.default(on(x > -3)).item() is True
    assert aten._is_any_true.default(on(x > 3)).item() is False
    torch.testing.assert_close(
        whole(aten.linalg__powsum.default(on(x), 3, [0])), aten.linalg__powsum.default(x, 3, [0])
    )
    with torch.inference_mode():
        columns = aten.contiguous.default(on(x).t())
        assert columns.is_contiguous()
        assert torch.equal(whole(columns), x.t())
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False}
    lists = [[x], [x + 1], [x * 0], [x * 0], []]
    step = [torch.tensor(1.0)]
    expected = aten._fused_adam.default(*lists, step, **options, maximize=False)
    actual = aten._fused_adam.default(*([on(t) for t in part] for part in lists), step, **options, maximize=False)
    torch.testing.assert_close(whole(actual), list(map(list, expected)))
    torch.manual_seed(3)
    drawn = aten.randint_like.low_dtype_out(on(x), 2, 900, out=on(x * 0))
    torch.manual_seed(3)
    assert torch.equal(whole(drawn), aten.randint_like.low_dtype_out(x, 2, 900, out=x * 0))


def test_ops_run_as_their_composite_kernels(pool):
    pool.run(ops_by_composite_kernels)


def anomaly_detection():
    x = on(VALUES).requires_grad_()
    with warnings.catch_warnings(), torch.autograd.detect_anomaly():
        warnings.simplefilter("ignore")
        (x * x).sum().backward()
        with pytest.raises(RuntimeError, match="SqrtBackward0' returned nan values"):
            (x * 0).sqrt().mul(0).sum().backward()
    assert torch.equal(whole(x.grad), 2 * VALUES)


def test_anomaly_detection(pool):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pool.run(anomaly_detection)


def distributions():
    x = VALUES
    location, scale = on(x), on(x.exp())
    normal = torch.distributions.Normal(location, scale, validate_args=True)
    torch.testing.assert_close(whole(normal.log_prob(location)), torch.distributions.Normal(x, x.exp()).log_prob(x))
    logits = torch.distributions.Categorical(logits=location)
    torch.testing.assert_close(whole(logits.entropy()), torch.distributions.Categorical(logits=x).entropy())
    with pytest.raises(ValueError, match="found invalid values"):  # on every rank, whoever holds the value
        torch.distributions.Normal(location, on(x + 1), validate_args=True)  # Dynamo turns the default off
    with pytest.raises(ValueError, match="within the support"):
        torch.distributions.Beta(scale, scale, validate_args=True).log_prob(on((x > 2.9) * 2.0))


def test_distributions_check_their_parameters(pool):
    pool.run(distributions)


# -- derivatives ------------------------------------------------------------------------------------------------------


def forward_mode():
    x, tangent = VALUES, VALUES.flip(0)

    def loss(t):
        return (t.exp() @ t.t()).sum(0)

    expected = torch.func.jvp(loss, (x,), (tangent,))
    torch.testing.assert_close(whole(torch.func.jvp(loss, (on(x),), (on(tangent),))), list(expected))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.LayerNorm(3))
    expected_of_net = torch.func.jvp(net, (x,), (tangent,))
    placed = sw.distribute_module(copy.deepcopy(net), mesh((4,)), {"0.weight": [Shard(0)]})
    torch.testing.assert_close(whole(torch.func.jvp(placed, (on(x),), (on(tangent),))), list(expected_of_net))
    with forward_ad.dual_level():
        dual = loss(forward_ad.make_dual(on(x), on(tangent)))
        torch.testing.assert_close(whole(forward_ad.unpack_dual(dual).tangent), expected[1])


def gated():
    x, tangent, more = VALUES, VALUES.flip(0), VALUES.cos()

    def slope(t):
        return torch.func.grad(lambda u: torch.nn.functional.glu(u * u).square().sum())(t)

    for function in (torch.nn.functional.glu, slope):
        expected = torch.func.jvp(function, (x,), (tangent * more,))
        torch.testing.assert_close(whole(torch.func.jvp(function, (on(x),), (on(tangent * more),))), list(expected))


@pytest.mark.parametrize("program", [forward_mode, gated])
def test_forward_mode(pool, program):
    pool.run(program)


def jacobians():
    x = VALUES[:3, 0] + 1.0
    ours = on(x)

    def cubes(t):
        return torch.outer(t, t) @ t

    def total(t):
        return (t * t * t).sum()

    for transform in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(whole(transform(cubes)(ours)), transform(cubes)(x))
    for strategy in ("reverse-mode", "forward-mode"):
        named = {"vectorize": True, "strategy": strategy}
        found = torch.autograd.functional.jacobian(cubes, ours, **named)
        torch.testing.assert_close(whole(found), torch.autograd.functional.jacobian(cubes, x, **named))
    expected = torch.func.hessian(total)(x)
    torch.testing.assert_close(whole(torch.func.jacrev(torch.func.jacrev(total))(ours)), expected)
    for vectorize in (False, True):
        hessian = torch.autograd.functional.hessian(total, ours, vectorize=vectorize)
        torch.testing.assert_close(whole(hessian), expected)
    torch.testing.assert_close(whole(torch.func.hessian(total)(ours)), expected)


def test_jacobians_and_hessians(pool):
    pool.run(jacobians)


def vmapped_look_ups():
    table, ids = VALUES, torch.tensor([[0, 5, 1], [2, 2, 4]])
    for layouts in ([Shard(0)], [Shard(1)], [Replicate()]):
        ours, where = on(table, *layouts), on(ids)
        found = torch.vmap(lambda i: functional.embedding(i, ours))(where)  # noqa: B023  # called here
        assert torch.equal(whole(found), table[ids])


def test_look_ups_under_vmap(pool):
    pool.run(vmapped_look_ups)


# -- lists of numbers --------------------------------------------------------------------------------------------------


def lists_of_numbers():
    x = on(VALUES)
    numbers = torch.tensor([x.sum(), 1.0, x[2, 1]])
    torch.testing.assert_close(numbers, torch.tensor([VALUES.sum(), 1.0, VALUES[2, 1]]))
    assert torch.as_tensor([[x.max()], [2]]).tolist() == [[3.0], [2.0]]
    assert torch.equal(whole(x[[0, 2]]), VALUES[[0, 2]])
    assert [row.shape for row in x] == [(2,)] * 6
    with pytest.raises(ItemError):
        torch.tensor([x, x])


def test_numbers_in_a_list(pool):
    pool.run(lists_of_numbers)


# -- indices that are one truth value ---------------------------------------------------------------------------------


def truth_values():
    for where in (True, False, torch.tensor(True), torch.tensor(False)):
        for x in (VALUES, torch.tensor(2.5)):
            ours = on(x, *([] if x.dim() else [Replicate()]))
            index = where if isinstance(where, bool) else on(where, Replicate())
            assert torch.equal(whole(ours[index]), x[where])
            written, expected = ours.clone(), x.clone()
            written[index] = 7.0
            expected[where] = 7.0
            assert torch.equal(whole(written), expected)


def test_a_truth_value_is_an_index(pool):
    pool.run(truth_values)


def numbers_by_rprop(foreach):
    results = []
    for on_mesh in (False, True):
        p = torch.nn.Parameter(on(torch.tensor(2.0), Replicate()) if on_mesh else torch.tensor(2.0))
        optimizer = torch.optim.Rprop([p], lr=0.5, foreach=foreach)
        for _ in range(4):
            optimizer.zero_grad()
            (p * p).backward()
            optimizer.step()
        results.append(whole(p.detach()))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("foreach", [False, True])
def test_rprop_of_a_number(pool, foreach):
    pool.run(numbers_by_rprop, foreach)


# -- training that is aware of quantization ------------------------------------------------------------------------


def trained_quantized(layout):
    torch.manual_seed(0)
    weight, rows, step = torch.randn(6, 8), torch.randn(8, 8), torch.full((6,), 0.05)
    model = torch.nn.Linear(8, 6)
    if layout is not None:
        sw.distribute_module(model, mesh((2, 2)), {"weight": layout, "bias": [Replicate(), Replicate()]})
        rows = sw.distribute_tensor(rows, mesh((2, 2)), [Shard(0), Replicate()])
    zeros = torch.zeros(6, dtype=torch.int32)
    rounded = torch.fake_quantize_per_channel_affine(model.weight, step, zeros, 0, -8, 7)
    out = torch.fake_quantize_per_tensor_affine(functional.linear(rows, rounded, model.bias), 0.1, 0, -128, 127)
    out = torch.ao.quantization.FusedMovingAvgObsFakeQuantize()(out) * weight[:, 0]
    out.square().sum().backward()
    return whole(out), whole(model.weight.grad), whole(model.bias.grad)


def fake_quantization():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = trained_quantized(None)
        for layout in ([Replicate(), Shard(0)], [Shard(1), Shard(0)]):
            for found, value in zip(trained_quantized(layout), wanted, strict=True):
                torch.testing.assert_close(found, value)


def test_training_that_is_aware_of_quantization(pool):
    pool.run(fake_quantization)


# -- modes of the program ----------------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Notes the shapes of products."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (aten.mm.default, aten.addmm.default):
            self.shapes.append(tuple(result.shape))
        return result


class Blocks(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
            for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x) * torch.arange(x.shape[-1])
        return x


def placed_blocks():
    m = mesh((2, 2))
    model = sw.distribute_module(
        Blocks(), m, {"blocks.*.1.*": [Replicate(), Shard(0)], "*.3.weight": [Shard(0), Shard(1)]}
    )
    return model, sw.distribute_tensor(torch.linspace(-1, 1, 48).view(6, 8), m, [Shard(0), Replicate()])


def trains_under(modes, model, x):
    """What the modes told of three steps."""
    told = []
    for _ in range(3):
        with modes()[0] as flops, modes()[1] as products:
            model(x).square().mean().backward()
        told.append((flops.get_total_flops(), products.shapes))
        model.zero_grad()
    return told


def modes_see_whole_tensors():
    def modes():
        return FlopCounterMode(display=False), Products()

    model, x = placed_blocks()
    assert trains_under(modes, model, x) == trains_under(modes, Blocks(), whole(x))
    with Products() as outer, sw.on(mesh((2, 2))), Products() as inner:
        assert type(torch.arange(3)) is sw.MeshTensor
        assert (x @ torch.ones(8, 2)).placements
    assert outer.shapes == inner.shapes == [(6, 2)]


def test_modes_see_the_ops_of_a_forward_pass_on_whole_tensors(pool):
    """As those of a backward pass."""
    pool.run(modes_see_whole_tensors)


def counts_collectives():
    model, x = placed_blocks()
    weight = model.blocks[0][3].weight.detach()
    calls = {
        "forward": lambda: model(x),
        "backward": lambda: model(x).square().mean().backward(),
        "op": lambda: (x @ weight.t()).relu().amax(),
        "gather": lambda: whole(x),
    }
    for _ in range(2):  # a warm op has another way
        for name, run in calls.items():
            sent = []
            with observe(sent.append), CommDebugMode() as counted:
                run()
            assert sent, name
            assert counted.get_total_counts() == len(sent), name


def test_collectives_inside_of_ops_are_counted(pool):
    pool.run(counts_collectives)


def written_by_debug_mode():
    debug_mode = pytest.importorskip("torch.utils._debug_mode")
    model, x = placed_blocks()
    with debug_mode.DebugMode() as forward:
        loss = model(x).square().mean()
    with debug_mode.DebugMode() as backward:
        loss.backward()
    assert "aten::addmm" in forward.debug_string()
    assert "aten::mm" in backward.debug_string()


def test_debug_mode_writes_what_a_rank_computes(pool):
    pool.run(written_by_debug_mode)
