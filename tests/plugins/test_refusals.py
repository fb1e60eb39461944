"""What one device refuses for its dtypes, a mesh refuses; what it computes, a mesh computes: every op of every rule."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

PARTS = 8
NO_LAYOUT = "the fake group has no data, so what moved is garbage or missing"
CHECKED = "the operand's values are places in memory, so its kernel is not asked; a rank with elements raises"
SHAPES = "torch's function for shapes refuses what the CPU's kernel takes"
NEVER = "torch's formulas never call it so, and the kernel does not look at this operand"
KNOWN = {
    "aten._embedding_bag_per_sample_weights_backward.default": CHECKED,
    "aten.embedding_renorm_.default": CHECKED,
    "aten.max_pool2d_with_indices.out": CHECKED,
    "aten.max_pool2d_with_indices_backward.default": CHECKED,
    "aten.max_pool2d_with_indices_backward.grad_input": CHECKED,
    "aten.max_pool3d_with_indices_backward.default": CHECKED,
    "aten.max_pool3d_with_indices_backward.grad_input": CHECKED,
    "aten.avg_pool3d.default": NO_LAYOUT,
    "aten.avg_pool3d.out": NO_LAYOUT,
    "aten.max_pool3d_with_indices.default": NO_LAYOUT,
    "aten.max_pool3d_with_indices.out": NO_LAYOUT,
    "aten.cholesky.default": NO_LAYOUT,
    "aten.cholesky.out": NO_LAYOUT,
    "aten.linalg_lstsq.out": NO_LAYOUT,
    "aten.addbmm.out": SHAPES,
    "aten.bmm.dtype": SHAPES,
    "aten.mm.dtype": SHAPES,
    "aten.nll_loss_backward.default": SHAPES,
    "aten.nll_loss_backward.grad_input": SHAPES,
    "aten.reflection_pad2d_backward.grad_input": SHAPES,
    "aten.replication_pad2d_backward.grad_input": SHAPES,
    "aten.replication_pad3d_backward.grad_input": SHAPES,
    "aten._softmax_backward_data.default": NEVER,
    "aten._log_softmax_backward_data.default": NEVER,
    "aten.convolution_backward.default": NEVER,
    "aten.cudnn_batch_norm.default": "the CPU has no kernel of it",
    "aten.smooth_l1_loss_backward.default": "the kernel divides integers by zero, which ends the process",
    "aten.smooth_l1_loss_backward.grad_input": "the kernel divides integers by zero, which ends the process",
}


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
    assert {op: lines[:3] for op, lines in found.items() if op not in KNOWN} == {}
