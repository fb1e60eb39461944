"""Values by place: what a region holds is its part of the whole, in range, and distributed as it should be."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.rng import sampling
from shardwise.rng.sampling import Draw, Region

CPU = torch.device("cpu")
DRAW = Draw(20, 3)
MANY = 200_000
KINDS = {
    "uniform": lambda region: DRAW.uniform(region, torch.float32, CPU),
    "uniform of bfloat16": lambda region: DRAW.uniform(region, torch.bfloat16, CPU),
    "uniform of float64": lambda region: DRAW.uniform(region, torch.float64, CPU),
    "uniform of complex64": lambda region: DRAW.uniform(region, torch.complex64, CPU),
    "positive": lambda region: DRAW.positive(region, torch.float32, CPU),
    "positive of float64": lambda region: DRAW.positive(region, torch.float64, CPU),
    "normal": lambda region: DRAW.normal(region, torch.float32, CPU),
    "normal of float64": lambda region: DRAW.normal(region, torch.float64, CPU),
    "normal of complex128": lambda region: DRAW.normal(region, torch.complex128, CPU),
    "below": lambda region: DRAW.below(region, 0.3, CPU),
    "bits": lambda region: DRAW.bits(region, CPU),
    "integers": lambda region: DRAW.integers(region, -5, 9, CPU),
}

GOLDEN_BITS = [-7139630017956984517, 1350887118657991639, -226550903459910403]
GOLDEN_UNIFORM = [0.6129598617553711, 0.4685865044593811, 0.07323169708251953]
GOLDEN_NORMAL = [-0.9701898, 0.1940189, -1.2356212]


@st.composite
def boxes(draw):
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    offset = [draw(st.integers(0, n)) for n in shape]
    return Region(
        tuple(shape), tuple(offset), tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))
    )


@given(boxes(), st.sampled_from(sorted(KINDS)), st.sampled_from([1, 3, 1 << 14]))
def test_a_region_holds_its_part_of_the_whole(region, kind, tile):
    whole = KINDS[kind](Region.whole(region.shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sampling._TILE, "cpu", tile)
        drawn = KINDS[kind](region)
    part = whole[tuple(slice(o, o + n) for o, n in zip(region.offset, region.size, strict=True))]
    assert torch.equal(drawn, part)
    assert drawn.is_contiguous()


def test_a_draw_is_what_it_was():
    """Golden values: seeds that people wrote down must not give other numbers in another release."""
    seen = Region.whole((3,))
    draw = Draw(42, 0)
    assert draw.bits(seen, CPU).tolist() == GOLDEN_BITS
    assert draw.uniform(seen, torch.float64, CPU).tolist() == [(b % (1 << 64) >> 11) * 2.0**-53 for b in GOLDEN_BITS]
    torch.testing.assert_close(draw.uniform(seen, torch.float32, CPU), torch.tensor(GOLDEN_UNIFORM), rtol=0, atol=0)
    torch.testing.assert_close(draw.normal(seen, torch.float32, CPU), torch.tensor(GOLDEN_NORMAL))


def test_seeds_numbers_and_elements_make_other_values():
    drawn = [Draw(s, n).bits(Region.whole((50,)), CPU) for s in (0, 1, 1 << 32, (1 << 64) - 1) for n in (0, 1, 1 << 40)]
    assert len(torch.stack(drawn).unique()) == len(drawn) * 50


def test_elements_beyond_32_bits_have_counters_of_their_own():
    far = Region((1 << 40,), (1 << 36,), (8,))
    assert not torch.equal(DRAW.bits(far, CPU), DRAW.bits(Region((1 << 40,), (0,), (8,)), CPU))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_values_are_below_one(dtype):
    drawn = DRAW.uniform(Region.whole((MANY,)), dtype, CPU)
    assert drawn.dtype == dtype
    assert drawn.min() >= 0
    assert drawn.max() < 1
    open_ = DRAW.positive(Region.whole((MANY,)), dtype, CPU)
    assert open_.min() > 0
    assert open_.max() < 1


def test_the_extreme_words_stay_in_range():
    ends = torch.tensor([[0, 0xFFFFFFFF], [0xFFFFFFFF, 0]])
    for opened in (sampling._open(ends), sampling._open_wide(ends, ends)):
        assert 0 < opened.min() < opened.max() < 1
        assert opened.log().max() < 0


def ks(values, cdf):
    """The Kolmogorov-Smirnov statistic, scaled: beyond 2.7 once in a million samples."""
    seen = cdf(values.double().sort().values)
    n = len(seen)
    above, below = torch.arange(1, n + 1) / n - seen, seen - torch.arange(n) / n
    return float(torch.maximum(above.max(), below.max())) * math.sqrt(n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_are_distributed_as_they_should_be(dtype):
    many = Region.whole((MANY,))
    assert ks(DRAW.uniform(many, dtype, CPU), lambda x: x) < 2
    assert ks(DRAW.positive(many, dtype, CPU), lambda x: x) < 2
    values = DRAW.normal(many, dtype, CPU)
    assert ks(values, torch.special.ndtr) < 2
    # Neighbours come of one pair.
    assert abs(float(torch.corrcoef(values.view(-1, 2).t())[0, 1])) < 4 / math.sqrt(MANY / 2)
    assert abs(float((values**4).mean()) - 3) < 0.1
    assert abs(float(DRAW.below(many, 0.3, CPU).double().mean()) - 0.3) < 4 * math.sqrt(0.21 / MANY)


def test_integers_are_uniform_on_any_range():
    counts = DRAW.integers(Region.whole((MANY,)), 3, 13, CPU).bincount(minlength=13)
    assert counts[:3].tolist() == [0, 0, 0]
    assert float(((counts[3:] - MANY / 10) ** 2 / (MANY / 10)).sum()) < 28  # chi-squared with 9 degrees: one in a 1000
    lowest, highest = -(1 << 63), (1 << 63) - 1
    for low, high in [(lowest, highest), (lowest, highest + 1), (0, highest), (lowest, 0), (-5, highest), (-1, 0)]:
        drawn = DRAW.integers(Region.whole((1000,)), low, high, CPU).tolist()
        assert low <= min(drawn)
        assert max(drawn) < high
        middle = sum(value >= (low + high) // 2 for value in drawn)
        assert middle == 1000 if high - low == 1 else 400 < middle < 600


def test_probabilities_may_be_numbers_or_tensors():
    region = Region.whole((1000,))
    for p in (0.0, 0.25, 1 / 3, 1.0):
        by_tensor = DRAW.below(region, torch.full((1000,), p, dtype=torch.float64), CPU)
        assert torch.equal(DRAW.below(region, p, CPU), by_tensor)
    assert not DRAW.below(region, 0.0, CPU).any()
    assert DRAW.below(region, 1.0, CPU).all()


def test_a_permutation_has_each_number_once():
    drawn = DRAW.permutation(1000, CPU)
    assert sorted(drawn.tolist()) == list(range(1000))
    assert not torch.equal(drawn, torch.arange(1000))
    # Where a number comes to lie is anywhere: the mean place of the first half is that of all.
    assert abs(float(drawn[:500].double().mean()) - 499.5) < 50


def test_generators_of_torch_are_seeded_by_draw_and_place():
    def first(draw, place=()):
        return torch.rand((), generator=draw.generator(CPU, place)).item()

    assert first(Draw(1, 2), (3,)) == first(Draw(1, 2), (3,))
    assert (
        len({first(Draw(1, 2), (3,)), first(Draw(1, 2), (4,)), first(Draw(1, 3), (3,)), first(Draw(2, 2), (3,))}) == 4
    )


def test_torchs_default_generator_is_seeded_for_a_while():
    before = torch.get_rng_state()
    with Draw(1, 2).seeding(CPU):
        first = torch.rand(3)
    with Draw(1, 2).seeding(CPU):
        assert torch.equal(torch.rand(3), first)
    with Draw(1, 3).seeding(CPU):
        assert not torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), before)
