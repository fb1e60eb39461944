"""Functions of one number or two: logarithms, angles and steps.

A logarithm passes no partial tensor: the smaller value of another rank may be negative.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.rule import Call, TensorMeta, iterated_over, linear, monotone, row_major
from shardwise_pointwise.elementwise import elementwise, elementwise_of

__all__ = ["RULES"]

aten = torch.ops.aten

# -- no partial tensor passes ------------------------------------------------------------------------------------

LOGARITHMS = "log log2 log10 log1p logaddexp logaddexp2 logit xlogy logit_backward"
ANGLES = "sin cos tan asin acos cosh acosh atanh atan2 sinc polar complex"
STEPS = "abs sgn sign signbit frac frexp fmod remainder floor_divide heaviside copysign nextafter nan_to_num"
EXTREMES = "fmax fmin"  # they leave NaN out, which a partial maximum returns


def _angles(call: Call, device_type: str) -> Sequence[TensorMeta | None]:
    """Angles of complex numbers are row-major."""
    x = call.args["self"]
    return row_major(call, device_type) if x.dtype.is_complex else call.outputs


def _times_power(call: Call, device_type: str) -> Sequence[TensorMeta | None]:
    """``self`` times a power of the number 2, which is row-major."""
    x, exponent = call.args["self"], call.args["other"]
    return iterated_over(call, [x, TensorMeta.contiguous(exponent.shape, exponent.dtype)])


RULES = (
    elementwise("angle", results=_angles),
    elementwise(f"{LOGARITHMS} {ANGLES} {STEPS} {EXTREMES}"),
    elementwise("exp expm1 sinh asinh tanh atan erf sigmoid", monotone("self")),
    elementwise("ceil floor trunc round", monotone("self")),
    elementwise("deg2rad rad2deg", linear("self"), monotone("self")),
    # By name, since ATen lists an overload of ldexp that it lacks. No partial sum passes: 2 ** other may be infinite.
    elementwise_of([aten.ldexp.Tensor, aten.ldexp.out, aten.ldexp_.default], results=_times_power),
)
