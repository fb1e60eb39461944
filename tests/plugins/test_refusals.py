"""What one device refuses for its dtypes, a mesh refuses; what it computes, a mesh computes: every op of every rule."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

PARTS = 8
# What may differ, by the reason. Names are without "aten.".
KNOWN = {
    "the fake group has no data, so what moved is garbage or missing": """
        avg_pool3d.default avg_pool3d.out max_pool3d_with_indices.default max_pool3d_with_indices.out cholesky.default
        cholesky.out linalg_lstsq.out as_strided_copy.default as_strided_copy.out as_strided_scatter.default
        bernoulli_.Tensor repeat_interleave.Tensor repeat_interleave.Tensor_out rrelu_with_noise.default
        rrelu_with_noise_.default segment_reduce.default segment_reduce.out
    """,
    "an operand's values are places in memory, so its kernel is not asked; a rank with elements raises": """
        _embedding_bag_per_sample_weights_backward.default embedding_renorm_.default max_pool2d_with_indices.out
        max_pool2d_with_indices_backward.default max_pool2d_with_indices_backward.grad_input
        max_pool3d_with_indices_backward.default max_pool3d_with_indices_backward.grad_input cummax.out cummin.out
    """,
    "it takes sizes that must fit its operands, so its kernel is not asked": "as_strided_scatter.out",
    "torch's function for shapes refuses what the CPU's kernel takes": """
        addbmm.out bmm.dtype mm.dtype nll_loss_backward.default nll_loss_backward.grad_input abs.out
        reflection_pad2d_backward.grad_input replication_pad2d_backward.grad_input
        replication_pad3d_backward.grad_input __lshift__.Scalar __lshift__.Scalar_out __lshift__.Tensor
        __lshift__.Tensor_out __rshift__.Scalar __rshift__.Scalar_out __rshift__.Tensor __rshift__.Tensor_out
        __ilshift__.Tensor __irshift__.Tensor _fft_c2c.out _fft_c2r.out _fft_r2c.out _unsafe_masked_index.default
        _unsafe_masked_index_put_accumulate.default
        all.all_out all.dims_out all.out any.all_out any.dims_out any.out logsumexp.out mean.out nansum.out
        masked_fill.Tensor masked_fill.Tensor_out masked_fill_.Tensor nan_to_num_.default native_dropout.default
        normal.Tensor_float rrelu_with_noise_backward.out select_scatter.out slice_scatter.out where.Scalar
        where.ScalarOther where.ScalarSelf where.self where.self_out
    """,
    "torch has no function for its shapes, or they depend on data, so that out= must be plain": """
        _add_relu.out _add_relu.Scalar_out _add_relu_.Tensor _dirichlet_grad.out _standard_gamma_grad.out
        histogram.bin_ct_out histogram.bins_tensor_out masked_select.out nonzero.out view_copy.dtype_out
    """,
    "torch's formulas never call it so, and the kernel does not look at this operand": """
        _softmax_backward_data.default _log_softmax_backward_data.default convolution_backward.default
    """,
    "the CPU has no kernel of it": "cudnn_batch_norm.default",
    "torch's kernel ends the process: it divides integers by zero, or trusts lengths": """
        smooth_l1_loss_backward.default smooth_l1_loss_backward.grad_input _segment_reduce_backward.default
        _segment_reduce_backward.out
    """,
}
NAMES = {f"aten.{name}" for names in KNOWN.values() for name in names.split()}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_one_device_and_a_mesh_refuse_the_same(part):
    script = Path(__file__).with_name("refusals.py")
    command = [sys.executable, str(script), str(part), str(PARTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = defaultdict(list)
    for text in done.stdout.splitlines():
        line = json.loads(text)
        found[line.pop("op")].append(line)
    assert {op: lines[:3] for op, lines in found.items() if op not in NAMES} == {}
