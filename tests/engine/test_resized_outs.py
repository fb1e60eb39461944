"""``out=`` tensors of another shape than the result take its shape, as in torch."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard
from shardwise.errors import InPlaceError
from shardwise.testing import mesh

# Each writes its results into the given tensors; one number per result.
CALLS = {
    "add": (1, lambda a, _, out: torch.add(a, a, out=out[0])),
    "cat": (1, lambda a, _, out: torch.cat([a, a], out=out[0])),
    "eigh": (2, lambda a, b, out: torch.linalg.eigh(a @ b + (a @ b).mT, out=tuple(out))),
    "inv": (1, lambda a, b, out: torch.linalg.inv(a @ b, out=out[0])),
    "matmul": (1, lambda a, b, out: torch.matmul(a, b, out=out[0])),
    "no rule of its own": (1, lambda a, _, out: torch.special.xlog1py(a.abs(), a.abs(), out=out[0])),
    "norm": (1, lambda a, _, out: torch.norm(a, dim=1, out=out[0])),
    "svd": (3, lambda a, _, out: torch.linalg.svd(a, out=tuple(out))),
}


def put(value: Tensor, *placements: object) -> MeshTensor:
    return sw.distribute_tensor(value, mesh((4,)), list(placements))


def operands() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 6, generator=generator), torch.randn(6, 8, generator=generator)


def into_empty(call: str, kind: str) -> None:
    count, run = CALLS[call]
    a, b = operands()
    expected = [torch.empty(0) for _ in range(count)]
    run(a, b, expected)
    x, y = put(a, Shard(0)), put(b, Shard(1))
    for _ in range(2):  # the plan of an empty tensor is not kept for the resized one
        outs = [torch.empty(0) if kind == "plain" else x.new_empty(0) for _ in range(count)]
        run(x, y, outs)
        for out, value in zip(outs, expected, strict=True):
            assert out.shape == value.shape
            assert out.stride() == value.stride()
            whole = out if kind == "plain" else out.full_tensor()
            # Vectors of eigenvalues and singular values may have either sign.
            torch.testing.assert_close(*((whole, value) if count == 1 else (whole.abs(), value.abs())))


@pytest.mark.parametrize("kind", ["plain", "on the mesh"])
@pytest.mark.parametrize("call", CALLS)
def test_an_empty_tensor_takes_the_shape_of_the_result(pool, call, kind):
    pool.run(into_empty, call, kind)


def layouts() -> None:
    values = torch.arange(96.0).view(4, 3, 2, 4).to(memory_format=torch.channels_last)
    x = put(values, Shard(0))
    out = x.new_empty(0)
    before = out._version
    assert torch.add(x, 1, out=out) is out
    assert out.placements == (Shard(0),)
    assert out._version > before
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert out.to_local().is_contiguous(memory_format=torch.channels_last)
    # Its layout is its own from now on.
    out.mul_(2)
    assert torch.equal(out.full_tensor(), (values + 1) * 2)
    # A sum of partial results is reduced.
    a, b = operands()
    out = x.new_empty(0)
    torch.mm(put(a, Shard(1)), put(b, Shard(0)), out=out)
    assert not any(isinstance(p, Partial) for p in out.placements)
    torch.testing.assert_close(out.full_tensor(), a @ b)


def test_it_takes_the_layout_of_the_result(pool):
    pool.run(layouts)


def with_elements() -> None:
    a, _ = operands()
    x, out = put(a, Shard(0)), put(torch.ones(3, 3), Replicate())
    with pytest.raises(InPlaceError, match="pass an empty tensor"):
        torch.add(x, x, out=out)
    assert torch.equal(out.full_tensor(), torch.ones(3, 3))
    plain = torch.ones(3, 3)
    with pytest.warns(UserWarning, match=r"shape \[3, 3\] and is resized") as told:
        torch.add(x, x, out=plain)
    assert told[0].filename == __file__
    assert torch.equal(plain, a + a)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.add(x, x, out=plain)  # now it has the shape


def test_one_with_elements_is_resized_only_if_it_is_plain(pool):
    pool.run(with_elements)


def of_too_few_dims() -> None:
    x = put(operands()[0], Shard(0))
    with pytest.raises(InPlaceError, match="change the shape of the tensor in place, to \\(8, 6\\)"):
        torch.add(x, x, out=x.new_ones(3))


def test_one_with_elements_that_has_fewer_dims_than_the_result_is_refused_for_its_shape(pool):
    pool.run(of_too_few_dims)


def by_data() -> None:
    a, _ = operands()
    x = put(a, Shard(0))
    with pytest.raises(InPlaceError, match="depends on data"):
        torch.masked_select(x, x > 0, out=x.new_empty(0))
    plain = torch.empty(0)
    torch.masked_select(x, x > 0, out=plain)
    assert torch.equal(plain, a[a > 0])


def test_a_shape_that_depends_on_data_is_for_plain_tensors(pool):
    pool.run(by_data)


def made_on_the_mesh() -> None:
    with sw.on(mesh((4,))):
        out = torch.empty(0)
        torch.arange(5, out=out)
        assert torch.equal(out.full_tensor(), torch.arange(5.0))


def test_a_factory_resizes_too(pool):
    pool.run(made_on_the_mesh)
