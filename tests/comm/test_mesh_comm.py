"""The communication of lowerings on real ranks; what a simulated one refuses is in tests/testing/test_simulated.py."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import events
from shardwise.comm.mesh_comm import MeshComm
from shardwise.testing import mesh

RANK = torch.distributed.get_rank


def several_shifts_at_once():
    comm = MeshComm(mesh((4,)))
    under_way = [comm.start_shift(torch.full((3,), 10.0 * RANK() + i), 0, by) for i, by in enumerate((1, 2, 3, 1, -1))]
    received = [coming.wait().tolist() for coming in reversed(under_way)][::-1]
    assert received == [[10.0 * ((RANK() - by) % 4) + i] * 3 for i, by in enumerate((1, 2, 3, 1, -1))]
    whole_round = torch.ones(2)
    assert comm.start_shift(whole_round, 0, 4).wait() is whole_round


def test_shifts_come_as_they_were_started_whatever_the_order_of_waiting(pool):
    pool.run(several_shifts_at_once)


def shifts_of_any_shape_and_dtype():
    comm = MeshComm(mesh((4,)))
    before = (RANK() - 1) % 4
    for dtype in (torch.float64, torch.bfloat16, torch.bool, torch.complex64):
        sent = torch.ones(RANK(), 2, dtype=dtype)
        shifted = comm.start_shift(sent, 0, 1, (before, 2)).wait()
        assert shifted.dtype == dtype
        assert torch.equal(shifted, torch.ones(before, 2, dtype=dtype))
    turned = torch.arange(6.0).view(2, 3).t() + RANK()
    assert torch.equal(comm.shift(turned, 0), turned - RANK() + before)


def test_shifts_take_any_shape_and_dtype(pool):
    pool.run(shifts_of_any_shape_and_dtype)


def lines_over_two_mesh_dims():
    turned = MeshComm(DeviceMesh("cpu", [[3, 1], [0, 2]]))
    before = {3: 2, 1: 3, 0: 1, 2: 0}[RANK()]
    assert turned.start_shift(torch.tensor([RANK()]), (0, 1)).wait().tolist() == [before]
    order = [3, 1, 0, 2]
    place = order.index(RANK())
    sent = [torch.full((i,), 10 * place + i) for i in range(4)]
    expected = [[10 * i + place] * place for i in range(4)]
    assert [t.tolist() for t in turned.all_to_all(sent, (0, 1))] == expected
    assert [t.tolist() for t in turned.all_to_all(sent, (0, 1), [(place,)] * 4)] == expected
    assert [int(t) for t in turned.all_gather(torch.tensor(RANK()), (0, 1))] == order


def test_several_mesh_dims_make_one_line(pool):
    pool.run(lines_over_two_mesh_dims)


def told():
    seen = []
    with events.observe(seen.append, phases=("issued", "finished", "waited")):
        coming = MeshComm(mesh((4,))).start_shift(torch.ones(3), 0)
        early = [(event.kind, event.phase) for event in seen]
        coming.wait()
    assert early == [("shift", "issued")]
    assert sorted((event.kind, event.phase, event.nbytes) for event in seen) == [
        ("shift", phase, 12) for phase in ("finished", "issued", "waited")
    ]


def test_observers_are_told_of_shifts(pool):
    pool.run(told)


def dropped():
    comm = MeshComm(mesh((4,)))
    comm.start_shift(torch.full((1 << 16,), float(RANK())), 0)
    return comm.shift(torch.tensor([RANK()]), 0).item()


def test_a_shift_that_is_dropped_leaves_nothing_behind(pool):
    assert pool.run(dropped) == [3, 0, 1, 2]
