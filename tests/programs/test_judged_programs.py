"""Laws of policies, on random programs of the whole registry: nothing forbidden is sent, nothing is forbidden that
would send nothing, and no policy changes a number or a layout.
"""

from __future__ import annotations

from collections import Counter

import made_programs
import pytest
from judged_programs import run_judged


def check(pool, seed) -> Counter[str]:
    program = made_programs.drawn_program(pool.world_size, seed)
    by_rank = pool.run(run_judged, program, timeout=60)
    counts: Counter[str] = Counter()
    assert all(is_same for _, is_same in by_rank), f"seed {seed}: a policy changed a value"
    for calls in zip(*(judged for judged, _ in by_rank), strict=True):
        what = f"seed {seed}: {calls[0]}"
        assert len({call.forbidden for call in calls}) == 1, what
        assert len({call.error for call in calls}) == 1, what
        assert not any(call.sent_under_policy for call in calls), what
        if calls[0].forbidden and not calls[0].unknown:
            assert any(call.sends for call in calls), what  # a rank without a part may send nothing
        counts["forbidden" if calls[0].forbidden else "ran"] += 1
    return counts


@pytest.mark.slow
@pytest.mark.sample
def test_laws(pool):
    counts = sum((check(pool, seed) for seed in range(100)), Counter())
    assert counts["forbidden"] > 200
    assert counts["ran"] > 150


@pytest.mark.slow
def test_laws_on_many_programs(pool):
    for seed in range(100, 2000):
        check(pool, seed)
