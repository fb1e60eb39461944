"""Modules of torch that are changed when something else imports them, because loading them takes time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from attrs import frozen

__all__ = ["when_imported"]


def when_imported(name: str, call: Callable[[ModuleType], None]) -> None:
    """Call a function with a module: now if it is imported already, else right after its first import."""
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Import(name, call))


@frozen(eq=False)
class _Import(MetaPathFinder):
    """An entry of ``sys.meta_path`` that calls a function with one module, after the module's first import."""

    name: str
    call: Callable[[ModuleType], None]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002  # Python's
        if name != self.name:
            return None
        with suppress(ValueError):  # another thread was here first
            sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_call(module: ModuleType) -> None:
                load(module)
                self.call(module)

            spec.loader.exec_module = load_and_call  # type: ignore[method-assign]
        return spec
