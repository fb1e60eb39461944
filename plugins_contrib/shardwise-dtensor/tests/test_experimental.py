"""``local_map``, ``register_sharding`` and ``implicit_replication`` beside one device and beside torch's own."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.experimental import local_map as torchs_local_map

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard
from shardwise.errors import PlainTensorError, RankDisagreementError, RuleError
from shardwise.testing import RuleRefuted, check_rule, mesh
from shardwise.testing.pool import WorkerPool
from shardwise_dtensor import rules_of
from shardwise_dtensor.experimental import LocalMapError, implicit_replication, local_map, register_sharding

KERNELS = str(Path(__file__).with_name("kernels.py"))
ROW, COLUMN, WHOLE = [Shard(0)], [Shard(1)], [Replicate()]


def made(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- local_map -------------------------------------------------------------------------------------------------------


def reduced_product(x, w):
    """A product of this rank's columns and rows, with a collective of its own."""
    out = x @ w
    dist.all_reduce(out)
    return out


def products():
    on = mesh((4,))
    x, w = made(8, 12), made(12, 5, seed=1)
    ours = [sw.distribute_tensor(x, on, COLUMN), sw.distribute_tensor(w, on, ROW)]
    theirs = [distribute_tensor(x, on, COLUMN), distribute_tensor(w, on, ROW)]
    options = {"out_placements": WHOLE, "in_placements": (COLUMN, ROW)}
    mine = local_map(reduced_product, **options)(*ours)
    beside = torchs_local_map(reduced_product, **options)(*theirs)
    assert isinstance(mine, MeshTensor)
    assert mine.placements == beside.placements == (Replicate(),)
    torch.testing.assert_close(mine.to_local(), beside.to_local())
    torch.testing.assert_close(mine.to_local(), x @ w)

    @local_map(out_placements=WHOLE, in_placements=(COLUMN, ROW), redistribute_inputs=True)
    def decorated(a, b):
        assert type(a) is type(b) is torch.Tensor
        assert (a.shape, b.shape) == ((8, 3), (3, 5))
        return reduced_product(a, b)

    moved = [sw.distribute_tensor(x, on, ROW), sw.distribute_tensor(w, on, COLUMN)]
    torch.testing.assert_close(decorated(*moved).to_local(), x @ w)


def test_a_function_of_local_parts(pool):
    pool.run(products)


def gradients():
    """A sharded batch and a replicated weight: each rank sees its rows, so the weight's gradient is a sum of parts."""
    on = mesh((4,))
    x, w = made(8, 6).requires_grad_(), made(6, 5, seed=1).requires_grad_()
    (torch.tanh(x @ w) * made(8, 5, seed=2)).sum().backward()
    found = []
    for place, mapped, before in (
        (sw.distribute_tensor, local_map, ROW),
        (sw.distribute_tensor, local_map, WHOLE),
        (sw.distribute_tensor, local_map, COLUMN),
        (distribute_tensor, torchs_local_map, ROW),
    ):
        a = place(x.detach(), on, before).requires_grad_()
        b = place(w.detach(), on, WHOLE).requires_grad_()
        function = mapped(
            lambda p, q: torch.tanh(p @ q),
            out_placements=ROW,
            in_placements=(ROW, WHOLE),
            in_grad_placements=(ROW, [Partial()]),
            redistribute_inputs=True,
        )
        (function(a, b) * place(made(8, 5, seed=2), on, ROW)).sum().backward()
        torch.testing.assert_close(a.grad.full_tensor(), x.grad)
        torch.testing.assert_close(b.grad.full_tensor(), w.grad)
        found.append((a.grad.placements, b.grad.placements))
    assert found[:3] == [((p,), (Replicate(),)) for (p,) in (ROW, WHOLE, COLUMN)]

    # Without it each rank's part of the sum would be taken for the whole: the option is what makes it right.
    b = sw.distribute_tensor(w.detach(), on, WHOLE).requires_grad_()
    function = local_map(lambda p, q: torch.tanh(p @ q), out_placements=ROW)
    (
        function(sw.distribute_tensor(x.detach(), on, ROW), b) * sw.distribute_tensor(made(8, 5, seed=2), on, ROW)
    ).sum().backward()
    assert not torch.allclose(b.grad.to_local(), w.grad)


def test_gradients_lie_as_in_grad_placements_says(pool):
    pool.run(gradients)


def trees_and_other_values():
    on = mesh((2, 2))
    x = made(8, 6)
    placed = sw.distribute_tensor(x, on, [Shard(0), Shard(1)])

    def function(pair, factor, *, shift):
        made_here = torch.ones(3, dtype=torch.float64)
        assert type(made_here) is torch.Tensor
        return {"sum": pair[0] + pair[1] * factor + shift, "count": 3, "rows": made_here.sum() * pair[0].sum(1)}

    mapped = local_map(function, out_placements=([Shard(0), Shard(1)], None, [Shard(0), Partial()]))
    with sw.on(on):
        result = mapped((placed, placed), 2.0, shift=1.0)
    torch.testing.assert_close(result["sum"].full_tensor(), 3 * x + 1)
    assert result["count"] == 3
    torch.testing.assert_close(result["rows"].full_tensor(), 3 * x.sum(1))
    plain = local_map(lambda a: a + 1, out_placements=ROW)(x)
    assert type(plain) is torch.Tensor


def test_lists_numbers_and_keywords_go_through(pool):
    pool.run(trees_and_other_values)


def uneven():
    on = mesh((4,))
    x = sw.distribute_tensor(made(10, 3), on, ROW)
    with pytest.raises(RankDisagreementError):
        local_map(lambda a: a * 2, out_placements=ROW)(x)


def test_parts_of_unequal_shapes_are_refused(pool):
    pool.run(uneven)


def refusals():
    on = mesh((4,))
    x = sw.distribute_tensor(made(8, 12), on, ROW)
    cases = [
        (local_map(torch.neg, ROW, (COLUMN,)), (x,), ValueError, "set redistribute_inputs=True"),
        (local_map(torch.neg, ROW, (None,)), (x,), AssertionError, "argument expects placements"),
        (local_map(torch.neg, ROW, (ROW,), (None,)), (x,), AssertionError, "gradient expects placements"),
        (local_map(torch.neg, ROW, (ROW, None)), (x,), AssertionError, "2 entries for 1 values"),
        (local_map(torch.mul, ROW, (ROW, ROW)), (x, 2.0), AssertionError, "a float, no tensor, and in_placements"),
        (local_map(lambda a: 3, ROW), (x,), AssertionError, "an int, no tensor|a int, no tensor, and out_placements"),
        (local_map(lambda a: (a, a), ROW), (x,), AssertionError, "1 entries for 2 values"),
        (local_map(lambda a: x, ROW), (x,), AssertionError, r"a MeshTensor \[S\(0\)\]"),
    ]
    for function, args, kind, words in cases:
        with pytest.raises(LocalMapError, match=words) as refused:
            function(*args)
        assert isinstance(refused.value, kind)


def test_placements_that_do_not_fit_are_refused(pool):
    pool.run(refusals)


def compiled():
    on = mesh((4,))
    x, w = sw.distribute_tensor(made(8, 12), on, COLUMN), sw.distribute_tensor(made(12, 5, seed=1), on, ROW)
    mapped = local_map(lambda a, b: a @ b, out_placements=[Partial()])

    def program(a, b):
        return mapped(a, b).sum(0)

    found = torch.compile(program, backend="aot_eager", fullgraph=True)(x, w)
    torch.testing.assert_close(found.full_tensor(), (made(8, 12) @ made(12, 5, seed=1)).sum(0))


def test_it_compiles(pool):
    pool.run(compiled)


# -- register_sharding -----------------------------------------------------------------------------------------------


def squashed(load):
    """A rule of rows over an op that no plugin knows, and one in place of a plugin's rule."""
    bridge = load(KERNELS).bridge

    @register_sharding(bridge.shares.default)
    def shares(x, down):
        kept = 1 if down else 0
        return [([Replicate()], [Replicate(), None]), ([Shard(kept)], [Shard(kept), None])]

    for shape, placements in (((4,), ROW), ((4,), COLUMN), ((2, 2), [Shard(0), Shard(1)])):
        x = sw.distribute_tensor(made(8, 12), mesh(shape), placements)
        for down in (True, False):
            found = bridge.shares(x, down)
            torch.testing.assert_close(found.full_tensor(), made(8, 12).softmax(0 if down else 1))
            assert all(p in (Replicate(), Shard(1 if down else 0)) for p in found.placements)

    @register_sharding([torch.ops.aten.mul.Tensor])
    def whole_only(x, other):
        count = sum(isinstance(value, sw.TensorMeta) for value in (x, other))
        return [([Replicate()], [Replicate()] * count + [None] * (2 - count))]

    x = sw.distribute_tensor(made(8, 12), mesh((4,)), ROW)
    assert (x * x).placements == (Replicate(),)
    assert (x * 2.0).placements == (Replicate(),)
    torch.testing.assert_close((x * 2.0).full_tensor(), made(8, 12) * 2)

    @register_sharding(torch.ops.aten.min.dim_min)
    def smallest(x, dim, keepdim, min, min_indices):  # noqa: A002  # the op's names
        return [([Replicate(), Replicate()], [Replicate(), None, None, Replicate(), Replicate()])]

    values, places = (
        sw.zeros(8, 1, dtype=torch.float64, device_mesh=mesh((4,))),
        sw.zeros(8, 1, dtype=torch.int64, device_mesh=mesh((4,))),
    )
    torch.min(x, dim=1, keepdim=True, out=(values, places))
    torch.testing.assert_close(values.full_tensor(), made(8, 12).min(1, keepdim=True).values)


def test_acceptable_shardings_are_a_rule(loader):
    # Workers of their own: what they register stays.
    with WorkerPool(4) as own:
        own.run(squashed, loader)


@pytest.fixture
def registered(kernels):
    """A decorator whose rules are taken back after the test."""
    from shardwise.discovery.process import default_registry

    registry = default_registry()
    before = {op: list(entries) for op, entries in registry._overrides.items()}
    yield kernels.bridge
    registry._overrides.clear()
    registry._overrides.update(before)
    registry.changed()


def test_its_rules_are_judged_by_the_oracle(registered):
    space = {
        "register_sharding": register_sharding,
        "Shard": Shard,
        "Replicate": Replicate,
        "op": registered.shares.default,
    }
    text = """
@register_sharding(op)
def shares(x, down):
    return [([Shard({})], [Shard({}), None])]
"""
    exec(compile(text.format("int(down)", "int(down)"), "right.py", "exec"), space)
    (right,) = rules_of(space)
    samples = [((made(8, 6), True), {}), ((made(5, 7), False), {})]
    assert check_rule(right, samples).cases
    assert right.source == "right.py:2"
    exec(compile(text.format("1 - int(down)", "1 - int(down)"), "wrong.py", "exec"), space)
    with pytest.raises(RuleRefuted):
        check_rule(rules_of(space)[1], samples)


def test_a_pair_that_does_not_fit_is_refused(registered):
    @register_sharding(registered.shares.default)
    def short(x, down):
        return [([Replicate()], [Replicate(), Replicate(), Replicate()])]

    (rule,) = [r for r in rules_of(short.__globals__) if "short" in r.text]
    with pytest.raises(RuleRefuted) as refuted:
        check_rule(rule, [((made(8, 6), True), {})])
    assert isinstance(refuted.value.__cause__, RuleError)
    assert "1 results and 3 tensor arguments; the call has 1 and 1" in str(refuted.value.__cause__)


# -- implicit_replication --------------------------------------------------------------------------------------------


def plain_operands():
    on = mesh((4,))
    x = sw.distribute_tensor(made(8, 3), on, ROW)
    beside = DTensor.from_local(x.to_local(), on, ROW)
    table = made(3, seed=3)
    with sw.plain("refuse"):
        with pytest.raises(PlainTensorError):
            x + table
        with implicit_replication():
            found = x + table
        with pytest.raises(PlainTensorError):
            x + table
    from torch.distributed.tensor.experimental import implicit_replication as torchs

    with torchs():
        other = beside + table
    assert found.placements == other.placements == (Shard(0),)
    torch.testing.assert_close(found.to_local(), other.to_local())
    with implicit_replication():  # nothing is compared
        x + table * on.get_local_rank()


def test_plain_tensors_count_as_replicated(pool):
    pool.run(plain_operands)
