"""What is written is whole, and takes the place of nothing but a file."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
from full_disk import full_disk

from shardwise.kernel.foreign_files import read_beginning, read_bytes
from shardwise.kernel.whole_files import write_whole


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / ("a" * 255)  # as long as names can be
    for text in ("first", "zweite\n"):
        write_whole(path, text)
        assert path.read_bytes() == text.encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_a_socket_or_a_folder_stays_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name, kind in (("pipe", stat.S_ISFIFO), ("socket", stat.S_ISSOCK), ("folder", stat.S_ISDIR)):
            with pytest.raises(OSError, match="it is not a file"):
                write_whole(tmp_path / name, "text")
            assert kind((tmp_path / name).lstat().st_mode)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_link_is_replaced_and_not_followed(tmp_path):
    target = tmp_path / "target"
    target.write_text("mine")
    for name, to in (("link", "target"), ("dangling", "nowhere"), ("loop", "loop")):
        (tmp_path / name).symlink_to(to)
        write_whole(tmp_path / name, "new")
        assert not (tmp_path / name).is_symlink()
    assert target.read_text() == "mine"


def test_after_an_error_the_file_is_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_text("before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "a"
    path.write_text("before")
    with full_disk(), pytest.raises(OSError, match="File too large"):
        write_whole(path, "after" * 100)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_letters_that_no_file_of_utf_8_has_are_an_error_as_others_are(tmp_path):
    path = tmp_path / "a"
    path.write_text("before")
    with pytest.raises(OSError, match="UTF-8"):
        write_whole(path, "name \udcff")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("read", [read_bytes, lambda path: read_beginning(path, 3)], ids=["all", "the beginning"])
def test_what_is_read_is_what_was_opened(tmp_path, monkeypatch, read):
    """A pipe that takes the place of a file after it was looked at holds nothing up."""
    path = tmp_path / "a"
    os.mkfifo(path)
    monkeypatch.setattr(Path, "is_file", lambda _: True)
    with pytest.raises(ValueError, match="it is not a file"):
        read(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        read(path)
