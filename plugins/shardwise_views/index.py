"""Which module has the rules of which ops, for all versions of torch. `nox -s known_ops` writes it."""

MODULES = {
    "shardwise_views.axes": """
        aten::diag_embed aten::diagonal aten::diagonal_backward aten::diagonal_copy aten::permute aten::permute_copy
        aten::t aten::t_copy aten::transpose aten::transpose_copy aten::unfold aten::unfold_backward aten::unfold_copy
    """,
    "shardwise_views.memory": """
        aten::as_strided_scatter aten::resize aten::resize_as
    """,
    "shardwise_views.reinterpret": """
        aten::_conj aten::_conj_copy aten::_neg_view aten::_neg_view_copy aten::view aten::view_as_complex
        aten::view_as_complex_copy aten::view_as_real aten::view_as_real_copy aten::view_copy
    """,
    "shardwise_views.shapes": """
        aten::_reshape_copy aten::_unsafe_view aten::expand aten::expand_copy aten::repeat aten::squeeze
        aten::squeeze_copy aten::unsqueeze aten::unsqueeze_copy aten::view aten::view_copy
    """,
    "shardwise_views.strided": """
        aten::_reshape_alias aten::as_strided aten::as_strided_copy
    """,
}
