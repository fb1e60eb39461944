"""Sample calls of linear algebra: batches even, uneven and empty, broadcast batches, vectors, several columns."""

import torch

from shardwise.testing.samples import out_variants
from shardwise.testing.values import made

aten = torch.ops.aten
F32, F64, C128 = torch.float32, torch.float64, torch.complex128

BATCHES = [(8,), (5,), (2, 3), (0,), ()]
SOME = [(8,), (5,), ()]


def general(shape, seed=0, dtype=F64):
    return made(shape, dtype, seed)


def square(batch, n=3, seed=0, dtype=F64):
    """Matrices well away from singular ones."""
    return made((*batch, n, n), dtype, seed) + 8 * torch.eye(n, dtype=dtype)


def positive(batch, n=3, seed=0, dtype=F64):
    root = made((*batch, n, n), dtype, seed)
    return root @ root.mH + n * torch.eye(n, dtype=dtype)


def squares(batches=BATCHES):
    return [square(batch, seed=i) for i, batch in enumerate(batches)]


def lower(batches=BATCHES):
    return [torch.linalg.cholesky(positive(batch, seed=i)) for i, batch in enumerate(batches)]


def calls(operands, *more, **kwargs):
    return [([x, *more], kwargs) for x in operands]


def tall_and_wide():
    shapes = [(8, 4, 3), (5, 3, 4), (2, 3, 3, 2), (0, 3, 2), (4, 3)]
    return [general(shape, i) for i, shape in enumerate(shapes)]


# -- factors -----------------------------------------------------------------------------------------------------


def cholesky_ex():
    definite = [positive(batch, seed=i) for i, batch in enumerate(BATCHES)]
    # The factorization stops half way in some matrices, and says so.
    return calls(definite) + calls([positive((5,)) - 6 * torch.eye(3, dtype=F64)]) + calls(definite[:1], upper=True)


def checked(operands):
    return calls(operands) + calls(operands[:1], check_errors=True)


def lu_factors(batches=SOME):
    return [torch.linalg.lu_factor(a) for a in squares(batches)]


def lu_unpack():
    both = [[*pair, *flags] for pair in lu_factors() for flags in ((), (True, False), (False, True))]
    return [(args, {}) for args in both]


def modes():
    return [([x, mode], {}) for x in tall_and_wide() for mode in ("reduced", "complete", "r")]


def reflectors():
    return [torch.geqrf(x) for x in tall_and_wide() if x.shape[-2] >= x.shape[-1]]


def found(bad):
    """What a factorization says of its matrices: all are well, or it raises."""
    return calls([torch.zeros(n, dtype=torch.int32) for n in (8, 5, 0)], "linalg.inv", is_matrix=False)


# -- spectra -----------------------------------------------------------------------------------------------------


def singular_values():
    some = tall_and_wide()
    return calls(some) + calls(some[:2], True) + calls(some[:3], False, False)


def hermitian():
    some = [x + x.mT for x in squares()]
    return calls(some) + calls(some[:2], "U") + calls(some[:2], "L", False) + calls([positive((4,), dtype=C128)])


def pseudo_inverses():
    some = tall_and_wide()
    tolerances = {"atol": torch.full((8,), 0.5, dtype=F64), "rtol": torch.tensor(0.1, dtype=F64)}
    return calls(some) + calls(some[:1], **tolerances) + calls([positive((4,))], hermitian=True)


# -- solvers -----------------------------------------------------------------------------------------------------

# Batches of a matrix and of its right-hand sides, and how many these are.
SYSTEMS = [
    ((8,), (8,), 5),
    ((5,), (5,), 2),
    ((1,), (4,), 3),
    ((4,), (1,), 1),
    ((2, 3), (3,), 2),
    ((), (), 8),
    ((0,), (0,), 2),
]


def systems(matrix, systems=SYSTEMS):
    return [(matrix(a, seed=i), general((*b, 3, n), i + 1)) for i, (a, b, n) in enumerate(systems)]


ALIKE = [one for one in SYSTEMS if one[0] == one[1]]


def solve():
    both = systems(square)
    vectors = [(square((5,)), general((5, 3))), (square(()), general((3,)))]
    turned = [([a, b.mT], {"left": False}) for a, b in both[:3]]
    return [([a, b], {}) for a, b in [*both, *vectors]] + turned + [([*both[0]], {"check_errors": True})]


def solve_triangular():
    both = systems(square)
    turned = [([a.tril(), b.mT], {"upper": False, "left": False}) for a, b in both[:3]]
    return [([a.triu(), b], {"upper": True}) for a, b in both] + turned


def lu_solve():
    both = [(torch.linalg.lu_factor(a), b) for a, b in systems(square)]
    turned = [([*f, b.mT], {"left": False, "adjoint": True}) for f, b in both[:2]]
    return [([*f, b], {}) for f, b in both] + turned


def ldl_solve():
    both = [
        (torch.linalg.ldl_factor(positive(a)), b)
        for (a, _, _), (_, b) in zip(ALIKE, systems(square, ALIKE), strict=True)
    ]
    return [([*f, b], {}) for f, b in both]


def cholesky_solve(systems_=SYSTEMS):
    return [([b, torch.linalg.cholesky(a)], {}) for a, b in systems(positive, systems_)]


def triangular_solve():
    return [([b, a.triu()], {}) for a, b in systems(square)]


def reflect():
    samples = []
    for i, (batch, n) in enumerate([((8,), 4), ((5,), 2), ((), 8), ((0,), 2)]):
        a, tau = torch.geqrf(general((*batch, 4, 3), i))
        other = general((*batch, 4, n), i + 1)
        samples += [([a, tau, other], {}), ([a, tau, other.mT.contiguous(), False, True], {})]
    return samples


def least_squares():
    shapes = [
        ((8, 4, 3), (8, 4, 2)),
        ((5, 4, 3), (5, 4)),
        ((3, 4), (3, 8)),
        ((1, 4, 3), (4, 4, 3)),
        ((0, 4, 3), (0, 4, 2)),
    ]
    pairs = [(general(a, i), general(b, i + 1)) for i, (a, b) in enumerate(shapes)]
    drivers = [
        ([*pairs[i]], {"driver": driver}) for i, driver in ((0, "gels"), (3, "gels"), (0, "gelsd"), (2, "gelss"))
    ]
    return [([a, b], {}) for a, b in pairs] + drivers


# -- distances ---------------------------------------------------------------------------------------------------

POINTS = [
    ((8, 5, 3), (8, 4, 3)),
    ((5, 3), (8, 3)),
    ((1, 5, 2), (4, 3, 2)),
    ((5, 0), (4, 0)),
    ((0, 3), (4, 3)),
    ((30, 3), (6, 3)),
]


def points():
    return [(general(a, i), general(b, i + 1)) for i, (a, b) in enumerate(POINTS)]


def cdist():
    return [([a, b, p, mode], {}) for a, b in points() for p, mode in ((2.0, None), (1.0, None), (2.0, 2))]


def cdist_backward():
    samples = []
    for a, b in points()[:5]:
        for p in (2.0, 1.0):
            d = torch.cdist(a, b, p)
            samples.append(([general(d.shape, 7), a.expand(*d.shape[:-2], *a.shape[-2:]), b, p, d], {}))
    return samples


def euclidean():
    return [([a, b], {}) for a, b in points()[:2]]


def pdist():
    return [([general((n, 3)), p], {}) for n in (5, 8) for p in (2.0, 1.0)]


def pdist_backward():
    return [([general(d.shape, 5), x, p, d], {}) for (x, p), _ in pdist() for d in [torch.pdist(x, p)]]


def crossed():
    pairs = [((8, 3), (8, 3), -1), ((3, 5), (3, 5), 0), ((1, 3), (4, 3), 1), ((0, 3), (0, 3), -1)]
    return [([general(a), general(b, 1)], {"dim": dim}) for a, b, dim in pairs]


SAMPLES = {
    aten.linalg_cholesky_ex.default: cholesky_ex,
    # Gone from torch 2.14 on.
    **(
        {aten.cholesky.default: lambda: calls([positive(batch) for batch in BATCHES])}
        if hasattr(aten, "cholesky")
        else {}
    ),
    aten.cholesky_inverse.default: lambda: calls(lower()) + calls(lower(SOME), True),
    aten.linalg_lu_factor_ex.default: lambda: checked(squares()) + calls(tall_and_wide()),
    aten.linalg_lu.default: lambda: calls(tall_and_wide()),
    aten.lu_unpack.default: lu_unpack,
    aten.linalg_ldl_factor_ex.default: lambda: checked([positive(batch) for batch in BATCHES]),
    aten.linalg_qr.default: modes,
    aten.geqrf.default: lambda: calls(tall_and_wide()),
    aten.linalg_householder_product.default: lambda: [([*pair], {}) for pair in reflectors()],
    aten._linalg_check_errors.default: lambda: found(bad=False),
    aten._linalg_svd.default: singular_values,
    aten._linalg_eigh.default: hermitian,
    aten.linalg_eig.default: lambda: calls(squares()),
    aten.linalg_eigvals.default: lambda: calls(squares()),
    aten._linalg_eigvals.default: lambda: calls(squares()),
    aten._linalg_det.default: lambda: calls(squares()),
    aten._linalg_slogdet.default: lambda: calls(squares()),
    aten.linalg_inv_ex.default: lambda: checked(squares()),
    aten.linalg_pinv.atol_rtol_tensor: pseudo_inverses,
    aten.linalg_matrix_exp.default: lambda: calls(general((*batch, 3, 3)) for batch in BATCHES),
    aten._linalg_solve_ex.default: solve,
    aten.linalg_solve_triangular.default: solve_triangular,
    aten.linalg_lu_solve.default: lu_solve,
    aten.linalg_ldl_solve.default: ldl_solve,
    aten.cholesky_solve.default: cholesky_solve,
    aten._cholesky_solve_helper.default: lambda: [([*args, False], {}) for args, _ in cholesky_solve(ALIKE)],
    aten.triangular_solve.default: triangular_solve,
    aten.ormqr.default: reflect,
    aten.linalg_lstsq.default: least_squares,
    aten._cdist_forward.default: cdist,
    aten._cdist_backward.default: cdist_backward,
    aten._euclidean_dist.default: euclidean,
    aten._pdist_forward.default: pdist,
    aten._pdist_backward.default: pdist_backward,
    aten.linalg_cross.default: crossed,
}


SAMPLES |= out_variants(SAMPLES)
