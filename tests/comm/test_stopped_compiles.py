"""A thread that compiles is stopped, whatever the error of the other rank says; one that has finished is not."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from shardwise.comm.failure_notes import Note, World
from shardwise.comm.shared_store import SharedStore
from shardwise.comm.stopped_compiles import raised_as, stop_compiling
from shardwise.errors import RankFailedError

# A bare assert has no message.
NOTE = Note(1, "", "AssertionError", "", "AssertionError", 1, is_final=True)


class Compiles:
    """A thread that compiles until it is released, and then runs on until it may end. ``raised`` is what it raised."""

    def __init__(self) -> None:
        self.is_inside, self.is_released, self.is_outside, self.may_end = (threading.Event() for _ in range(4))
        self.raised: list[BaseException] = []
        # torch 2.11 built for cards crashes without one where all that it compiles, and fails to, is in other threads.
        torch.compile(lambda x: x - 1, backend="eager")(torch.ones(2))
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.is_inside.wait(60)

    def _run(self) -> None:
        try:
            torch.compile(lambda x: x + 1, backend=self._compiler)(torch.ones(2))
            self.is_outside.set()
            _until(self.may_end)
        except BaseException as error:  # noqa: BLE001  # the test looks at it
            self.raised.append(error)

    def _compiler(self, graph: Any, _: Any) -> Any:
        self.is_inside.set()
        _until(self.is_released)
        return graph


def _until(event: threading.Event) -> None:
    end = time.monotonic() + 60
    while not event.is_set() and time.monotonic() < end:
        time.sleep(0.01)  # in Python, where an error can be raised


@pytest.mark.parametrize("finishes", [False, True], ids=["it compiles", "it finishes meanwhile"])
def test_a_thread_is_stopped_only_inside_a_compiler(monkeypatch: pytest.MonkeyPatch, finishes: bool) -> None:
    compiles = Compiles()

    def give_up(world: World, note: Note) -> None:  # closes connections, which takes its time
        world.failure = note
        if finishes:
            compiles.is_released.set()
            assert compiles.is_outside.wait(60)

    monkeypatch.setattr(World, "give_up", give_up)
    world = World(store=SharedStore(None, 2), rank=0, size=2, prefix="", default_group=lambda: None, final={1: NOTE})
    stop_compiling(world)
    time.sleep(0.1)
    compiles.may_end.set()
    compiles.thread.join(60)
    assert world.failure is NOTE
    assert len(compiles.raised) == (0 if finishes else 1)
    assert finishes or "rank 1 has failed: AssertionError" in str(compiles.raised[0])


def test_python_may_give_the_class_a_value():
    """It does where the error arrives while the thread makes another one."""
    error = RankFailedError(asked="wait for the other ranks", found="rank 1 has failed", do="Correct it.")
    assert raised_as(error)() is error
    assert raised_as(error)("takes 2 arguments") is error
    assert issubclass(raised_as(error), RankFailedError)
