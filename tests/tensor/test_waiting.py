"""Asynchronous redistribution: what waits, what does not, and that no wait is forgotten."""

from __future__ import annotations

import copy
import gc
import io
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard
from shardwise.comm.async_result import AsyncResult, InFlightLimit
from shardwise.comm.events import observe
from shardwise.comm.waiting_ranks import _look
from shardwise.errors import PlacementError
from shardwise.tensor.waiting import source_of
from shardwise.testing import WorkerPool, mesh

PHASES = ("issued", "waited")


ROWS = (Shard(0),)


def sharded(shape=(8, 4), layout=ROWS, mesh_shape=(4,), requires_grad=False):
    full = torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape)
    return full, sw.distribute_tensor(full, mesh(mesh_shape), layout).requires_grad_(requires_grad)


def log_of(run):
    """The phases of the collectives in a run, with what the run itself notes down, in order."""
    log = []
    with observe(lambda event: log.append(f"{event.phase} {event.kind}"), phases=PHASES):
        run(log)
    return log


# -- laziness, by the order of events ----------------------------------------------------------------------------


def waits_at_first_use_only():
    full, x = sharded()

    def run(log):
        y = x.redistribute(placements=[Replicate()], async_op=True)
        log.append("compute")
        (x * 2).to_local()
        assert (y.shape, y.dtype, y.placements, y.device) == (full.shape, full.dtype, (Replicate(),), full.device)
        log.append("use")
        assert torch.equal(y.to_local(), full)
        assert type(y) is MeshTensor
        assert torch.equal((y + 1).to_local(), full + 1)

    return log_of(run)


def test_the_first_use_waits_and_nothing_else(pool):
    expected = ["issued all_gather", "compute", "use", "waited all_gather"]
    assert pool.run(waits_at_first_use_only) == [expected] * 4


def two_at_once():
    full, x = sharded((8, 4), [Shard(0), Shard(1)], (2, 2))

    def run(log):
        rows = x.redistribute(placements=[Replicate(), Shard(1)], async_op=True)
        columns = x.redistribute(placements=[Shard(0), Replicate()], async_op=True)
        log.append("compute")
        assert torch.equal(columns.full_tensor(), full)
        assert torch.equal(rows.full_tensor(), full)

    return log_of(run)[:3]


def test_collectives_over_two_mesh_dims_are_under_way_at_once(pool):
    assert pool.run(two_at_once) == [["issued all_gather", "issued all_gather", "compute"]] * 4


@pytest.mark.parametrize("before", [[Shard(0)], [Shard(1)], [Replicate()], [Partial()], [Partial("avg")]])
@pytest.mark.parametrize("after", [[Shard(0)], [Shard(1)], [Replicate()]])
@pytest.mark.parametrize("shape", [(8, 4), (5, 3)])
def test_every_kind_of_move_gives_what_it_gives_at_once(pool, before, after, shape):
    def moved():
        full, x = sharded(shape, before)
        y = x.redistribute(placements=after, async_op=True)
        expected = x.redistribute(placements=after)
        assert torch.equal(y.to_local(), expected.to_local())
        assert y.to_local().stride() == expected.to_local().stride()
        assert torch.equal(y.full_tensor(), full)

    pool.run(moved)


def chains():
    full, x = sharded((8, 6), [Partial(), Shard(1)], (2, 2))
    t = x.t()
    for tensor, whole in ((x, full), (t, full.t())):
        for after in ([Shard(0), Replicate()], [Replicate(), Replicate()], [Shard(1), Shard(1)]):
            y = tensor.redistribute(placements=after, async_op=True)
            assert torch.equal(y.full_tensor(), whole)
            assert y.to_local().stride() == tensor.redistribute(placements=after).to_local().stride()


def test_a_chain_of_collectives_and_a_transposed_tensor(pool):
    pool.run(chains)


def every_kind(kind, dtype):
    full = torch.arange(30_000).remainder(5).to(dtype)
    x = sw.distribute_tensor(full, mesh((4,)), [Partial(kind)], src_data_rank=None)
    assert torch.equal(x.redistribute(placements=[Replicate()], async_op=True).to_local(), full)
    assert torch.equal(x.redistribute(placements=[Shard(0)], async_op=True).full_tensor(), full)


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min", "product"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
def test_reductions_that_backends_lack_are_done_at_the_wait(pool, kind, dtype):
    pool.run(every_kind, kind, dtype)


def bad_placements():
    _, x = sharded()
    with pytest.raises(PlacementError):
        x.redistribute(placements=[Shard(2)], async_op=True)
    with pytest.raises(PlacementError):
        x.redistribute(placements=[{}], async_op=True)
    return log_of(lambda _: x.redistribute(placements=[Shard(0)], async_op=True))


def test_bad_placements_raise_and_nothing_to_do_issues_nothing(pool):
    assert pool.run(bad_placements) == [[]] * 4


def gathered_together():
    from shardwise.comm.coalescing import coalesced

    m = mesh((2, 2))
    tensors = [
        sw.distribute_tensor(torch.arange(60).reshape(12, 5).to(dtype), m, layout)
        for dtype in (torch.float64, torch.int32, torch.bool)
        for layout in ([Shard(0), Replicate()], [Replicate(), Shard(1)], [Shard(0), Shard(0)], [Shard(1), Shard(0)])
    ]

    def run(log):
        with coalesced():
            moved = [t.redistribute(placements=[Replicate()] * 2, async_op=True) for t in tensors]
            # Wanted before the end: what is there so far is issued.
            assert torch.equal(moved[1].to_local(), tensors[1].redistribute(placements=[Replicate()] * 2).to_local())
            moved += [t.redistribute(placements=[Replicate()] * 2, async_op=True) for t in tensors]
        log.append("use")
        for tensor, whole in zip(tensors * 2, moved, strict=True):
            assert torch.equal(whole.to_local(), tensor.full_tensor())

    log = log_of(run)
    return log[: log.index("use") + 1]


def test_gathers_that_go_together(pool):
    logs = pool.run(gathered_together)
    assert logs == [logs[0]] * 4
    # Three groups (rows, columns, all) and three dtypes; the flag and the int32 differ, the bool is sent as bytes.
    assert logs[0].count("issued all_gather") <= 2 * 9 + 1
    assert logs[0][-1] == "use"


def reduced_together():
    from shardwise.comm.coalescing import coalesced

    m = mesh((2, 2))
    numbers = torch.arange(8 * 6.0).reshape(8, 6) * (m.get_rank() + 1)
    moves = [
        (sw.MeshTensor.from_local(numbers.to(dtype), m, source), target)
        for dtype in (torch.float64, torch.float32, torch.complex64, torch.int32)
        for source, target in (
            ([Partial(), Replicate()], [Replicate(), Replicate()]),
            ([Replicate(), Partial()], [Replicate(), Replicate()]),
            ([Partial(), Partial()], [Replicate(), Replicate()]),
            ([Replicate(), Partial()], [Replicate(), Shard(0)]),
            ([Replicate(), Partial()], [Replicate(), Shard(1)]),
        )
    ]

    def run(log):
        with coalesced():
            moved = [t.redistribute(placements=target, async_op=True) for t, target in moves * 2]
        log.append("use")
        for (tensor, target), result in zip(moves * 2, moved, strict=True):
            assert torch.equal(result.to_local(), tensor.redistribute(placements=target).to_local())

    log = log_of(run)
    return log[: log.index("use")]


def test_reductions_that_go_together(pool):
    logs = pool.run(reduced_together)
    assert logs == [logs[0]] * 4
    # Three groups and three dtypes: complex64 is summed as float32. It is scattered one tensor at a time.
    assert logs[0].count("issued all_reduce") == 3 * 3
    assert logs[0].count("issued reduce_scatter") == 3 + 4


# -- what may be done with a waiting tensor ----------------------------------------------------------------------


def views_wait():
    full, x = sharded()
    log = []
    with observe(lambda event: log.append(event.phase), phases=PHASES):
        y = x.redistribute(placements=[Replicate()], async_op=True)
        seen = [y.detach(), y.t(), y.view(4, 8), y.t()[1:3], y.unsqueeze(0), y.transpose(0, 1).t()]
        assert [s.shape for s in seen] == [(8, 4), (4, 8), (4, 8), (2, 8), (1, 8, 4), (8, 4)]
        assert log == ["issued"]
        expected = [full, full.t(), full.view(4, 8), full.t()[1:3], full.unsqueeze(0), full]
        for s, e in zip(reversed(seen), reversed(expected), strict=True):
            assert torch.equal(s.to_local(), e)
            assert s.stride() == s.to_local().stride() == e.stride()
    assert log == ["issued", "waited"]
    y.fill_(7)
    assert all((s == 7).all() for s in seen), "a view of a waiting tensor shares its memory"


def test_views_of_a_waiting_tensor_wait_too_and_share_its_memory(pool):
    pool.run(views_wait)


def reshape_is_no_view():
    full, x = sharded()
    y = x.redistribute(placements=[Replicate()], async_op=True).t()
    flat = y.reshape(-1)
    y.fill_(0)
    assert torch.equal(flat.to_local(), full.t().reshape(-1))
    with torch.inference_mode():
        z = x.redistribute(placements=[Replicate()], async_op=True)
        converted = z.to(torch.float32)
        assert torch.equal(z.reshape(4, 8).to_local(), full.reshape(4, 8))
        assert torch.equal(converted.to_local(), full.float())


def test_what_may_copy_copies_at_once(pool):
    pool.run(reshape_is_no_view)


def other_views():
    full, x = sharded((8, 4))
    y = x.redistribute(placements=[Replicate()], async_op=True)
    assert torch.equal(y.view(torch.int64).to_local(), full.view(torch.int64))
    z = sw.distribute_tensor(full + 1j, mesh((4,)), [Shard(0)]).redistribute(placements=[Replicate()], async_op=True)
    assert torch.equal(z.conj().to_local(), full - 1j)
    y = x.redistribute(placements=[Replicate()], async_op=True)
    assert [p.shape for p in y.split(3)] == [(3, 4), (3, 4), (2, 4)]
    y = x.redistribute(placements=[Replicate()], async_op=True)
    window = y[2:7, 1:]
    assert torch.equal(window.t()[1:, 2:].to_local(), full[2:7, 1:].t()[1:, 2:])
    assert torch.equal(window.expand(2, 5, 3).to_local(), full[2:7, 1:].expand(2, 5, 3))


def test_views_of_other_kinds(pool):
    pool.run(other_views)


def a_view_that_needs_data():
    full, x = sharded((4, 6), [Partial(), Shard(1)], (2, 2))
    y = x.redistribute(placements=[Replicate(), Shard(1)], async_op=True)
    assert torch.equal(y.reshape(3, 8).full_tensor(), full.reshape(3, 8))
    y = x.redistribute(placements=[Replicate(), Shard(1)], async_op=True)
    with sw.sharing_views(), pytest.raises(sw.ShardingError, match="view would need data"):
        y.view(3, 8)
    assert torch.equal(y.view(3, 8).full_tensor(), full.view(3, 8))


def test_a_view_that_needs_data_from_another_rank(pool):
    pool.run(a_view_that_needs_data)


def in_lists_and_copies():
    full, x = sharded()

    def waiting():
        return x.redistribute(placements=[Replicate()], async_op=True)

    for total in torch._foreach_add([waiting(), waiting()], [waiting(), x]):
        assert torch.equal(total.full_tensor(), full * 2)
    assert torch.equal(torch.cat([waiting(), waiting()]).to_local(), torch.cat([full, full]))
    assert torch.equal(copy.deepcopy(waiting()).to_local(), full)
    assert type(copy.deepcopy(waiting())) is MeshTensor
    assert torch.equal(copy.copy(waiting()).to_local(), full)
    assert "[R]" in repr(waiting())
    assert waiting().tolist() == full.tolist()
    parameter = torch.nn.Parameter(waiting())
    assert isinstance(parameter, torch.nn.Parameter)
    assert torch.equal(parameter.to_local(), full)
    file = io.BytesIO()
    torch.save(x.redistribute(placements=[Shard(1)], async_op=True), file)
    file.seek(0)
    back = torch.load(file, weights_only=False)
    assert torch.equal(back.to_local(), x.redistribute(placements=[Shard(1)]).to_local())
    y = waiting()
    y.add_(1)
    assert torch.equal(y.to_local(), full + 1)
    out = waiting()
    torch.mul(waiting(), 2, out=out)
    assert torch.equal(out.to_local(), full * 2)


def test_lists_copies_files_and_writes(pool):
    pool.run(in_lists_and_copies)


def from_two_threads():
    full, x = sharded((64, 64), [Partial("avg")])
    for _ in range(20):
        y = x.redistribute(placements=[Replicate()], async_op=True)
        seen = [y, y.detach(), y.t().t()]
        found = []
        threads = [threading.Thread(target=lambda s=s, f=found: f.append(s.to_local())) for s in seen * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(f, full) for f in found)  # averaged once, not once per thread


def test_threads_may_wait_for_the_same_tensor(pool):
    pool.run(from_two_threads)


# -- autograd ----------------------------------------------------------------------------------------------------


def backward_is_asynchronous():
    full, x = sharded(requires_grad=True)
    other = torch.ones(4, 3, dtype=torch.float64)

    def run(log):
        y = x.redistribute(placements=[Replicate()], async_op=True)
        z = y @ sw.distribute_tensor(other, mesh((4,)), [Shard(1)], src_data_rank=None)
        loss = z.to_local(grad_placements=[Shard(1)]).sum()
        log.append("backward")
        loss.backward()
        log.append("use")
        assert torch.equal(x.grad.full_tensor(), torch.full_like(full, 3))

    return log_of(run)


def test_backward_of_an_asynchronous_move_is_asynchronous(pool):
    (log, *others) = pool.run(backward_is_asynchronous)
    assert [log] * 3 == others
    forward, backward = log[: log.index("backward")], log[log.index("backward") :]
    assert forward == ["issued all_gather", "waited all_gather"]
    assert backward[:4] == ["backward", "issued reduce_scatter", "use", "waited reduce_scatter"]


def gradients_are_reduced_meanwhile():
    m = mesh((4,))
    full = torch.arange(12.0, dtype=torch.float64).reshape(3, 4)
    a, b = (sw.distribute_tensor(full, m, [Replicate()]).requires_grad_() for _ in range(2))
    x = sw.distribute_tensor(torch.ones(8, 3, dtype=torch.float64), m, [Shard(0)])

    def run(log):
        loss = (torch.relu(x @ a) @ b.t()).sum()
        b.register_hook(lambda _: log.append("hook of b"))
        loss.backward()
        assert source_of(a.grad) is not None
        log.append("step")
        torch._foreach_add_([a.detach(), b.detach()], [a.grad, b.grad], alpha=-1.0)

    log = log_of(run)
    first, second = full.clone().requires_grad_(), full.clone().requires_grad_()
    (torch.relu(torch.ones(8, 3, dtype=torch.float64) @ first) @ second.t()).sum().backward()
    torch.testing.assert_close(a.full_tensor(), full - first.grad)
    torch.testing.assert_close(b.full_tensor(), full - second.grad)
    return [entry for entry in log if "reduce" in entry or " " not in entry or "hook" in entry]


def test_gradients_are_reduced_while_backward_goes_on(pool):
    for log in pool.run(gradients_are_reduced_meanwhile):
        step = log.index("step")
        assert log.index("issued all_reduce") < log.index("hook of b") < step
        assert log[:step].count("issued all_reduce") == 2
        assert "waited all_reduce" not in log[:step]
        assert log[step:].count("waited all_reduce") == 2


def kept_while_sent(after):
    """Whether the tensor that is redistributed lives on until the wait, and whether it does after it."""
    _, x = sharded((8, 8), [Partial()])
    y = x.redistribute(placements=after, async_op=True)
    seen, x = weakref.ref(x), None
    before = seen() is not None
    y.to_local()
    return before, seen() is not None


def test_a_gradient_is_kept_while_its_own_memory_is_sent(pool):
    """Autograd adds to gradients in place where it alone holds them."""
    assert pool.run(kept_while_sent, [Shard(0)]) == [(True, False)] * 4
    assert pool.run(kept_while_sent, [Replicate()]) == [(False, False)] * 4  # a copy is reduced


def gradients_that_share_memory():
    m = mesh((4,))
    full = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = []
    for distributed in (False, True):
        leaves = [full.clone() * i for i in (1, 2, 3)]
        data = torch.ones(64, 64, dtype=torch.float64)
        if distributed:
            leaves = [sw.distribute_tensor(t, m, [Shard(0)]) for t in leaves]
            data = sw.distribute_tensor(data, m, [Shard(1)])
        a, b, c = (t.requires_grad_() for t in leaves)
        for _ in range(3):
            h = a + b  # one gradient for a, b and c at once, partial on the mesh
            s = h + c
            (data.t() @ s + data.t() @ h).square().mean().backward()
        results.append([t.grad.full_tensor() if distributed else t.grad for t in (a, b, c)])
    torch.testing.assert_close(results[1], results[0])


def test_gradients_that_share_memory_stay_apart(pool):
    pool.run(gradients_that_share_memory)


def accumulated_over_two_passes():
    m = mesh((4,))
    w = sw.distribute_tensor(torch.ones(4, 3), m, [Replicate()]).requires_grad_()
    for rows in (4, 8):
        (sw.distribute_tensor(torch.ones(rows, 4), m, [Shard(0)]) @ w).sum().backward()
    assert torch.equal(w.grad.to_local(), torch.full((4, 3), 12.0))
    (g,) = torch.autograd.grad((sw.distribute_tensor(torch.ones(4, 4), m, [Shard(0)]) @ w).square().sum(), [w])
    assert torch.equal(g.to_local(), torch.full((4, 3), 32.0))


def test_gradients_accumulate(pool):
    pool.run(accumulated_over_two_passes)


def local_gradients():
    m = mesh((4,))
    data = torch.arange(32.0).reshape(8, 4)
    weights = [sw.distribute_tensor(torch.ones(4, n), m, [Replicate()]).requires_grad_() for n in (3, 2)]
    bucket, leaves = [], []

    def used(w):
        view = w.redistribute(placements=w.placements, grad_placements=w.placements)

        def take(grad):
            assert grad.placements == (Partial(),)
            bucket.append(grad.to_local())
            leaves.append(w)
            return sw.zeros(grad.shape, device_mesh=m, placements=[Replicate()])

        view.register_hook(take)
        return view

    x = sw.distribute_tensor(data, m, [Shard(0)])

    def run(_):
        sum((x @ used(w)).sum() for w in weights).backward()
        flat = torch.cat([g.flatten() for g in bucket])
        whole = MeshTensor.from_local(flat, m, [Partial()]).redistribute(placements=[Replicate()]).to_local()
        for w, part in zip(leaves, whole.split([w.numel() for w in leaves]), strict=True):
            w.grad = MeshTensor.from_local(part.view(w.shape), m, [Replicate()])

    log = log_of(run)
    for w in weights:
        assert torch.equal(w.grad.to_local(), data.sum(0)[:, None].expand(w.shape))
    return [entry for entry in log if entry.startswith("issued")]


def test_a_hook_may_take_the_local_gradients_for_a_bucket(pool):
    # One for both parameters, and none for either alone.
    assert pool.run(local_gradients) == [["issued all_reduce"]] * 4


# -- no wait is forgotten ----------------------------------------------------------------------------------------


def dropped():
    full, x = sharded((64, 64))
    gc.freeze()  # a collection need not look at all of torch
    for i in range(50):
        y = x.redistribute(placements=[Replicate() if i % 2 else Shard(1)], async_op=True)
        if i % 3 == 0:
            ring = [y, y.t()]
            ring.append(ring)  # only the garbage collector finds this one
            del ring
        if dist.get_rank() == i % 4:
            time.sleep(0.001)
        del y
        if dist.get_rank() == i % 3:
            gc.collect()
    gc.unfreeze()
    gc.collect()
    assert torch.equal(x.full_tensor(), full)
    return len([f for f in gc.get_objects() if isinstance(f, AsyncResult)])


def test_tensors_that_are_dropped_leave_nothing_behind(pool):
    assert pool.run(dropped) == [0] * 4


def test_who_looks_for_failed_ranks_keeps_nothing_alive_that_has_waited():
    """The watcher reads the frames of threads that wait. While it asks the store, they go on."""
    under_way, is_dropped = threading.Lock(), threading.Event()
    under_way.acquire()
    result = AsyncResult(SimpleNamespace(wait=under_way.acquire), torch.ones(2))
    alive = weakref.ref(result)
    seen = []

    def read(ranks):
        under_way.release()
        is_dropped.wait(60)
        seen.append(alive())
        return {}

    # Its first looks are also those at which it learns the processes of the other ranks.
    of_world = {"waits": {}, "notes": {}, "logs": {}, "compares": {}, "size": 2, "own": None, "question": None}
    world = SimpleNamespace(**of_world, looks=2, read=read)

    def watch():
        try:
            for now in range(1000):
                if seen:
                    break
                time.sleep(0.01)
                world.looks = 2
                _look(world, float(now))
        finally:
            if not seen:
                under_way.release()

    watcher = threading.Thread(target=watch)
    watcher.start()
    result.wait()
    del result
    is_dropped.set()
    watcher.join()
    assert seen == [None]


def a_dropped_result_has_waited():
    log = []

    class Work:
        def wait(self):
            log.append("wait")

    AsyncResult(Work(), torch.ones(2))
    result = AsyncResult(Work(), torch.ones(2)).then(lambda t: t + 1)
    taken = result.wait(), result.wait()
    del result
    assert taken[0] is taken[1]
    return log


def test_a_dropped_result_waits_once():
    assert a_dropped_result_has_waited() == ["wait", "wait"]


def test_what_was_done_with_a_result_is_not_done_again_after_a_failure():
    class Work:
        def wait(self):
            pass

    calls = []

    def fails_once(tensor):
        calls.append("fails once")
        if len(calls) == 1:
            raise MemoryError
        return tensor

    result = AsyncResult(Work(), torch.ones(2)).then(lambda t: t.mul_(2)).then(fails_once).then(lambda t: t + 1)
    with pytest.raises(MemoryError):
        result.wait()
    assert result.wait().tolist() == result.wait().tolist() == [3, 3]


def failing_work():
    class Work:
        def wait(self):
            raise RuntimeError("a peer is gone")

    return AsyncResult(Work(), torch.ones(2))


def test_a_failure_reaches_whoever_waits_and_nobody_else():
    result = failing_work()
    with pytest.raises(RuntimeError, match="a peer is gone"):
        result.wait()
    del result
    failing_work()
    gc.collect()


def test_a_limit_waits_for_the_oldest_when_too_much_is_held():
    waited = []

    class Work:
        def __init__(self, name):
            self.name = name

        def wait(self):
            waited.append(self.name)

    def result(name, length):
        return AsyncResult(Work(name), torch.ones(length, dtype=torch.uint8), torch.ones(length, dtype=torch.uint8))

    limit, results = InFlightLimit(100), [result(i, 20) for i in range(4)]
    limit.add(results[0])
    limit.add(results[1])
    assert waited == []
    limit.add(results[2])
    assert waited == [0]
    results[1].wait()
    limit.add(results[3])
    assert waited == [0, 1]
    limit.add(result("large", 1000))
    assert waited == [0, 1, 2, 3, "large"], "all before it are waited for, and itself as it is dropped"


def open_at_the_end():
    full, x = sharded(mesh_shape=(2,))
    kept = x.redistribute(placements=[Replicate()], async_op=True)
    left = x.redistribute(placements=[Shard(1)], async_op=True)
    dist.destroy_process_group()
    del left
    gc.collect()
    return torch.equal(kept.to_local(), full)


@pytest.mark.slow
@pytest.mark.sample
def test_destroying_the_process_group_with_collectives_under_way_is_no_crash():
    with WorkerPool(2, start_method="forkserver") as ranks:
        assert ranks.run(open_at_the_end) == [True, True]
        assert len(ranks.run(gc.collect)) == 2  # both are still up


# -- memory ------------------------------------------------------------------------------------------------------


def peak_of(run):
    """The most bytes of tensors that a run held at once beyond what was there, as torch's profiler counts them."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(profile_memory=True, activities=kinds, acc_events=True) as profile:
        result = run()
    held = most = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    del result
    return most


@pytest.fixture
def fake_mesh():
    """A mesh of four ranks that do not communicate: what the backends hold is not ours to count."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


MOVES = [
    (Shard(0), Replicate(), 1),
    (Partial(), Replicate(), 1),
    (Replicate(), Shard(0), 1),
    (Replicate(), Partial(), 1),
    # Pieces of columns, as they arrive and as they are put in their places.
    (Shard(1), Replicate(), 2),
    # What is sent, once, and what arrives; for rows what is sent is the tensor itself.
    (Shard(1), Shard(0), 2),
    (Shard(0), Shard(1), 2),
    (Partial(), Shard(0), 1),
    (Partial(), Shard(1), 5),
]


@pytest.mark.parametrize(("before", "after", "copies"), MOVES)
def test_no_more_is_held_than_the_result_and_what_is_sent_and_received(fake_mesh, before, after, copies):
    x = sw.distribute_tensor(torch.ones(256, 128), fake_mesh, [before], src_data_rank=None)
    result = x.redistribute(placements=[after]).to_local().nbytes
    assert peak_of(lambda: x.redistribute(placements=[after])) == copies * result
    assert peak_of(lambda: x.redistribute(placements=[after], async_op=True).to_local()) == copies * result
