"""``torch.func``, ``torch.autograd.functional`` and forward mode over functions that move tensors."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, functional

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard
from shardwise.errors import LayoutError, LocalGradientError, ShardingError, TracingError
from shardwise.testing import mesh

func = torch.func
WHOLE = [Replicate(), Replicate()]


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, T, W = numbers(5, 3), numbers(5, 3, seed=1), numbers(3, 3, seed=2)


def on(tensor, *placements):
    return sw.distribute_tensor(tensor, mesh((2, 2)), placements or [Shard(0), Shard(tensor.dim() - 1)])


def as_it_is(tensor, *_placements):
    return tensor.clone()


def move(tensor, *placements, **options):
    """To other placements; on one device nothing."""
    return tensor.redistribute(placements=placements, **options) if hasattr(tensor, "placements") else tensor


def whole(value):
    if isinstance(value, (list, tuple)):
        return [whole(part) for part in value]
    if isinstance(value, dict):
        return {key: whole(part) for key, part in value.items()}
    return value.full_tensor() if isinstance(value, MeshTensor) else value


# -- each transform of each call -------------------------------------------------------------------------------------


def by_dual(f, x, t):
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(f(forward_ad.make_dual(x, t)))
        return dual.primal, dual.tangent


def by_linearize(f, x, t):
    result, derivative = func.linearize(f, x)
    return result, derivative(t), derivative(t * 2)


def squares(f):
    return lambda x: f(x).square().sum()


TRANSFORMS = {
    "grad": lambda f, x, _: func.grad(squares(f))(x),
    "grad of grad": lambda f, x, _: func.grad(lambda y: func.grad(squares(f))(y).square().sum())(x),
    "jvp": lambda f, x, t: func.jvp(f, (x,), (t,)),
    "jvp of grad": lambda f, x, t: func.jvp(func.grad(squares(f)), (x,), (t,)),
    "vmap": lambda f, x, _: func.vmap(lambda row: f(row.unsqueeze(0)).squeeze(0))(x),
    "vmap of columns": lambda f, x, _: func.vmap(lambda row: f(row.unsqueeze(0)).squeeze(0), in_dims=1)(x[:3, :3]),
    "vmap of grad": lambda f, x, _: func.vmap(func.grad(lambda row: f(row.unsqueeze(0)).square().sum()))(x),
    "vmap of factors": lambda f, x, _: func.vmap(lambda k: f(x * k))(torch.arange(3.0, dtype=torch.float64)),
    "jacrev": lambda f, x, _: func.jacrev(f)(x),
    "jacfwd": lambda f, x, _: func.jacfwd(f)(x),
    "hessian": lambda f, x, _: func.hessian(squares(f))(x),
    "linearize": by_linearize,
    "dual": by_dual,
    "dual without grad": torch.no_grad()(by_dual),
    "jacobian": lambda f, x, _: functional.jacobian(f, x),
    "jacobian, vectorized": lambda f, x, _: functional.jacobian(f, x, vectorize=True),
    "jacobian, forward": lambda f, x, _: functional.jacobian(f, x, vectorize=True, strategy="forward-mode"),
    "functional.hessian": lambda f, x, _: functional.hessian(squares(f), x),
    "functional.hessian, vectorized": lambda f, x, _: functional.hessian(squares(f), x, vectorize=True),
    "functional.hessian, forward": lambda f, x, _: functional.hessian(
        squares(f), x, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "functional.jvp": functional.jvp,
    "functional.hvp": lambda f, x, t: functional.hvp(squares(f), x, t),
    "functional.vhp": lambda f, x, t: functional.vhp(squares(f), x, t),
}


def joined(local, like):
    return MeshTensor.from_local(local, like.device_mesh, like.placements, shape=like.shape)


def averaged(x, w):
    """A local function with an average, whose parts count less than those of a sum."""
    part = sw.local(lambda p: p * p, inputs=WHOLE, outputs=[Partial("avg"), Replicate()])(x)
    return part.redistribute(placements=WHOLE) @ w


def product(x, w):
    return x @ w


# Each gets a MeshTensor and the weight as one; then the same on one device.
CALLS = {
    "redistribute": (lambda x, w: move(x, *WHOLE) @ w, product),
    "redistribute to shards": (lambda x, w: move(x, Shard(x.dim() - 1), Replicate()) @ w, product),
    "redistribute a weight": (lambda x, w: x @ move(w, Replicate(), Shard(1)), product),
    "to_local, from_local": (lambda x, w: joined(x.to_local().sin(), x) @ w, lambda x, w: x.sin() @ w),
    "the part of a weight": (lambda x, w: x @ joined(w.to_local().sin(), w), lambda x, w: x @ w.sin()),
    "full_tensor": (lambda x, w: x.full_tensor() @ w.full_tensor(), product),
    "distribute_tensor": (
        lambda x, w: sw.distribute_tensor(x.full_tensor(), w.device_mesh, [Shard(0), Replicate()]) @ w,
        product,
    ),
    "local": (
        lambda x, w: sw.local(torch.sin, outputs=x.placements)(x) @ w,
        lambda x, w: x.sin() @ w,
    ),
    "local with an average": (averaged, lambda x, w: (x * x) @ w),
}
# The same with a plain tensor.
CALLS_ON_PLAIN = {
    "distribute_tensor, plain": lambda x, w: sw.distribute_tensor(x, w.device_mesh, [Shard(0), Shard(1)]) @ w,
    "from_local, plain": lambda x, w: move(MeshTensor.from_local(x, w.device_mesh, WHOLE), Shard(0), Replicate()) @ w,
}


@cache
def on_one_device(alone):
    """What each transform of a call gives."""
    return {name: whole(apply(lambda x: alone(x, W).sin(), X, T)) for name, apply in TRANSFORMS.items()}


def transformed(name, expected):
    w = on(W)
    ours = CALLS[name][0] if name in CALLS else CALLS_ON_PLAIN[name]
    place = as_it_is if name in CALLS_ON_PLAIN else on
    for transform, apply in TRANSFORMS.items():
        actual = apply(lambda x: ours(x, w).sin(), place(X), place(T))
        torch.testing.assert_close(whole(actual), expected[transform], msg=lambda text: f"{transform}: {text}")  # noqa: B023


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own forward mode uses it
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # torch's own linearize says it
@pytest.mark.parametrize("name", [*CALLS, *CALLS_ON_PLAIN])
def test_every_transform_of_a_call(pool, name):
    pool.run(transformed, name, on_one_device(CALLS[name][1] if name in CALLS else product))


# -- programs --------------------------------------------------------------------------------------------------------


def gradients_of_samples(on):
    p = {"w": on(W), "b": on(W[0], Replicate(), Shard(0))}

    def loss(p, row):
        return (move(row, *WHOLE) @ move(p["w"], Replicate(), Shard(1)) + move(p["b"], *WHOLE)).tanh().square().sum()

    return [func.vmap(func.grad(loss, argnums=(0, 1)), in_dims=(None, 0))(p, x) for x in (on(X), on(X, *WHOLE))]


def models_called_with_other_parameters(on):
    torch.manual_seed(1)
    first, last = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = first, last

        def forward(self, x):
            return move(self.last(move(self.first(x).tanh(), Replicate(), Shard(1))), Shard(1), Replicate())

    model, x = Model(), on(X, Shard(0), Replicate())
    p = {name: on(v.detach(), Replicate(), Shard(0)) for name, v in model.named_parameters()}

    def loss(p, x):
        return func.functional_call(model, p, (x,)).square().sum()

    stacked, _ = func.stack_module_state([copy.deepcopy(first) for _ in range(3)])
    stacked = {name: on(v.detach(), Replicate(), Shard(0)) for name, v in stacked.items()}

    def call(p, x):
        return move(func.functional_call(first, p, (x,)), Shard(0), Replicate()).sum()

    hessian = func.hessian(lambda bias: loss({**p, "last.bias": bias}, x))(p["last.bias"])
    return func.grad(loss)(p, x), hessian, func.vmap(func.grad(call), in_dims=(0, None))(stacked, x)


def hidden_dims(on):
    cube = numbers(3, 4, 5)

    def f(u):
        return move(u.sin(), Shard(0), Replicate()).cumsum(0)

    def slope(u):
        return func.grad(lambda v: f(v).square().sum())(u)

    weights = torch.stack([W, W * 2, W.sin()])

    def rows(w, x):
        return move(x @ move(w, Replicate(), Shard(1)), Shard(0), Replicate()).sum(0)

    return (
        func.vmap(func.vmap(f, in_dims=1), in_dims=2)(on(cube, Shard(1), Shard(2))),
        func.vmap(func.vmap(slope))(on(cube, Shard(0), Shard(2))),
        func.vmap(rows, in_dims=(0, None), out_dims=1)(on(weights, Shard(2), Shard(1)), on(X, Shard(1), Replicate())),
        func.vmap(f, chunk_size=2)(on(X)),
    )


def gradients_beside(on):
    """The gradients of a tensor from elsewhere, by the ordinary backward pass."""
    w = on(W).requires_grad_()

    def f(x):
        return move(x @ move(w, Shard(1), Replicate()), Shard(1), Shard(0)).sin()

    slope = func.grad(lambda x: f(x).sum())(on(X))
    value, pull = func.vjp(f, on(X))
    (pulled,) = pull(on(T))
    (slope.square().sum() + pulled.square().sum()).backward()
    return slope.detach(), value.detach(), pulled.detach(), w.grad


def partial_sums(on):
    def f(x):
        if not hasattr(x, "placements"):
            return ((x @ x.t()) * 3).sin().sum()
        product = (x @ x.t()).redistribute(placements=[Partial(), Replicate()])
        part = MeshTensor.from_local(product.to_local() * 3, product.device_mesh, product.placements)
        return part.redistribute(placements=[Shard(0), Shard(1)]).sin().sum()

    x, t = on(X), on(T)
    return func.grad(f)(x), func.jvp(f, (x,), (t,)), func.jvp(func.grad(f), (x,), (t,)), func.hessian(f)(x)


def options_of_redistribute(on):
    def f(x):
        options = {"grad_placements": [Replicate(), Shard(0)], "async_op": True} if hasattr(x, "placements") else {}
        return move(x.sin(), Shard(1), Replicate(), **options).square().sum()

    def narrowed(x):
        if not hasattr(x, "placements"):
            return x.float().double().square().sum()
        return move(x, Shard(0), Replicate(), forward_dtype=torch.float32).double().square().sum()

    return [(func.grad(g)(on(X)), func.jvp(g, (on(X),), (on(T),))) for g in (f, narrowed)]


def tensors_made_inside(on):
    def f(x):
        if not hasattr(x, "placements"):
            return (x * 3 * torch.arange(3.0, dtype=torch.float64)).sin().sum()
        here = {"dtype": torch.float64, "device_mesh": x.device_mesh}
        threes = sw.ones(5, 3, placements=[Shard(0), Shard(1)], **here) * 2 + sw.full((5, 3), 1.0, **here)
        with sw.on(x.device_mesh):
            return (x * threes * torch.arange(3.0, dtype=torch.float64)).sin().sum()

    factors = torch.arange(2.0, dtype=torch.float64)
    return func.grad(f)(on(X)), func.jvp(f, (on(X),), (on(T),)), func.vmap(lambda k: f(on(X) * k))(factors)


def numbers_read_inside(on):
    def f(x):
        total = move(x, *WHOLE).sum()
        return (x * total.item()).sin().sum() if total < 100 else x.sum()

    return func.grad(f)(on(X)), func.jvp(f, (on(X),), (on(T),))


def auxiliary_results(on):
    def f(x):
        with torch.no_grad():
            scale = move(x, *WHOLE) * 2
        return (move(x, Shard(1), Replicate()) * scale).sin().sum(), move(x, Shard(1), Shard(0)) * 2

    seed = torch.tensor(2.0, dtype=torch.float64)
    return func.grad(f, has_aux=True)(on(X)), func.vjp(f, on(X), has_aux=True)[1](seed)


def batches_of_gradients(on):
    x = on(X).requires_grad_()
    y = move(x.sin(), Shard(1), Replicate()) @ move(on(W), Replicate(), Shard(0))
    z = move(x.cos(), Shard(0), Replicate())
    local = z.full_tensor() if isinstance(z, MeshTensor) else z
    gradients = numbers(4, 5, 3)
    return (
        torch.autograd.grad(y, x, on(gradients, Replicate(), Shard(1)), is_grads_batched=True),
        torch.autograd.grad(local, x, gradients, is_grads_batched=True),
    )


def forward_over_reverse(on):
    x = on(X).requires_grad_()
    with forward_ad.dual_level():
        y = move(forward_ad.make_dual(x, on(T)).sin(), Shard(1), Replicate()).square().sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return [part.detach() for part in forward_ad.unpack_dual(slope)]


def tangents_in_other_layouts(on):
    """Torch asks of a tangent that it lies in memory as its primal does; of views it takes no other."""
    functions = (
        lambda d: d[1:3],
        lambda d: d.cumsum(0),
        lambda d: move(d, Shard(1), Replicate()).logsumexp(0),
        lambda d: d.max(1)[0],
        lambda d: torch.cat([d, d * 2]).t()[1:],
        lambda d: d.clone().mul_(2).add_(d),
        lambda d: torch.zeros_like(d).copy_(d)[3:],
        lambda d: d.unsqueeze(0).expand(2, 5, 3).softmax(1),
    )
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(on(X), on(T, Shard(1), Replicate()))
        return [[*forward_ad.unpack_dual(function(dual))] for function in functions]


PROGRAMS = [
    tangents_in_other_layouts,
    gradients_of_samples,
    models_called_with_other_parameters,
    hidden_dims,
    gradients_beside,
    partial_sums,
    options_of_redistribute,
    tensors_made_inside,
    numbers_read_inside,
    auxiliary_results,
    batches_of_gradients,
    forward_over_reverse,
]


def beside_one_device(program):
    torch.testing.assert_close(whole(program(on)), whole(program(as_it_is)))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program(pool, program):
    pool.run(beside_one_device, program)


def compiled():
    def slope(x):
        return func.grad(lambda y: (y.redistribute(placements=WHOLE) @ y.t()).sin().sum())(x)

    expected = func.grad(lambda y: (y @ y.t()).sin().sum())(X)
    actual = torch.compile(slope, backend="aot_eager", fullgraph=True)(on(X))
    torch.testing.assert_close(actual.full_tensor(), expected)
    has_part = torch.compile(lambda x: x + hasattr(x, "to_local"), backend="eager", fullgraph=True)
    assert torch.equal(has_part(X), X)


@pytest.mark.slow
def test_a_compiled_program(pool):
    pool.run(compiled)


def has_attributes():
    x = on(X)
    seen = []
    func.vmap(lambda row: seen.append((row.placements, row.spec.shape, row.device_mesh)) or row)(x)
    func.grad(lambda y: seen.append((y.placements, y.spec.shape, y.device_mesh)) or y.sum())(x)
    assert seen == [
        ((Replicate(), Shard(0)), (3,), x.device_mesh),
        ((Shard(0), Shard(1)), (5, 3), x.device_mesh),
    ]
    for name in ("placements", "spec", "device_mesh", "redistribute", "to_local", "full_tensor"):
        assert not hasattr(X, name)
        with pytest.raises(AttributeError, match=f"'Parameter' object has no attribute '{name}'"):
            getattr(nn.Parameter(X), name)
        assert func.vmap(lambda row: row * hasattr(row, name))(X).abs().sum() == 0  # noqa: B023


def test_only_tensors_around_meshtensors_have_the_attributes(pool):
    pool.run(has_attributes)


# -- refusals --------------------------------------------------------------------------------------------------------


def refuses():
    x = on(X)
    with pytest.raises(TracingError, match=r"in torch.func.functionalize: .* Move it before or after"):
        func.functionalize(lambda y: y.redistribute(placements=WHOLE))(x)
    with pytest.raises(LayoutError, match=r"all of its calls would get the same numbers.*randomness="):
        func.vmap(lambda row: row + sw.rand(3, device_mesh=x.device_mesh))(x)
    with pytest.raises(LayoutError, match=r"the gradient of the local part is a MeshTensor"):
        func.vjp(lambda y: y.full_tensor(), x)[1](x)
    with pytest.raises(LocalGradientError, match=r"the tangent of .*P\(max\)"):
        func.jvp(lambda y: y.redistribute(placements=[Partial("max"), Replicate()]).to_local(), (x,), (on(T),))
    with pytest.raises(ShardingError, match="there is no dim 1"):
        func.vmap(lambda row: row.redistribute(placements=[Shard(1), Replicate()]))(x)
    same = func.vmap(lambda row: row * 0 + sw.rand(3, device_mesh=x.device_mesh), randomness="same")(x).full_tensor()
    assert torch.equal(same, same[:1].expand(5, 3))


def test_what_is_refused(pool):
    pool.run(refuses)
