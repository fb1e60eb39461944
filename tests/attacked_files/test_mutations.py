"""The attacks: each kind changes something, and the watch sees what it is to see."""

import os
import subprocess
import sys

import pytest
from mutations import MUTATIONS, drawing, misplaced, mutated, watched

TEXT = b'{"version": 1, "digest": "0123456789abcdef", "name": [1, 2],\n "more": {"deep": 3}\n}\n'


def test_every_kind_of_mutation_is_drawn_and_changes_the_file():
    drawn = [mutated(drawing(seed), TEXT, [TEXT.replace(b"abc", b"xyz")]) for seed in range(600)]
    assert {what for what, _ in drawn} == set(MUTATIONS)
    changed = {what for what, data in drawn if data != TEXT}
    assert changed == set(MUTATIONS)
    assert sum(data == TEXT for _, data in drawn) < 60
    assert [mutated(drawing(3), TEXT), mutated(drawing(3), TEXT)] == [mutated(drawing(3), TEXT)] * 2


def test_every_kind_of_misplacing_is_drawn(tmp_path):
    kinds = set()
    for seed in range(40):
        (tmp_path / str(seed)).mkdir()
        path = tmp_path / str(seed) / "file"
        path.write_bytes(TEXT)
        kinds.add(misplaced(drawing(seed), path))
        assert not path.is_file() or path.is_symlink()
    assert kinds == {"folder", "nothing", "pipe", "link out", "link to itself"}


def opened_elsewhere(folder):
    (folder.parent / "secret").read_text()


def written_inside(folder):
    (folder / "new").write_text("")


def followed(folder):
    (folder / "link").symlink_to(folder.parent / "secret")
    (folder / "link").read_text()


ACTS = {
    "reads elsewhere": opened_elsewhere,
    "writes": written_inside,
    "follows a link": followed,
    "runs a command": lambda _: os.system("true"),  # noqa: S605, S607  # it is seen, that is all
    "starts a process": lambda _: subprocess.run([sys.executable, "--version"], check=True, capture_output=True),
    "removes": lambda folder: (folder / "there").unlink(),
    "makes a folder": lambda folder: (folder / "more").mkdir(),
}


@pytest.mark.parametrize("act", ACTS)
def test_the_watch_sees(tmp_path, act):
    folder = tmp_path / "it"
    folder.mkdir()
    (folder / "there").write_text("")
    (tmp_path / "secret").write_text("")
    with pytest.raises(AssertionError), watched(folder):
        ACTS[act](folder)


def test_the_watch_lets_files_of_the_folder_be_read(tmp_path):
    (tmp_path / "there").write_text("it")
    with watched(tmp_path):
        assert (tmp_path / "there").read_text() == "it"
    (tmp_path / "there").write_text("afterwards all is as before")
