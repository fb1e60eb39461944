"""Every function of torch.fft on real ranks: forward and backward, against one device, in double precision."""

import warnings
from itertools import product

import pytest
import torch

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.testing import mesh

F = torch.fft
GRID = (5, 6, 7)

COMPLEX = {f"{name} {d}": (name, {"dim": d}) for name in ("fft", "ifft", "hfft", "irfft") for d in (0, 2)}
COMPLEX |= {name: (name, {"dim": (0, 2), "norm": "ortho"}) for name in ("fft2", "ifft2", "hfft2", "irfft2")}
COMPLEX |= {name: (name, {"norm": "forward"}) for name in ("fftn", "ifftn", "hfftn", "irfftn")}
COMPLEX |= {name: (name, {}) for name in ("fftshift", "ifftshift")}
COMPLEX |= {
    "fft padded": ("fft", {"n": 9, "dim": 0}),
    "fft cut": ("fft", {"n": 4, "dim": 0}),
    "irfft odd": ("irfft", {"n": 11, "dim": 2}),
    "fftn sizes": ("fftn", {"s": (4, 9), "dim": (1, 2)}),
    "irfftn sizes": ("irfftn", {"s": (4, 9), "dim": (0, 1)}),
}
REAL = {f"{name} {d}": (name, {"dim": d}) for name in ("rfft", "ihfft", "fft", "ifft") for d in (0, 2)}
REAL |= {name: (name, {"dim": (0, 2), "norm": "ortho"}) for name in ("rfft2", "ihfft2", "fft2", "ifft2")}
REAL |= {name: (name, {"norm": "backward"}) for name in ("rfftn", "ihfftn", "fftn", "ifftn")}
REAL |= {"rfft padded": ("rfft", {"n": 8, "dim": 0}), "rfftn sizes": ("rfftn", {"s": (9, 4), "dim": (0, 1)})}

LINE = [[Shard(d)] for d in range(3)]
SQUARE = [[Shard(0), Shard(1)], [Shard(2), Shard(0)], [Shard(1), Shard(1)], [Shard(2), Replicate()]]


def made(shape, dtype, seed=0):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def call(name, options, x, weight):
    """The result and the gradient of a loss that weighs all its elements differently."""
    x = x.requires_grad_()
    y = getattr(F, name)(x, **options)
    (y * weight).abs().square().sum().backward()
    return y.detach(), x.grad


def wrong(table, dtype, shape, layouts):
    """The functions and layouts that do not give what one device gives."""
    found = []
    for key, (name, options) in table.items():
        whole = made(GRID, dtype)
        result = getattr(F, name)(whole, **options)
        weight = made(result.shape, result.dtype, 1)
        expected = call(name, options, whole.clone(), weight)
        for layout in layouts:
            x = sw.distribute_tensor(whole, mesh(shape), layout)
            y, grad = call(name, options, x, sw.distribute_tensor(weight, mesh(shape)))
            equal = [
                a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a.full_tensor(), b, 1e-9, 1e-10)
                for a, b in zip((y, grad), expected, strict=True)
            ]
            if not all(equal) or grad.placements != tuple(layout):
                found.append((key, layout, y.placements, equal))
    return found


@pytest.mark.parametrize(("shape", "layouts"), [((4,), LINE), ((2, 2), SQUARE)], ids=["4", "2x2"])
@pytest.mark.parametrize(("table", "dtype"), [(COMPLEX, torch.complex128), (REAL, torch.float64)], ids=["c", "r"])
def test_every_function(pool, table, dtype, shape, layouts):
    assert pool.run(wrong, table, dtype, shape, layouts) == [[]] * 4


def test_the_tables_have_every_transform():
    there = {name for name in dir(F) if "fft" in name and not name.startswith("_")}
    takes_no_tensor = {"fftfreq", "rfftfreq"}
    assert {name for name, _ in [*COMPLEX.values(), *REAL.values()]} == there - takes_no_tensor


# -- one dim alone -----------------------------------------------------------------------------------------------


def alone():
    found = []
    for n, dtype, norm in product((64, 37, 3), (torch.complex128, torch.float64), ("ortho", "backward")):
        for name in ("fft", "ifft"):
            whole = made((n,), dtype)
            weight = made((n,), torch.complex128, 1)
            expected = call(name, {"norm": norm}, whole.clone(), weight)
            x = sw.distribute_tensor(whole, mesh(), [Shard(0)])
            y, grad = call(name, {"norm": norm}, x, sw.distribute_tensor(weight, mesh(), [Shard(0)]))
            assert y.placements == grad.placements == (Shard(0),)
            found += [torch.allclose(a.full_tensor(), b) for a, b in zip((y, grad), expected, strict=True)]
    for name, dtype in (("rfft", torch.float64), ("irfft", torch.complex128), ("hfft", torch.complex128)):
        whole = made((33,), dtype)
        weight = made(getattr(F, name)(whole).shape, torch.float64, 1)
        expected = call(name, {}, whole.clone(), weight)
        x = sw.distribute_tensor(whole, mesh(), [Shard(0)])
        got = call(name, {}, x, sw.distribute_tensor(weight, mesh()))
        found += [torch.allclose(a.full_tensor(), b) for a, b in zip(got, expected, strict=True)]
    return found


def test_one_dim_alone(pool):
    found = pool.run(alone)
    assert all(map(all, found))
    assert len(found[0]) == 54


def roots_of_a_long_line():
    whole = made((1 << 16,), torch.complex64)
    y = F.fft(sw.distribute_tensor(whole, mesh(), [Shard(0)])).full_tensor()
    exact = F.fft(whole.to(torch.complex128))
    error = lambda z: float((z - exact).abs().max() / exact.abs().max())
    return error(y), error(F.fft(whole))


def test_the_four_step_algorithm_is_as_exact_as_the_plain_one(pool):
    here, there = pool.run(roots_of_a_long_line)[0]
    assert here < 3 * there


# -- conjugates, partial tensors, short-time transforms ------------------------------------------------------------


def conjugated():
    whole = made((6, 8), torch.complex128)
    found = []
    for layout in LINE[:2]:
        x = sw.distribute_tensor(whole, mesh(), layout)
        found += [
            torch.allclose(F.fft(x.conj(), dim=0).full_tensor(), F.fft(whole.conj(), dim=0)),
            torch.allclose(F.rfft(x.conj().imag, dim=0).full_tensor(), F.rfft(whole.conj().imag, dim=0)),
            torch.allclose(F.fft2(x).conj().redistribute(placements=[Shard(1)]).full_tensor(), F.fft2(whole).conj()),
        ]
    return found


def test_conjugates(pool):
    found = pool.run(conjugated)
    assert found == [[True] * 6] * 4


def partials():
    parts = [made((4, 6), torch.complex128, seed) for seed in range(4)]
    mine = parts[torch.distributed.get_rank()]
    x = sw.MeshTensor.from_local(mine, mesh(), [Partial("sum")])
    y = F.fft2(x)
    return y.placements == (Partial("sum"),) and torch.allclose(y.full_tensor(), F.fft2(sum(parts)))


def test_partial_sums_stay_partial(pool):
    assert pool.run(partials) == [True] * 4


def short_time():
    signal, window = made((5, 40), torch.float64), torch.hann_window(8, dtype=torch.float64)
    expected = torch.stft(signal, 8, 4, window=window, center=False, return_complex=True)
    x = sw.distribute_tensor(signal, mesh(), [Shard(0)])
    w = sw.distribute_tensor(window, mesh())
    frames = F.rfft(x.unfold(-1, 8, 4) * w).mT
    spectrum = torch.stft(signal, 8, 4, window=window, return_complex=True)
    back = torch.istft(sw.distribute_tensor(spectrum, mesh(), [Shard(0)]), 8, 4, window=w, length=40)
    return torch.allclose(frames.full_tensor(), expected) and torch.allclose(back.full_tensor(), signal)


def test_short_time_transforms(pool):
    assert pool.run(short_time) == [True] * 4


def moves():
    found = []
    for dtype in (torch.complex64, torch.complex128):
        whole = made((5, 6), dtype)
        starts = [sw.distribute_tensor(whole, mesh(), [p]) for p in (Replicate(), Shard(0), Shard(1))]
        starts += [sw.MeshTensor.from_local(whole / n, mesh(), [Partial(kind)]) for n, kind in ((4, "sum"), (1, "avg"))]
        for x, to in product(starts, (Replicate(), Shard(0), Shard(1))):
            found.append(torch.allclose(x.redistribute(placements=[to]).full_tensor(), whole))
    return found


def test_complex_tensors_move_between_all_layouts(pool):
    assert pool.run(moves) == [[True] * 30] * 4


# -- compiled ----------------------------------------------------------------------------------------------------

# Whole dims; swaps of one and of two mesh dims and back, uneven; the four-step algorithm; a line that is gathered.
COMPILED = [
    (lambda x: F.rfft(x, dim=1), (6, 8), (4,), [Shard(0)]),
    (lambda x: F.rfft(x, dim=0), (7, 6), (4,), [Shard(0)]),
    (lambda x: F.irfftn(F.rfftn(x), s=x.shape), (6, 7, 5), (2, 2), [Shard(0), Shard(1)]),
    (F.fft2, (7, 9), (2, 2), [Shard(0), Shard(0)]),
    (F.ifft, (64,), (4,), [Shard(0)]),
    (F.hfft, (9,), (4,), [Shard(0)]),
]


def compiled():
    """Per program: whether its loss and its gradient are those of one device."""
    found = []
    for function, shape, on, layout in COMPILED:
        torch._dynamo.reset()
        loss = lambda x, function=function: function(x).abs().square().sum()
        whole = made(shape, torch.float64)
        x = sw.distribute_tensor(whole, mesh(on), layout).requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about complex numbers in graphs
            got = torch.compile(loss, backend="aot_eager", fullgraph=True)(x)
            got.backward()
        expected = loss(whole.requires_grad_())
        expected.backward()
        pairs = (got.detach(), expected.detach()), (x.grad, whole.grad)
        found.append([torch.allclose(a.full_tensor(), b) for a, b in pairs])
    return found


def test_transforms_along_any_dim_compile(pool):
    assert pool.run(compiled) == [[[True, True]] * len(COMPILED)] * 4
