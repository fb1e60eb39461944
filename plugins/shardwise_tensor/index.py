"""Which module has the rules of which ops, for all versions of torch. `nox -s known_ops` writes it."""

MODULES = {
    "shardwise_tensor.copying": """
        aten::_assert_async aten::_local_scalar_dense aten::_new_zeros_with_same_feature_meta aten::_pin_memory
        aten::_to_copy aten::alias aten::alias_copy aten::allclose aten::clone aten::copy aten::detach
        aten::detach_copy aten::equal aten::fill aten::is_pinned aten::is_same_size aten::lift aten::lift_fresh
        aten::lift_fresh_copy aten::zero
    """,
    "shardwise_tensor.counting": """
        aten::_convert_indices_from_coo_to_csr aten::_convert_indices_from_csr_to_coo aten::_histogramdd_bin_edges
        aten::_histogramdd_from_bin_cts aten::_histogramdd_from_bin_tensors aten::bincount aten::histc aten::histogram
    """,
    "shardwise_tensor.creating": """
        aten::empty_like aten::fill aten::full_like aten::linspace aten::logspace aten::new_empty
        aten::new_empty_strided aten::new_full aten::new_ones aten::new_zeros aten::ones_like aten::zero
        aten::zeros_like
    """,
    "shardwise_tensor.gathering": """
        aten::gather aten::index_select aten::take
    """,
    "shardwise_tensor.indexing": """
        aten::_unsafe_index aten::_unsafe_masked_index aten::index
    """,
    "shardwise_tensor.joining": """
        aten::_chunk_cat aten::cat aten::stack
    """,
    "shardwise_tensor.masking": """
        aten::_unique aten::_unique2 aten::bucketize aten::isin aten::masked_fill aten::masked_scatter
        aten::masked_scatter_backward aten::masked_select aten::nonzero aten::nonzero_static aten::repeat_interleave
        aten::searchsorted aten::unique_consecutive aten::unique_dim aten::unique_dim_consecutive
    """,
    "shardwise_tensor.putting": """
        aten::_index_put_impl aten::_unsafe_index_put aten::_unsafe_masked_index_put_accumulate aten::index_put
    """,
    "shardwise_tensor.rearranging": """
        aten::flip aten::roll aten::rot90 aten::tril aten::triu
    """,
    "shardwise_tensor.scattering": """
        aten::index_add aten::index_copy aten::index_fill aten::index_reduce aten::put aten::scatter aten::scatter_add
        aten::scatter_reduce
    """,
    "shardwise_tensor.segments": """
        aten::_segment_reduce_backward aten::segment_reduce
    """,
    "shardwise_tensor.slicing": """
        aten::diagonal_scatter aten::narrow_copy aten::select aten::select_backward aten::select_copy
        aten::select_scatter aten::slice aten::slice_backward aten::slice_copy aten::slice_scatter aten::split
        aten::split_copy aten::split_with_sizes aten::split_with_sizes_copy aten::unbind aten::unbind_copy
        aten::unsafe_split aten::unsafe_split_with_sizes
    """,
}
