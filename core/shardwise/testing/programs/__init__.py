"""Random programs: chains of calls of registered ops on random meshes and placements, against one device.

:class:`Catalogue` holds sample calls, :func:`draw` makes a :class:`Program` of them, :func:`check_program` runs it on
the ranks of a pool and on one device, and :func:`shrink` makes a small one of one that goes wrong.
"""

from shardwise.testing.programs.drawing import Catalogue, draw
from shardwise.testing.programs.program import Assign, Call, Copy, Leaf, Move, Program, Value, drawn, leaf
from shardwise.testing.programs.shrinking import shrink
from shardwise.testing.programs.verdict import Verdict, check_program

__all__ = [
    "Assign",
    "Call",
    "Catalogue",
    "Copy",
    "Leaf",
    "Move",
    "Program",
    "Value",
    "Verdict",
    "check_program",
    "draw",
    "drawn",
    "leaf",
    "shrink",
]
