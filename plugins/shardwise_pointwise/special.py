"""Special functions and orthogonal polynomials. No partial tensor passes."""

from __future__ import annotations

from shardwise_pointwise.elementwise import elementwise

__all__ = ["RULES"]

SPECIAL = """
    digamma lgamma polygamma igamma igammac erfc erfinv i0 special_airy_ai special_bessel_j0 special_bessel_j1
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

RULES = (elementwise(SPECIAL), elementwise("mvlgamma", results=None), elementwise(POLYNOMIALS))
