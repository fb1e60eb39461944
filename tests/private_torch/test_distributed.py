"""The shelf ``private_torch.distributed``: each function has a test that fails clearly when torch takes it away."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.device_mesh import init_device_mesh

from shardwise.errors import MeshMismatchError, TorchPartError
from shardwise.private_torch import distributed


def test_without_a_mesh_in_force_the_error_says_what_to_do():
    with pytest.raises(MeshMismatchError, match="Pass device_mesh="):
        distributed.current_mesh()


def entered_mesh(shape):
    mesh = init_device_mesh("cpu", shape)
    with mesh:
        return distributed.current_mesh() == mesh


def test_the_mesh_in_force_is_found(pool):
    assert pool.run(entered_mesh, (2, 2)) == [True] * 4


def note_in_the_store(key):
    store = distributed.default_store()
    store.add(key, dist.get_rank() + 1)
    dist.barrier()
    return store.add(key, 0), store.check([key + " of nobody"])


def test_all_ranks_have_the_default_store(pool):
    assert distributed.default_store() is None, "one process has nobody to tell"
    assert pool.run(note_in_the_store, "tests/private_torch") == [(10, False)] * 4


def groups_by_name():
    ranks = [0, 1] if dist.get_rank() < 2 else [2, 3]
    group = distributed.new_local_group(ranks, f"tests/private_torch/{ranks}")
    total = torch.ones(())
    dist.all_reduce(total, group=group)
    return group.group_name, total.item()


def test_some_ranks_make_a_group_under_a_name_of_their_own(pool):
    assert (
        pool.run(groups_by_name)
        == [("tests/private_torch/[0, 1]", 2.0)] * 2 + [("tests/private_torch/[2, 3]", 2.0)] * 2
    )


def calls_over_a_group():
    group = dist.new_group([0, 1, 2, 3])
    before = distributed.calls_of(group)
    dist.all_reduce(torch.ones(()), group=group)
    dist.barrier(group)
    return before, distributed.calls_of(group)


def test_calls_over_a_group_are_counted(pool):
    assert distributed.calls_of(None) == 0, "nothing that counts"
    assert pool.run(calls_over_a_group) == [(0, 2)] * 4


def threads_of_a_mesh():
    def threads():
        return len(list(Path("/proc/self/task").iterdir()))

    before = threads()
    init_device_mesh("cpu", (2, 2))
    return threads() - before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_groups_of_a_worker_share_one_event_loop(pool):
    for more in pool.run(threads_of_a_mesh):
        assert more == 4, "two for each of two groups; a third means that torch makes groups elsewhere"


def test_where_torch_makes_no_device_each_group_has_its_own(monkeypatch):
    before = dist.distributed_c10d.ProcessGroupGloo
    monkeypatch.setattr(dist, "ProcessGroupGloo", object())
    distributed.share_gloo_device("")
    assert dist.distributed_c10d.ProcessGroupGloo is before


@pytest.mark.parametrize("interface", ["", "lo,lo", "none-of-this-name"])
def test_where_there_is_no_such_interface_each_group_has_its_own_device(interface):
    before = dist.distributed_c10d.ProcessGroupGloo
    distributed.share_gloo_device(interface)
    assert dist.distributed_c10d.ProcessGroupGloo is before


def test_a_connection_to_a_store_ends_with_its_process():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    there = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    connection = distributed.connection_to(dist.PrefixStore("a", dist.PrefixStore("b", there)))
    assert connection is not None
    with pytest.raises(BlockingIOError):
        connection.recv(1)
    there.set("key", "value")  # a connection that says nothing disturbs nobody
    del store
    with connection:
        connection.settimeout(30)
        assert connection.recv(1) == b""
    assert distributed.connection_to(there) is None, "nobody answers"
    assert distributed.connection_to(dist.HashStore()) is None


def collectives_of_a_graph():
    group, rank = dist.group.WORLD, float(dist.get_rank())
    mine = torch.tensor([rank, rank + 10])
    return (
        distributed.graph_all_gather(mine, 4, group).tolist(),
        distributed.graph_all_reduce(mine, "sum", group).tolist(),
        distributed.graph_reduce_scatter(torch.arange(4.0) + rank, "sum", 4, group).tolist(),
        distributed.graph_all_to_all(torch.arange(4.0) + 10 * rank, [1] * 4, [1] * 4, group).tolist(),
        mine.tolist(),
    )


def test_collectives_of_a_graph_do_what_their_names_say(pool):
    answers = pool.run(collectives_of_a_graph)
    assert [f[0] for f in answers] == [[0, 10, 1, 11, 2, 12, 3, 13]] * 4
    assert [f[1] for f in answers] == [[6, 46]] * 4
    assert [f[2] for f in answers] == [[4 * i + 6] for i in range(4)]
    assert [f[3] for f in answers] == [[i, 10 + i, 20 + i, 30 + i] for i in range(4)]
    assert [f[4] for f in answers] == [[i, i + 10] for i in range(4)]


def test_the_functions_on_state_dicts_are_wrapped_where_torch_takes_them_from():
    from torch.distributed import _state_dict_utils as ours
    from torch.distributed.checkpoint import state_dict as taker

    import shardwise.tensor  # noqa: F401  # wraps them

    names = ("_gather_state_dict", "_distribute_state_dict", "_broadcast_state_dict", "_offload_state_dict_to_cpu")
    for name in names:
        assert getattr(taker, name) is getattr(ours, name)
        assert getattr(taker, name).__wrapped__.__module__ == ours.__name__
    # What is wrapped are their first two arguments and three options of the first.
    assert ours._gather_state_dict({"a": [1]}, pg=None, cpu_offload=False, ranks_only=()) == {"a": [1]}


@pytest.mark.parametrize("comes", ["before", "after"])
def test_functions_on_state_dicts_are_wrapped_when_their_module_comes(monkeypatch, tmp_path, comes):
    name = f"state_dicts_{comes}"
    (tmp_path / f"{name}.py").write_text("def gather(): return 'gathered'\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"user_{name}.py").write_text("def get_state_dict(): return 'shards'\n")
    monkeypatch.setattr(distributed, "_STATE_DICTS", name)
    monkeypatch.setattr(distributed, "_USERS", f"user_{name}")
    monkeypatch.setattr(distributed, "_FUNCTIONS", {n: f"{name}.{n}" for n in ("gather", "gone")})
    if comes == "before":
        importlib.import_module(name)
    finders = list(sys.meta_path)
    distributed.wrap_state_dict_functions(
        {
            "gather": lambda gather: lambda: gather() + " and wrapped",
            "gone": lambda gone: gone,
        }
    )
    assert importlib.import_module(name).gather() == "gathered and wrapped"
    with pytest.raises(TorchPartError, match=rf"gather or load a state dict: torch \S+ has no {name}.gone"):
        importlib.import_module(f"user_{name}").get_state_dict()
    assert sys.meta_path == finders, "nothing is left behind"


def test_every_op_by_which_a_graph_issues_a_collective_is_wrapped():
    """Sends and receives of single ranks are no collectives."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("_c10d_functional::")]
    overloads = [getattr(torch.ops._c10d_functional, name.partition("::")[2]).default for name in names]
    takes_group = {o for o in overloads if any(a.name == "group_name" for a in o._schema.arguments)}
    collectives = {o._schema.name.partition("::")[2] for o in takes_group} - {"isend", "irecv", "batch_p2p_ops"}
    assert collectives == {name for names in distributed._ISSUING.values() for name in names}


def test_a_wrapped_op_says_where_its_arguments_are(monkeypatch):
    class Overload:
        _schema = torch.ops._c10d_functional.all_reduce.default._schema

        def _op(self, *args):
            return args

    class Ops:
        all_reduce = type("Packet", (), {"default": Overload()})
        wait_tensor = type("Packet", (), {"default": object()})  # of a torch that has no such function

    monkeypatch.setattr(distributed, "_functional", Ops)
    ops = []

    def issuing(op):
        ops.append(op)
        return lambda *args: ("seen", op.run(*args))

    distributed.wrap_graph_collectives(issuing, lambda wait: wait)
    assert Ops.all_reduce.default._op(1, "sum", "0") == ("seen", (1, "sum", "0"))
    (op,) = ops
    assert (op.kind, op.place_of_reduction, op.place_of_group, op.is_uneven) == ("all_reduce", 1, 2, False)


def test_the_call_that_stages_a_tensor_is_told_from_others():
    class Asked(torch.Tensor):
        def new_empty(self, *size, **options):
            seen.append(distributed.is_staging(inspect.currentframe().f_back))
            return super().new_empty(*size, **options)

    seen = []
    tensor = torch.ones(2).as_subclass(Asked)
    tensor.new_empty(2)
    StateDictStager(False, False).stage({"x": tensor})
    assert seen == [False, True]
    assert not distributed.is_staging(None)
