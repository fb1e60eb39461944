"""Which module has the rules of which ops, for all versions of torch. `nox -s known_ops` writes it."""

MODULES = {
    "shardwise_embedding.bags": """
        aten::_embedding_bag aten::_embedding_bag_backward aten::_embedding_bag_dense_backward
        aten::_embedding_bag_forward_only aten::_embedding_bag_per_sample_weights_backward
    """,
    "shardwise_embedding.tables": """
        aten::embedding aten::embedding_dense_backward aten::embedding_renorm
    """,
}
