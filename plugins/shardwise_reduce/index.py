"""Which module has the rules of which ops, for all versions of torch. `nox -s known_ops` writes it."""

MODULES = {
    "shardwise_reduce.along": """
        aten::dist aten::hash_tensor aten::kthvalue aten::median aten::mode aten::nanmedian aten::renorm aten::sort
        aten::trace
    """,
    "shardwise_reduce.extremes": """
        aten::all aten::amax aten::amin aten::aminmax aten::any aten::max aten::min
    """,
    "shardwise_reduce.largest": """
        aten::topk
    """,
    "shardwise_reduce.moments": """
        aten::std aten::std_mean aten::var aten::var_mean
    """,
    "shardwise_reduce.norms": """
        aten::linalg_vector_norm aten::logsumexp aten::norm
    """,
    "shardwise_reduce.positions": """
        aten::argmax aten::argmin aten::max aten::min
    """,
    "shardwise_reduce.scans": """
        aten::cummax aten::cummin aten::cumprod aten::cumsum aten::logcumsumexp
    """,
    "shardwise_reduce.sums": """
        aten::count_nonzero aten::mean aten::nansum aten::prod aten::sum
    """,
}
