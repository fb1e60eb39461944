"""Sample calls of the embeddings: tables and indices even, uneven, of size 1 and 0, repeated indices, padding."""

import torch

from shardwise.testing.samples import made

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
    found = [((made(t), indices(t[0], s)), {}) for t, s in TABLES]
    found += [((made((9, 4)), indices(9, (5,)), 3), {}), ((made((4, 9)).t(), indices(9, (5,))), {})]
    found += [((made((5, 7), BF16), indices(5, (9,))), {}), ((made((5, 7)), indices(5, (9,), torch.int32)), {})]
    nan = made((5, 3))
    nan[2] = float("nan")
    return [*found, ((nan, indices(5, (4, 2))), {})]


def backwards():
    found = []
    for i, (table, shape) in enumerate([*TABLES, *TABLES]):
        gradient = made((*shape, table[1]), seed=2)
        found.append(((gradient, indices(table[0], shape), table[0], i % table[0] - i // len(TABLES), i % 2 == 0), {}))
    gradient = made((9, 7), BF16, 2)
    return [*found, ((gradient, indices(5, (9,)), 5, -1, False), {})]


def renorms():
    found = [((made(t), indices(t[0], s), 1.0, 2.0), {}) for t, s in TABLES[:5]]
    return [*found, ((made((9, 4)), indices(9, (3,)), 0.5, 1.0), {})]


SAMPLES = {
    aten.embedding.default: lookups,
    aten.embedding_dense_backward.default: backwards,
    aten.embedding_renorm_.default: renorms,
}
