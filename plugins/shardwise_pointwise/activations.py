"""Activations and their backwards."""

from __future__ import annotations

import torch

from shardwise.rule import linear, monotone
from shardwise_pointwise.elementwise import elementwise, elementwise_of

__all__ = ["RULES"]

aten = torch.ops.aten

ACTIVATIONS = """
    celu elu selu hardshrink hardsigmoid hardswish leaky_relu mish _prelu_kernel silu softplus
    softshrink threshold _add_relu
"""
BACKWARD = """
    sigmoid_backward tanh_backward hardtanh_backward hardsigmoid_backward
    hardswish_backward hardshrink_backward softshrink_backward elu_backward softplus_backward
    silu_backward mish_backward
"""
# Their kernels iterate over what was activated first, and so do torch's meta kernels.
SELF_FIRST = "threshold_backward leaky_relu_backward rrelu_with_noise_backward _prelu_kernel_backward"

RULES = (
    elementwise(ACTIVATIONS),
    elementwise("relu relu6 hardtanh", monotone("self")),
    elementwise(BACKWARD, linear("grad_output|grad_out")),
    elementwise(SELF_FIRST, linear("grad_output"), results=None),
    # gelu.out and gelu_backward.grad_input are left out: on a CPU they silently leave an out= tensor as it was when
    # its strides differ from the input's (oneDNN, torch 2.11 to 2.13), as local strides may where global ones do not.
    elementwise_of([aten.gelu.default, aten.gelu_.default]),
    elementwise_of([aten.gelu_backward.default], linear("grad_output")),
)
