"""Which module has the rules of which ops, for all versions of torch. `nox -s known_ops` writes it."""

MODULES = {
    "shardwise_linalg.distances": """
        aten::_cdist_backward aten::_cdist_forward aten::_euclidean_dist aten::_pdist_backward aten::_pdist_forward
        aten::linalg_cross
    """,
    "shardwise_linalg.factors": """
        aten::_linalg_check_errors aten::cholesky aten::cholesky_inverse aten::geqrf aten::linalg_cholesky_ex
        aten::linalg_householder_product aten::linalg_ldl_factor_ex aten::linalg_lu aten::linalg_lu_factor_ex
        aten::linalg_qr aten::lu_unpack
    """,
    "shardwise_linalg.least_squares": """
        aten::linalg_lstsq
    """,
    "shardwise_linalg.solvers": """
        aten::_cholesky_solve_helper aten::_linalg_solve_ex aten::cholesky_solve aten::linalg_ldl_solve
        aten::linalg_lu_solve aten::linalg_solve_triangular aten::ormqr aten::triangular_solve
    """,
    "shardwise_linalg.spectra": """
        aten::_linalg_det aten::_linalg_eigh aten::_linalg_eigvals aten::_linalg_slogdet aten::_linalg_svd
        aten::linalg_eig aten::linalg_eigvals aten::linalg_inv_ex aten::linalg_matrix_exp aten::linalg_pinv
    """,
}
