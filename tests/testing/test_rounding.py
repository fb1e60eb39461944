"""The reach of rounding: what an op rounds is within it, what a wrong rule does is not."""

import pytest
import torch

from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import REPLICATE, partial
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.testing.judge import difference
from shardwise.testing.rounding import Rounding, sizes_of
from shardwise.testing.special_values import special_samples
from shardwise.testing.values import made

aten = torch.ops.aten


def reach_holds(whole, operands, apart, *, pointwise=False, **kwargs):
    expected = whole(operands)
    rounding = Rounding(whole, operands, [t.abs() for t in operands], expected, pointwise=pointwise, **kwargs)
    apart = torch.full(expected[0].shape, apart, dtype=torch.float64)
    size = expected[0].abs().double().nan_to_num(0, 0, 0)
    return bool(rounding.within(0, apart, size, lambda t: t, added=False).all())


def small_of_large(operands, _=None):
    large, exponent, small = operands
    return [large - torch.exp(exponent) * (large + small)]


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2.0**-7), (torch.float64, 2.0**-36)])
def test_what_an_op_rounds_on_its_way_counts(dtype, unit):
    """The large terms move together, so moved operands do not show that each is rounded to a multiple of a unit."""
    operands = [torch.tensor([value], dtype=dtype) for value in (65536.0, 2.0**-16, 2.3145)]
    assert reach_holds(small_of_large, operands, unit / 2)
    assert not reach_holds(small_of_large, operands, 100 * unit)


def test_no_run_in_two_precisions_is_made_for_what_is_infinitely_far_away():
    """What such a run finds is finite. One run in double precision says whether one device overflows on the way."""
    in_others = []

    def whole(operands, dtypes=()):
        in_others.append(bool(dtypes))
        return [operands[0] * 2]

    assert not reach_holds(whole, [torch.ones(3)], float("inf"))
    assert sum(in_others) == 1


def test_a_random_op_is_not_compared_with_its_draws_in_double_precision():
    def whole(operands, _=None):
        (x,) = operands
        return [x * (2.0 if x.dtype == torch.float64 else 1.0)]

    assert not reach_holds(whole, [torch.ones(3)], 0.1, random=True)


def test_moved_operands_lie_in_memory_as_the_operands_do():
    def picky(operands, _=None):
        (x,) = operands
        if x.stride() != (8, 1):
            raise RuntimeError("strides must be multiples of 16 bytes")
        return [x - x.sum()]

    operand = torch.empty_strided((3, 5), (8, 1)).copy_(made((3, 5)))
    assert reach_holds(picky, [operand], 1e-6)


@pytest.mark.parametrize("as_one", [True, False])
def test_nan_and_infinity_may_be_one_but_no_number_is_either(as_one):
    expected = torch.tensor([float("nan"), float("inf"), 1.0])
    spec = TensorSpec(AbstractMesh((1,)), (REPLICATE,), TensorMeta.of(expected))
    found = torch.tensor([float("inf"), float("nan"), 1.0])
    assert (difference({(0,): found}, spec, expected, 1e-4, as_one=as_one) is None) is as_one
    finite = torch.tensor([float("inf"), 2.0, 1.0])
    assert difference({(0,): finite}, spec, expected, 1e-4, as_one=as_one) is not None


def is_finite(sample):
    return all(t.isfinite().all() for t in sample[0] if isinstance(t, torch.Tensor))


def test_calls_that_no_kernel_defines_for_nan_have_none():
    binomial = special_samples(aten.binomial.default, [((made((5, 7)).abs(), made((5, 7)).sigmoid()), {})], 4)
    lstsq = special_samples(aten.linalg_lstsq.default, [((made((4, 3)), made((4, 3))), {})], 4)
    assert all(map(is_finite, [*binomial, *lstsq]))
    assert not all(map(is_finite, special_samples(aten.mm.default, [((made((8, 8)), made((8, 8))), {})], 4)))


def test_polynomials_have_degrees_that_are_whole_numbers_and_no_nan_elsewhere():
    """For NaN torch's recurrences return what the element before has left."""
    samples = special_samples(aten.special_laguerre_polynomial_l.default, [((made((9, 7)), made((9, 7))), {})], 4)
    assert {3.0, 12.0, -1.0, 2.5} <= {n for args, _ in samples for n in args[1].flatten().tolist()}
    assert any(args[1].isnan().any() for args, _ in samples)
    assert not any(args[1].isinf().any() or args[0].isnan().any() for args, _ in samples)
    assert any(args[0].isinf().any() for args, _ in samples)


def test_what_meets_padding_is_finite_and_what_is_padded_is_not():
    x, weight, gradient = made((2, 3, 9)), made((4, 3, 2), seed=1), made((2, 4, 10), seed=2)
    settings = [1], [1], [1], False, [0], 1
    forward = special_samples(aten.convolution.default, [((x, weight, None, *settings), {})], 4)
    backward = special_samples(
        aten.convolution_backward.default, [((gradient, x, weight, None, *settings, [True] * 3), {})], 4
    )
    assert all(args[1].isfinite().all() for args, _ in forward)
    assert all(args[i].isfinite().all() for args, _ in backward for i in (0, 2))
    assert not all(args[0].isfinite().all() for args, _ in forward)
    without = special_samples(aten.convolution.default, [((x, weight, None, [1], [0], *settings[2:]), {})], 4)
    assert not all(args[1].isfinite().all() for args, _ in without)


def test_a_larger_of_two_that_drops_nan_in_its_last_elements_gets_none():
    moments = [[made((8, 3), seed=seed)] for seed in range(5)]
    step = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "maximize": False}

    def special(amsgrad):
        options = {**step, "amsgrad": amsgrad}
        return special_samples(aten._fused_adam_.default, [((*moments, [torch.tensor(1.0)]), options)], 4)

    assert all(t.isfinite().all() for args, _ in special(True) for (t,) in args)
    assert not all(t.isfinite().all() for args, _ in special(False) for (t,) in args)


def test_an_element_may_be_what_the_vectorised_loop_makes_of_it():
    """From -0.0 that loop of ``logit_backward`` gives an infinity of the other sign than the scalar loop for the last
    elements, so that torch gives both for equal elements.
    """

    def whole(operands, _=None):
        return [aten.logit_backward.default(*operands, None)]

    few, many = ([torch.ones(size), torch.full((size,), -0.0)] for size in (3, 512))
    seen = set(whole(few)[0].tolist()) | set(whole(many)[0].tolist())
    assert reach_holds(whole, few, float("inf"), pointwise=True) == (len(seen) == 2)
    assert not reach_holds(whole, few, float("inf"))
    assert not reach_holds(lambda t, _=None: [t[0] + t[1]], few, float("inf"), pointwise=True)


@pytest.mark.parametrize("size", range(2, 9))
def test_a_kernel_that_adds_is_known_by_operands_of_other_signs(size):
    """A draw of signs may change none of them, or all, which changes no absolute value of a sum."""
    operands, least = [torch.zeros(3), torch.zeros(size)], 5e-324
    assert reach_holds(lambda t, _=None: [t[0] * t[1].sum()], operands, least)
    assert not reach_holds(lambda t, _=None: [t[0] * t[1].prod()], operands, least)


def test_the_sizes_of_pieces_are_the_largest_of_all_ranks_with_the_same_value():
    value = torch.tensor([1.0])
    spec = TensorSpec(AbstractMesh((2, 2)), (REPLICATE, partial("sum")), TensorMeta.of(value))
    pieces = {(0, 0): 1.0, (0, 1): 0.0, (1, 0): 65.0, (1, 1): -64.0}
    assert sizes_of(value, spec, {at: torch.tensor([piece]) for at, piece in pieces.items()}).item() == 129
