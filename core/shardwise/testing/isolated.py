"""A temporary registry, so that a test sees exactly the rules that it names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.discovery.entry_points import discover
from shardwise.discovery.loading import load
from shardwise.discovery.process import use_registry
from shardwise.kernel.dispatcher import clear_plans
from shardwise.kernel.precedence import Origin
from shardwise.kernel.registry import Registrar, Registry
from shardwise.kernel.rule import AnyRule

__all__ = ["IsolatedRegistry", "isolated_registry"]


class IsolatedRegistry(Registry):
    """A registry that is easy to fill by hand."""

    def add(self, *rules: AnyRule, plugin: str = "test", distribution: str = "this test") -> None:
        """Add rules as if a plugin of this name had registered them.

        A second rule for an op is a conflict, as between two plugins; :meth:`override` puts rules above others.
        Raises :class:`RuleError` for a value that is not a rule, and for an op that occurs twice.
        """
        registrar = Registrar(Origin(plugin, distribution))
        registrar.add(*rules)
        self.accept(registrar)


@contextmanager
def isolated_registry(*rules: AnyRule, installed: bool = False) -> Iterator[IsolatedRegistry]:
    """Replace this process's registry by a new one, with ``rules`` above all others; restore the old one at the end.

    With ``installed`` it also has the rules of all installed plugins. Entering and leaving clears the plans of other
    rules. It changes this process only: on a pool's workers, enter it in the function that the pool runs.
    """
    registry = IsolatedRegistry()
    if installed:
        load(discover(), registry)
    if rules:
        registry.override(*rules)
    with use_registry(registry):
        clear_plans()
        try:
            yield registry
        finally:
            clear_plans()
