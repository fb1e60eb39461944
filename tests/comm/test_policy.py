"""Policies: what they are about, and how settings write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.comm.policy_text import ACTIONS, KINDS, PHASES, Policy, checked_policy, parse_policies
from shardwise.errors import SettingsError
from shardwise.settings import read_settings

policies = st.builds(
    lambda action, over, kinds, above, phases: checked_policy(action, over, kinds, above, phases, "test"),
    st.sampled_from(ACTIONS),
    st.none() | st.lists(st.sampled_from(["dp", "tp", 0, 1]), min_size=1, max_size=3, unique=True),
    st.none() | st.lists(st.sampled_from(KINDS), min_size=1, unique=True),
    st.integers(0, 1 << 40),
    st.none() | st.lists(st.sampled_from(PHASES), min_size=1, unique=True),
)


@given(st.lists(policies, min_size=1, max_size=3))
def test_a_policy_reads_back_from_its_text(some):
    assert parse_policies(["; ".join(map(str, some))], "test") == tuple(some)


@given(policies)
def test_every_condition_can_take_a_collective_out(policy):
    dims = {"dp", "tp", 0, 1}
    kinds, phases = policy.kinds or KINDS, policy.phases
    fits = {"phase": phases[0], "kind": kinds[0], "dims": dims, "nbytes": policy.above + 1}
    assert policy.covers(**fits)
    assert policy.covers(**{**fits, "kind": None, "nbytes": None})
    assert not policy.covers(**{**fits, "phase": "elsewhere"})
    if policy.over is not None:
        assert not policy.covers(**{**fits, "dims": {"pod", 7}})
    if policy.kinds is not None:
        assert not policy.covers(**{**fits, "kind": "broadcast"})
    if policy.above:
        assert not policy.covers(**{**fits, "nbytes": policy.above})


def test_units():
    (policy,) = parse_policies(["forbid over tp,1 kinds all_gather above 2MiB phases forward"], "test")
    assert policy == Policy("forbid", ("tp", 1), ("all_gather",), 2 << 20, ("forward",))


@pytest.mark.parametrize(
    "text",
    [
        "forbidden",
        "forbid tp",
        "forbid over",
        "forbid over ,",
        "forbid kinds all_gathers",
        "forbid above much",
        "forbid phases step",
        "forbid over tp over dp",
        "forbid above 1KB",
    ],
)
def test_a_setting_that_cannot_be_read_says_where_it_is(text):
    with pytest.raises(SettingsError, match="SHARDWISE_COMMUNICATION"):
        parse_policies([text], "read SHARDWISE_COMMUNICATION")


@pytest.mark.parametrize(
    "given",
    [
        {"policy": "never"},
        {"over": []},
        {"over": [1.5]},
        {"over": [True]},
        {"kinds": ["broadcasts"]},
        {"above": -1},
        {"above": 1.0},
        {"phases": ["middle"]},
    ],
    ids=str,
)
def test_values_that_a_policy_cannot_have_are_refused(given):
    with pytest.raises(SettingsError):
        sw.communication(**{"policy": "forbid", **given})


def test_settings_hold_several(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.shardwise]\ncommunication = ["warn", "forbid over tp"]\n')
    assert read_settings({}, tmp_path).communication == ("warn", "forbid over tp")
    by_environment = read_settings({"SHARDWISE_COMMUNICATION": "warn; allow over dp"}, tmp_path)
    assert parse_policies(by_environment.communication, "test") == (Policy("warn"), Policy("allow", ("dp",)))


def test_lists_of_a_text_may_have_blanks_after_commas():
    (policy,) = parse_policies(["forbid over dp, tp kinds all_gather ,all_reduce"], "read a setting")
    assert (policy.over, policy.kinds) == (("dp", "tp"), ("all_gather", "all_reduce"))


@given(policies)
def test_a_context_takes_the_text_of_a_policy(policy):
    assert sw.communication(str(policy)).policy == policy


@pytest.mark.parametrize(
    ("text", "given", "found"),
    [
        ("forbid over tp", {"above": 5}, "has conditions of its own, and more are given beside it"),
        ("forbid over tp", {"kinds": "all_gather"}, "has conditions of its own, and more are given beside it"),
        ("warn; forbid over tp", {}, "has 2 policies, and a context is one"),
        ("forbid  tp", {}, "is not a policy. Write it as"),
        ("; ;", {}, "has 0 policies, and a context is one"),
    ],
)
def test_a_text_that_is_no_context_is_refused(text, given, found):
    with pytest.raises(SettingsError, match=f"set a policy on communication: .*{found}"):
        sw.communication(text, **given)
