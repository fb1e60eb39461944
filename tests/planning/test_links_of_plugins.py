"""The hook that gives link figures: what it raises or returns by mistake names the plugin."""

from __future__ import annotations

import pytest

from shardwise.errors import PluginLoadError
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.precedence import Origin
from shardwise.planning.cost import answer_of, default_links

ORIGIN = Origin("acme-wires", "acme-wires", "1.0")
MESH = ((2, 2), "cpu", ("ethernet", "ethernet"))


def raises(*_):
    raise ValueError("a mistake of mine")


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (
            raises,
            "its hook shardwise_links raised ValueError: a mistake of mine. Return None, or Links with 2 mesh dims.",
        ),
        (lambda *_: 3, "its hook shardwise_links answers 3."),
        (lambda *_: default_links(AbstractMesh((2,), "cpu")), "Return None, or Links with 2 mesh dims."),
    ],
)
def test_a_hook_that_gives_no_figures_is_named(hook, said):
    with pytest.raises(PluginLoadError) as refusal:
        answer_of(ORIGIN, hook, *MESH)
    assert said in str(refusal.value)
    assert "by the plugin acme-wires 1.0" in str(refusal.value)


def test_figures_and_none_are_answers():
    links = default_links(AbstractMesh((2, 2), "cpu"))
    assert answer_of(ORIGIN, lambda *_: links, *MESH) is links
    assert answer_of(ORIGIN, lambda *_: None, *MESH) is None
