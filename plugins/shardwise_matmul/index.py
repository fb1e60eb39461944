"""Which module has the rules of which ops, for all versions of torch. `nox -s known_ops` writes it."""

MODULES = {
    "shardwise_matmul.attention": """
        aten::_scaled_dot_product_attention_math aten::_scaled_dot_product_cudnn_attention
        aten::_scaled_dot_product_cudnn_attention_backward aten::_scaled_dot_product_efficient_attention
        aten::_scaled_dot_product_efficient_attention_backward aten::_scaled_dot_product_flash_attention
        aten::_scaled_dot_product_flash_attention_backward aten::_scaled_dot_product_flash_attention_for_cpu
        aten::_scaled_dot_product_flash_attention_for_cpu_backward shardwise::attention_math
        shardwise::attention_math_backward
    """,
    "shardwise_matmul.flex": """
        shardwise::flex_attention shardwise::flex_attention_backward
    """,
    "shardwise_matmul.fused": """
        aten::_native_multi_head_attention aten::_transformer_encoder_layer_fwd
    """,
    "shardwise_matmul.grouped": """
        aten::_grouped_mm
    """,
    "shardwise_matmul.padding": """
        aten::constant_pad_nd
    """,
    "shardwise_matmul.products": """
        aten::_trilinear aten::block_diag aten::bmm aten::dot aten::matmul aten::mm aten::mv aten::vdot
    """,
    "shardwise_matmul.scaled": """
        aten::_int_mm aten::_scaled_mm aten::_scaled_mm_v2
    """,
    "shardwise_matmul.sums": """
        aten::_addmm_activation aten::addbmm aten::addmm aten::addmv aten::addr aten::baddbmm aten::linear
    """,
}
