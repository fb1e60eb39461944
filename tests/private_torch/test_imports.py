"""The shelf ``private_torch.imports``: modules that are changed when something else imports them."""

from __future__ import annotations

import importlib
import sys

from shardwise.private_torch.imports import when_imported


def test_a_module_is_handed_over_right_after_its_first_import(monkeypatch, tmp_path):
    (tmp_path / "comes_later.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    when_imported("comes_later", lambda module: seen.append(module.value))
    assert not seen
    importlib.import_module("comes_later")
    importlib.import_module("comes_later")
    assert seen == [1]
    monkeypatch.delitem(sys.modules, "comes_later")


def test_a_module_that_is_there_is_handed_over_at_once():
    seen = []
    when_imported("sys", seen.append)
    assert seen == [sys]
