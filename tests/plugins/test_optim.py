"""Rules for optimizer ops: what they say, the traps, and whole optimizers on real ranks."""

import math

import pytest
import torch

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.errors import ListLengthError
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.results import output_metas
from shardwise.planning.strategies import make_call
from shardwise.rule.lowering import LocalCall
from shardwise.testing import mesh
from shardwise_optim import foreach, fused, norms, scaling

aten = torch.ops.aten
RULES = (*foreach.RULES, *fused.RULES, *norms.RULES, *scaling.RULES)
OPS = {op: rule for rule in RULES for op in rule.ops}
MESH = AbstractMesh((2, 3))


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def spec(tensor, *placements):
    return TensorSpec(MESH, placements or [Replicate()] * 2, TensorMeta.of(tensor))


def call_of(op, *args, **kwargs):
    values = [
        tuple(map(spec, a))
        if isinstance(a, list) and a and isinstance(a[0], torch.Tensor)
        else spec(a)
        if isinstance(a, torch.Tensor)
        else a
        for a in args
    ]
    schema = OpSchema.of(op, *values, static=OPS[op].static, **kwargs)
    return make_call(OPS[op], schema, output_metas(op, schema.values))


def rows(op, *args, **kwargs):
    """The rows of the first list position, as text."""
    call = call_of(op, *args, **kwargs)
    return [str(row).partition(": ")[2] for row in OPS[op].rows(call.position(0))]


def partials(op, *args, **kwargs):
    return {row for row in rows(op, *args, **kwargs) if "P(" in row}


# -- what rules say ----------------------------------------------------------------------------------------------


LEFT_OUT = {
    "aten._foreach_powsum.Scalar_out",
    *("aten._amp_foreach_non_finite_check_and_unscale.default", "aten._amp_foreach_non_finite_check_and_unscale.out"),
    *(
        f"aten._fused_{name}.{tag}"
        for name in ("adam", "adamw", "sgd", "adagrad")
        # torch's meta device takes no functional form, so their results cannot be planned; nothing calls them.
        for tag in ("default", "tensor_lr", "out", "tensor_lr_out")
    ),
}


def test_every_foreach_and_fused_op_has_a_rule():
    named = (name.removeprefix("aten::").partition(".") for name in torch._C._dispatch_get_all_op_names())
    listed = {
        getattr(getattr(aten, name), tag or "default")
        for name, _, tag in named
        if name.startswith(("_foreach_", "_fused_ada", "_fused_sgd", "_amp_"))
    }
    assert {str(op) for op in listed if op not in OPS} == LEFT_OUT


def test_no_op_has_two_rules():
    listed = [op for rule in RULES for op in rule.ops]
    assert len(listed) == len(set(listed)) > 200


GOLDEN = [
    (aten._foreach_sqrt.default, [[meta(4)]], ["[S(0)] -> [S(0)]", "[R] -> [R]"]),
    (aten._foreach_sqrt_.default, [[meta(4)]], ["[S(0)] -> []", "[R] -> []"]),
    (aten._foreach_neg_.default, [[meta(4)]], ["[S(0)] -> []", "[P(sum)] -> []", "[P(avg)] -> []", "[R] -> []"]),
    (aten._foreach_div.List, [[meta(4)], [meta(4)]], ["[S(0), S(0)] -> [S(0)]", "[R, R] -> [R]"]),
    (aten._foreach_div.Tensor, [[meta(4)], meta()], ["[S(0), R] -> [S(0)]", "[R, R] -> [R]"]),
    (aten._foreach_max.default, [[meta(4)]], ["[S(0)] -> [P(max)]", "[P(max)] -> [P(max)]", "[R] -> [R]"]),
    (aten._foreach_norm.Scalar, [[meta(4)]], ["[S(0)] -> [R]", "[R] -> [R]"]),
]


@pytest.mark.parametrize(("op", "args", "expected"), GOLDEN, ids=lambda v: str(v) if not isinstance(v, list) else "")
def test_rows(op, args, expected):
    assert rows(op, *args) == expected


ADAM = {"beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 0.1, "amsgrad": False, "maximize": False}


def test_a_fused_step_keeps_counters_whole_and_takes_empty_lists():
    p = [meta(4, 3)]
    assert rows(aten._fused_adam_.default, p, p, p, p, [], [meta()], lr=0.1, **ADAM) == [
        "[S(0), S(0), S(0), S(0), -, R, -, -] -> []",
        "[S(1), S(1), S(1), S(1), -, R, -, -] -> []",
        "[R, R, R, R, -, R, -, -] -> []",
    ]


# -- traps -------------------------------------------------------------------------------------------------------


def test_a_tensor_that_all_positions_share_is_whole():
    assert partials(aten._foreach_mul.Tensor, [meta(4)], meta()) == {
        "[P(sum), R] -> [P(sum)]",
        "[P(avg), R] -> [P(avg)]",
    }
    assert partials(aten._foreach_add.Tensor, [meta(4)], meta()) == {"[P(avg), R] -> [P(avg)]"}


def test_in_place_the_first_operand_must_lie_as_the_result():
    assert "[R, P(avg)] -> [P(avg)]" in partials(aten._foreach_add.List, [meta(4)], [meta(4)])
    assert "[R, P(avg)] -> []" not in partials(aten._foreach_add_.List, [meta(4)], [meta(4)])
    assert "[P(avg), R] -> []" in partials(aten._foreach_add_.List, [meta(4)], [meta(4)])


@pytest.mark.parametrize(
    "dtypes", [(torch.int8, torch.int8), (torch.float32, torch.bfloat16), (torch.bool, torch.float32)]
)
def test_partial_rows_are_for_floats_of_one_dtype(dtypes):
    one, other = (meta(4, dtype=dtype) for dtype in dtypes)
    assert not partials(aten._foreach_mul.List, [one], [other])


class CountingComm:
    """One rank's handle: notes what is asked for and answers as if all ranks held the same."""

    def __init__(self):
        self.asked = []

    def all_reduce(self, tensor, kind, mesh_dims):
        self.asked.append((tuple(tensor.shape), kind, tuple(mesh_dims)))
        return tensor * 6 if kind == "sum" else tensor


def test_norms_of_many_tensors_take_one_all_reduce_per_set_of_mesh_dims():
    tensors = [torch.ones(4), torch.ones(6), torch.ones(0, 7), torch.ones(5), torch.ones(3)]
    layouts = [
        (Shard(0), Shard(0)),
        (Replicate(), Shard(0)),
        (Shard(0), Shard(0)),
        (Replicate(), Replicate()),
        (Shard(0), Shard(0)),
    ]
    shapes = [(24,), (18,), (5, 7), (5,), (18,)]
    inputs = tuple(spec(meta(*shape), *layout) for shape, layout in zip(shapes, layouts, strict=True))
    results = tuple(spec(meta()) for _ in inputs)
    comm = CountingComm()
    call = call_of(aten._foreach_norm.Scalar, [meta(*shape) for shape in shapes])
    result = norms.norms(LocalCall(call, inputs, results, (0, 0), comm), tensors, 2)
    assert comm.asked == [((3,), "sum", (0, 1)), ((1,), "sum", (1,))]
    assert [float(n) for n in result] == pytest.approx([math.sqrt(n) for n in (24, 36, 0, 5, 18)])


def test_a_norm_whose_power_is_no_float_is_found():
    result = spec(meta())
    local = LocalCall(
        call_of(aten._foreach_norm.Scalar, [meta(12)]),
        (spec(meta(12), Shard(0), Shard(0)),),
        (result,),
        (0, 0),
        CountingComm(),
    )
    (norm,) = norms.norms(local, [torch.tensor([3e18, 4e18])], 2)
    assert float(norm) == pytest.approx(5e18 * math.sqrt(6))


# -- on real ranks -----------------------------------------------------------------------------------------------


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LAYOUTS = {
    (4,): [[Shard(0)], [Shard(1)], [Replicate()]],
    (2, 2): [[Shard(0), Shard(1)], [Shard(0), Replicate()], [Shard(0), Shard(0)]],
}
SHAPES = ((5, 7), (8, 6), (3, 1))
OPTIMIZERS = [
    lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
    lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=False, amsgrad=True),
    lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    lambda ps: torch.optim.Adam(ps, lr=0.1, fused=True, amsgrad=True, weight_decay=0.1),
    lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True, nesterov=True),
    lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True, weight_decay=0.1),
    lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True),
    lambda ps: torch.optim.Adagrad(ps, lr=0.1, foreach=True),
    lambda ps: torch.optim.Adagrad(ps, lr=0.1, fused=True),
    lambda ps: torch.optim.RMSprop(ps, lr=0.1, foreach=True, centered=True, momentum=0.5),
    lambda ps: torch.optim.NAdam(ps, lr=0.1, foreach=True),
    lambda ps: torch.optim.RAdam(ps, lr=0.1, foreach=True),
    lambda ps: torch.optim.Adadelta(ps, lr=0.1, foreach=True),
    lambda ps: torch.optim.Adamax(ps, lr=0.1, foreach=True),
]


def parameters(shape):
    """The same parameters twice: plain, and each laid out in its own way on a mesh."""
    plain = [values(*s, seed=i).requires_grad_() for i, s in enumerate(SHAPES)]
    laid = [
        sw.distribute_tensor(p.detach().clone(), mesh(shape), layout).requires_grad_()
        for p, layout in zip(plain, LAYOUTS[shape], strict=True)
    ]
    return plain, laid


def three_steps(shape):
    for make in OPTIMIZERS:
        plain, laid = parameters(shape)
        for params in (plain, laid):
            optimizer = make(params)
            for _ in range(3):
                optimizer.zero_grad()
                sum(((p - 0.3) ** 2).sum() for p in params).backward()
                torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
                optimizer.step()
        for p, expected, layout in zip(laid, plain, LAYOUTS[shape], strict=True):
            assert p.placements == tuple(layout)
            assert torch.allclose(p.full_tensor(), expected, atol=1e-6), optimizer


def clip_by_every_norm():
    for shape in LAYOUTS:
        for order in (2.0, 1.0, 3.0, 0.5, math.inf, -math.inf):
            plain, laid = parameters(shape)
            for params in (plain, laid):
                sum((p**3).sum() for p in params).backward()
            expected = torch.nn.utils.clip_grad_norm_(plain, 0.5, norm_type=order, foreach=True)
            norm = torch.nn.utils.clip_grad_norm_(laid, 0.5, norm_type=order, foreach=True)
            assert torch.allclose(norm.full_tensor(), expected)
            assert all(torch.allclose(p.grad.full_tensor(), q.grad) for p, q in zip(laid, plain, strict=True))


def an_overflow_on_one_rank_is_found_on_all():
    for place in (0, 4):
        grad = torch.ones(5)
        grad[place] = math.inf
        grads = [sw.distribute_tensor(g, mesh((4,)), [Shard(0)]) for g in (grad, torch.ones(3))]
        result = torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_(grads, result, torch.tensor(0.5))
        assert result == 1
        assert grads[1].full_tensor().tolist() == [0.5] * 3


def a_scaler_skips_the_step_with_an_overflow():
    plain, laid = parameters((2, 2))
    for params in (plain, laid):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        optimizer = torch.optim.SGD(params, lr=0.1)
        for factor in (1.0, math.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale(sum((p * factor).sum() for p in params)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 4.0 * 2 / 2 * 2
    assert all(torch.allclose(p.full_tensor(), q) for p, q in zip(laid, plain, strict=True))


def bad_lists_and_partial_gradients_are_refused():
    x = [sw.distribute_tensor(values(4), mesh((4,)), [Shard(0)]) for _ in range(2)]
    # Of foreach ops, torch compares the lengths itself before anybody sees the call.
    with pytest.raises(RuntimeError, match="same number of tensors"):
        torch._foreach_add(x, x[:1])
    with pytest.raises(ListLengthError, match="grads"):
        torch._fused_sgd_(
            x,
            x[:1],
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=0.1,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=True,
        )
    p = sw.MeshTensor.from_local(torch.ones(4), mesh((4,)), [Partial()])
    torch._amp_foreach_non_finite_check_and_unscale_([p], torch.zeros(()), torch.tensor(0.5))
    torch._foreach_sqrt_([p])
    assert p.placements == (Partial(),)
    torch.testing.assert_close(p.full_tensor(), torch.full((4,), 2.0).sqrt())


@pytest.mark.parametrize("shape", list(LAYOUTS), ids=str)
def test_optimizers_on_ranks(pool, shape):
    pool.run(three_steps, shape)


@pytest.mark.parametrize(
    "program",
    [
        clip_by_every_norm,
        an_overflow_on_one_rank_is_found_on_all,
        a_scaler_skips_the_step_with_an_overflow,
        bad_lists_and_partial_gradients_are_refused,
    ],
)
def test_on_ranks(pool, program):
    pool.run(program)
