"""Which module has the rules of which ops, for all versions of torch. `nox -s known_ops` writes it."""

MODULES = {
    "shardwise_spectral.transforms": """
        aten::_fft_c2c aten::_fft_c2r aten::_fft_r2c
    """,
}
