"""Precedence: the winner follows from what is declared and set, never from an order."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernel.precedence import Entry, Origin, resolve
from shardwise.rule.authoring import rule

MM = torch.ops.aten.mm.default
RULE = rule(MM, "R, R -> R")
FIRST = Origin("shardwise-matmul", "shardwise", "1")


def entry(name, replaces=None):
    return Entry(MM, RULE, FIRST if name == "shardwise" else Origin(name, name, "1"), replaces)


def winner(entries, prefer=(), overrides=()):
    found = resolve(MM, overrides, entries, prefer).winner
    return found and found.origin.plugin


def test_the_only_rule_holds():
    assert winner([entry("a")]) == "a"
    assert winner([]) is None


def test_a_chain_of_replacements_has_its_last_link_win():
    assert winner([entry("shardwise"), entry("a", "shardwise"), entry("b", "a")]) == "b"


def test_a_replacement_names_the_plugin_its_distribution_or_everything_that_ships_with_shardwise():
    for name in ("shardwise", "shardwise-matmul"):
        assert winner([entry("shardwise"), entry("a", name)]) == "a"
        family = Entry(MM, RULE, Origin("shardwise-matmul", "shardwise-matmul", "1"))
        assert winner([family, entry("a", name)]) == "a"
    assert winner([entry("shardwise"), entry("a", "shardwise-conv")]) is None
    assert winner([Entry(MM, RULE, Origin("b-mm", "b", "1")), entry("a", "b-mm")]) == "a"


def test_the_setting_prefer_takes_the_same_names():
    family = Entry(MM, RULE, Origin("shardwise-matmul", "shardwise-matmul", "1"))
    for name in ("shardwise", "shardwise-matmul"):
        assert winner([entry("shardwise"), entry("a")], [("aten.mm", name)]) == "shardwise-matmul"
        assert winner([family, entry("a")], [("aten.mm", name)]) == "shardwise-matmul"


def test_two_that_replace_each_other_are_a_conflict():
    assert winner([entry("a", "b"), entry("b", "a")]) is None


def test_a_circle_is_a_conflict_that_names_it_and_none_that_it_leaves_out_wins():
    circle = [entry("a", "b"), entry("b", "c"), entry("c", "a")]
    assert resolve(MM, (), circle).reason == "a, b, c replace each other in a circle"
    # It replaces nobody, and nothing says that it should hold.
    assert winner([*circle, entry("d")]) is None
    assert resolve(MM, (), [*circle, entry("d")]).reason == "a, b, c replace each other in a circle"
    # What a member of it replaces is no member.
    assert resolve(MM, (), [entry("a", "b"), entry("b", "a"), entry("d", "a"), entry("e", "d")]).reason.startswith(
        "a, b "
    )
    assert winner([*circle, entry("d")], [("aten.mm", "d")]) == "d"


def test_a_replacement_of_something_else_says_nothing():
    assert winner([entry("a", "c"), entry("b")]) is None


def test_every_loser_is_listed_with_the_reason():
    resolution = resolve(MM, [], [entry("shardwise"), entry("a", "shardwise")])
    ((loser, why),) = resolution.losers
    assert (loser.origin.plugin, why) == ("shardwise-matmul", "replaced by a 1")
    assert resolution.reason == "it declares replaces='shardwise'"


NAMES = ["shardwise", "a", "b", "c"]


@given(data=st.data())
def test_the_order_of_entries_and_settings_decides_nothing(data):
    names = data.draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4))
    entries = [entry(n, data.draw(st.sampled_from([None, *(o for o in NAMES if o != n)]))) for n in names]
    keys = data.draw(st.lists(st.sampled_from(["*", "aten.m*", "aten.mm", "aten.mm.default", "aten.add"]), unique=True))
    prefer = [(key, data.draw(st.sampled_from(NAMES))) for key in keys]
    one = resolve(MM, [], entries, prefer)
    other = resolve(MM, [], data.draw(st.permutations(entries)), data.draw(st.permutations(prefer)))
    assert one.winner is other.winner
    assert one.reason == other.reason
    assert [e for e, _ in one.losers] == [e for e, _ in other.losers]
    assert set(one.rivals) == set(entries)
    assert winner(entries, prefer, [entry("x"), entry("y")]) == "y"
