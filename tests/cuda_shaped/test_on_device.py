"""What leaves a device is found, with its line, and the rest is left alone."""

import pytest
import torch
from shaped_programs import sharded

import shardwise as sw
from shardwise import Replicate
from shardwise.errors import HostWaitError
from shardwise.testing import on_device
from shardwise.tools.rehearse import rehearse


def leaving(call, shape=(8,)):
    """Where a warm call leaves the device, for ``call(mesh, sharded, whole, local)``."""
    found = []

    def program(mesh):
        x = sharded(torch.rand(16, 8), mesh)
        whole = sw.distribute_tensor(torch.rand(16, 8), mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
        local = torch.rand(3)
        with torch.device("cpu"):
            call(mesh, x, whole, local)
            with on_device(raises=False) as waits:
                call(mesh, x, whole, local)
        found.extend(waits)

    rehearse(program, shape, device="cuda")
    return found


READS, TO_HOST, NOT_PINNED, MIXED = "reads a number", "to the host", "not pinned", "on the host and on the device"


@pytest.mark.parametrize(
    ("call", "does"),
    [
        (lambda _m, x, _w, _l: x.sum().item(), READS),
        (lambda _m, x, _w, _l: bool((x > 0).any()), READS),
        (lambda _m, _x, _w, local: float(local.sum()), READS),
        (lambda _m, _x, _w, local: torch.equal(local, local), READS),
        (lambda _m, _x, _w, local: local.cpu(), TO_HOST),
        (lambda _m, x, _w, _l: x.to_local().to("cpu", non_blocking=True), TO_HOST),
        (lambda _m, _x, _w, local: local.copy_(torch.ones(3)), NOT_PINNED),
        (lambda _m, _x, _w, local: torch.ones(3).to(local.device), NOT_PINNED),
        (lambda _m, _x, _w, local: local * torch.tensor(2.0), MIXED),
        (lambda _m, x, _w, _l: x * torch.tensor(2.0), MIXED),
    ],
)
def test_what_leaves_the_device(call, does):
    (wait,) = leaving(call)
    assert does in wait.does
    assert "test_on_device.py" in wait.site


def half_of_partial(_mesh, x, whole, _local):
    """A partial sum divided by a number on the device was looked at for a zero."""
    return x.sum() / whole.sum()


def clipped(_mesh, x, _whole, _local):
    return torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(x)], 1.0)


@pytest.mark.parametrize(
    "call",
    [
        half_of_partial,
        clipped,
        lambda _m, x, _w, _l: x.full_tensor(),
        lambda _m, x, _w, _l: x.topk(2, -1),
        lambda _m, x, _w, _l: torch.where(x > 0, x, 0.0) * 2.0,
        lambda _m, x, _w, _l: (x.sum(0), x.mean(), x.amax(1), x.var(), x.median()),
        lambda _m, x, whole, _l: x + whole.sum(),
        lambda mesh, *_: sw.rand((3,), device_mesh=mesh),
    ],
)
def test_what_stays(call):
    assert leaving(call, (2, 4)) == []


def test_it_raises_where_the_program_leaves_the_device():
    def program(mesh):
        x = sharded(torch.rand(16, 8), mesh)
        with on_device():
            float(x.sum())

    with pytest.raises(
        HostWaitError, match=r"reads a number or a shape from the device, at .*test_on_device.py"
    ) as caught:
        rehearse(program, (8,), device="cuda")
    assert caught.value.op == "aten._local_scalar_dense.default"


def test_a_shape_that_depends_on_data_is_found_with_data():
    """Without data such an op cannot run at all, so this device is the CPU."""
    x = torch.tensor([1.0, -1.0])
    with on_device("cpu", raises=False) as waits:
        assert len(x[x > 0]) == 1
        x.nonzero()
    assert [wait.op for wait in waits] == ["aten.index.Tensor", "aten.nonzero.default"]
