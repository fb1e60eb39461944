"""The pictures by the names of their files."""

from collections.abc import Callable, Mapping

import layout_pictures
import rule_pictures
import time_pictures
from svg_canvas import Picture

PICTURES: Mapping[str, Callable[[], Picture]] = {
    "halo-exchange": time_pictures.halo_exchange,
    "landing": rule_pictures.landing,
    "life-of-a-call": rule_pictures.life_of_a_call,
    "life-of-a-plugin": rule_pictures.life_of_a_plugin,
    "nested-cuts": layout_pictures.nested_cuts,
    "overlap": time_pictures.overlap,
    "partial-to-whole": layout_pictures.partial_to_whole,
    "placements": layout_pictures.placements,
    "plan": time_pictures.plan,
    "redistribution": layout_pictures.redistribution,
    "ring-attention": time_pictures.ring_attention,
    "rule-to-strategy": rule_pictures.rule_to_strategy,
}
