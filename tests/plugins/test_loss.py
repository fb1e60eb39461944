"""Rules for softmax and losses: what they print, the traps of a mean over shards, and training on real ranks."""

import pytest
import torch
from attrs import evolve
from described import rows_of
from torch.nn import functional

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.kernel.placements import show_all
from shardwise.rule.authoring import einop, rule_from
from shardwise.testing import RuleRefuted, check_rule, mesh
from shardwise_loss import elementwise, likelihood, margins, softmax

aten = torch.ops.aten
RULES = {op: rule for m in (softmax, likelihood, elementwise, margins) for rule in m.RULES for op in rule.ops}
NONE, MEAN, SUM = 0, 1, 2


def rows(op, *args, **kwargs):
    """The rows of a call; ``*`` marks those that run a lowering."""
    return [f"{show_all(r.inputs)} -> {show_all(r.outputs)}{'*' * r.lowered}" for r in rows_of(op, *args, **kwargs)]


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


SCORES, TARGET = empty(6, 5), empty(6, dtype=torch.int64)

# -- what rules say ----------------------------------------------------------------------------------------------


def test_rows_of_softmax():
    assert rows(aten._softmax.default, empty(4, 5, 6), -2, False) == [
        "[S(0)] -> [S(0)]",
        "[S(2)] -> [S(2)]",
        "[S(1)] -> [S(1)]*",
        "[R] -> [R]",
    ]
    assert rows(aten._log_softmax_backward_data.default, empty(4, 5), empty(4, 5), 1, torch.float32) == [
        "[S(0), S(0)] -> [S(0)]",
        "[P(sum), R] -> [P(sum)]",
        "[P(avg), R] -> [P(avg)]",
        "[S(1), S(1)] -> [S(1)]*",
        "[R, R] -> [R]",
    ]


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        (NONE, "[S(0), S(0), -] -> [S(0), R]"),
        (MEAN, "[S(0), S(0), -] -> [R, R]*"),
        (SUM, "[S(0), S(0), -] -> [P(sum), P(sum)]"),
    ],
)
def test_rows_of_likelihood(reduction, expected):
    assert expected in rows(aten.nll_loss_forward.default, SCORES, TARGET, None, reduction, -100)


def test_rows_of_likelihood_of_pictures():
    listed = rows(
        aten.nll_loss2d_forward.default, empty(4, 3, 2, 2), empty(4, 2, 2, dtype=torch.int64), None, SUM, -100
    )
    assert [row.partition(",")[0] for row in listed] == ["[S(0)", "[S(1)", "[S(2)", "[S(3)", "[R"]


def test_the_gradient_of_a_mean_is_divided_by_the_total_weight_that_it_is_given():
    listed = rows(aten.nll_loss_backward.default, empty(), SCORES, TARGET, None, MEAN, -100, empty())
    assert listed[0] == "[R, S(0), S(0), -, R] -> [S(0)]"


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        (NONE, ["[S(0), S(0)] -> [S(0)]", "[S(1), S(1)] -> [S(1)]", "[R, R] -> [R]"]),
        (MEAN, ["[S(0), S(0)] -> [P(sum)]*", "[S(1), S(1)] -> [P(sum)]*", "[R, R] -> [R]"]),
        (SUM, ["[S(0), S(0)] -> [P(sum)]", "[S(1), S(1)] -> [P(sum)]", "[R, R] -> [R]"]),
    ],
)
def test_rows_of_squares(reduction, expected):
    assert rows(aten.mse_loss.default, empty(4, 5), empty(4, 5), reduction) == expected


def test_tensors_of_two_shapes_are_compared_whole():
    assert rows(aten.mse_loss.default, empty(4, 5), empty(5), MEAN) == ["[R, R] -> [R]"]


# -- traps -------------------------------------------------------------------------------------------------------

UNEVEN = torch.tensor([1, -100, 0, 2, -100, -100, 1])


def test_a_mean_of_means_is_refused():
    def local_means(local, *args):
        loss, total = local.call.op(*args)
        return loss.nan_to_num(0) / local.spec("target").num_shards, local.comm.all_reduce(total, "sum", [0])

    wrong = rule_from(aten.nll_loss_forward.default, lowering=local_means)(
        lambda: einop(
            "n _, n, R -> (), ()", partial=["n, n, R -> sum, R"], lowered=["n, n, R -> sum, R"], replicate=["n"]
        )
    )
    even = torch.tensor([0, 1, 2, 0])
    check_rule(wrong, [((torch.randn(4, 3), even, None, MEAN, -100), {})], meshes=[(4,)])
    with pytest.raises(RuleRefuted, match="n, n, R -> sum, R"):
        check_rule(wrong, [((torch.randn(7, 3), UNEVEN, None, MEAN, -100), {})], meshes=[(4,)])


@pytest.mark.parametrize("weight", [None, torch.tensor([0.1, 5.0, 1.0])])
def test_a_mean_divides_by_the_total_weight_of_all_targets(weight):
    only = evolve(likelihood.forward, ops=(aten.nll_loss_forward.default,))
    assert check_rule(only, [((torch.randn(7, 3), UNEVEN, weight, MEAN, -100), {})]).cases


def test_the_gradient_of_a_mean_by_local_counts_is_refused():
    wrong = rule_from(aten.mse_loss_backward.default)(lambda: einop("(), n, n -> n"))
    sample = (torch.tensor(1.0), torch.randn(7), torch.randn(7), MEAN)
    with pytest.raises(RuleRefuted, match="shard n"):
        check_rule(wrong, [(sample, {})])


# -- on real ranks -----------------------------------------------------------------------------------------------

LAYOUTS = [
    ((4,), [Shard(0)]),
    ((4,), [Replicate()]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 2), [Shard(0), Replicate()]),
    ((4,), [Shard(1)]),
]


def numbers(*shape):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator)


def compare(loss, *operands):
    """A loss and its gradient with the first operand sharded, against one device; the others lie as the batch does."""
    for shape, layout in LAYOUTS:
        batch = [p if p == Shard(0) else Replicate() for p in layout]
        full = operands[0].clone().requires_grad_()
        x = sw.distribute_tensor(operands[0], mesh(shape), layout).requires_grad_()
        others = [sw.distribute_tensor(t, mesh(shape), batch) for t in operands[1:]]
        result, expected = loss(x, *others), loss(full, *operands[1:])
        torch.testing.assert_close(result.full_tensor(), expected)
        (result * result).sum().backward()
        (expected * expected).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), full.grad)
        assert x.grad.placements == tuple(layout)


def cross_entropy():
    for reduction in ("mean", "sum", "none"):
        compare(lambda x, y: functional.cross_entropy(x, y, reduction=reduction), numbers(7, 3), UNEVEN)  # noqa: B023
    compare(lambda x, y: functional.cross_entropy(x, y, label_smoothing=0.1), numbers(7, 3), UNEVEN)
    pictures = torch.stack([UNEVEN, UNEVEN.flip(0)]).expand(5, 2, 7).contiguous()
    compare(functional.cross_entropy, numbers(5, 3, 2, 7), pictures)
    compare(functional.cross_entropy, numbers(5, 3), numbers(5, 3).softmax(1))


def weighted_cross_entropy():
    weight = torch.tensor([0.1, 5.0, 1.0])
    for shape, layout in LAYOUTS[:4]:
        x = sw.distribute_tensor(numbers(7, 3), mesh(shape), layout)
        y = sw.distribute_tensor(UNEVEN, mesh(shape), layout)
        w = sw.distribute_tensor(weight, mesh(shape), [Replicate()] * len(shape))
        result = functional.cross_entropy(x, y, w)
        torch.testing.assert_close(result.full_tensor(), functional.cross_entropy(numbers(7, 3), UNEVEN, weight))


def comparisons():
    losses = [
        functional.mse_loss,
        functional.l1_loss,
        functional.smooth_l1_loss,
        functional.huber_loss,
        functional.soft_margin_loss,
        lambda x, y: functional.mse_loss(x, y, reduction="sum"),
        lambda x, y: functional.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
        lambda x, y: functional.binary_cross_entropy_with_logits(x, y.sigmoid()),
        lambda x, y: functional.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
    ]
    for loss in losses:
        compare(loss, numbers(5, 6), numbers(5, 6).flip(0))


def square_roots_of_partial_sums():
    """Of features in shards, cosine similarity takes the root of a sum in place."""
    x, y, sign = numbers(5, 6), numbers(5, 6).flip(0), torch.tensor([1, -1, 1, 1, -1])
    put = [sw.distribute_tensor(t, mesh((4,)), [Shard(1)]) for t in (x, y)]
    result = functional.cosine_embedding_loss(*put, sw.distribute_tensor(sign, mesh((4,)), [Replicate()]))
    torch.testing.assert_close(result.full_tensor(), functional.cosine_embedding_loss(x, y, sign))


def alignments():
    """Lengths differ, so a rank's longest target is not that of all."""
    scores, targets = numbers(6, 5, 4).log_softmax(2), torch.arange(15).view(5, 3) % 3 + 1
    lengths = torch.tensor([6, 5, 6, 4, 6]), torch.tensor([1, 1, 2, 1, 3])
    whole = scores.clone().requires_grad_()
    x = sw.distribute_tensor(scores, mesh((4,)), [Shard(1)]).requires_grad_()
    y = sw.distribute_tensor(targets, mesh((4,)), [Shard(0)])
    result = functional.ctc_loss(x, y, *(n.tolist() for n in lengths), reduction="sum")
    expected = functional.ctc_loss(whole, targets, *lengths, reduction="sum")
    torch.testing.assert_close(result.full_tensor(), expected)
    result.backward()
    expected.backward()
    torch.testing.assert_close(x.grad.full_tensor(), whole.grad)
    assert x.grad.placements == (Shard(1),)


def a_partial_loss_is_a_number():
    x = sw.distribute_tensor(numbers(5, 6), mesh((4,)), [Shard(0)])
    loss = functional.mse_loss(x, torch.zeros_like(x))
    assert loss.placements == (Partial("sum"),)
    assert loss.item() == pytest.approx(numbers(5, 6).square().mean().item())


PROGRAMS = [
    cross_entropy,
    weighted_cross_entropy,
    comparisons,
    a_partial_loss_is_a_number,
    square_roots_of_partial_sums,
    alignments,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_on_ranks(pool, program):
    pool.run(program)
