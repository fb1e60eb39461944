"""Custom ops as an author writes them: their rules, forward and backward, before the oracle and on real ranks."""

# ruff: noqa: ARG005  # a fake and a backward take what the op takes

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.library import custom_op

import shardwise as sw
from shardwise.errors import NotationError, RuleError
from shardwise.kernel.placements import REPLICATE, partial
from shardwise.kernel.rule import Row, Rows
from shardwise.rule.authoring import like, rule, rule_from
from shardwise.testing import GradientRefuted, RuleRefuted, check_gradients, check_rule, isolated_registry, made, mesh

# -- the ops: workers get them by value --------------------------------------------------------------------------


@custom_op("kit::swish_gate", mutates_args=())
def swish_gate(x: Tensor, gate: Tensor, beta: float = 1.0) -> Tensor:
    return x * gate * torch.sigmoid(beta * gate)


@custom_op("kit::swish_gate_backward", mutates_args=())
def swish_gate_backward(grad: Tensor, x: Tensor, gate: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(beta * gate)
    return grad * gate * s, grad * x * (s + beta * gate * s * (1 - s))


swish_gate.register_fake(lambda x, gate, beta=1.0: torch.empty_like(x))
swish_gate_backward.register_fake(lambda grad, x, gate, beta: (torch.empty_like(x), torch.empty_like(gate)))


def save_gate(ctx, inputs, output):
    x, gate, ctx.beta = inputs
    ctx.save_for_backward(x, gate)


def gate_backward(ctx, grad):
    return *swish_gate_backward(grad, *ctx.saved_tensors, ctx.beta), None


swish_gate.register_autograd(gate_backward, setup_context=save_gate)


@custom_op("kit::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


cube.register_fake(torch.empty_like)
cube.register_autograd(
    lambda ctx, grad: 3 * grad * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@custom_op("kit::halves", mutates_args=())
def halves(x: Tensor, parts: int) -> list[Tensor]:
    return [x / (i + 1) for i in range(parts)]


halves.register_fake(lambda x, parts: [torch.empty_like(x) for _ in range(parts)])
halves.register_autograd(
    lambda ctx, grads: (sum(g / (i + 1) for i, g in enumerate(grads)), None),
    setup_context=lambda ctx, inputs, output: None,
)


@custom_op("kit::total", mutates_args=())
def total(xs: Sequence[Tensor], bias: Tensor | None, *, scale: float | None = None) -> Tensor:
    result = sum(xs) if bias is None else sum(xs) + bias
    return result * (1.0 if scale is None else scale)


total.register_fake(lambda xs, bias, *, scale=None: torch.empty_like(xs[0]))


@custom_op("kit::scale_into", mutates_args={"out"})
def scale_into(x: Tensor, out: Tensor, *, factor: float) -> None:
    out.copy_(x * factor)


@custom_op("kit::no_gradient_for_x", mutates_args=())
def no_gradient_for_x(x: Tensor, y: Tensor) -> Tensor:
    return x.sign() * y


no_gradient_for_x.register_fake(lambda x, y: torch.empty_like(x))
no_gradient_for_x.register_autograd(
    lambda ctx, grad: (None, grad * ctx.saved_tensors[0].sign()),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@custom_op("kit::plain_backward", mutates_args=())
def plain_backward(x: Tensor) -> Tensor:
    return 2 * x


plain_backward.register_fake(torch.empty_like)
plain_backward.register_autograd(
    lambda ctx, grad: grad * torch.full(grad.shape, 2.0), setup_context=lambda ctx, inputs, output: None
)


@custom_op("kit::no_fake", mutates_args=())
def no_fake(x: Tensor) -> Tensor:
    return 2 * x


library = torch.library.Library("kit", "FRAGMENT")
library.define("count(Tensor x, *, Tensor(a!) state) -> Tensor")
library.impl("count", lambda x, *, state: (state.add_(x.sum()), 2 * x)[1], "CompositeExplicitAutograd")

GATE = rule(swish_gate, "..., ... -> ...", partial=["sum, R -> sum"])
GATE_BACKWARD = rule(swish_gate_backward, "..., ..., ... -> ..., ...")
BROADCAST = "..., ... -> ..."


# -- the oracle --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "good",
    [
        GATE,
        GATE_BACKWARD,
        rule(cube, "... -> ..."),
        rule(halves, "... -> ...", partial=["sum -> sum"]),
        rule(total, BROADCAST),
        rule(total, {"xs": "...", "bias": "..."}),
        rule(scale_into, "..., ... ->"),
    ],
    ids=str,
)
def test_the_oracle_needs_nothing_but_the_schema(good):
    report = check_rule(good, cases=60)
    assert report.cases >= 60
    assert report.rows > 3
    assert not report.unexercised
    assert not report.unsampled


def test_the_oracle_refuses_a_wrong_backward_rule():
    wrong = rule(swish_gate_backward, "..., ..., ... -> ..., ...", partial=["R, sum, R -> sum, sum"])
    with pytest.raises(RuleRefuted) as refused:
        check_rule(wrong)
    assert refused.value.rows == ("R, sum, R -> sum, sum",)


def test_an_op_without_a_fake_is_refused_with_what_to_do():
    with pytest.raises(RuleRefuted, match=r"There was no fake impl registered.*Make the op's fake"):
        check_rule(rule(no_fake, "... -> ..."))


def test_a_guessed_call_that_the_rule_does_not_speak_of_is_left_out():
    report = check_rule(rule(total, "a b, b -> a b"), cases=20)
    assert report.cases == 20
    given = [(([made((5, 7))], made((5, 7))), {})]
    with pytest.raises(RuleRefuted, match="the rule writes 'b' for a tensor of 2 dims"):
        check_rule(rule(total, "a b, b -> a b"), given)


def test_an_operand_that_is_written_for_a_list_holds_for_each_of_its_tensors():
    rows = rule(total, "a b, R -> a b", partial=["sum, sum, ... -> sum"])
    report = check_rule(rows, [(([made((5, 7))], None), {}), (([made((5, 7), seed=s) for s in (1, 2)], None), {})])
    assert report.unexercised == ()


# -- real ranks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    # Of eight cases; a list of no parts has no gradient.
    ("op", "rules", "gradients"),
    [
        (swish_gate, [GATE, GATE_BACKWARD], 16),
        (cube, rule(cube, "... -> ..."), 8),
        (halves, rule(halves, "... -> ..."), 6),
        (total, rule(total, BROADCAST), 0),
        (scale_into, rule(scale_into, "..., ... ->"), 0),
        (no_gradient_for_x, rule(no_gradient_for_x, BROADCAST), 8),
    ],
    ids=lambda value: getattr(value, "_qualname", ""),
)
def test_results_and_gradients_are_those_of_one_device(pool, op, rules, gradients):
    report = check_gradients(op, pool=pool, rules=rules, cases=8)
    assert report.cases == 8
    assert report.results >= 8 - report.refused
    assert report.gradients == gradients


def test_a_wrong_rule_of_the_backward_is_refused_and_what_ran_is_named(pool):
    @rule_from(swish_gate_backward)
    def planted(grad, x, gate):
        """Each rank has the whole gradient of the gate, and calls it a part of a sum."""
        return Rows((Row((REPLICATE,) * 3, (REPLICATE, partial("sum")), "planted"),))

    with pytest.raises(GradientRefuted, match="the gradient of 'gate'") as refused:
        check_gradients(swish_gate, pool=pool, rules=[GATE, planted], cases=8)
    assert any("backward: kit.swish_gate_backward.default by 'planted" in line for line in refused.value.ran)
    assert __file__.rpartition("/")[2] in str(refused.value)


def test_a_wrong_rule_of_the_forward_is_refused(pool):
    @rule_from(cube)
    def planted(x):
        return Rows((Row((partial("sum"),), (partial("sum"),), "planted"),))

    samples = [((made((5, 7)),), {})]
    with pytest.raises(GradientRefuted, match="result 0") as refused:
        check_gradients(cube, samples, pool=pool, rules=planted, cases=8)
    assert "planted" in refused.value.rows


def test_a_backward_may_make_a_plain_tensor(pool):
    check_gradients(plain_backward, pool=pool, rules=rule(plain_backward, "... -> ..."), cases=4)


def test_a_rule_that_refuses_every_case_is_refused(pool):
    @rule_from(cube)
    def planted(x):
        return Rows(())

    with pytest.raises(GradientRefuted, match="its rule refuses every case, as NoStrategyError"):
        check_gradients(cube, [((made((5, 7)),), {})], pool=pool, rules=planted, cases=4)


def test_an_op_that_takes_no_sample_is_refused(pool):
    with pytest.raises(GradientRefuted, match="the op takes none of them on one device"):
        check_gradients(
            swish_gate, [((made((5, 7)), made((4, 3))), {})], pool=pool, rules=[GATE, GATE_BACKWARD], cases=4
        )


# -- what core makes of them -------------------------------------------------------------------------------------


def test_a_rule_takes_what_custom_op_returned_and_packets_of_one_overload():
    assert rule(cube, "... -> ...").ops == (torch.ops.kit.cube.default,)
    assert rule([cube, torch.ops.kit.no_fake], "... -> ...").ops[1] is torch.ops.kit.no_fake.default
    with pytest.raises(RuleError, match=r"aten.add'\)> is not one op overload"):
        rule(torch.ops.aten.add, "..., ... -> ...")


def test_a_state_that_an_op_keeps_is_an_operand_and_no_out():
    op = torch.ops.kit.count.default
    with pytest.raises(NotationError, match="'x', 'state'"):
        rule(op, "a -> a")
    good = rule(op, "..., () -> ...", replicate=["...1", "...2"])
    samples = [((made((5, 7)),), {"state": torch.zeros(())})]
    assert check_rule(good, samples).rows == 1
    wrong = rule(op, "a b, () -> a b")
    with pytest.raises(RuleRefuted, match="the written operand state"):
        check_rule(wrong, samples)


def rows_taken(count, first, second):
    """The rows of an op before and after its rule changes, on one rank's handlers."""

    def by(one):
        with isolated_registry(one, installed=True):
            x = sw.distribute_tensor(made((8, 6)), mesh((count,)), [sw.Shard(0)])
            return str(torch.ops.kit.cube(x).placements)

    return by(first), by(second), by(first), by(second)


def test_a_custom_op_takes_the_rule_that_holds_now(pool):
    sharded, whole = rule(cube, "... -> ..."), rule(cube, "a b -> a b", replicate=["a", "b"])
    s0, r = str((sw.Shard(0),)), str((sw.Replicate(),))
    assert pool.run(rows_taken, 4, sharded, whole)[0] == (s0, r, s0, r)


def test_a_rule_from_a_function_takes_custom_ops():
    @rule_from(cube)
    def by_function(x):
        return like(x)

    assert check_rule(by_function, cases=10).cases == 10
