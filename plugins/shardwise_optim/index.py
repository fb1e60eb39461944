"""Which module has the rules of which ops, for all versions of torch. `nox -s known_ops` writes it."""

MODULES = {
    "shardwise_optim.foreach": """
        aten::_foreach_abs aten::_foreach_acos aten::_foreach_add aten::_foreach_addcdiv aten::_foreach_addcmul
        aten::_foreach_asin aten::_foreach_atan aten::_foreach_ceil aten::_foreach_clamp_max aten::_foreach_clamp_min
        aten::_foreach_clone aten::_foreach_copy aten::_foreach_cos aten::_foreach_cosh aten::_foreach_div
        aten::_foreach_erf aten::_foreach_erfc aten::_foreach_exp aten::_foreach_expm1 aten::_foreach_floor
        aten::_foreach_frac aten::_foreach_lerp aten::_foreach_lgamma aten::_foreach_log aten::_foreach_log10
        aten::_foreach_log1p aten::_foreach_log2 aten::_foreach_maximum aten::_foreach_minimum aten::_foreach_mm
        aten::_foreach_mul aten::_foreach_neg aten::_foreach_pow aten::_foreach_reciprocal aten::_foreach_round
        aten::_foreach_rsqrt aten::_foreach_sigmoid aten::_foreach_sign aten::_foreach_sin aten::_foreach_sinh
        aten::_foreach_sqrt aten::_foreach_sub aten::_foreach_tan aten::_foreach_tanh aten::_foreach_trunc
        aten::_foreach_zero
    """,
    "shardwise_optim.fused": """
        aten::_fused_adagrad aten::_fused_adam aten::_fused_adamw aten::_fused_sgd
    """,
    "shardwise_optim.norms": """
        aten::_foreach_max aten::_foreach_norm aten::_foreach_powsum
    """,
    "shardwise_optim.scaling": """
        aten::_amp_foreach_non_finite_check_and_unscale aten::_amp_update_scale
    """,
}
