"""What depends on streams and on a capture, with torch's answers in place of a card's."""

import pytest
import torch
from shaped_programs import sharded

from shardwise import Shard
from shardwise.comm.events import observe
from shardwise.engine import shared_moves
from shardwise.errors import TracingError
from shardwise.rng import generator
from shardwise.tools.rehearse import rehearse


def gathers_of(monkeypatch, *, stream=lambda _local: "one", captured=lambda _local: False):
    """How often an operand is gathered for two products of the same activation."""
    monkeypatch.setattr(shared_moves, "_stream", stream)
    monkeypatch.setattr(shared_moves, "_is_captured", captured)
    kinds = []

    def program(mesh):
        x = sharded(torch.rand(16, 256), mesh) * 1
        columns = sharded(torch.rand(256, 512), mesh, 1)
        with observe(lambda event: kinds.append(event.kind)), shared_moves.keeping_moves(1 << 20):
            for _ in range(2):
                assert (x @ columns).placements == (Shard(1),)

    rehearse(program, (8,), device="cuda")
    return len(kinds)


def test_a_kept_move_belongs_to_its_stream(monkeypatch):
    once = gathers_of(monkeypatch)
    streams = iter(range(100))
    assert gathers_of(monkeypatch, stream=lambda _local: next(streams)) == 2 * once > 0


def test_nothing_is_kept_while_a_graph_is_captured(monkeypatch):
    assert gathers_of(monkeypatch, captured=lambda _local: True) == 2 * gathers_of(monkeypatch) > 0


def test_draws_by_place_are_refused_in_a_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with generator.using("counter"), pytest.raises(TracingError, match="a CUDA graph is being captured"):
        generator.next_draw(lambda seed, number: (seed, number))
    with generator.using("torch"):
        assert generator.next_draw(lambda seed, number: (seed, number)) is None
