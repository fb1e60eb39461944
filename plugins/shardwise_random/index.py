"""Which module has the rules of which ops, for all versions of torch. `nox -s known_ops` writes it."""

MODULES = {
    "shardwise_random.categories": """
        aten::multinomial aten::randperm
    """,
    "shardwise_random.draws": """
        aten::bernoulli aten::cauchy aten::exponential aten::geometric aten::log_normal aten::normal
        aten::normal_functional aten::rand_like aten::randint_like aten::randn_like aten::random aten::uniform
    """,
    "shardwise_random.dropout": """
        aten::native_dropout aten::native_dropout_backward
    """,
    "shardwise_random.leaky": """
        aten::rrelu_with_noise
    """,
    "shardwise_random.parameters": """
        aten::_sample_dirichlet aten::_standard_gamma aten::bernoulli aten::binomial aten::normal aten::poisson
    """,
}
