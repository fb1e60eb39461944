"""Sample calls of shardwise_tensor's ops: small whole tensors, even and uneven over 2, 3 and 4 ranks."""

from itertools import product

import torch

from shardwise.testing.values import made

aten = torch.ops.aten

SHAPES = ((8, 6), (5, 7), (4, 1, 3), (1, 2), (0, 3), (9,))
OTHER_DTYPES = (torch.bfloat16, torch.int64, torch.bool)


def tensors():
    """One tensor per shape in float32, one in each other dtype, and one that is not contiguous."""
    samples = [made(shape, seed=i) for i, shape in enumerate(SHAPES)]
    samples += [made((5, 7), dtype, 11) for dtype in OTHER_DTYPES]
    return [*samples, made((6, 8), seed=12).t(), made((4, 6, 5), seed=13).transpose(0, 2)]


def index(shape, below, seed=0, low=0):
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randint(low, below, shape, generator=generator)


def over(*calls):
    """Samples of a call ``(args after self, kwargs)`` on every tensor, for what fits."""
    return lambda: [((x, *args), dict(kwargs)) for x in tensors() for args, kwargs in calls]


def after(*calls):
    return over(*((args, {}) for args in calls))


SAMPLES = {}
UNSAMPLED = {
    aten._pin_memory.default: "only where there is an accelerator",
    aten._pin_memory.out: "only where there is an accelerator",
    aten.detach_.default: "it changes what autograd knows, no value",
}

# -- copying -----------------------------------------------------------------------------------------------------


def casts():
    whole = (torch.int64, torch.int32, torch.uint8, torch.bool)
    pairs = product((torch.float32, torch.bfloat16, torch.float64, *whole), repeat=2)
    return [((made((5, 6), a, 3),), {"dtype": b}) for a, b in pairs] + [
        ((made((5, 7)),), {"dtype": torch.complex64}),
        ((made((5, 7), torch.complex64),), {"dtype": torch.complex128}),
        ((made((2, 5, 3, 2)),), {"memory_format": torch.channels_last}),
        ((made((6, 8)).t(),), {"dtype": torch.float64, "memory_format": torch.contiguous_format}),
    ]


def copies():
    samples = [((x, made(x.shape, x.dtype, 5)), {}) for x in tensors()]
    samples += [((made((5, 7)), made((5, 7), dtype, 4)), {}) for dtype in OTHER_DTYPES]
    samples += [((made((5, 7), dtype), made((5, 7), seed=4)), {}) for dtype in OTHER_DTYPES]
    samples += [((made((5, 7)), made(shape, seed=6)), {}) for shape in ((7,), (5, 1), (), (1, 7))]
    samples.append(((made((5, 7), torch.float64), made((5, 7), torch.float32, 4)), {}))
    return [*samples, ((made((0, 3)), made((1, 3))), {})]


def fills_from():
    samples = [((x, made((), x.dtype, 7)), {}) for x in tensors()]
    return [*samples, ((made((5, 7)), made((), torch.int64, 3)), {})]


def questions():
    samples = [((x, x.clone()), {}) for x in tensors()]
    for x in (made((8, 6)), made((5, 7)), made((9,))):
        changed = x.clone()
        changed.view(-1)[-1] += 1
        samples.append(((x, changed), {}))
    return [*samples, ((made((5, 7)), made((7, 5))), {}), ((made((8, 6)), made((8,))), {}), ((made(()), made(())), {})]


SAMPLES |= {
    aten._to_copy.default: casts,
    aten._to_copy.out: lambda: [
        ((made((5, 6), a, 3),), {"out": torch.zeros(5, 6, dtype=b)})
        for a, b in product((torch.float32, torch.bfloat16, torch.int64), repeat=2)
    ],
    aten.copy_.default: copies,
    aten.fill.Scalar: after((3,), (-1.5,), (0,)),
    aten.fill.Tensor: fills_from,
    aten.equal.default: questions,
    aten.is_same_size.default: questions,
    aten._new_zeros_with_same_feature_meta.default: lambda: [
        *questions(),
        *(
            ((made((3, *x.shape), torch.float64), x), {"self_num_batch_dims": 1})
            for x in (made((8, 6)), made((5, 7)).t())
        ),
    ],
    aten.allclose.default: lambda: (
        [(pair, {}) for pair, _ in questions()]
        + [((x, x + 1, 0, bound), {}) for x in (made((8, 6)), made((5, 7))) for bound in (0.5, 2)]
    ),
    aten._assert_async.default: lambda: [((torch.tensor(value),), {}) for value in (True, 3.0)],
    aten._assert_async.msg: lambda: [((torch.tensor(value), "no"), {}) for value in (True, 3.0)],
    aten._local_scalar_dense.default: lambda: [((made(shape),), {}) for shape in ((1,), (), (1, 1))],
}

# -- creating ----------------------------------------------------------------------------------------------------

SIZES = ((8, 6), (5, 7), (9,), (3,), (), (0, 3), (4, 1, 3))


def strided():
    whole = [(made((5, 7)), (5, 7), (7, 1)), (made((5, 7)), (5, 7), (1, 5)), (made((5, 7)), (5, 7), (8, 1))]
    whole += [(made((5, 7)), (5, 7), (0, 1)), (made((4, 1, 3)), (4, 1, 3), (3, 99, 1)), (made((0, 3)), (0, 3), (3, 1))]
    whole += [(made((8, 6)), (2, 3), (3, 1)), (made((4, 6, 5)), (4, 6, 5), (6, 1, 24))]
    return [(call, {}) for call in whole]


def new_into(*more):
    return lambda: [((made((5, 7)), s, *more), {"out": torch.full(s, 9.0)}) for s in SIZES]


SAMPLES |= {
    aten.new_zeros.out: new_into(),
    aten.new_ones.out: new_into(),
    aten.new_full.out: new_into(3),
    aten.full_like.default: after((2,), (-1.5,)),
    aten.new_empty.default: after(*((size,) for size in SIZES)),
    aten.new_zeros.default: lambda: [
        *over(*(((size,), {}) for size in SIZES), (((5, 7),), {"dtype": torch.float64}))(),
        *(((made((5, 3, 4), torch.complex64), size), {}) for size in ((5, 3, 7), (5, 8, 4), (5, 8, 7), (5, 12))),
    ],
    aten.new_ones.default: after(*((size,) for size in SIZES)),
    aten.new_full.default: after(*((size, 3) for size in SIZES)),
    aten.new_empty_strided.default: strided,
}

# -- slicing -----------------------------------------------------------------------------------------------------

SLICES = ((0,), (0, 0, 99), (0, 1), (-1, None, -1), (1, 0, 4, 2), (0, -3, 7), (1, 2, 2), (-1, None, None, 1))


def slice_backwards():
    samples = []
    for shape in SHAPES:
        for dim, start, end, step in ((0, 0, 99, 1), (0, 1, 4, 1), (len(shape) - 1, 0, 99, 2), (-1, 0, 2**63 - 1, 1)):
            grad = aten.slice.Tensor(made(shape, seed=1), dim, start, end, step).clone()
            samples.append(((grad, list(shape), dim, start, end, step), {}))
    return samples


def select_backwards():
    samples = []
    for shape in ((8, 6), (5, 7), (4, 1, 3), (9,)):
        samples += [((made(shape).select(d, i).clone(), list(shape), d, i), {}) for d, i in ((0, 2), (-1, -1))]
    return samples


def slice_scatters():
    samples = []
    for x in (made((5, 7)), made((8, 6)), made((4, 1, 3)), made((0, 3)), made((5, 7), torch.int64)):
        for where in SLICES:
            part = aten.slice.Tensor(x, *where)
            samples.append(((x, made(part.shape, x.dtype, 5), *where), {}))
    return [*samples, ((made((5, 7)), made((2, 7), torch.int64), 0, 1, 3), {})]


def select_scatters():
    calls = (((5, 7), 0, 2), ((5, 7), 1, -1), ((8, 6), 1, 0), ((4, 1, 3), 1, 0))
    return [((made(s), made(made(s).select(d, i).shape, seed=3), d, i), {}) for s, d, i in calls]


def diagonal_scatters():
    calls = (((5, 7), 0, 0, 1), ((5, 5), 1, 1, 0), ((4, 5, 6), -1, 0, 2), ((4, 5, 6), 0, -1, 1))
    return [((made(s), made(made(s).diagonal(*at).shape, seed=3), *at), {}) for s, *at in calls]


def splits_into(op, *calls):
    def samples():
        sample_calls = []
        for args in calls:
            for shape in ((8, 6), (5, 7), (4, 5, 3)):
                x = made(shape)
                if sum(args[0] if isinstance(args[0], list) else []) in (0, x.shape[args[-1]]):
                    sample_calls.append(((x, *args), {"out": [torch.zeros_like(part) for part in op(x, *args)]}))
        return sample_calls

    return samples


SIZED = (([2, 3], 0), ([5, 0, 1, 2], 0), ([4, 3], 1), ([1, 2, 3], -1), ([5, 0], -2), ([2, 1], -1))

SAMPLES |= {
    aten.slice.Tensor: after(*SLICES),
    aten.slice_copy.Tensor: after(*SLICES),
    aten.narrow_copy.default: after((0, 1, 2), (-1, 0, 1), (1, 0, 6)),
    aten.select.int: after((0, 0), (-1, 1), (1, -1), (0, 4)),
    aten.select_copy.int: after((0, 0), (-1, 1), (1, -1)),
    aten.split.Tensor: after((2,), (3, 1), (99, 0), (4, -1)),
    aten.split_copy.Tensor: after((2,), (3, 1), (4, -1)),
    aten.unsafe_split.Tensor: after((2,), (3, 1), (4, -1)),
    aten.split_with_sizes.default: after(*SIZED),
    aten.split_with_sizes_copy.default: after(*SIZED),
    aten.unsafe_split_with_sizes.default: after(*SIZED),
    aten.split_copy.Tensor_out: splits_into(aten.split_copy.Tensor, (2, 0), (3, 1), (4, -1)),
    aten.unsafe_split.Tensor_out: splits_into(aten.unsafe_split.Tensor, (2, 0), (3, 1), (4, -1)),
    aten.split_with_sizes_copy.out: splits_into(aten.split_with_sizes_copy.default, *SIZED),
    aten.unsafe_split_with_sizes.out: splits_into(aten.unsafe_split_with_sizes.default, *SIZED),
    aten.unbind.int: after((0,), (-1,), (1,)),
    aten.unbind_copy.int: after((0,), (-1,), (1,)),
    aten.unbind_copy.int_out: splits_into(aten.unbind_copy.int, (0,), (-1,)),
    aten.slice_backward.default: slice_backwards,
    aten.select_backward.default: select_backwards,
    aten.slice_scatter.default: slice_scatters,
    aten.select_scatter.default: select_scatters,
    aten.diagonal_scatter.default: diagonal_scatters,
}

# -- joining -----------------------------------------------------------------------------------------------------


def cats():
    lists = [
        ([(5, 7), (2, 7)], 0),
        ([(5, 7), (5, 1), (5, 4)], 1),
        ([(8, 6), (8, 6)], -1),
        ([(0,), (5, 7), (0,), (3, 7)], 0),
        ([(0,), (5, 7)], 1),
        ([(0, 6), (4, 6)], -2),
        ([(4,), (0,), (5,)], 0),
        ([(0,), (0,)], 0),
        ([(3, 1, 6)], 1),
    ]
    samples = [(([made(s, seed=i) for i, s in enumerate(shapes)], dim), {}) for shapes, dim in lists]
    samples += [(([made((5, 7), dtype), made((2, 7), dtype, 1)],), {}) for dtype in OTHER_DTYPES]
    return [*samples, (([made((5, 6)), made((3, 6), torch.bfloat16), made((2, 6), torch.int64)],), {})]


def stacks():
    samples = [(([made(s, seed=i) for i in range(3)], d), {}) for s in ((5, 7), (4, 1, 3), (0, 3)) for d in (0, 1, -1)]
    samples += [(([made((8, 6)), made((8, 6), torch.int64)], 2), {}), (([made(()), made((), seed=2)],), {})]
    return [*samples, (([made((5, 7), torch.int64), made((5, 7), torch.int64, 4)], -2), {})]


SAMPLES |= {aten.cat.default: cats, aten.stack.default: stacks}

# -- rearranging, masking ----------------------------------------------------------------------------------------


def masked_fills(values):
    def samples():
        calls = [((x, made(x.shape, torch.bool, 5), value), {}) for x in tensors() for value in values(x.dtype)]
        narrow = [((5, 7), mask) for mask in ((7,), (5, 1), ())]
        for x, mask in (*narrow, ((5, 1), (5, 7)), ((6,), (4, 6)), ((1, 7), (5, 1))):
            calls += [((made(x), made(mask, torch.bool, 3), value), {}) for value in values(torch.float32)]
        return calls

    return samples


def searches():
    rows = made((6,)).sort().values
    samples = [((rows, made(shape, seed=3)), {}) for shape in ((5, 7), (9,), (0, 3), ())]
    many = made((5, 6)).sort(-1).values
    samples += [((many, made((5, n), seed=3)), {"right": True}) for n in (4, 7)]
    loose = made((5, 6), seed=8)
    return [*samples, ((loose, made((5, 3), seed=3)), {"sorter": loose.argsort(-1)})]


def masked_scatters():
    return [((x, made(x.shape, torch.bool, 4), made((80,), x.dtype, 5)), {}) for x in tensors() if x.numel() <= 80]


ROWS = made((5,)).sort().values
TESTS = torch.tensor([1, -3, 4])

SAMPLES |= {
    aten.flip.default: after(([0],), ([-1],), ([0, -1],), ([],)),
    aten.roll.default: after(([1], [0]), ([-2], [-1]), ([3],), ([1, 2], [0, 1])),
    aten.rot90.default: after((1, [0, 1]), (2, [1, 0]), (3, [0, -1])),
    aten.tril.default: after((), (1,), (-3,)),
    aten.triu.default: after((), (1,), (-3,)),
    aten.masked_fill.Scalar: masked_fills(lambda _: (0, 1, float("-inf"))),
    aten.masked_fill.Tensor: masked_fills(lambda dtype: (made((), dtype, 2), made((), torch.int64, 3))),
    aten.bucketize.Tensor: over(((ROWS,), {}), ((ROWS,), {"right": True, "out_int32": True})),
    aten.bucketize.Scalar: lambda: [((0.5, ROWS), {}), ((2, ROWS), {"right": True})],
    aten.searchsorted.Tensor: searches,
    aten.searchsorted.Scalar: lambda: [((ROWS, 0.5), {}), ((ROWS, -9), {"right": True})],
    aten.isin.Scalar_Tensor: lambda: [((1, TESTS), {}), ((2, TESTS), {"invert": True})],
    aten.nonzero.default: after(()),
    aten.nonzero_static.default: over(((), {"size": 4})),
    aten.masked_select.default: lambda: [((x, made(x.shape, torch.bool, 4)), {}) for x in tensors()],
    aten.masked_scatter.default: masked_scatters,
    aten.masked_scatter_backward.default: lambda: [
        ((made((5, 7)), made((5, 7), torch.bool, n), [6, 7]), {}) for n in (1, 2)
    ],
    aten._unique2.default: after((), (True, True, True)),
    aten.unique_consecutive.default: after((), (True, True, 0)),
    aten.unique_dim.default: after((0,), (-1, True, True, True)),
    aten.unique_dim_consecutive.default: after((0,), (-1, True, True)),
    aten.repeat_interleave.Tensor: lambda: [
        ((torch.tensor(counts),), {"output_size": sum(counts)}) for counts in ([2, 0, 1, 3], [1, 1])
    ],
}

# -- gathering, scattering ---------------------------------------------------------------------------------------

# Self, dim, index: covering all of the other dims, part of them, repeating, empty, and without dims.
ALONG = (
    ((8, 6), 0, (8, 6)),
    ((8, 6), 1, (8, 4)),
    ((5, 7), 0, (9, 7)),
    ((5, 7), -1, (5, 3)),
    ((5, 7), 0, (2, 4)),
    ((4, 1, 3), 1, (4, 5, 3)),
    ((9,), 0, (4,)),
    ((5, 7), 1, (0, 3)),
    ((0, 3), 1, (0, 3)),
    ((), 0, ()),
    ((), 0, (3,)),
    ((5,), 0, ()),
)
# Rows are chosen by an index per slice.
PICKS = (
    ((8, 6), 0, (4,)),
    ((5, 7), 1, (9,)),
    ((5, 7), 0, (1,)),
    ((4, 1, 3), -1, (5,)),
    ((9,), 0, (7,)),
    ((5, 7), 0, (0,)),
)


def size_of(shape, dim):
    return shape[dim] if shape else 1


def gathers():
    samples = [((made(s), d, index(i, size_of(s, d))), {}) for s, d, i in ALONG]
    return samples + [((made((5, 7), dtype), 0, index((6, 7), 5)), {}) for dtype in OTHER_DTYPES]


def scatters(value, *more, dtypes=OTHER_DTYPES, unique=True):
    """``value(shape, dtype)`` is what is scattered. Unique indices, as duplicates leave the order open."""

    def samples():
        calls = [(s, d, i, torch.float32) for s, d, i in ALONG]
        calls += [((5, 7), 0, (4, 7), dtype) for dtype in dtypes]
        sample_calls = []
        for shape, dim, at, dtype in calls:
            if unique and at and at[dim] > size_of(shape, dim):
                continue
            where = unique_index(at, dim, size_of(shape, dim)) if unique else index(at, size_of(shape, dim))
            sample_calls += [((made(shape, dtype), dim, where, source, *more), {}) for source in value(at, dtype)]
        return sample_calls

    return samples


def unique_index(shape, dim, below):
    """Along ``dim`` each number at most once."""
    if not shape:
        return torch.zeros((), dtype=torch.int64)
    rest = [n for d, n in enumerate(shape) if d != dim % len(shape)]
    generator = torch.Generator().manual_seed(1)
    order = torch.rand((*rest, below), generator=generator).argsort(-1)[..., : shape[dim]]
    return order.movedim(-1, dim)


def sources(shape, dtype):
    larger = tuple(n + 2 for n in shape)
    return made(shape, dtype, 5), made(larger, dtype, 5)


def scatter_reduces():
    samples = []
    for reduce, include in product(("sum", "prod", "mean", "amax", "amin"), (True, False)):
        for shape, dim, at in ALONG:
            args = (made(shape), dim, index(at, size_of(shape, dim)), made(at, seed=4), reduce)
            samples.append((args, {"include_self": include}))
    return samples


def scatter_operations(value):
    base = scatters(value, dtypes=(torch.int64,), unique=False)
    return lambda: [(args, {"reduce": reduce}) for args, _ in base() for reduce in ("add", "multiply")]


def selects():
    samples = [((made(s), d, index(i, s[d])), {}) for s, d, i in PICKS]
    samples += [((made((5, 7), dtype), 1, index((6,), 7)), {}) for dtype in OTHER_DTYPES]
    return [*samples, ((made((5, 7)), 0, torch.tensor(3)), {}), ((made(()), 0, torch.tensor([0])), {})]


def slice_writes(*more, unique, dtypes=(torch.int64, torch.bfloat16), **named):
    def samples():
        calls = []
        for dtype, (shape, dim, (count,)) in product((torch.float32, *dtypes), PICKS):
            if unique and count > shape[dim]:
                continue
            where = torch.randperm(shape[dim])[:count] if unique else index((count,), shape[dim])
            source = made((*shape[: dim % len(shape)], count, *shape[dim % len(shape) + 1 :]), dtype, 5)
            calls.append(((made(shape, dtype), dim, where, source, *more), dict(named)))
        return [*calls, ((made((5,)), 0, torch.tensor(2), made((), seed=3), *more), dict(named))]

    return samples


def index_reduces():
    kinds = ("prod", "mean", "amax", "amin")
    return [
        (args, {"include_self": include})
        for kind, include in product(kinds, (True, False))
        for args, _ in slice_writes(kind, unique=False, dtypes=())()
    ]


def index_fills(value):
    return lambda: (
        [((made(s), d, index(i, s[d]), value), {}) for s, d, i in PICKS]
        + [
            ((made(()), 0, torch.tensor([0]), value), {}),
            ((made((5, 7), torch.int64), 1, torch.tensor(-1), value), {}),
        ]
    )


SAMPLES |= {
    aten.gather.default: gathers,
    aten.index_select.default: selects,
    aten.take.default: lambda: [
        ((x, index(shape, x.numel(), low=-x.numel())), {})
        for x in tensors()
        if x.numel()
        for shape in ((5, 7), (9,), ())
    ],
    aten.scatter.src: scatters(sources),
    aten.scatter.value: scatters(lambda *_: (1, 0), unique=False),
    aten.scatter.reduce: scatter_operations(sources),
    aten.scatter.value_reduce: scatter_operations(lambda *_: (2,)),
    aten.scatter_add.default: scatters(sources, dtypes=(torch.bfloat16, torch.int64), unique=False),
    aten.scatter_reduce.two: scatter_reduces,
    aten.index_add.default: lambda: slice_writes(unique=False)() + slice_writes(unique=False, alpha=-2)(),
    aten.index_copy.default: slice_writes(unique=True),
    aten.index_reduce.default: index_reduces,
    # Its meta kernel refuses an empty index.
    aten.index_reduce.out: lambda: [
        (args, {**named, "out": torch.ones_like(args[0])}) for args, named in index_reduces() if args[2].numel()
    ],
    aten.index_fill.int_Scalar: index_fills(3),
    aten.index_fill.int_Tensor: index_fills(torch.tensor(2)),
    aten.put.default: lambda: [
        ((made((5, 7)), torch.randperm(35)[:6], made((6,), seed=2), accumulate), {}) for accumulate in (False, True)
    ],
}

# -- indexing ----------------------------------------------------------------------------------------------------


def indexings():
    """Tensors with indices: one, several next to each other or apart, broadcast, 0-dim, and fewer than dims."""
    one = [((5, 7), [index((9,), 5)]), ((5, 7), [None, index((4,), 7)]), ((8, 6), [index((3, 5), 8)])]
    one += [((9,), [index((4, 4), 9)]), ((4, 1, 3), [None, None, index((5,), 3)]), ((5, 7), [torch.tensor(3)])]
    one += [((5, 7), [index((0,), 5)]), ((0, 3), [None, index((4,), 3)])]
    several = [
        ((5, 7), [index((6,), 5), index((6,), 7, 2)]),
        ((4, 6, 5), [index((5, 1), 4), index((3,), 6, 2)]),
        ((4, 6, 5), [index((4,), 4), None, index((4,), 5, 2)]),
        ((4, 6, 5), [None, index((4, 2), 6), index((4, 1), 5, 2)]),
        ((4, 6, 5, 3), [None, index((4,), 6), None, index((), 3)]),
    ]
    negative = [((5, 7), [index((6,), 5, low=-5), index((6,), 7, 3, low=-7)])]
    return one + several + negative


def index_calls():
    samples = [((made(shape), indices), {}) for shape, indices in indexings()]
    samples += [((made((5, 7), dtype), [None, index((4,), 7)]), {}) for dtype in OTHER_DTYPES]
    samples += [((made((6, 8)).t(), [index((4,), 8)]), {}), ((made((5, 7)), [index((3,), 5).to(torch.int32)]), {})]
    return samples + [((made((5, 7)), [made(mask, torch.bool, 2)]), {}) for mask in ((5, 7), (5,))]


def puts():
    samples = []
    for shape, indices in indexings():
        x = made(shape)
        picked = aten.index.Tensor(x, indices)
        # Values of all dims, of the last, of none; equal ones where they are not added, as duplicates have no order.
        for values in (made(picked.shape, seed=4), made(picked.shape[-1:], seed=4), made((), seed=4)):
            samples.append(((x, indices, values, True), {}))
            samples.append(((x, indices, torch.full_like(values, 3), False), {}))
    apart = [torch.randperm(5)[:4], torch.randperm(7)[:4]]
    samples += [((made((5, 7), dtype), apart, made((4,), dtype, 5)), {}) for dtype in (torch.float32, torch.int64)]
    samples.append(((made((4, 6, 5)), [None, torch.tensor([5, 0, 2]), None], made((4, 3, 5), seed=5)), {}))
    return samples + masked_puts()


def masked_puts():
    samples = []
    for accumulate in (False, True):
        samples += [((made((5, 7)), [made((5, 7), torch.bool, 2)], made((), seed=3), accumulate), {})]
        rows = [made((8,), torch.bool, 2)]
        samples += [((made((8, 6)), rows, made(s, seed=3), accumulate), {}) for s in ((6,), (1, 6), (1,))]
        samples += [((made((4, 6, 5)), [None, made((6,), torch.bool, 2)], made((4, 1, 5), seed=3), accumulate), {})]
        mask = made((5, 7), torch.bool, 2)
        samples += [((made((5, 7)), [mask], made((int(mask.sum()),), seed=3), accumulate), {})]
    return samples


SAMPLES |= {
    aten.index.Tensor: index_calls,
    aten._unsafe_index.Tensor: lambda: index_calls()[:-2],
    aten.index_put.default: puts,
    aten._index_put_impl.default: puts,
    aten._unsafe_index_put.default: puts,
}


def masked_indexings():
    samples = []
    for shape, indices in indexings():
        picked = aten.index.Tensor(made(shape), indices)
        samples.append((made(shape), made(picked.shape, torch.bool, 3), indices, picked.shape))
    return samples


SAMPLES |= {
    aten._unsafe_masked_index.default: lambda: [((x, m, i, 2.5), {}) for x, m, i, _ in masked_indexings()],
    aten._unsafe_masked_index_put_accumulate.default: lambda: [
        ((x, m, i, made(s, seed=5)), {}) for x, m, i, s in masked_indexings()
    ],
}

# -- chunks, counts, segments and steps --------------------------------------------------------------------------


def chunked():
    lists = [([(5, 7), (5, 3)], 1, 2), ([(8, 6), (3, 6)], 0, 4), ([(4, 5, 3), (4, 2)], 1, 3), ([(9,)], 0, 2)]
    return [(([made(s, seed=i) for i, s in enumerate(shapes)], dim, n), {}) for shapes, dim, n in lists]


def segmented():
    lengths, offsets = torch.tensor([2, 0, 3]), torch.tensor([0, 2, 2, 5])
    samples = [((made((5, 7)), kind), {"lengths": lengths, "initial": 1}) for kind in ("sum", "mean", "max")]
    return [*samples, ((made((5, 7, 3)), "min"), {"offsets": offsets, "initial": 9})]


def segments_undone():
    samples = []
    for (data, kind), named in segmented():
        reduced = aten.segment_reduce(data, kind, **named)
        samples.append(((made(reduced.shape, seed=4), reduced, data, kind), named))
    return samples


POINTS = lambda: [made((9, 2)), made((5, 2))]
STEP_ARGUMENTS = ((torch.tensor(1.0), 4.0), (1.0, torch.tensor(4.0)), (torch.tensor(1.0), torch.tensor(4.0)))


def stepped(at, **named):
    return lambda: [((*STEP_ARGUMENTS[at], count), dict(named)) for count in (5, 1)]


SAMPLES |= {
    aten._chunk_cat.default: chunked,
    aten.histc.default: lambda: [((x, 5, *b), {}) for x in (made((5, 7)), made((9,))) for b in ((), (-1, 2))],
    aten.bincount.default: lambda: [((index((9,), 5),), {}), ((index((9,), 5), made((9,))), {})],
    aten._convert_indices_from_coo_to_csr.default: lambda: [
        ((index((9,), 5).sort().values, 5), {}),
        ((index((8,), 3), 6), {"out_int32": True}),
    ],
    aten._convert_indices_from_csr_to_coo.default: lambda: [
        ((torch.tensor([0, 2, 2, 5, 8]), index((8,), 4)), kwargs) for kwargs in ({}, {"transpose": True})
    ],
    aten.histogram.bin_ct: lambda: [((made((5, 7)), 4), {}), ((made((5, 7)), 3), {"weight": made((5, 7)).abs()})],
    aten.histogram.bins_tensor: lambda: [((made((5, 7)), torch.tensor([-1.0, 0.0, 2.0])), {"density": True})],
    aten._histogramdd_bin_edges.default: lambda: [((x, [3, 4]), {}) for x in POINTS()],
    aten._histogramdd_from_bin_cts.default: lambda: [((x, [3, 4]), {}) for x in POINTS()],
    aten._histogramdd_from_bin_tensors.default: lambda: [
        ((x, [torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([-2.0, 2.0])]), {}) for x in POINTS()
    ],
    aten.segment_reduce.default: segmented,
    aten._segment_reduce_backward.default: segments_undone,
    aten.linspace.Tensor_Scalar: stepped(0),
    aten.linspace.Scalar_Tensor: stepped(1),
    aten.linspace.Tensor_Tensor: stepped(2),
    aten.logspace.Tensor_Scalar: stepped(0, base=2.0),
    aten.logspace.Scalar_Tensor: stepped(1, base=2.0),
    aten.logspace.Tensor_Tensor: stepped(2, base=2.0),
}
