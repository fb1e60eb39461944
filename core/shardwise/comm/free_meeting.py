"""A meeting of ranks that a program has not asked for, from which they go on where one of them does not come.

A collective, or a question of :func:`shardwise.comm.rank_failures.all_say`, ends the program where ranks have parted. A
program whose ranks part where it sends nothing runs without this meeting, so it must run with it. So a rank that waits
here waits for nobody as far as other ranks see: it looks itself whether those that it misses still may come. If one has
ended, has failed or waits for this rank elsewhere, it goes on. What comes of a meeting is written once, so that all
ranks, late ones too, take the same from it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Sequence
from typing import Any

from shardwise.comm.failure_notes import TICK, World
from shardwise.comm.gone_processes import gone_rank
from shardwise.comm.rank_failures import joined_world
from shardwise.comm.standstill import waits_for_this_rank

__all__ = ["meet"]

_SHORTEST, _LONGEST = 0.0002, 0.02  # seconds between two looks at what came of a meeting
_STANDS = 1.0  # seconds for which a rank is seen to fail or to wait elsewhere, until it is not expected any more
_LIMIT = 30.0  # seconds until a rank that only does not come is not expected any more

_SAME, _DIFFERENT, _PARTED = "same", "different", "parted"


def meet(text: str, ranks: Sequence[int]) -> bool | None:
    """Whether some ranks come here and say the same text; ``None``, on each of them, if one of them does not come.

    After ``None`` the ranks may be at different meetings, so none of them may go to another one.
    """
    world = joined_world()
    if world is None or world.failure is not None:
        return None
    # Ranks that have parted have been at different numbers of meetings; they count anew when they start anew.
    place = f"learn/{world.epoch}/{hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]}"
    world.asked[place] += 1
    try:
        came = _what_came(world, f"{world.prefix}/{place}/{world.asked[place]}", text, ranks)
    except RuntimeError:  # the store is gone, as its process has ended
        return None
    return None if came == _PARTED else came == _SAME


def _what_came(world: World, key: str, text: str, ranks: Sequence[int]) -> str:
    store = world.store
    same = f"{key}/{hashlib.sha256(text.encode()).hexdigest()}"
    store.add(same, 1)
    store.set(f"{key}/came/{world.rank}", "")
    if store.add(f"{key}/all", 1) == len(ranks):
        _end(world, key, _SAME if store.add(same, 0) == len(ranks) else _DIFFERENT)
    begin, pause, looks_at, seen = time.monotonic(), _SHORTEST, TICK, dict[Any, float]()
    while not store.check([f"{key}/end"]):
        waited = time.monotonic() - begin
        if waited >= looks_at:
            looks_at = waited + TICK
            missing = [r for r in ranks if r != world.rank and not store.check([f"{key}/came/{r}"])]
            if waited >= _LIMIT or world.failure is not None or _is_elsewhere(world, missing, waited, seen):
                _end(world, key, _PARTED)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    return str(store.get(f"{key}/end").decode())


def _end(world: World, key: str, came: str) -> None:
    """Write what came of a meeting, unless a rank has done so."""
    world.store.compare_set(f"{key}/end", "", came)


def _is_elsewhere(world: World, missing: Collection[int], waited: float, seen: dict[Any, float]) -> bool:
    """Whether one of the ranks that have not come will not come, as far as can be known.

    ``seen`` has what they say of themselves, and how long this rank had waited when it first saw that.
    """
    notes = world.read(list(missing))
    if any(note.is_final or note.is_end for note in notes.values()) or gone_rank(world, missing) is not None:
        return True
    # One that waits for a late rank, and not for this one, comes when that has come.
    awaits = ((rank, waits_for_this_rank(world, rank)) for rank in missing)
    says: list[Any] = [*notes.items(), *((rank, what) for rank, what in awaits if what)]
    standing = {said: seen.get(said, waited) for said in says}
    seen.clear()
    seen.update(standing)
    return any(waited - since >= _STANDS for since in standing.values())
