"""Scripted and traced functions of a MeshTensor, where torch fuses their ops as it does on a card.

Torch for CPUs has the fuser too, off, with an interpreter of its kernels. The program runs in a process of its own: a
fused kernel that reads the memory of a wrapper ends it.
"""

import subprocess
import sys
from pathlib import Path


def test_a_script_runs_op_by_op():
    command = [sys.executable, str(Path(__file__).with_name("scripted.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"ended at {done.stdout.splitlines()[-1:]}: {done.stderr[-2000:]}"
