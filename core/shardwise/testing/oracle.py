"""The oracle judges a rule: scatter the inputs by its rows over simulated ranks, run the op, gather and compare.

It needs no process group. It judges each row alone on 1-D meshes and rows in combination on N-D meshes, because the
row of one mesh dim gets the shards of the others.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from attrs import define, evolve, field, frozen

from shardwise.errors import RuleError
from shardwise.kernel.arguments import refuse_argument
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import show_all
from shardwise.kernel.rule import AnyRule, FullMeshRule, Rule
from shardwise.kernel.signature import Call, Op, op_name
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.strategies import make_call, problems
from shardwise.testing.cases import Listed, Option, list_cases
from shardwise.testing.given_samples import given_samples, warn_of_large
from shardwise.testing.judge import judge
from shardwise.testing.report import Report, RuleRefuted
from shardwise.testing.samples import Samples, by_op, samples_of
from shardwise.testing.special_values import special_samples
from shardwise.testing.subject import Plugin, subject_of
from shardwise.testing.trial import Case, Illegal, Trial
from shardwise.testing.values import Sample

__all__ = ["MESHES", "Report", "RuleRefuted", "check_plugin", "check_rule", "quietly"]

MESHES: tuple[tuple[int, ...], ...] = ((4,), (2, 2), (2, 3))
# The most random combinations of rows per sample and N-D mesh: without a limit of cases, and the least with one.
_ALL = 49
_FEW = 4
# Calls with special values are made from so many samples of an op: without a limit of cases, and one per so many cases.
_SPECIAL = 4
_FEW_SPECIAL = 20

_MEND_ROW = "Remove or correct the row, or give it a lowering."
_MEND_FAKE = (
    "Make the op's fake (torch.library.register_fake) or the rule's results= say what the op returns, "
    "or give samples of calls that the op is meant for."
)

StandIns = Mapping[Any, Callable[..., Any]]  # by op, or what stands for one


@frozen
class _Settings:
    meshes: tuple[tuple[int, ...], ...]
    cases: int | None
    seed: int
    stand_ins: Mapping[Op, Callable[..., Any]]
    keep_going: bool
    trust_results: bool
    strided: bool


def check_rule(  # noqa: PLR0913  # keyword-only options of one value
    rule: AnyRule,
    samples: Samples | Sequence[Sample] | None = None,
    *,
    meshes: Sequence[Sequence[int]] = MESHES,
    cases: int | None = None,
    seed: int = 0,
    stand_ins: StandIns | None = None,
    keep_going: bool = False,
    trust_results: bool = False,
    strided: bool | None = None,
) -> Report:
    """Judge a rule on every op that it names. Raises :class:`RuleRefuted` with the first wrong row.

    ``samples`` are ``(args, kwargs)`` of whole CPU tensors: one list for all ops, or a mapping from ops to
    functions that make lists (the samples of other ops are made from the schemas). ``cases`` bounds the number of cases
    per op (a seeded choice that contains every row). ``stand_ins`` run in place of ops that this machine lacks.
    With ``keep_going`` the report collects the refusals, one per op and row. ``trust_results`` takes the results'
    shapes and dtypes from data, for an op without a meta kernel. ``strided`` judges the rows with strided shards as
    well, by default where ``cases`` sets no bound.

    Calls with zeros of both signs, infinities, NaN and numbers far from 1 are made from the samples and added.
    """
    if not isinstance(rule, (Rule, FullMeshRule)):
        refuse_argument("judge a rule", "rule", rule, "Pass what rule(), rule_from() or full_mesh_rule() returned.")
    if cases is not None and (type(cases) is not int or cases < 1):
        refuse_argument("judge a rule", "cases", cases, "Give the most cases per op, a whole number above 0.")
    inside = cases is None if strided is None else strided
    shapes, run_by = _mesh_shapes(meshes), by_op(stand_ins or {})
    settings = _Settings(shapes, cases, seed, run_by, keep_going, trust_results, inside)
    report = Report(rules=1)
    by_overload = by_op(samples or {}) if samples is None or isinstance(samples, Mapping) else samples
    for op in rule.ops:
        with quietly():
            calls = samples_of(op, by_overload) if isinstance(by_overload, Mapping) else given_samples(op, by_overload)
        warn_of_large(op, calls)
        guessed = isinstance(by_overload, Mapping) and op not in by_overload
        with quietly():
            report += _Hearing(rule, op, settings, guessed).run(calls)
    return report


def _mesh_shapes(meshes: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of meshes; raises :class:`ArgumentError` for what is no list of them."""
    is_list = isinstance(meshes, Sequence) and all(isinstance(shape, Sequence) and shape for shape in meshes)
    if not is_list or not all(type(size) is int and size > 0 for shape in meshes for size in shape):
        refuse_argument("judge a rule", "meshes", meshes, f"Give shapes of meshes with sizes above 0, as in {MESHES}.")
    return tuple(map(tuple, meshes))


@contextmanager
def quietly() -> Iterator[None]:
    """Hide warnings of sample calls, and use one thread: for small tensors a thread pool costs more than it gains."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


def check_plugin(plugin: Plugin, samples: Samples | None = None, **options: Any) -> Report:
    """:func:`check_rule` over all rules of a plugin; takes the same options.

    ``plugin`` is the name of an installed plugin, a module (or other object) with a ``shardwise_register`` hook that
    need not be installed, a rule, or a list of rules. Raises :class:`PluginLoadError` for anything else, and for a
    plugin that does not load.
    """
    report = Report()
    for rule in subject_of(plugin).rules:
        report += check_rule(rule, samples, **options)
    return report


@frozen(eq=False)
class _Candidate:
    """A sample call and a case of it that may be run."""

    trial: Trial
    call: Call
    option: Option


@define(eq=False)
class _Hearing:
    """The judgement of one op of a rule. ``ran`` maps each row to whether it ran.

    ``guessed`` is true for sample calls from the schema. The rule may refuse some of them.
    """

    rule: AnyRule
    op: Op
    settings: _Settings
    guessed: bool
    ran: dict[str, bool] = field(factory=dict, init=False)
    cases: int = field(default=0, init=False)
    left: int = field(default=0, init=False)
    refuted: dict[tuple[str, ...], RuleRefuted] = field(factory=dict, init=False)

    def run(self, calls: Sequence[Sample]) -> Report:
        rng = random.Random(self.settings.seed + crc32(op_name(self.op).encode()))  # noqa: S311  chance, no secret
        limit = self.settings.cases
        special = special_samples(self.op, calls, _SPECIAL if limit is None else 1)
        if limit is not None:  # one for each few cases
            special = rng.sample(special, min(len(special), 1 + limit // _FEW_SPECIAL))
        calls = [*calls, *special]
        trials = [trial for trial in self._trials(calls) if self._takes(trial)]
        most = _ALL if limit is None else max(_FEW, 2 * limit // max(1, len(trials)))
        meshes = [AbstractMesh(shape) for shape in self.settings.meshes]
        several = [mesh for mesh in meshes if mesh.ndim > 1]
        candidates: list[_Candidate] = []
        for trial in trials:
            if limit is not None:  # the 1-D meshes and one of the others
                meshes = [mesh for mesh in meshes if mesh.ndim == 1] + rng.sample(several, min(1, len(several)))
            for mesh in meshes:
                candidates += self._candidates(trial, mesh, rng, most)
        if limit is not None:
            # A seeded choice of about ``limit`` candidates that contains every row.
            rows: set[str] = set()
            with_new_rows: list[_Candidate] = []
            others: list[_Candidate] = []
            for candidate in rng.sample(candidates, len(candidates)):
                (others if rows.issuperset(candidate.option.rows) else with_new_rows).append(candidate)
                rows.update(candidate.option.rows)
            candidates = (with_new_rows + others)[: max(limit, len(with_new_rows))]
        for candidate in candidates:
            if candidate.option.rows not in self.refuted:
                self._try(candidate)
        return Report(
            ops=1,
            rows=sum(self.ran.values()),
            cases=self.cases,
            left=self.left,
            unexercised=tuple(f"{op_name(self.op)}: {name}" for name, ran in self.ran.items() if not ran),
            unsampled=() if trials or self.refuted else (op_name(self.op),),
            refuted=tuple(self.refuted.values()),
        )

    def _trials(self, calls: Sequence[Sample]) -> Iterator[Trial]:
        run = self.settings.stand_ins.get(self.op, self.op)
        for args, kwargs in calls:
            try:
                trial = Trial.of(self.rule, self.op, args, kwargs, run)
            except Illegal:
                continue
            if trial.disagreement and not self.settings.trust_results:
                self._refuse(trial, None, trial.disagreement, do=_MEND_FAKE)
            elif self.settings.trust_results:
                real = trial.expected.tensors
                yield evolve(trial, planned=tuple(None if t is None else TensorMeta.of(t) for t in real))
            else:
                yield trial

    def _takes(self, trial: Trial) -> bool:
        """Whether the rule takes a call. An op may accept more calls than its rule. If the rule refuses a guessed call,
        that is no evidence against it: on a mesh the call raises the rule's error.
        """
        if not self.guessed or trial.op.namespace == "aten" or isinstance(self.rule, FullMeshRule):
            return True
        schema = trial.schema(AbstractMesh((1,)))
        try:
            problems(self.rule, schema, make_call(self.rule, schema, trial.planned))
        except RuleError:
            return False
        except Exception:  # noqa: BLE001  :meth:`_candidates` reports it
            return True
        return True

    def _candidates(self, trial: Trial, mesh: AbstractMesh, rng: random.Random, most: int) -> list[_Candidate]:
        schema = trial.schema(mesh)
        call = make_call(self.rule, schema, trial.planned)
        try:
            listed = list_cases(self.rule, schema, call, mesh, rng, most)
            if self.settings.strided and not isinstance(self.rule, FullMeshRule):
                inside = list_cases(self.rule, schema, call, mesh, rng, most, strided=True)
                names = {name for option in inside.options for name in option.rows}
                listed = Listed((*listed.options, *inside.options), (*listed.rows, *names), listed.left + inside.left)
        except Exception as error:  # noqa: BLE001  a rule is a plugin's function and may raise anything
            # What names the rule's line already says what its function did.
            is_about_rule = isinstance(error, RuleError) and "source" in error.fields
            what = error.found if is_about_rule else f"the rule raises {type(error).__name__}: {error}"  # type: ignore[attr-defined]
            self._refuse(trial, None, what, error)
            return []
        self.left += listed.left
        for name in listed.rows:
            self.ran.setdefault(name, False)
        return [_Candidate(trial, call, option) for option in listed.options]

    def _try(self, candidate: _Candidate) -> None:
        trial, case = candidate.trial, candidate.option.case()
        self.cases += 1
        generator = torch.Generator().manual_seed(self.settings.seed + self.cases)
        operands = trial.scatter(case, generator)
        before = {at: tuple(None if t is None else t.clone() for t in ts) for at, ts in operands.items()}
        try:
            wrong = judge(trial, case, before, trial.locally(case, candidate.call, operands))
            cause = None
        except Exception as error:  # noqa: BLE001  whatever a rank raises is evidence against the row
            wrong, cause = str(error), error
        if wrong:
            self._refuse(trial, case, wrong, cause)
        self.ran.update(dict.fromkeys(case.rows, True))

    def _refuse(
        self, trial: Trial, case: Case | None, wrong: str, cause: BaseException | None = None, do: str = _MEND_ROW
    ) -> None:
        asked = f"the rule for {op_name(trial.op)} ({self.rule.source}) to {trial}"
        mesh = placements = "-"
        if case is not None:
            mesh = "x".join(map(str, case.mesh.shape))
            placements = f"{_placements_text(case.inputs)} -> {_placements_text(case.outputs)}"
            asked = f"row {' | '.join(case.rows)!r} of {asked} on a {mesh} mesh with {placements}"
        refusal = RuleRefuted(
            asked=f"apply {asked}",
            found=wrong,
            do=do,
            op=op_name(trial.op),
            source=self.rule.source,
            rows=case.rows if case else (),
            mesh=mesh,
            sample=str(trial),
            placements=placements,
        )
        if not self.settings.keep_going:
            raise refusal from cause
        self.refuted.setdefault(tuple(refusal.rows), refusal)


def _placements_text(specs: Sequence[TensorSpec | None]) -> str:
    return ", ".join("-" if s is None else show_all(s.placements) for s in specs)
