"""Whole training scripts on four ranks against one device: losses, parameters and buffers."""

from __future__ import annotations

import pytest
import torch
from whole_programs import PROGRAMS, Setting, results

from shardwise.testing import mesh


def on_mesh(name, layout):
    return results(PROGRAMS[name], Setting(mesh((2, 2)), layout))


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("layout", ["by column and row", "every one over all ranks"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_the_numbers_of_one_device(pool, name, layout):
    expected = results(PROGRAMS[name], Setting())
    assert all(t.isfinite().all() for t in expected.values())
    for found in pool.run(on_mesh, name, layout):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
