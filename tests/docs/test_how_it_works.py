"""The page's walk of one call: a miss goes through the files that it names, a hit through none but the handler."""

import re
import sys
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise import Shard
from shardwise.kernel import dispatcher

CORE = Path(sw.__file__).parent


def files_called(call):
    """The files of core whose functions a call enters."""
    files = set()

    def note(frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(CORE)):
            files.add(str(Path(name).relative_to(CORE)))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def miss_and_hit():
    mesh = init_device_mesh("cpu", (4,))
    # Sizes that no other test has: the first call is a miss.
    a = sw.MeshTensor.from_local(torch.ones(3, 12 * 7), mesh, [Shard(0)])
    b = sw.MeshTensor.from_local(torch.ones(3 * 7, 19), mesh, [Shard(0)])
    dispatcher.clear_plans()  # another test may have called the op
    moved = files_called(lambda: torch.mm(a, b))
    whole = sw.ones(84, 19, device_mesh=mesh)
    torch.mm(a, whole)
    return moved, files_called(lambda: torch.mm(a, whole))


def walk(page):
    """The files of the page's table, in its order."""
    table = page.split("## The life of one call")[1].split("\n## ")[0]
    folder, files = "", []
    for cell in re.findall(r"^\|[^|]*\|([^|]*)\|", table, re.MULTILINE):
        for name in re.findall(r"`([\w/]+\.py)`", cell):
            folder = name.rpartition("/")[0] or folder
            files.append(f"{folder}/{name.rpartition('/')[2]}")
    return files


def test_a_call_goes_where_the_page_says(pool, docs):
    hit, *miss = walk((docs.ROOT / "docs" / "how-it-works.md").read_text())
    assert hit == "kernel/handlers.py"
    for moved, direct in pool.run(miss_and_hit):
        assert set(miss) <= moved
        assert not direct  # the handler is generated, so it is in no file
