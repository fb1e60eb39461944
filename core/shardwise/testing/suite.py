"""The tests of a plugin as one class that its author subclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from shardwise.errors import PluginLoadError
from shardwise.kernel.rule import AnyRule
from shardwise.kernel.signature import Op, op_name
from shardwise.private_torch.ops import OpLike
from shardwise.testing.gradients import check_gradients
from shardwise.testing.light import heavy_imports
from shardwise.testing.oracle import check_rule
from shardwise.testing.pickling import importable
from shardwise.testing.pool import WorkerPool
from shardwise.testing.report import Report
from shardwise.testing.samples import Samples, by_op, samples_of
from shardwise.testing.schema_samples import lacks_fake
from shardwise.testing.subject import Plugin, Subject, subject_of
from shardwise.testing.values import one_op

__all__ = ["PluginTests"]


class PluginTests:
    """The tests of a plugin. Subclass it in a test module and name the plugin; pytest collects a test for each rule.

    ::

        class TestAcme(PluginTests):
            plugin = "acme-kernels"
            samples = {acme.ops.swish_gate: [((made((5, 7)), made((5, 7), seed=1)), {})]}

    ``plugin`` and ``samples`` are those of :func:`shardwise.testing.check_plugin`. The tests on real ranks use the
    ``pool`` fixture of :mod:`shardwise.testing.pytest_plugin`. State whatever is left out, each with a reason: ops
    without a sample in ``unsampled``, and rows that no sample reaches in ``unexercised`` (by the line that the failing
    test shows). ``imports`` names the packages that the plugin's module may import besides its own. A reason that no
    longer holds fails a test, too.
    """

    plugin: ClassVar[Plugin]
    samples: ClassVar[Samples] = {}
    stand_ins: ClassVar[Mapping[OpLike, Callable[..., Any]]] = {}
    """Run in place of ops that this machine lacks; such ops do not run on real ranks."""
    unsampled: ClassVar[Mapping[OpLike, str]] = {}
    unexercised: ClassVar[Mapping[str, str]] = {}
    imports: ClassVar[Sequence[str]] = ()
    cases: ClassVar[int | None] = 40
    """Cases per op that the oracle tries, which contain every row; ``None``: all."""
    rank_cases: ClassVar[int] = 8
    """Cases per op on real ranks; 0: none."""
    seed: ClassVar[int] = 0

    _reports: ClassVar[dict[AnyRule, Report]]
    _subject: ClassVar[Subject | None]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._reports = {}
        cls._subject = None

    # -- collecting --
    @classmethod
    def pytest_generate_tests(cls, metafunc: Any) -> None:
        """Called by pytest for each test of the class: a ``rule`` or an ``op`` argument gets each of the plugin's."""
        import pytest

        for name, listed in (("rule", cls._rules), ("op", cls._ops_on_ranks)):
            if name not in metafunc.fixturenames:
                continue
            try:
                parameters = [pytest.param(value, id=label) for label, value in listed()]
            except Exception as error:  # noqa: BLE001  it fails the test and not the whole collection
                parameters = [pytest.param(error, id="loads")]
            metafunc.parametrize(name, parameters)

    @classmethod
    def subject(cls) -> Subject:
        """The plugin's rules. Raises :class:`PluginLoadError` when they cannot be read."""
        if cls._subject is None:
            if not hasattr(cls, "plugin"):
                raise PluginLoadError(
                    asked=f"collect the tests of {cls.__name__}",
                    found="it names no plugin",
                    do="Set plugin = to the name of an installed plugin, a module with the hook, or a list of rules.",
                    plugin="",
                )
            cls._subject = subject_of(cls.plugin)
        return cls._subject

    @classmethod
    def _rules(cls) -> Iterator[tuple[str, AnyRule]]:
        for rule in cls.subject().rules:
            more = f"+{len(rule.ops) - 1}" if len(rule.ops) > 1 else ""
            yield f"{op_name(rule.ops[0])}{more}", rule

    @classmethod
    def _ops_on_ranks(cls) -> Iterator[tuple[str, Op]]:
        left_out = {*by_op(cls.stand_ins), *by_op(cls.unsampled)}
        for op in (op for rule in cls.subject().rules for op in rule.ops) if cls.rank_cases else ():
            if op not in left_out and torch.Tag.nondeterministic_seeded not in op.tags:
                yield op_name(op), op

    # -- judging --
    @classmethod
    def report(cls, rule: AnyRule) -> Report:
        """The oracle's report on one rule, made once."""
        if rule not in cls._reports:
            options: dict[str, Any] = {"stand_ins": cls.stand_ins, "cases": cls.cases, "seed": cls.seed}
            cls._reports[rule] = check_rule(rule, cls.samples, keep_going=True, **options)
        return cls._reports[rule]

    @classmethod
    def total(cls) -> Report:
        """The oracle's report on all rules."""
        return sum((cls.report(rule) for rule in cls.subject().rules), Report())

    # -- the tests --
    def test_the_oracle_accepts(self, rule: AnyRule) -> None:
        """Each row of the rule gives what the op gives on one device."""
        if isinstance(rule, Exception):
            raise rule
        refuted = self.report(rule).refuted
        assert not refuted, "\n\n".join(map(str, refuted))

    def test_every_op_is_sampled(self) -> None:
        """Each op has a call that it takes on this machine, or a reason in ``unsampled``."""
        missing = self.total().unsampled
        stated = {op_name(one_op(op, "read unsampled")): why for op, why in self.unsampled.items()}
        _check_stated("ops without a sample that they take", missing, stated, "samples, or a reason in unsampled")

    def test_every_op_has_a_fake(self) -> None:
        """Each op says without data what it returns, unless data decide the shape (then torch has a tag for it).

        An op that does not runs on whole tensors only, whatever its rule says. The test skips torch's own ops.
        """
        samples = by_op(self.samples)
        ops = {op for rule in self.subject().rules for op in rule.ops if op.namespace != "aten"}
        ops -= set(by_op(self.stand_ins))
        silent = sorted(op_name(op) for op in ops if lacks_fake(op, samples_of(op, samples)))
        assert not silent, f"no fake says what these return: {', '.join(silent)}. Use torch.library.register_fake"

    def test_every_row_is_exercised(self) -> None:
        """Each row ran in some case, or has a reason in ``unexercised``."""
        missing = self.total().unexercised
        _check_stated("rows that no sample reaches", missing, self.unexercised, "a sample, or a reason in unexercised")

    def test_the_module_is_light(self) -> None:
        """The module with the hook imports only what is stated: every process that looks up a rule imports it."""
        import pytest

        module = self.subject().module
        if module is None or not importable(module):
            pytest.skip("the hook is in no module that a fresh process can import")
        heavy = heavy_imports(module, allowed=self.imports)
        assert not heavy, (
            f"{module} imports {', '.join(heavy)}: import these where they are needed, or state them in imports = (...)"
        )

    def test_real_ranks_give_what_one_device_does(self, op: Op, pool: WorkerPool) -> None:
        """Results and gradients on the pool's ranks are those of one device."""
        import pytest

        if isinstance(op, Exception):
            raise op
        samples = samples_of(op, by_op(self.samples))
        if not samples:
            pytest.skip(f"{op_name(op)} has no sample")
        rules = self.subject().loose_rules
        check_gradients(op, samples, pool=pool, rules=rules, cases=max(self.rank_cases, 1), seed=self.seed)


def _check_stated(what: str, missing: Iterable[str], stated: Mapping[str, str], want: str) -> None:
    unstated = sorted(set(missing) - set(stated))
    assert not unstated, f"{what}: {'; '.join(unstated)}. Give each {want}"
    stale = sorted(set(stated) - set(missing))
    assert not stale, f"a reason is stated for {'; '.join(stale)}, which are not among the {what} any more: remove it"
    bare = sorted(name for name, why in stated.items() if not why.strip())
    assert not bare, f"no reason is stated for {'; '.join(bare)}"
