"""Sample calls of the reductions: dims in every way, even, uneven and empty shards, ints, bools, bf16, NaN and inf."""

import torch

from shardwise.testing.values import made

aten = torch.ops.aten
BF16, I64, I32, U8, BOOL, F64 = torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.float64
C64 = torch.complex64


def turned(shape, dtype=torch.float32):
    """A tensor with its two dims swapped in memory."""
    return made((shape[1], shape[0]), dtype).t()


def wholes(dtypes=(BF16, I64), empty=True):
    """Tensors to reduce altogether."""
    samples = (
        [made(s) for s in ((8, 6), (5, 7), (9,), (1, 2), ())] + [made((5, 7), d) for d in dtypes] + [turned((6, 8))]
    )
    return samples + [made((0, 3))] * empty


def with_nan(shape):
    x = made(shape)
    x.view(-1)[1::5] = float("nan")
    return x


def full(dtypes=(BF16, I64), empty=True, **options):
    return lambda: [((x,), dict(options)) for x in wholes(dtypes, empty)]


# (shape, dims): None, one, several, negative, all; even, uneven, size 1 and 0
DIMS = [
    ((8, 6), [0]),
    ((5, 7), [-1]),
    ((5, 7), [0, 1]),
    ((4, 1, 3), [0, 2]),
    ((4, 5, 6), [1]),
    ((3, 5, 6), [0, -1]),
    ((1, 2), [0]),
    ((9,), [0]),
]


def lists(more=(), dtypes=(BF16, I64), empty=((0, 3), [1]), **options):
    """Calls with a list of dims, every second one keeping them."""

    def make():
        samples = [((made(shape), dims, i % 2 == 1), dict(options)) for i, (shape, dims) in enumerate(DIMS)]
        samples += [((made((5, 7), dtype), [0], True), dict(options)) for dtype in dtypes]
        samples += [((turned((6, 8)), [1]), dict(options)), ((made(empty[0]), empty[1]), dict(options))]
        return samples + list(more)

    return make


def ints(dtypes=(BF16, I64), keepdim=True, more=()):
    """Calls with one dim."""

    def make():
        shapes = [
            ((8, 6), 0),
            ((5, 7), -1),
            ((4, 5, 6), 1),
            ((4, 1, 3), 1),
            ((1, 2), 0),
            ((9,), 0),
            ((), 0),
            ((0, 3), 1),
        ]
        samples = [(made(shape), dim) for shape, dim in shapes]
        samples += [(made((5, 7), dtype), 0) for dtype in dtypes] + [(turned((6, 8)), 1)]
        return [((*args, True) if keepdim and i % 2 else args, {}) for i, args in enumerate(samples)] + list(more)

    return make


NAN = with_nan((5, 7))
INF = torch.tensor([[1.0, -float("inf"), 2.0], [float("inf"), 0.0, -1.0]])
LOW = torch.full((5, 3), -float("inf"))
# Shards that overflow by themselves, in a whole that does not.
HUGE = torch.tensor([[1e-30, 0.0, -3e38], [1e16, 2.0, 3e38], [1e16, 3.0, 3e38], [1e16, 1.0, -3e38], [1e16, 2.0, 1.0]])
TIES = torch.tensor([[3, 1, 3, 3, 2, 3, 1], [1, 1, 1, 1, 1, 1, 1]])

EQUALS = [((x, dim), {}) for x in (TIES, NAN, LOW) for dim in (0, 1)]

SUM_FULL = lambda: [
    *full((BF16, I64, I32, U8, BOOL))(),
    ((made((5, 7)),), {"dtype": F64}),
    ((made((5, 7)),), {"dtype": I64}),
]
SUM_DIMS = lists(
    [
        ((made((5, 7)), None), {}),
        ((made((5, 7)), []), {}),
        ((made((5, 7), I64), [1]), {"dtype": torch.float32}),
        ((made((5, 7), BOOL), [0]), {}),
        ((made((5, 7), C64), [0]), {}),
    ],
    (BF16, I64, I32),
)
FLOATS = (BF16, F64)
MEAN_FULL = lambda: [*full(FLOATS)(), ((made((5, 7), I64),), {"dtype": torch.float32}), ((made((5, 7), C64),), {})]
MEAN_DIMS = lists([((made((5, 7)), None, True), {}), ((made((5, 7)), []), {}), ((made((0, 3)), [0]), {})], FLOATS)
EXTREME_DIMS = lists([((made((5, 7)), []), {}), ((NAN, [1]), {}), ((made((5, 7), BOOL), [0]), {})])
EXTREME_FULL = lambda: [*full((BF16, I64, BOOL), empty=False)(), ((NAN,), {}), ((LOW,), {})]
TRUTH = (BF16, I64, BOOL, U8)
SPARSE = [((made((9, 7), I64) > 3, 0), {}), ((torch.zeros(5, 7), 1, True), {}), ((torch.ones(5, 7), 0), {})]


def moments():
    samples = [
        ((made(shape), dims), {"correction": i % 3, "keepdim": i % 2 == 1}) for i, (shape, dims) in enumerate(DIMS)
    ]
    samples += [((made((5, 7), dtype), [0]), {}) for dtype in (BF16, F64, C64)]
    samples += [((made((5, 7)) + 1000,), {}), ((made((5, 7)), None), {"correction": 0.5}), ((turned((6, 8)), [1]), {})]
    return [*samples, ((made((1, 5)), [0]), {"correction": 1}), ((made((5, 7)), []), {})]


ORDERS = (2, 1, 3, 0.5, 0, -1, float("inf"), -float("inf"))


def vector_norms():
    samples = [
        ((made(shape), p, dims, i % 2 == 1), {}) for i, p in enumerate(ORDERS) for shape, dims in DIMS[i % 2 :: 2]
    ]
    samples += [((made((5, 7), BF16), p, [0]), {}) for p in ORDERS[:3]] + [((made((5, 7), C64), 2, [1]), {})]
    samples += [((made((9,)), p), {}) for p in ORDERS] + [((made((5, 7), BF16), 2, None), {"dtype": torch.float32})]
    return [
        *samples,
        ((made((0, 3)), 2, [0]), {}),
        ((turned((6, 8)), 2), {}),
        ((NAN, 2, [0]), {}),
        ((made((5, 7)), 2, []), {}),
    ]


def old_norms(dims=True, dtype=None):
    options = {} if dtype is None else {"dtype": dtype}
    if not dims:
        return lambda: [((made(s), p), options) for p in ORDERS for s in ((5, 7), (9,), (8, 6))]
    samples = lambda p, i: [((made(shape), p, dims_, i % 2 == 1), options) for shape, dims_ in DIMS[i % 2 :: 2]]
    return lambda: [call for i, p in enumerate((None, *ORDERS)) for call in samples(p, i)]


def sums_of_exponents():
    return [
        *lists([((INF, [0]), {}), ((INF, [1]), {}), ((LOW, [0]), {}), ((made((9, 3)) + 500, [0]), {})])(),
        ((NAN, [1]), {}),
    ]


def positions(dims):
    more = [((TIES, 1), {}), ((NAN, 0), {}), ((NAN, 1), {}), ((LOW, 0), {}), ((made((9, 4), BOOL), 0), {})]
    everything = [((made((5, 7)),), {}), ((TIES, None, True), {})] if not dims else []
    samples = ints((BF16, I64), more=more)()
    # An empty dim has no position; the op refuses (0, 3) along dim 0 and takes it along dim 1.
    return [*samples, *everything]


def ranked(**options):
    return lambda: [((x, *args[1:]), options) for args, _ in ints(keepdim=False)() for x in args[:1]]


def topk():
    shapes = [((8, 6), 3, 0), ((5, 7), 2, -1), ((4, 5, 6), 5, 1), ((9,), 9, 0), ((5, 7), 0, 1)]
    few = [((4, 17), 3, 1), ((9,), 2, 0), ((9, 3), 1, 0), ((3, 8), 2, -1)]
    samples = [((made(s), k, d, i % 2 == 0), {}) for i, (s, k, d) in enumerate(shapes + few)]
    equal = [((x, 1, 1), {}) for x in (TIES, NAN, LOW.t().contiguous())] + [((TIES.t(), 1, 0, False), {})]
    return [*samples, *equal, ((made((5, 7), I64), 2, 0, False, True), {}), ((made((9,)), 2, 0, True, False), {})]


def kth():
    return [((made(s), k, d), {}) for s, k, d in [((8, 6), 3, 0), ((5, 7), 2, -1), ((4, 5, 6), 5, 1), ((9,), 9, 0)]]


def with_out(calls, of, dtype):
    """Calls with an ``out=`` tensor of the right shape, for overloads that cannot resize one."""
    return lambda: [(args, {**kwargs, "out": torch.zeros_like(of(*args), dtype=dtype)}) for args, kwargs in calls()]


def listed():
    """Calls with a list of dims and nothing more."""
    return [((made(shape), dims), {}) for shape, dims in DIMS]


def _pairs():
    return [((made(s), made(s, seed=1), p), {}) for s in ((5, 7), (9,), (8, 6)) for p in (2, 1, float("inf"))]


SAMPLES = {
    aten.sum.default: SUM_FULL,
    aten.sum.dim_IntList: SUM_DIMS,
    aten.nansum.default: lambda: [*lists()(), ((NAN, [0]), {}), ((NAN, None), {})],
    aten.count_nonzero.default: lambda: (
        [((x,), {}) for x in wholes((BF16, I64, BOOL))] + [((made((5, 7), I64), 1), {})]
    ),
    aten.count_nonzero.dim_IntList: lambda: [((made(s, I64), d), {}) for s, d in DIMS],
    aten.count_nonzero.dim_IntList_out: with_out(listed, aten.count_nonzero.dim_IntList, I64),
    aten.any.dims_out: with_out(listed, aten.any.dims, BOOL),
    aten.all.dims_out: with_out(listed, aten.all.dims, BOOL),
    aten.any.out: with_out(ints(), aten.any.dim, BOOL),
    aten.all.out: with_out(ints(), aten.all.dim, BOOL),
    aten.prod.default: full((BF16, I64, I32, BOOL)),
    aten.prod.dim_int: ints((BF16, I64, I32, BOOL)),
    aten.mean.default: MEAN_FULL,
    aten.mean.dim: MEAN_DIMS,
    aten.amax.default: EXTREME_DIMS,
    aten.amin.default: EXTREME_DIMS,
    aten.max.default: EXTREME_FULL,
    aten.min.default: EXTREME_FULL,
    aten.any.default: full(TRUTH),
    aten.any.dim: ints(TRUTH, more=SPARSE),
    aten.any.dims: lists([((made((5, 7)), []), {}), ((made((5, 7)), None), {})], TRUTH),
    aten.all.default: full(TRUTH),
    aten.all.dim: ints(TRUTH, more=SPARSE),
    aten.all.dims: lists([((made((5, 7)), []), {}), ((made((5, 7)), None), {})], TRUTH),
    aten.aminmax.default: lambda: [
        ((x,), {"dim": d}) for x in (made((8, 6)), made((5, 7)), NAN, made((5, 7), I64)) for d in (None, 0, 1)
    ],
    aten.var.correction: moments,
    aten.std.correction: moments,
    aten.var_mean.correction: moments,
    aten.std_mean.correction: moments,
    aten.linalg_vector_norm.default: vector_norms,
    aten.norm.Scalar: old_norms(dims=False),
    aten.norm.ScalarOpt_dtype: old_norms(dims=False, dtype=torch.float32),
    aten.norm.ScalarOpt_dim: old_norms(),
    aten.norm.ScalarOpt_dim_dtype: old_norms(dtype=torch.float32),
    aten.logsumexp.default: sums_of_exponents,
    aten.max.dim: lambda: positions(dims=True),
    aten.min.dim: lambda: positions(dims=True),
    aten.argmax.default: lambda: positions(dims=False),
    aten.argmin.default: lambda: positions(dims=False),
    aten.cumsum.default: ints((BF16, I64, I32, BOOL), keepdim=False, more=[((HUGE, 0), {}), ((NAN, 1), {})]),
    aten.cumprod.default: ints((BF16, I64, I32), keepdim=False, more=[((NAN, 1), {})]),
    aten.cummax.default: ints((BF16, I64), keepdim=False, more=EQUALS),
    aten.cummin.default: ints((BF16, I64), keepdim=False, more=EQUALS),
    aten.logcumsumexp.default: ints(
        (BF16, C64), keepdim=False, more=[((INF, 0), {}), ((INF, 1), {}), ((LOW, 0), {}), ((NAN, 1), {})]
    ),
    aten.hash_tensor.default: lambda: [(args[:2], {"keepdim": args[2:] == (True,)}) for args, _ in lists()()],
    aten.hash_tensor.out: with_out(listed, aten.hash_tensor.default, torch.uint64),
    aten.sort.default: ranked(),
    aten.sort.stable: lambda: [
        ((x,), {"stable": True, "dim": d}) for x in (made((8, 6)), TIES, made((5, 7))) for d in (0, -1)
    ],
    aten.topk.default: topk,
    aten.kthvalue.default: kth,
    aten.mode.default: ints((I64,)),
    aten.median.dim: ints((I64,)),
    aten.nanmedian.dim: ints((I64,), more=[((NAN, 1), {})]),
    aten.median.default: full((I64,)),
    aten.nanmedian.default: full((I64,)),
    aten.trace.default: lambda: [((made(s),), {}) for s in ((5, 7), (8, 6), (1, 2))],
    aten.dist.default: _pairs,
    aten.renorm.default: lambda: [((made(s), 2, d, 1.0), {}) for s, d in (((8, 6), 0), ((5, 7), 1), ((4, 5, 6), -1))],
}
