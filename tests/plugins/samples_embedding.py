"""Sample calls of the embeddings: tables and indices even, uneven, of size 1 and 0, repeated indices, padding."""

import torch

from shardwise.testing.values import made

aten = torch.ops.aten
BF16 = torch.bfloat16

# (rows, columns) of the table and the shape of the indices
TABLES = [
    ((8, 6), (4, 3)),
    ((5, 7), (9,)),
    ((9, 4), (5, 2)),
    ((2, 3), (8,)),
    ((1, 5), (3,)),
    ((7, 1), ()),
    ((6, 4), (0, 3)),
]


def indices(rows, shape, dtype=torch.int64):
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(rows, shape, generator=generator, dtype=dtype)


def lookups():
    samples = [((made(t), indices(t[0], s)), {}) for t, s in TABLES]
    samples += [((made((9, 4)), indices(9, (5,)), 3), {}), ((made((4, 9)).t(), indices(9, (5,))), {})]
    samples += [((made((5, 7), BF16), indices(5, (9,))), {}), ((made((5, 7)), indices(5, (9,), torch.int32)), {})]
    nan = made((5, 3))
    nan[2] = float("nan")
    return [*samples, ((nan, indices(5, (4, 2))), {})]


def backwards():
    samples = []
    for i, (table, shape) in enumerate([*TABLES, *TABLES]):
        gradient = made((*shape, table[1]), seed=2)
        samples.append(
            ((gradient, indices(table[0], shape), table[0], i % table[0] - i // len(TABLES), i % 2 == 0), {})
        )
    gradient = made((9, 7), BF16, 2)
    return [*samples, ((gradient, indices(5, (9,)), 5, -1, False), {})]


def renorms():
    samples = [((made(t), indices(t[0], s), 1.0, 2.0), {}) for t, s in TABLES[:5]]
    powers = (1.0, float("inf"), 3.0)
    return [*samples, *(((made((9, 4)), indices(9, (3,)), 0.5, power), {}) for power in powers)]


SUM, MEAN, MAX = 0, 1, 2
# (rows, columns) of the table, number of indices, offsets, padding index
BAGS = [((8, 6), 9, [0, 2, 2, 6], -1), ((5, 7), 6, [0, 3], 2), ((2, 3), 5, [0, 1, 4], -1), ((9, 4), 4, [0, 2, 4], 1)]


def bags():
    samples = []
    for table, count, offsets, padding in BAGS:
        where = indices(table[0], (count,)), torch.tensor(offsets)
        last = padding == 1
        samples += [((made(table), *where, False, mode, False, None, last, padding), {}) for mode in (SUM, MEAN, MAX)]
        scale = made((count,), seed=3)
        samples.append(((made(table), *where, False, SUM, False, scale, last, padding), {}))
    where = indices(5, (6,)), torch.tensor([0, 2, 2])
    return [*samples, ((made((5, 7), BF16), *where, False, MEAN), {})]


def bag_backwards(*, by_offsets=False):
    samples = []
    for (weight, where, offsets, _, mode, _, scale, last, padding), _ in bags()[:-1]:
        result, _, sizes, places = aten._embedding_bag(weight, where, offsets, False, mode, False, scale, last, padding)
        bag_of = torch.bucketize(torch.arange(len(where)), offsets[: len(result)], right=True) - 1
        gradient = made(result.shape, seed=4)
        by_frequency = mode == SUM and scale is None
        starts, sparse = ((offsets,), (False,)) if by_offsets else ((), ())
        after = (bag_of, sizes, places, len(weight), by_frequency, mode, *sparse, scale, padding)
        samples.append(((gradient, where, *starts, *after), {}))
    return samples


def bag_scale_backwards():
    samples = []
    for table, count, offsets, padding in BAGS[:3]:
        where, starts = indices(table[0], (count,)), torch.tensor(offsets)
        bag_of = torch.bucketize(torch.arange(count), starts, right=True) - 1
        gradient = made((len(offsets), table[1]), seed=4)
        samples.append(((gradient, made(table), where, starts, bag_of, SUM, padding), {}))
    return samples


def with_bag_of_index(op):
    """The op with the bag of each index told always, as the rule tells it; the CPU's kernels leave it out at times."""

    def bag(weight, where, offsets, *rest):
        result = op(weight, where, offsets, *rest)
        bag_of = torch.bucketize(torch.arange(len(where)), offsets[: len(result[0])], right=True) - 1
        return result[0], bag_of.to(offsets.dtype), *result[2:]

    return bag


SAMPLES = {
    aten.embedding.default: lookups,
    aten.embedding_dense_backward.default: backwards,
    aten.embedding_renorm_.default: renorms,
    aten._embedding_bag.default: bags,
    aten._embedding_bag_forward_only.default: bags,
    aten._embedding_bag_backward.default: lambda: bag_backwards(by_offsets=True),
    aten._embedding_bag_dense_backward.default: bag_backwards,
    aten._embedding_bag_per_sample_weights_backward.default: bag_scale_backwards,
}

STAND_INS = {
    op: with_bag_of_index(op) for op in (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
}
