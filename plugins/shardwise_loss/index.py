"""Which module has the rules of which ops, for all versions of torch. `nox -s known_ops` writes it."""

MODULES = {
    "shardwise_loss.alignment": """
        aten::_ctc_loss aten::_ctc_loss_backward
    """,
    "shardwise_loss.elementwise": """
        aten::binary_cross_entropy aten::binary_cross_entropy_backward aten::binary_cross_entropy_with_logits
        aten::huber_loss aten::huber_loss_backward aten::mse_loss aten::mse_loss_backward aten::smooth_l1_loss
        aten::smooth_l1_loss_backward aten::soft_margin_loss aten::soft_margin_loss_backward
    """,
    "shardwise_loss.likelihood": """
        aten::nll_loss2d_backward aten::nll_loss2d_forward aten::nll_loss_backward aten::nll_loss_forward
    """,
    "shardwise_loss.margins": """
        aten::multi_margin_loss aten::multi_margin_loss_backward aten::multilabel_margin_loss_backward
        aten::multilabel_margin_loss_forward
    """,
    "shardwise_loss.projected": """
        torch_nn::_linear_cross_entropy_batch_chunked torch_nn::_linear_cross_entropy_batch_chunked_no_reduction
    """,
    "shardwise_loss.softmax": """
        aten::_log_softmax aten::_log_softmax_backward_data aten::_masked_softmax aten::_masked_softmax_backward
        aten::_safe_softmax aten::_softmax aten::_softmax_backward_data
    """,
}
