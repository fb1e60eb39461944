"""Random ops by place: the same numbers on one device and on any mesh, and the distributions that torch documents."""

import math
import warnings

import oracle_rules
import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.discovery.process import default_registry
from shardwise.engine.traffic import in_lowering
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.results import output_metas
from shardwise.planning.strategies import make_call
from shardwise.testing import mesh
from shardwise.testing.oracle import check_rule

UNSEEDED = torch.tensor([1, 0, 0, 0])


@pytest.fixture(autouse=True)
def unseeded():
    sw.random.set_state(UNSEEDED)
    yield
    sw.random.set_state(UNSEEDED)


# -- the rules ---------------------------------------------------------------------------------------------------------


def _rules():
    (plugin,) = [f for f in oracle_rules.first_party() if f.origin.plugin == "shardwise-random"]
    rules, error = oracle_rules.rules_of(plugin)
    assert error is None
    return [pytest.param(rule, id=oracle_rules.rule_id("shardwise-random", rule)) for rule in rules]


def judged(rule, cases):
    with sw.random.using("counter"):
        samples = oracle_rules.declared("shardwise-random", "SAMPLES")
        return check_rule(rule, samples, cases=cases, keep_going=True)


@pytest.mark.parametrize("rule", _rules())
def test_the_oracle_accepts_values_by_place(rule):
    report = judged(rule, 4)
    assert not report.refuted, "\n\n".join(map(str, report.refuted))
    assert report.cases


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("rule", _rules())
def test_the_oracle_accepts_many_cases_by_place(rule):
    report = judged(rule, 60)
    assert not report.refuted, "\n\n".join(map(str, report.refuted))


# -- programs ----------------------------------------------------------------------------------------------------------


def like(x):
    yield torch.rand_like(x)
    yield torch.randn_like(x, dtype=torch.float64)
    yield torch.randn_like(x, dtype=torch.complex64)
    yield torch.rand_like(x, dtype=torch.bfloat16)
    yield torch.randint_like(x, 3, 17)
    yield torch.rand_like(x.t())


def dropouts(x):
    yield functional.dropout(x, 0.5)
    yield functional.alpha_dropout(x, 0.5, True)
    yield functional.dropout1d(x.unsqueeze(1), 0.5)
    yield functional.dropout2d(x.expand(3, 2, *x.shape), 0.5)
    yield functional.dropout3d(x.expand(2, 3, 2, *x.shape), 0.5)
    yield functional.feature_alpha_dropout(x, 0.5, True)
    yield functional.rrelu(-x, 0.1, 0.3, True)
    yield functional.gumbel_softmax(x)
    heads = x.expand(2, 3, *x.shape).contiguous()
    yield functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.4)


def by_parameters(x):
    p = x.abs().clamp(0, 1)
    yield torch.bernoulli(p)
    yield torch.bernoulli(x, 0.3)
    yield torch.empty_like(x).bernoulli_(p)
    yield torch.normal(x, 1.5)
    yield torch.normal(0.5, x.abs())
    yield torch.normal(x, x.abs())
    yield torch.multinomial(x.abs(), 2)
    yield torch.multinomial(x.abs(), 9, replacement=True)
    yield torch.poisson(x.abs() * 3)


def in_place(x):
    for name, args in IN_PLACE:
        yield getattr(torch.empty_like(x), name)(*args)
    for name in ("trunc_normal_", "kaiming_uniform_", "xavier_normal_"):
        yield getattr(nn.init, name)(torch.empty_like(x))


IN_PLACE = [
    ("bernoulli_", (0.2,)),
    ("cauchy_", ()),
    ("exponential_", (2.0,)),
    ("geometric_", (0.3,)),
    ("log_normal_", ()),
    ("normal_", (1.0, 2.0)),
    ("random_", ()),
    ("random_", (5,)),
    ("random_", (3, 9)),
    ("uniform_", (-2.0, 3.0)),
]
PROGRAMS = {"like": like, "dropouts": dropouts, "by parameters": by_parameters, "in place": in_place}


def factories(**where):
    make = sw if where else torch
    yield make.rand(5, 6, **where)
    yield make.randn((5, 6), dtype=torch.float64, **where)
    yield make.randn((5, 6), dtype=torch.complex64, **where)
    yield make.randint(3, 9, (5, 6), **where)
    yield make.rand((5, 6), dtype=torch.bfloat16, **where)


def operand():
    return torch.randn(6, 10, generator=torch.Generator().manual_seed(0))


def same_numbers(name, layouts):
    for mesh_shape, layout in layouts:
        m = mesh(mesh_shape)
        if m.get_coordinate() is None:
            continue
        x = operand()
        sw.manual_seed(42)
        with sw.random.on_one_device():
            expected = list(factories() if name == "factories" else PROGRAMS[name](x.clone()))
        state = sw.random.get_state()
        sw.manual_seed(42)
        where = {"device_mesh": m, "placements": layout}
        result = factories(**where) if name == "factories" else PROGRAMS[name](sw.distribute_tensor(x, m, layout))
        for i, (one, other) in enumerate(zip(result, expected, strict=True)):
            torch.testing.assert_close(one.full_tensor(), other, msg=f"{name} {i} on {mesh_shape} {layout}")
        assert torch.equal(sw.random.get_state(), state)
    sw.random.set_state(torch.tensor([1, 0, 0, 0]))


EVERYDAY = [((2, 2), [Shard(1), Shard(0)]), ((4,), [Shard(0)])]
MORE = [
    ((4,), [Replicate()]),
    ((4,), [Shard(1)]),
    ((2,), [Shard(0)]),
    ((2, 2), [Shard(1), Shard(1)]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 2), [Replicate(), Shard(1)]),
    ((2, 2), [Shard(0), Replicate()]),
    ((2, 2, 1), [Shard(0), Shard(1), Replicate()]),
]


@pytest.mark.parametrize("name", ["factories", *PROGRAMS])
def test_a_mesh_draws_what_one_device_draws(pool, name):
    pool.run(same_numbers, name, EVERYDAY)


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("name", ["factories", *PROGRAMS])
def test_every_mesh_draws_what_one_device_draws(pool, name):
    pool.run(same_numbers, name, MORE)


def partial_and_orders():
    m = mesh((2, 2))
    sw.manual_seed(2)
    with sw.random.on_one_device():
        expected = [torch.rand(4, 3), torch.randperm(11)]
    sw.manual_seed(2)
    found = [
        sw.rand(4, 3, device_mesh=m, placements=[Partial(), Shard(0)]),
        sw.randperm(11, device_mesh=m, placements=[Shard(0), Shard(0)]),
    ]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.full_tensor(), other)
    sw.random.set_state(torch.tensor([1, 0, 0, 0]))


def test_partial_tensors_and_random_orders(pool):
    pool.run(partial_and_orders)


def refusals():
    """What is wrong on one rank is refused by all, and torch's own generators are drawn from when they are given."""
    m = mesh((4,))
    sw.manual_seed(1)
    bad = sw.distribute_tensor(torch.tensor([[1.0, 2], [1, 1], [0, 0], [1, 1]]), m, [Shard(0)])
    with pytest.raises(RuntimeError, match="invalid multinomial distribution"):
        torch.multinomial(bad, 1)
    with pytest.raises(RuntimeError, match="<= 1"):
        torch.bernoulli(bad)
    with pytest.raises(RuntimeError, match="std >= 0"):
        torch.normal(bad, -bad)
    with pytest.raises(RuntimeError, match="std"):
        bad.normal_(0, -1)
    state = sw.random.get_state()
    drawn = torch.zeros_like(bad).uniform_(generator=torch.Generator().manual_seed(5))
    assert torch.equal(drawn.full_tensor(), torch.zeros(4, 2).uniform_(generator=torch.Generator().manual_seed(5)))
    assert torch.equal(sw.random.get_state(), state)
    sw.random.set_state(torch.tensor([1, 0, 0, 0]))


def test_bad_parameters_and_given_generators(pool):
    pool.run(refusals)


def through_backward():
    m = mesh((2, 2))
    x = sw.ones(6, 8, device_mesh=m, placements=[Shard(0), Shard(1)]).requires_grad_()
    sw.manual_seed(0)
    y = nn.Dropout(0.4)(x)
    y.sum().backward()
    assert torch.equal(x.grad.full_tensor(), y.detach().full_tensor())
    assert 0 < int((y == 0).sum()) < 48
    sw.random.set_state(torch.tensor([1, 0, 0, 0]))


def test_the_backward_of_dropout_sees_its_mask(pool):
    pool.run(through_backward)


# -- one device --------------------------------------------------------------------------------------------------------


def test_the_fused_dropout_has_the_mask_of_the_other():
    x = torch.ones(1000)
    with sw.random.on_one_device():
        sw.manual_seed(0)
        plain = functional.dropout(x, 0.3)
        sw.manual_seed(0)
        fused, mask = torch.native_dropout(x, 0.3, True)
    torch.testing.assert_close(fused, plain)
    assert torch.equal(mask, plain != 0)


def test_other_ops_and_given_generators_are_left_alone():
    sw.manual_seed(0)
    state = sw.random.get_state()
    with sw.random.on_one_device():
        given = torch.rand(3, generator=torch.Generator().manual_seed(2))
        assert torch.equal(given, torch.rand(3, generator=torch.Generator().manual_seed(2)))
        q = torch.ones(1, 1, 4, 4)
        functional.scaled_dot_product_attention(q, q, q)
        assert torch.rand(3, device="meta").is_meta
    assert torch.equal(sw.random.get_state(), state)


def test_ops_without_a_rule_draw_from_torch_seeded_for_them():
    x = torch.rand(1, 1, 8, 8)
    with sw.random.on_one_device():
        sw.manual_seed(0)
        plain = torch.get_rng_state()
        first = [functional.fractional_max_pool2d(x, 2, output_size=3) for _ in range(4)]
        sw.manual_seed(0)
        again = [functional.fractional_max_pool2d(x, 2, output_size=3) for _ in range(4)]
    assert all(map(torch.equal, first, again))
    assert plain.shape == torch.get_rng_state().shape


MANY = 100_000


def ks(values, cdf):
    seen = cdf(values.double().sort().values)
    n = len(seen)
    above, below = torch.arange(1, n + 1) / n - seen, seen - torch.arange(n) / n
    return float(torch.maximum(above.max(), below.max())) * math.sqrt(n)


CONTINUOUS = {
    "uniform_": ((-2.0, 3.0), lambda x: (x + 2) / 5),
    "normal_": ((1.0, 2.0), lambda x: torch.special.ndtr((x - 1) / 2)),
    "exponential_": ((1.5,), lambda x: 1 - torch.exp(-1.5 * x)),
    "cauchy_": ((1.0, 3.0), lambda x: torch.atan((x - 1) / 3) / math.pi + 0.5),
    "log_normal_": ((0.5, 0.7), lambda x: torch.special.ndtr((x.log() - 0.5) / 0.7)),
}


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_continuous_draws_follow_their_distributions(name, dtype):
    args, cdf = CONTINUOUS[name]
    sw.manual_seed(1)
    with sw.random.on_one_device():
        assert ks(getattr(torch.empty(MANY, dtype=dtype), name)(*args), cdf) < 2


def test_draws_of_whole_numbers_follow_theirs():
    sw.manual_seed(1)
    with sw.random.on_one_device():
        trials = torch.empty(MANY, dtype=torch.int64).geometric_(0.25)
        places = torch.randperm(7)
        drawn = torch.multinomial(torch.tensor([0.1, 0.0, 0.6, 0.3]), MANY, replacement=True)
        firsts = torch.multinomial(torch.tensor([[0.1, 0.0, 0.6, 0.3]]).expand(MANY // 10, 4), 3)
    assert places.sort().values.tolist() == list(range(7))
    assert trials.min() == 1
    for k in range(1, 6):
        p = 0.25 * 0.75 ** (k - 1)
        assert abs(float((trials == k).double().mean()) - p) < 4 * math.sqrt(p / MANY)
    for sample, n in ((drawn, MANY), (firsts[:, 0], MANY // 10)):
        shares = sample.bincount(minlength=4) / n
        assert shares[1] == 0
        torch.testing.assert_close(shares, torch.tensor([0.1, 0.0, 0.6, 0.3]), rtol=0, atol=4 * math.sqrt(0.25 / n))
    assert (firsts.sort(-1).values == torch.tensor([0, 2, 3])).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.bool, torch.bfloat16, torch.float32])
def test_whole_numbers_have_the_range_that_torch_gives_a_dtype(dtype):
    sw.manual_seed(1)
    with sw.random.on_one_device():
        values = torch.empty(4000, dtype=dtype).random_().double()
    plain = torch.empty(4000, dtype=dtype).random_().double()
    assert 0 <= values.min() <= max(plain.max() / 100, 1)
    assert plain.max() * 0.99 <= values.max() <= plain.max() * 1.01


def test_rounding_never_reaches_an_open_end():
    sw.manual_seed(1)
    with sw.random.on_one_device():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert torch.empty(20_000, dtype=dtype).uniform_(1.0, 1.01).max() < 1.01
            # The largest below 300 that bfloat16 holds is 298; torch warns that it cannot hold all of them.
            with warnings.catch_warnings(action="ignore"):
                assert torch.empty(20_000, dtype=dtype).random_(0, 300).max() < 300


def test_what_torchs_way_gathers_is_told_ahead():
    mesh_of_four = AbstractMesh((4,))
    op = torch.ops.aten.bernoulli.default
    spec = TensorSpec(mesh_of_four, [Shard(0)], TensorMeta.contiguous((8, 3), torch.float32))
    for chosen, kinds in (("torch", ["all_gather", "all_to_all"]), ("counter", [])):
        with sw.random.using(chosen):
            entry = default_registry().lookup(op)
            schema = OpSchema.of(op, spec)
            metas = output_metas(op, schema.values)
            call = make_call(entry.rule, schema, metas)
            issued = in_lowering(entry, schema, schema.values, call, [spec], [spec])
        assert issued.complete
        assert [c.kind for c in issued.collectives] == kinds
