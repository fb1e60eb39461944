"""Which module has the rules of which ops, for all versions of torch. `nox -s known_ops` writes it."""

MODULES = {
    "shardwise_norm.batch": """
        aten::_batch_norm_no_update aten::_batch_norm_with_update aten::_batch_norm_with_update_functional
        aten::_native_batch_norm_legit aten::_native_batch_norm_legit_functional
        aten::_native_batch_norm_legit_no_training aten::batch_norm_backward aten::native_batch_norm
        aten::native_batch_norm_backward
    """,
    "shardwise_norm.cudnn": """
        aten::cudnn_batch_norm aten::cudnn_batch_norm_backward
    """,
    "shardwise_norm.group": """
        aten::native_group_norm aten::native_group_norm_backward
    """,
    "shardwise_norm.layer": """
        aten::_fused_rms_norm aten::_fused_rms_norm_backward aten::native_layer_norm aten::native_layer_norm_backward
    """,
    "shardwise_norm.weight": """
        aten::_weight_norm_interface aten::_weight_norm_interface_backward
    """,
}
