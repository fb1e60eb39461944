"""Which module has the rules of which ops, for all versions of torch. `nox -s known_ops` writes it."""

MODULES = {
    "shardwise_pointwise.activations": """
        aten::_add_relu aten::_prelu_kernel aten::_prelu_kernel_backward aten::celu aten::elu aten::elu_backward
        aten::gelu aten::gelu_backward aten::hardshrink aten::hardshrink_backward aten::hardsigmoid
        aten::hardsigmoid_backward aten::hardswish aten::hardswish_backward aten::hardtanh aten::hardtanh_backward
        aten::leaky_relu aten::leaky_relu_backward aten::mish aten::mish_backward aten::relu aten::relu6
        aten::rrelu_with_noise_backward aten::selu aten::sigmoid_backward aten::silu aten::silu_backward
        aten::softplus aten::softplus_backward aten::softshrink aten::softshrink_backward aten::tanh_backward
        aten::threshold aten::threshold_backward
    """,
    "shardwise_pointwise.arithmetic": """
        aten::_conj_physical aten::add aten::addcdiv aten::addcmul aten::clamp aten::clamp_max aten::clamp_min
        aten::clip aten::conj_physical aten::div aten::exp2 aten::float_power aten::hypot aten::lerp aten::maximum
        aten::minimum aten::mul aten::neg aten::positive aten::pow aten::reciprocal aten::rsqrt aten::rsub aten::sqrt
        aten::square aten::sub aten::true_divide aten::where
    """,
    "shardwise_pointwise.cells": """
        aten::_thnn_fused_gru_cell aten::_thnn_fused_gru_cell_backward aten::_thnn_fused_lstm_cell
        aten::_thnn_fused_lstm_cell_backward_impl
    """,
    "shardwise_pointwise.comparisons": """
        aten::__and__ aten::__iand__ aten::__ilshift__ aten::__ior__ aten::__irshift__ aten::__ixor__ aten::__lshift__
        aten::__or__ aten::__rshift__ aten::__xor__ aten::bitwise_and aten::bitwise_left_shift aten::bitwise_not
        aten::bitwise_or aten::bitwise_right_shift aten::bitwise_xor aten::eq aten::gcd aten::ge aten::gt
        aten::isfinite aten::isinf aten::isnan aten::isneginf aten::isposinf aten::lcm aten::le aten::logical_and
        aten::logical_not aten::logical_or aten::logical_xor aten::lt aten::ne
    """,
    "shardwise_pointwise.fake_quantization": """
        aten::_fake_quantize_learnable_per_channel_affine aten::_fake_quantize_learnable_per_channel_affine_backward
        aten::_fake_quantize_learnable_per_tensor_affine aten::_fake_quantize_learnable_per_tensor_affine_backward
        aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams aten::_fused_moving_avg_obs_fq_helper
        aten::fake_quantize_per_channel_affine_cachemask aten::fake_quantize_per_tensor_affine_cachemask
    """,
    "shardwise_pointwise.functions": """
        aten::abs aten::acos aten::acosh aten::angle aten::asin aten::asinh aten::atan aten::atan2 aten::atanh
        aten::ceil aten::complex aten::copysign aten::cos aten::cosh aten::deg2rad aten::erf aten::exp aten::expm1
        aten::floor aten::floor_divide aten::fmax aten::fmin aten::fmod aten::frac aten::frexp aten::heaviside
        aten::ldexp aten::log aten::log10 aten::log1p aten::log2 aten::logaddexp aten::logaddexp2 aten::logit
        aten::logit_backward aten::nan_to_num aten::nextafter aten::polar aten::rad2deg aten::remainder aten::round
        aten::sgn aten::sigmoid aten::sign aten::signbit aten::sin aten::sinc aten::sinh aten::tan aten::tanh
        aten::trunc aten::xlogy
    """,
    "shardwise_pointwise.gated": """
        aten::glu aten::glu_backward aten::glu_backward_jvp aten::glu_jvp aten::isin aten::log_sigmoid_backward
        aten::log_sigmoid_forward
    """,
    "shardwise_pointwise.special": """
        aten::_dirichlet_grad aten::_standard_gamma_grad aten::digamma aten::erfc aten::erfinv aten::i0 aten::igamma
        aten::igammac aten::lgamma aten::mvlgamma aten::polygamma aten::special_airy_ai aten::special_bessel_j0
        aten::special_bessel_j1 aten::special_bessel_y0 aten::special_bessel_y1 aten::special_chebyshev_polynomial_t
        aten::special_chebyshev_polynomial_u aten::special_chebyshev_polynomial_v aten::special_chebyshev_polynomial_w
        aten::special_entr aten::special_erfcx aten::special_hermite_polynomial_h aten::special_hermite_polynomial_he
        aten::special_i0e aten::special_i1 aten::special_i1e aten::special_laguerre_polynomial_l
        aten::special_legendre_polynomial_p aten::special_log_ndtr aten::special_modified_bessel_i0
        aten::special_modified_bessel_i1 aten::special_modified_bessel_k0 aten::special_modified_bessel_k1
        aten::special_ndtri aten::special_scaled_modified_bessel_k0 aten::special_scaled_modified_bessel_k1
        aten::special_shifted_chebyshev_polynomial_t aten::special_shifted_chebyshev_polynomial_u
        aten::special_shifted_chebyshev_polynomial_v aten::special_shifted_chebyshev_polynomial_w
        aten::special_spherical_bessel_j0 aten::special_xlog1py aten::special_zeta
    """,
}
