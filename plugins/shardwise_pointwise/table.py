"""All elementwise ops of ATen, by the partial tensors that pass through them.

A partial row stands here only if it is exact for every finite value. Sums and averages pass linear ops, averages also
affine ones. Maxima and minima pass an op that never falls on the whole real line and returns NaN for NaN; an op that
never rises swaps the two. A logarithm has no row: the smaller value of another rank may be negative.
"""

from __future__ import annotations

import torch

from shardwise.rule import UNMOVED, Facts, affine, decreasing, linear, monotone, moves
from shardwise_pointwise.addition import ADDED_ONCE, add_once
from shardwise_pointwise.elementwise import elementwise, elementwise_of
from shardwise_pointwise.scaling import by_one_number, divide, multiply

__all__ = ["RULES"]

aten = torch.ops.aten

# -- no partial tensor passes ------------------------------------------------------------------------------------

POWERS = "pow float_power square rsqrt reciprocal exp2 hypot"
LOGARITHMS = "log log2 log10 log1p logaddexp logaddexp2 logit xlogy logit_backward"
ANGLES = "sin cos tan asin acos cosh acosh atanh atan2 angle sinc polar complex"
STEPS = "abs sgn sign signbit frac frexp fmod remainder floor_divide heaviside copysign nextafter nan_to_num"
EXTREMES = "fmax fmin"  # they leave NaN out, which a partial maximum returns
INTEGERS = "gcd lcm bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift"
OPERATORS = "__and__ __or__ __xor__ __lshift__ __rshift__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__"
COMPARISONS = "eq ne lt le gt ge isnan isinf isfinite isneginf isposinf"
LOGIC = "logical_and logical_or logical_xor logical_not"
ACTIVATIONS = """
    celu elu selu hardshrink hardsigmoid hardswish leaky_relu mish _prelu_kernel silu softplus
    softshrink threshold _add_relu
"""
SPECIAL = """
    digamma lgamma mvlgamma polygamma igamma igammac erfc erfinv i0 special_airy_ai special_bessel_j0 special_bessel_j1
    special_bessel_y0 special_bessel_y1 special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
    special_ndtri special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0
    special_xlog1py special_zeta _standard_gamma_grad _dirichlet_grad
"""
POLYNOMIALS = """
    special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he
    special_laguerre_polynomial_l special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_w
"""

# -- some partial tensors pass -----------------------------------------------------------------------------------

# x + y and x - y, where `alpha` may have either sign: only the first operand is sure to rise.
ADDITIVE = linear("self other") + affine("self", "other")

BACKWARD = """
    sigmoid_backward tanh_backward threshold_backward hardtanh_backward hardsigmoid_backward
    hardswish_backward hardshrink_backward softshrink_backward leaky_relu_backward elu_backward softplus_backward
    silu_backward mish_backward rrelu_with_noise_backward _prelu_kernel_backward
"""

# x + w (y - x): linear in x and y together, affine in each. Affine in w, too, but from w = 1/2 on torch computes
# y - (y - x) (1 - w), which for infinite x or y is infinite where the other is NaN, and parts of w are on either side.
LERP = linear("self end") + affine("self", "end")
# x + v y z: linear in x with one of y and z, affine in each of the three.
ADDCMUL = linear("self tensor1", "self tensor2") + affine("self", "tensor1", "tensor2")
# A whole value may stand beside one that is partial under avg, max or min, since equal pieces reduce to themselves. No
# fact says that, so these rows are written out.
WHERE: tuple[str | Facts, ...] = (
    moves("self other"),
    *(row for kind in UNMOVED for row in (f"R, {kind}, R -> {kind}", f"R, R, {kind} -> {kind}")),
)

RULES = (
    elementwise(f"{POWERS} {LOGARITHMS} {ANGLES} {STEPS} {EXTREMES}"),
    # torch's composites run it in place on sums that they have just computed.
    elementwise("sqrt", resolves=True),
    elementwise(f"{INTEGERS} {OPERATORS} {COMPARISONS} {LOGIC}"),
    elementwise(ACTIVATIONS),
    elementwise(SPECIAL),
    elementwise(POLYNOMIALS),
    elementwise("exp expm1 sinh asinh tanh atan erf sigmoid", monotone("self")),
    elementwise("relu relu6 hardtanh ceil floor trunc round", monotone("self")),
    elementwise("clamp clip clamp_min clamp_max", monotone("self"), resolves=True),
    elementwise("deg2rad rad2deg", linear("self"), monotone("self")),
    elementwise("neg", linear("self"), decreasing("self")),
    elementwise("positive conj_physical _conj_physical", linear("self")),
    elementwise("add sub", ADDITIVE, monotone("self"), lowering=(ADDED_ONCE, add_once)),
    elementwise("rsub", ADDITIVE, monotone("other"), lowering=(ADDED_ONCE, add_once)),
    elementwise(
        "mul",
        partial={2: (linear("other"), "product, product -> product")},
        lowering=(dict.fromkeys((1, 2), (linear("self"),)), multiply),
        lowered_when=by_one_number,
    ),
    # By name, since ATen lists an overload of ldexp that it lacks.
    elementwise_of([aten.ldexp.Tensor, aten.ldexp.out, aten.ldexp_.default], partial={2: (linear("self"),)}),
    elementwise("div true_divide", when=by_one_number, lowering=(dict.fromkeys((1, 2), (linear("self"),)), divide)),
    elementwise("maximum", partial={2: ["max, max -> max", monotone("self"), monotone("other")]}),
    elementwise("minimum", partial={2: ["min, min -> min", monotone("self"), monotone("other")]}),
    elementwise("lerp", LERP),
    elementwise("addcmul", ADDCMUL),
    # x + v y / z: if z is zero, an infinity is added. An average passes it on; parts of y would have both signs.
    elementwise("addcdiv", affine("self")),
    elementwise("where", partial={3: WHERE}),
    elementwise(BACKWARD, linear("grad_output|grad_out")),
    # gelu.out and gelu_backward.grad_input are left out: on a CPU they silently leave an out= tensor as it was when
    # its strides differ from the input's (oneDNN, torch 2.11 to 2.13), as local strides may where global ones do not.
    elementwise_of([aten.gelu.default, aten.gelu_.default]),
    elementwise_of([aten.gelu_backward.default], linear("grad_output")),
)
