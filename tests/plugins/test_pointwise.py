"""Rules for elementwise ops: what they say, the traps of partial tensors, and activations on real ranks."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from attrs import evolve
from described import rows_of

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.discovery.process import default_registry
from shardwise.engine.traffic import in_lowering
from shardwise.planning.strategies import make_call
from shardwise.rule import AbstractMesh, OpSchema, TensorMeta, TensorSpec, infinite_factors
from shardwise.testing import RuleRefuted, check_rule, judge, mesh
from shardwise_pointwise import activations, arithmetic, comparisons, functions, gated, special

aten = torch.ops.aten
RULES = (*(r for m in (arithmetic, functions, comparisons, activations, special) for r in m.RULES), *gated.RULES)
OPS = {op: rule for rule in RULES for op in rule.ops}


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def printed(op, *args, **kwargs):
    return [str(row).partition(": ")[2] for row in rows_of(op, *args, **kwargs)]


def partials(op, *args, **kwargs):
    """The partial rows of a call, without their names."""
    return {text for text in printed(op, *args, **kwargs) if "P(" in text}


# -- which ops ---------------------------------------------------------------------------------------------------

ELSEWHERE = {
    "clone": "shardwise-tensor",
    "equal": "shardwise-tensor",
    "masked_fill": "shardwise-tensor",
    "native_dropout_backward": "shardwise-random",
    "max": "max.other is maximum",
    "min": "min.other is minimum",
    "rrelu": "made of rrelu_with_noise",
}


def test_every_op_that_torch_calls_pointwise_has_a_rule():
    names = [
        n.removeprefix("aten::").partition(".") for n in torch._C._dispatch_get_all_op_names() if n[:6] == "aten::"
    ]
    ops = {getattr(getattr(aten, name), tag or "default") for name, _, tag in names if name not in ELSEWHERE}
    tagged = [op for op in ops if torch.Tag.pointwise in op.tags]
    assert len(tagged) > 400
    assert [str(op) for op in tagged if op not in OPS] == []


def test_no_op_has_two_rules_and_there_are_many():
    listed = [op for rule in RULES for op in rule.ops]
    assert len(listed) == len(set(listed)) > 600


@pytest.mark.parametrize("op", [aten.gelu.out, aten.gelu_backward.grad_input])
def test_ops_that_may_leave_out_unwritten_are_refused(op):
    assert op not in OPS


# -- what rules say ----------------------------------------------------------------------------------------------


def test_broadcasting_rows():
    assert printed(aten.maximum.default, meta(5, 1, 7), meta(4, 7))[:3] == [
        "[S(0), R] -> [S(0)]",
        "[R, S(0)] -> [S(1)]",
        "[S(2), S(1)] -> [S(2)]",
    ]


GOLDEN = [
    (aten.sqrt.default, [meta(3)], set()),
    (aten.neg.default, [meta(3)], {"[P(sum)] -> [P(sum)]", "[P(avg)] -> [P(avg)]", "[P(max)] -> [P(min)]"}),
    (aten.exp.default, [meta(3)], {"[P(max)] -> [P(max)]", "[P(min)] -> [P(min)]"}),
    (aten.log.default, [meta(3)], set()),
    (aten.add.Scalar, [meta(3), 1.0], {"[P(avg)] -> [P(avg)]", "[P(max)] -> [P(max)]", "[P(min)] -> [P(min)]"}),
    (aten.mul.Scalar, [meta(3), 2.0], {"[P(sum)] -> [P(sum)]", "[P(avg)] -> [P(avg)]"}),
    (aten.div.Scalar, [meta(3), 2.0], {"[P(sum)] -> [P(sum)]", "[P(avg)] -> [P(avg)]"}),
    (aten.div.Tensor, [meta(3), meta()], {"[P(sum), R] -> [P(sum)]", "[P(avg), R] -> [P(avg)]"}),
    (aten.relu_.default, [meta(3)], {"[P(max)] -> [P(max)]", "[P(min)] -> [P(min)]"}),
    (aten.tanh_backward.default, [meta(3), meta(3)], {"[P(sum), R] -> [P(sum)]", "[P(avg), R] -> [P(avg)]"}),
    (aten.clamp.default, [meta(3), 0.0], {"[P(max)] -> [P(max)]", "[P(min)] -> [P(min)]"}),
    (aten.eq.Tensor, [meta(3), meta(3)], set()),
]


@pytest.mark.parametrize(("op", "args", "expected"), GOLDEN, ids=[str(op) for op, *_ in GOLDEN])
def test_partial_rows(op, args, expected):
    listed = partials(op, *args)
    assert listed >= expected
    assert bool(listed) == bool(expected)


def test_a_product_takes_one_partial_sum():
    assert partials(aten.mul.Tensor, meta(3), meta(3)) == {
        *("[P(sum), R] -> [P(sum)]", "[R, P(sum)] -> [P(sum)]", "[P(avg), R] -> [P(avg)]", "[R, P(avg)] -> [P(avg)]"),
        "[P(product), P(product)] -> [P(product)]",
    }


def test_a_sum_takes_two_partial_sums_or_adds_the_other_once():
    sums = {str(row) for row in rows_of(aten.add.Tensor, meta(3), meta(3)) if "P(sum)" in str(row) and not row.lowered}
    assert sums == {"sum, sum -> sum: [P(sum), P(sum)] -> [P(sum)]"}
    once = {row.name for row in rows_of(aten.add.Tensor, meta(3), meta(3)) if row.lowered}
    assert once == {"sum, R -> sum", "R, sum -> sum"}


# -- traps -------------------------------------------------------------------------------------------------------


def test_the_maximum_of_partial_minima_is_partial_in_neither():
    assert "[P(min), P(min)] -> [P(min)]" not in partials(aten.maximum.default, meta(3), meta(3))
    assert "[P(max), P(max)] -> [P(max)]" not in partials(aten.minimum.default, meta(3), meta(3))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8])
def test_an_or_and_a_wrapping_sum_do_not_pass_into_floats(dtype):
    assert partials(aten.mul.Tensor, meta(3, dtype=dtype), meta(1)) == {
        "[R, P(sum)] -> [P(sum)]",
        "[R, P(avg)] -> [P(avg)]",
    }
    assert partials(aten.mul.Tensor, meta(3, dtype=dtype), meta(3, dtype=dtype))


def test_an_average_of_integers_is_cut_and_does_not_pass():
    assert not any("avg" in row for row in partials(aten.mul.Scalar, meta(3, dtype=torch.int64), 2))


def test_a_maximum_of_integers_may_overflow_and_does_not_pass():
    assert not any("max" in row for row in partials(aten.add.Scalar, meta(3, dtype=torch.int8), 100))
    assert not partials(aten.relu.default, meta(3, dtype=torch.int8))


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_a_rounded_quotient_is_not_linear(mode):
    assert not partials(aten.div.Scalar_mode, meta(3), 2, rounding_mode=mode)
    assert partials(aten.div.Scalar_mode, meta(3), 2, rounding_mode=None)


def test_a_quotient_by_many_numbers_takes_no_partial_sum():
    assert not partials(aten.div.Tensor, meta(3), meta(3))


# -- on real ranks -----------------------------------------------------------------------------------------------


def values(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def numbers_beside_partial_sums():
    p = sw.MeshTensor.from_local(values(5), mesh((2, 2)), [Partial(), Replicate()], run_check=False)
    whole = p.full_tensor()
    kept = (lambda t: t + 1, lambda t: 2 - t, lambda t: t / 4, lambda t: t / torch.tensor(4.0), lambda t: 3 * t)
    for program in kept:
        assert program(p).placements == p.placements
        assert torch.allclose(program(p).full_tensor(), program(whole))


def division_by_zero_keeps_the_sign_of_the_sum():
    mine = torch.tensor([1.0, -1.0, 2.0, 0.0]) * (-1 if torch.distributed.get_rank() == 1 else 1)
    for divide in (lambda t: t / 0, lambda t: t.clone().div_(0), lambda t: t / torch.tensor(0.0)):
        quotient = divide(sw.MeshTensor.from_local(mine, mesh((4,)), [Partial()]))
        assert quotient.placements == (Partial(),)
        assert torch.allclose(quotient.full_tensor(), torch.tensor([2.0, -2.0, 4.0, 0.0]) / 0, equal_nan=True)


def in_place_results_keep_their_placement():
    p = sw.MeshTensor.from_local(torch.ones(4), mesh((4,)), [Partial("max")])
    assert (-p).placements == (Partial("min"),)
    assert p.neg_().placements == (Partial("max"),)
    assert torch.equal(p.full_tensor(), -torch.ones(4))
    x = sw.distribute_tensor(values(4, 6), mesh((2, 2)), [Shard(0), Shard(1)])
    expected = values(4, 6).mul_(2).add_(1).relu_()
    assert torch.equal(x.mul_(2).add_(1).relu_().full_tensor(), expected)
    assert x.placements == (Shard(0), Shard(1))


def an_error_leaves_what_it_would_have_written():
    for kind in ("sum", "avg", "product"):
        p = sw.MeshTensor.from_local(torch.arange(1.0, 4.0).to(torch.complex64), mesh((4,)), [Partial(kind)])
        before = p.full_tensor()
        with pytest.raises(RuntimeError, match="clamp is not supported for complex"):
            p.clamp_min_(1)
        assert torch.equal(p.full_tensor(), before)


ACTIVATIONS = [
    *(F.relu, F.gelu, F.silu, F.mish, F.elu, F.celu, F.selu, F.softplus, F.logsigmoid, F.hardtanh, F.hardswish),
    *(F.hardsigmoid, F.leaky_relu, F.relu6, F.softsign, F.tanhshrink, F.hardshrink, F.softshrink, torch.tanh),
    *(torch.sigmoid, lambda t: F.gelu(t, approximate="tanh"), lambda t: F.threshold(t, 0.1, 20.0), F.glu),
    *(lambda t: torch.where(t > 0, t, 0.5 * t), lambda t: torch.lerp(t, t * t, 0.3)),
    *(lambda t: torch.addcmul(t, t, t.exp()), lambda t: torch.addcdiv(t, t, 1 + t * t), lambda t: t.clamp(-1, 1) ** 3),
    *(lambda t: torch.logit(torch.sigmoid(t)), lambda t: torch.atan2(t, t + 3), lambda t: torch.maximum(t, -t)),
]


def activations_and_their_gradients():
    for layout in ([Shard(1), Shard(0)], [Shard(0), Shard(0)]):
        for program in ACTIVATIONS:
            full = values(5, 6).requires_grad_()
            x = sw.distribute_tensor(values(5, 6), mesh((2, 2)), layout).requires_grad_()
            y, expected = program(x), program(full)
            assert torch.allclose(y.full_tensor(), expected)
            y.sum().backward()
            expected.sum().backward()
            assert x.grad.placements == tuple(layout)
            assert torch.allclose(x.grad.full_tensor(), full.grad, atol=1e-6)


@pytest.mark.parametrize(
    "program",
    [
        numbers_beside_partial_sums,
        division_by_zero_keeps_the_sign_of_the_sum,
        in_place_results_keep_their_placement,
        an_error_leaves_what_it_would_have_written,
        activations_and_their_gradients,
    ],
)
def test_on_ranks(pool, program):
    pool.run(program)


FACTORS = torch.tensor([1.0, float("inf"), -2.0, float("-inf"), 3.0])
GIVEN = {
    aten.mul.Tensor: [(torch.randn(4, 5), FACTORS), (FACTORS, torch.randn(4, 5)), (torch.randn(4, 1), FACTORS)],
    aten.mul_.Tensor: [(torch.randn(4, 5), FACTORS)],
    aten.lerp.Tensor: [(torch.randn(4, 5), torch.randn(4, 5), FACTORS)],
    aten.addcmul.default: [(torch.randn(4, 5), torch.randn(4, 5), FACTORS), (torch.randn(5), FACTORS, torch.randn(5))],
}


@pytest.mark.parametrize("op", GIVEN, ids=str)
@pytest.mark.parametrize("looks", [True, False])
def test_the_oracle_sees_what_infinite_factors_make_of_parts(op, looks, monkeypatch):
    """Of other rules it accepts NaN for an infinity there (docs/rules.md); these look at their factors first."""
    compare = judge.difference
    monkeypatch.setattr(judge, "difference", lambda *args, **named: compare(*args, **{**named, "infinities": True}))
    if not looks:
        monkeypatch.setattr(infinite_factors, "_is_finite", lambda _: True)
    samples = [(args, {}) for args in GIVEN[op]]
    with nullcontext() if looks else pytest.raises(RuleRefuted, match=r"nan where one device has -?inf"):
        assert check_rule(evolve(OPS[op], ops=(op,)), samples, meshes=[(4,), (3,), (2, 2)]).cases


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_division_by_a_tensor_sends_is_known_where_no_value_decides_it(device):
    """Asked on meta tensors, for a mesh of either device. On a CPU it looks at the divisor; a small tensor on an
    accelerator is reduced in any case, rather than wait.
    """
    on = AbstractMesh((4,), device)
    x = TensorSpec(on, (Partial(),), TensorMeta.of(meta(5, 7)))
    by = TensorSpec(on, (Replicate(),), TensorMeta.of(meta()))
    entry = default_registry().lookup(aten.div.Tensor)
    schema = OpSchema.of(aten.div.Tensor, x, by)
    call = make_call(entry.rule, schema, [x.tensor_meta])
    issued = in_lowering(entry, schema, schema.values, call, [x, by], [x])
    assert [one.kind for one in issued.collectives] == ([] if device == "cpu" else ["all_reduce"])
    assert issued.complete == (device == "cuda")
