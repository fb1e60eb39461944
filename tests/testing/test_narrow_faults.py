"""Rules that are wrong for some calls only: uneven shards, one dtype, the backward op. The oracle sees each."""

import pytest
import torch
from torch import Tensor
from torch.library import custom_op

from shardwise.rule import rule
from shardwise.testing import RuleRefuted, check_plugin, check_rule, made


@custom_op("acme_narrow::row_mean", mutates_args=())
def row_mean(x: Tensor) -> Tensor:
    return x.mean(-1)


@row_mean.register_fake
def _(x):
    return x.new_empty(x.shape[:-1])


def op_of(name, function):
    @custom_op(f"acme_narrow::{name}", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return function(x)

    op.register_fake(torch.empty_like)
    return op


INTEGERS = op_of("integers", lambda x: x / 2 if x.is_floating_point() or x.is_complex() else x // 2)
BFLOAT16 = op_of("bfloat16", lambda x: x * x if x.dtype == torch.bfloat16 else x * 2)
COMPLEX = op_of("complex", lambda x: x.conj().resolve_conj() * 1j if x.is_complex() else x * 2)
IMAGINARY = op_of("imaginary", lambda x: torch.complex(x.real, x.imag**2) if x.is_complex() else x * 2)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(INTEGERS, "i64"), (BFLOAT16, "bf16"), (IMAGINARY, "c64")],
    ids=["integers", "bfloat16", "complex"],
)
def test_a_rule_that_is_wrong_for_one_dtype(op, dtype):
    with pytest.raises(RuleRefuted, match=rf"to \({dtype}\["):
        check_rule(rule(op, "... -> ...", linear="x"))


def test_a_rule_that_is_right_for_every_dtype_is_accepted():
    # Conjugation is additive, but not linear over complex numbers; a sum of parts needs no more.
    assert check_rule(rule(COMPLEX, "... -> ...", linear="x")).refuted == ()


def test_a_rule_that_is_wrong_on_uneven_shards():
    wrong = rule(row_mean, "... k -> ...", reduce={"k": "avg"})
    even = [((made((6, 8)),), {})]
    assert check_rule(wrong, even, meshes=[(4,), (2, 2)]).refuted == ()
    with pytest.raises(RuleRefuted, match="shard k' of the rule"):
        check_rule(wrong, [*even, ((made((6, 7)),), {})])
    with pytest.raises(RuleRefuted, match="shard k' of the rule"):
        check_rule(wrong)


@custom_op("acme_narrow::scale", mutates_args=())
def scale(x: Tensor, by: Tensor) -> Tensor:
    return x * by


@custom_op("acme_narrow::scale_backward", mutates_args=())
def scale_backward(grad: Tensor, x: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    return grad * by, (grad * x).sum(0)


scale.register_fake(lambda x, _: torch.empty_like(x))
scale_backward.register_fake(lambda _, x, by: (torch.empty_like(x), torch.empty_like(by)))
scale.register_autograd(
    lambda ctx, grad: scale_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),  # noqa: ARG005  # torch names them
)


@pytest.mark.parametrize(("kind", "right"), [("sum", True), ("avg", False)])
def test_a_rule_that_is_wrong_in_the_gradient_alone(kind, right):
    forward = rule(scale, "b n, n -> b n")
    backward = rule(scale_backward, "b n, b n, n -> b n, n", reduce={"b": kind})
    samples = {
        scale: lambda: [((made((8, 4)), made((4,))), {})],
        scale_backward: lambda: [((made((8, 4)), made((8, 4), seed=1), made((4,))), {})],
    }
    if right:
        assert check_plugin([forward, backward], samples=samples).refuted == ()
    else:
        with pytest.raises(RuleRefuted, match=r"acme_narrow\.scale_backward"):
            check_plugin([forward, backward], samples=samples)
