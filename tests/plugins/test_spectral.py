"""Rules for the Fourier transforms: what they print, and torch.fft on real ranks."""

from itertools import permutations

import pytest
import torch

import shardwise as sw
from shardwise import Shard
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import REPLICATE
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.strategies import rows
from shardwise.testing import mesh
from shardwise_spectral import transforms

aten = torch.ops.aten


def test_rows():
    x = torch.empty(4, 6, 8, dtype=torch.complex64, device="meta")
    spec = TensorSpec(AbstractMesh((2,)), [REPLICATE], TensorMeta.of(x))
    schema = OpSchema.of(aten._fft_c2c.default, spec, [1], 0, True)
    assert [str(row).partition(": ")[2] for row in rows(transforms.TRANSFORM, schema)] == [
        "[S(0)] -> [S(0)]",
        "[S(2)] -> [S(2)]",
        "[P(sum)] -> [P(sum)]",
        "[P(avg)] -> [P(avg)]",
        "[R] -> [R]",
    ]


def filtered(x):
    """There and back, with what is between: real and complex transforms, and an uneven batch."""
    spectrum = torch.fft.rfft(x)
    return torch.fft.irfft(spectrum * spectrum.conj(), x.shape[-1]) + torch.fft.fft2(x).real


def on_ranks(layout):
    torch.manual_seed(0)
    x = torch.randn(5, 6, 8)
    expected = x.clone().requires_grad_()
    filtered(expected).pow(2).sum().backward()
    sharded = sw.distribute_tensor(x, mesh((4,)), layout).requires_grad_()
    y = filtered(sharded)
    y.pow(2).sum().backward()
    torch.testing.assert_close(y.full_tensor(), filtered(x))
    torch.testing.assert_close(sharded.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-4)
    return y.placements


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_transforms_and_gradients(pool, dim):
    kept = pool.run(on_ranks, [Shard(dim)])[0]
    assert dim != 0 or kept == (Shard(0),)


VIEWS = (
    lambda x: x,
    lambda x: x.transpose(0, 1),
    lambda x: x.transpose(1, 2),
    lambda x: x[:, ::2],
    lambda x: x[..., ::2],
    lambda x: x[:1].expand(3, 6, 8),
)


def ordered_as_on_one_device(shape):
    torch.manual_seed(0)
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    placements = [Shard(0)] if shape == (4,) else [Shard(0), Shard(2)]
    for view in VIEWS:
        for layout in ([REPLICATE] * len(shape), placements):
            whole, sharded = view(x), view(sw.distribute_tensor(x, mesh(shape), layout))
            assert sharded.stride() == whole.stride()
            for count in (1, 2, 3):
                for dims in permutations(range(3), count):
                    calls = [
                        (aten._fft_r2c.default, dims, 0, True),
                        (aten._fft_r2c.default, dims, 0, False),
                        (aten._fft_c2c.default, dims, 0, True),
                        (aten._fft_c2r.default, dims, 0, 2 * whole.shape[dims[-1]] - 2),
                    ]
                    for op, *args in calls:
                        one, many = [t if op is aten._fft_r2c.default else t + 0j for t in (whole, sharded)]
                        expected, found = op(one, *args), op(many, *args)
                        assert found.stride() == expected.stride(), (op, one.stride(), args)
                        torch.testing.assert_close(found.full_tensor(), expected)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_results_lie_in_memory_as_on_one_device(pool, shape):
    pool.run(ordered_as_on_one_device, shape, timeout=300)
