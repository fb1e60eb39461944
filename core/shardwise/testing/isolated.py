"""A registry of one's own for a while, so that a test sees exactly the rules that it names."""

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
        """Take rules as if a plugin of this name had handed them over.

        An op that has a rule already then has two, as between two plugins; :meth:`override` puts rules above others.
        Raises :class:`RuleError` for something that is no rule, and for an op that comes twice.
        """
        registrar = Registrar(Origin(plugin, distribution))
        registrar.add(*rules)
        self.accept(registrar)


@contextmanager
def isolated_registry(*rules: AnyRule, installed: bool = False) -> Iterator[IsolatedRegistry]:
    """Make a registry of its own this process's one, with ``rules`` above all others; afterwards the old one is back.

    Without ``installed`` it has nothing else; with it, the rules of all installed plugins. Plans that were made by
    other rules are forgotten on the way in and out. It concerns this process only: on a pool's workers, enter it in
    the function that is sent.
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
