"""Torch without one of its private parts: the same numbers in another way, or an error that names the part."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import taken_away
import torch
from taken_away import COMPILED_FALLBACKS, ERROR_OF_TORCH, ERRORS, FALLBACKS, untouched

from shardwise.private_torch.parts import ALSO_RUN, TESTED_TORCH

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sample(cases=60),
    pytest.mark.skipif(torch.cuda.is_available(), reason="copies of a process cannot share its CUDA device"),
]


def run(which):
    """The outcomes of the cases, each in a copy of one process."""
    paths = [p for p in sys.path if p]
    result = subprocess.run(
        [sys.executable, taken_away.__file__, which],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def outcomes():
    return run("eager")


@pytest.fixture(scope="module")
def compiled():
    return run("compiled")


def first_name(case):
    return case.names[0]


def assert_names(outcome, part):
    assert outcome.get("error") == "TorchPartError", outcome
    assert outcome["part"] == part or outcome["part"].startswith(f"{part}.")
    assert f"torch {torch.__version__} has no {outcome['part']}. " in outcome["message"]


@pytest.mark.parametrize("name", taken_away.required())
def test_what_nothing_works_without_is_missed_at_import(outcomes, name):
    assert_names(outcomes[name], name)
    assert outcomes[name]["message"].startswith("use shardwise: ")
    assert f"Use a newer shardwise, or torch {TESTED_TORCH[0]} to {ALSO_RUN[-1]}." in outcomes[name]["message"]


@pytest.mark.parametrize("case", FALLBACKS, ids=first_name)
def test_a_program_has_the_same_numbers_without(outcomes, case):
    assert_same(outcomes, case)


@pytest.mark.parametrize("case", COMPILED_FALLBACKS, ids=first_name)
def test_a_compiled_program_has_the_same_numbers_without(compiled, case):
    assert_same(compiled, case)


def assert_same(outcomes, case):
    expected, outcome = outcomes[untouched(case)], outcomes[case.names[0]]
    assert "returned" in expected, expected
    assert "returned" in outcome, outcome
    if isinstance(expected["returned"], list) and isinstance(expected["returned"][0], float):
        assert outcome["returned"] == pytest.approx(expected["returned"], rel=1e-6)
    else:
        assert outcome == expected


@pytest.mark.parametrize("case", ERRORS, ids=first_name)
def test_an_error_names_the_part_where_it_is_needed(outcomes, case):
    assert_names(outcomes[case.names[0]], case.names[0])


def test_torch_says_it_where_it_does_not_ask(compiled):
    message = compiled[ERROR_OF_TORCH.names[0]]["message"]
    # The second is what torch says before 2.12.
    assert "Expected a MeshTensor tangent but got a plain Tensor" in message or "its\nmetadata incorrectly" in message
