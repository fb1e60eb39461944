"""``shardwise.local`` on gloo ranks: numbers, gradients and their placements are those of one device; refusals."""

from __future__ import annotations

import gc
import re
import weakref

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.comm import events
from shardwise.errors import (
    LocalGradientError,
    LocalPlacementError,
    LocalResultError,
    RankFailedError,
    TracingError,
    WorkerError,
)
from shardwise.kernel.placements import strided_shard
from shardwise.tensor.local_gradients import counted, dual, in_sums, same_work
from shardwise.testing import mesh

R, S0, S1, SUM, AVG = Replicate(), Shard(0), Shard(1), Partial(), Partial("avg")


def made(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- the table of gradients ------------------------------------------------------------------------------------------


def test_replicated_and_partial_are_each_others_gradients():
    layout = (R, SUM, S1, AVG, strided_shard(0, 2))
    assert dual(layout, ()) == (SUM, R, S1, R, strided_shard(0, 2))
    assert in_sums(layout) == (R, SUM, S1, SUM, strided_shard(0, 2))
    assert dual((R, R), {1}) == (SUM, R)
    assert counted(layout, (2, 3, 4, 5, 6)) == 5


PLAIN = st.sampled_from([R, S0, S1, SUM])


@given(st.lists(PLAIN, min_size=1, max_size=4))
def test_the_gradient_of_a_gradient_lies_as_the_tensor_does(layout):
    assert dual(dual(tuple(layout), ()), ()) == tuple(layout)


def test_all_ranks_do_the_same_work_where_every_result_is_replicated():
    arguments, sizes = [("w", (R, R))], (2, 2)
    assert same_work("f", arguments, [("0", (R, R))], sizes, ()) == {0, 1}
    assert same_work("f", arguments, [("0", (R, R)), ("1", (S0, R))], sizes, ()) == {1}
    assert same_work("f", arguments, [("0", (R, R))], sizes, {0}) == {1}
    assert same_work("f", [("x", (S0, R))], [("0", (R, R))], (1, 2), ()) == {0, 1}
    with pytest.raises(LocalPlacementError, match="different parts of x") as refused:
        same_work("f", [("x", (S0, R))], [("0", (R, R))], sizes, ())
    assert (refused.value.mesh_dim, refused.value.argument) == (0, "x")


# -- beside one device -----------------------------------------------------------------------------------------------


def product(x, w):
    return torch.tanh(x @ w)


def product_and_size(x, w):
    return torch.tanh(x @ w), (w * w).sum()


def linear(x, w):
    return x @ w


def loss_of(rows):
    return (rows.sin() * rows).sum(), rows.mean(0)


CASES = {
    "a batch and a weight": (product, ([S0, R], [R, R]), [S0, R]),
    "columns of a weight": (product, ([S0, R], [R, S1]), [S0, S1]),
    "all the same": (product, (R, R), R),
    "an inner dim": (linear, ([S0, S1], [R, S0]), [S0, SUM]),
    "a partial sum": (linear, ([SUM, S0], R), [SUM, S0]),
    "a partial average": (linear, ([AVG, S0], R), [AVG, S0]),
    "an average and a sum": (linear, ([AVG, SUM], R), [AVG, SUM]),
    "different work and the same": (product_and_size, ([S0, S0], R), ([S0, S0], R)),
    "the same work on one mesh dim": (product_and_size, ([R, S0], R), ([R, S0], R)),
    "mesh dims by name": (product, ({"dp": S0}, {"tp": S1}), {"dp": S0, "tp": S1}),
    "arguments by name": (product, {"w": R, "x": [S0, S0]}, [S0, S0]),
    "inside a dim": (product, ([S0, strided_shard(0, 2)], R), [S0, strided_shard(0, 2)]),
}
STARTS = [([S0, S0], [R, R]), ([R, S1], [S0, S1])]


def beside_one_device(name, starts):
    function, inputs, outputs = CASES[name]
    on = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, w, seeds = made(8, 6), made(6, 4, seed=1), made(8, 4, seed=2)
    mapped = sw.local(function, inputs=inputs, outputs=outputs)

    def gradients(f, x, w, seeds):
        """First derivatives, and those of a number that they make."""
        results = f(x, w)
        y, *more = results if isinstance(results, tuple) else (results,)
        loss = (y * seeds).sum() + sum(3 * z * z for z in more)
        first = torch.autograd.grad(loss, [x, w], create_graph=True)
        again = torch.autograd.grad(sum((g * g * g).sum() for g in first), [x, w])
        return [y, *more, *first, *again]

    whole = gradients(function, x.requires_grad_(), w.requires_grad_(), seeds)
    placed = [sw.distribute_tensor(t.detach(), on, p).requires_grad_() for t, p in zip((x, w), starts, strict=True)]
    parts = gradients(mapped, *placed, sw.distribute_tensor(seeds, on, [R, S0]))
    for mine, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(mine.full_tensor(), expected)


@pytest.mark.parametrize("starts", STARTS, ids=["as they lie", "moved"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_first_and_second_derivatives(pool, name, starts):
    pool.run(beside_one_device, name, starts)


def uneven():
    """7 rows on 4 ranks: the ranks agree once on the shape, and send nothing for it afterwards."""
    on = mesh((4,))
    x = sw.distribute_tensor(made(9, 3), on, [S0]).requires_grad_()
    double = sw.local(lambda a: torch.cat([a, a], 1), outputs=[S0])
    sent = []
    y = double(x)
    assert y.shape == (9, 6)
    with events.observe(sent.append):
        y = double(x)
    assert not sent
    (y * y).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 4 * made(9, 3))
    # Fewer rows than ranks.
    few = sw.distribute_tensor(made(3, 2), on, [S0])
    assert double(few).shape == (3, 4)
    told = sw.local(lambda a: a[:, :1] * 2, outputs=[S0], shapes=(9, 1))(x)
    torch.testing.assert_close(told.full_tensor(), 2 * made(9, 3)[:, :1])


def test_the_shapes_of_uneven_parts_are_agreed_on(pool):
    pool.run(uneven)


def wrong_shapes():
    """9 rows on 4 ranks lie as 3, 3, 3, 0. Some of these shapes would give some ranks the part that they have."""
    x = sw.distribute_tensor(made(9, 3), mesh((4,)), [S0])
    for shapes in ((8, 3), (10, 3), (12, 3), (9, 4), (9,), ((9, 3),), ((9, 3), (9, 3))):
        double = sw.local(lambda a: 2 * a, outputs=[S0], shapes=shapes)
        if shapes == ((9, 3),):
            assert double(x).shape == (9, 3)
            continue
        with pytest.raises(LocalResultError, match=r"take the results of .*<lambda> by local: "):
            double(x)


def test_shapes_that_are_wrong_on_some_ranks_are_refused_on_all(pool):
    pool.run(wrong_shapes)


def data_decides():
    on, rank = mesh((4,)), dist.get_rank()
    keep = sw.local(lambda a, n: a[:n], inputs=(S0, None), outputs=S0, shapes="agree")
    x = sw.distribute_tensor(made(8, 3), on, [S0])
    for step in range(3):
        rows = 2 if rank < 3 else step
        y = keep(x, rows)
        assert y.shape == (6 + step, 3)
        torch.testing.assert_close(y.full_tensor(), made(8, 3)[: 6 + step])


def test_shapes_that_data_decides_are_compared_at_each_call(pool):
    pool.run(data_decides)


def a_rank_without_work():
    """A weight that one rank alone uses: all ranks reduce its gradient, and nobody waits for ever."""
    on, rank = mesh((2,)), dist.get_rank()
    w = sw.distribute_tensor(made(3, seed=1), on, [R]).requires_grad_()
    x = sw.distribute_tensor(made(4, 3), on, [S0]).requires_grad_()
    f = sw.local(lambda a, b: a * b if rank else a * 2, outputs=[S0], inputs=(S0, R))
    for _ in range(2):
        (f(x, w)).sum().backward()
    torch.testing.assert_close(w.grad.full_tensor(), 2 * made(4, 3)[2:].sum(0))


def test_every_rank_has_a_gradient_of_what_some_rank_uses(two_ranks):
    two_ranks.run(a_rank_without_work)


def nested():
    on = mesh((2, 2))
    x = made(4, 6)
    placed = sw.distribute_tensor(x, on, [S0, S1])

    @sw.local(inputs={"pair": ([S0, S1], [S0, S1]), "named": [S0, S1]}, outputs=([S0, S1], None, [S0, SUM]))
    def function(pair, factor, *, shift, named):
        here = torch.ones(3, dtype=torch.float64)
        assert type(here) is torch.Tensor
        return {
            "sum": pair[0] + pair[1] * factor + shift + named["a"],
            "count": 3,
            "rows": here.sum() * pair[0].sum(1),
        }

    with sw.on(on), torch.no_grad():
        result = function((placed, placed), 2.0, shift=1.0, named={"a": placed})
    torch.testing.assert_close(result["sum"].full_tensor(), 4 * x + 1)
    torch.testing.assert_close(result["rows"].full_tensor(), 3 * x.sum(1))
    assert result["count"] == 3
    assert function.__name__ == "function"
    alone = function((x, x), 2.0, shift=1.0, named={"a": x})
    assert type(alone["sum"]) is torch.Tensor


def test_nested_values_keywords_and_one_device(pool):
    pool.run(nested)


def own_collective(x, w):
    """An inner product over ranks: torch's differentiable all_reduce, whose backward is its transpose."""
    from torch.distributed.nn.functional import all_reduce

    return all_reduce(x @ w)


def communicates():
    on = mesh((4,))
    x, w = made(5, 8).requires_grad_(), made(8, 3, seed=1).requires_grad_()
    (x @ w).sin().sum().backward()
    a = sw.distribute_tensor(x.detach(), on, [S1]).requires_grad_()
    b = sw.distribute_tensor(w.detach(), on, [S0]).requires_grad_()
    mapped = sw.local(own_collective, inputs=(S1, S0), outputs=R, communicates=0, check=True)
    y = mapped(a, b)
    torch.testing.assert_close(y.full_tensor(), x.detach() @ w.detach())
    y.sin().sum().backward()
    torch.testing.assert_close(a.grad.full_tensor(), x.grad)
    torch.testing.assert_close(b.grad.full_tensor(), w.grad)
    with pytest.raises(LocalPlacementError, match="communicates="):
        sw.local(own_collective, inputs=(S1, S0), outputs=R)(a, b)


def test_a_function_with_collectives_of_its_own(pool):
    pool.run(communicates)


def compiled():
    on = mesh((2, 2))
    x, w = made(8, 6).requires_grad_(), made(6, 4, seed=1).requires_grad_()

    def program(a, b):
        y, size = mapped(a, b)
        return y.sin().sum() + size

    mapped = sw.local(product_and_size, inputs=([S0, R], R), outputs=([S0, R], R))
    a = sw.distribute_tensor(x.detach(), on, [S0, S1]).requires_grad_()
    b = sw.distribute_tensor(w.detach(), on, [R, R]).requires_grad_()
    y, size = product_and_size(x, w)
    loss = y.sin().sum() + size
    loss.backward()
    found = torch.compile(program, backend="aot_eager", fullgraph=True)(a, b)
    found.backward()
    torch.testing.assert_close(found.full_tensor(), loss)
    torch.testing.assert_close(a.grad.full_tensor(), x.grad)
    torch.testing.assert_close(b.grad.full_tensor(), w.grad)
    odd = sw.distribute_tensor(made(7, 6), on, [S0, R])
    with pytest.raises(TracingError, match="Say the global shapes"):
        torch.compile(program, backend="aot_eager", fullgraph=True)(odd, b)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="dynamo cannot compare the classes of placements yet")
def test_it_compiles(pool):
    pool.run(compiled, timeout=120)


# -- refusals --------------------------------------------------------------------------------------------------------


def refusals():
    on = mesh((2, 2))
    x = sw.distribute_tensor(made(4, 6), on, [S0, R]).requires_grad_()
    plain = made(4, 6)
    cases = [
        (sw.local(torch.neg, outputs=S0), (x,), LocalPlacementError, "which of the mesh's 2 dims"),
        (sw.local(torch.neg, outputs={"dp": S0}), (x,), LocalPlacementError, "has no dim 'dp'"),
        (sw.local(torch.neg, outputs=[S0]), (x,), LocalPlacementError, "placements of a tensor on a mesh of 2"),
        (sw.local(torch.neg, outputs=[R, R]), (x,), LocalPlacementError, "different parts"),
        (sw.local(torch.neg, inputs=(None,), outputs=[S0, R]), (x,), LocalPlacementError, "inputs= has no placements"),
        (sw.local(torch.neg, inputs=(R, R), outputs=[S0, R]), (x,), LocalPlacementError, "2 entries for 1 positional"),
        (sw.local(linear, inputs={"y": R}, outputs=R), (x, x), LocalPlacementError, "names 'y'.*x, w"),
        (sw.local(linear, inputs=(R, R), outputs=R), (x, plain), LocalPlacementError, "a plain tensor"),
        (sw.local(torch.mul, inputs=(R, R), outputs=R), (x, 2.0), LocalPlacementError, "2.0, no tensor"),
        (sw.local(torch.neg, inputs=(R,), outputs=R, move=False), (x,), LocalPlacementError, "move=True"),
        (sw.local(torch.neg, outputs=[S0, R], communicates="dp"), (x,), LocalPlacementError, "the mesh dim 'dp'"),
        (sw.local(lambda a: (a, a), outputs=([S0, R],)), (x,), LocalResultError, "1 entry for 2 values"),
        (sw.local(lambda _: 3, outputs=[S0, R]), (x,), LocalResultError, "a int, no tensor"),
        (sw.local(lambda a: (a, 3), outputs=(None, None)), (x,), LocalResultError, "outputs= has no placements"),
        (sw.local(lambda _: x, outputs=[S0, R]), (x,), LocalResultError, "a MeshTensor"),
        (
            sw.local(torch.neg, inputs=([Partial("max"), R],), outputs=[Partial("max"), R]),
            (x,),
            LocalGradientError,
            "max",
        ),
        (sw.local(torch.neg, outputs=[Partial("max"), R]), (x,), LocalGradientError, "result 0"),
    ]
    for function, args, kind, words in cases:
        with pytest.raises(kind, match=words):
            function(*args)
    with torch.no_grad():
        most = sw.local(lambda a: a.amax(0), outputs=[Partial("max"), R])(x)
    torch.testing.assert_close(most.full_tensor(), plain.amax(0))


def test_what_does_not_fit_is_refused(pool):
    pool.run(refusals)


def parted(how):
    """Ranks whose results are not what outputs= says: every rank raises the same, and the next call runs."""
    on, rank = mesh((2,)), dist.get_rank()
    x = sw.distribute_tensor(made(4, 3), on, [S0])

    def function(a):
        if how == "shape":
            return a[: 1 + rank]  # ranks with 1 and 2 rows: chunk gives 2 and 1
        if how == "dims":
            return a if rank else a.sum(0)
        if how == "dtype":
            return a if rank else a.float()
        return (a,) if rank else (a, a)

    with pytest.raises(LocalResultError) as refused:
        sw.local(function, outputs=S0)(x)
    y = sw.local(torch.neg, outputs=S0)(x)
    torch.testing.assert_close(y.full_tensor(), -made(4, 3))
    return refused.value.found


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shape", r"rank at \(0,\) has a part of shape \(1, 3\), and \[S\(0\)\] gives it \(2, 3\)"),
        ("dims", r"parts have \[1, 2\] dims"),
        ("dtype", "dtype: float32 on rank 0, float64 on rank 1"),
        ("number", "number of results: 2 on rank 0, 1 on rank 1"),
    ],
)
def test_every_rank_raises_for_the_results_of_any(two_ranks, how, words):
    mine, others = two_ranks.run(parted, how)
    assert mine == others
    assert re.search(words, mine), mine


def fails_on_one_rank():
    on, rank = mesh((2,)), dist.get_rank()
    x = sw.distribute_tensor(made(4, 3), on, [S0])

    def function(a):
        if rank:
            raise ValueError("no such row")
        return a

    sw.local(function, outputs=S0)(x)


def test_the_error_of_one_rank_reaches_the_others():
    from shardwise.testing import WorkerPool

    with WorkerPool(2, start_method="forkserver") as own, pytest.raises(WorkerError, match="no such row") as failed:
        own.run(fails_on_one_rank)
    kinds = [failure and failure.kind for failure in failed.value.errors]
    assert kinds == [RankFailedError.__name__, "ValueError"]


def copies_that_differ():
    on, rank = mesh((2,)), dist.get_rank()
    w = sw.distribute_tensor(made(3), on, [R])
    with pytest.raises(sw.ShardingError, match="copies that should be replicated differ"):
        sw.local(lambda a: a + rank, outputs=R, check=True)(w)


def test_replicated_results_are_compared_on_request(two_ranks):
    two_ranks.run(copies_that_differ)


def kept_alive():
    """What is left of functions, and of what they refer to, that were called and dropped."""
    gone = []
    for _ in range(3):
        held = made(2, 2).requires_grad_()  # a closure may hold a whole model

        @sw.local(outputs={"dp": S0})
        def product(rows, held=held):
            return rows @ held

        x = sw.distribute_tensor(made(4, 2), mesh((2,), ("dp",)), [S0])
        product(x).sum().full_tensor()
        gone.append(weakref.ref(product.__wrapped__))
        del product, held
    gc.collect()
    return [one() for one in gone]


def test_what_is_known_of_its_calls_keeps_no_function_alive(two_ranks):
    assert two_ranks.run(kept_alive) == [[None] * 3] * 2


def triples(part):
    return part.mul_(3)


def writes():
    """As on one device: autograd notices that what it keeps was written. A written copy would be lost."""
    on = mesh((2,), ("tp",))
    rows, factor = torch.arange(8.0).reshape(4, 2), torch.ones(4, 2)
    x = sw.distribute_tensor(rows, on, [Shard(0)])
    weight = sw.distribute_tensor(factor, on, [Shard(0)]).requires_grad_()
    product = weight * x  # it keeps x
    write = sw.local(triples, inputs=([Shard(0)],), outputs=[Shard(0)])
    assert torch.equal(write(x).full_tensor(), rows * 3)
    assert torch.equal(x.full_tensor(), rows * 3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    columns = sw.distribute_tensor(rows, on, [Shard(1)])
    with pytest.raises(LocalResultError, match="it writes to an argument"):
        write(columns)


def test_what_a_function_writes_to_its_arguments_is_noticed(two_ranks):
    two_ranks.run(writes)
