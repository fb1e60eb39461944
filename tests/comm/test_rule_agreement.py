"""Ranks agree on their rules where a mesh is first used. Different installations are tested in tests/installed."""

import importlib
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.comm import events, rule_agreement
from shardwise.discovery.process import use_registry
from shardwise.errors import RankDisagreementError
from shardwise.kernel.precedence import Origin
from shardwise.kernel.registry import Registrar, Registry
from shardwise.rule.authoring import rule
from shardwise.testing import mesh


def registry_of(version, notation="R, R -> R"):
    registrar = Registrar(Origin("acme", "acme", version))
    registrar.add(rule(torch.ops.aten.mm.default, notation))
    registry = Registry()
    registry.accept(registrar)
    return registry


def refusal(make):
    """What this rank raises when it first uses a mesh with a registry of its own."""
    rule_agreement.forget()
    grid = mesh((2, 2))
    try:
        with use_registry(make(dist.get_rank())):
            sw.ones(4, device_mesh=grid)
    except RankDisagreementError as error:
        return error.differences
    finally:
        rule_agreement.forget()
    return ()


def by_version(rank):
    return registry_of("2" if rank == 3 else "1")


def by_notation(rank):
    return registry_of("1", "m n, R -> m n" if rank % 2 else "R, R -> R")


def alike(_):
    return registry_of("1")


def by_module(folder, rank):
    """The plugin registers a module of rules, whose files are those of this rank; it is imported on some ranks."""
    sys.path.insert(0, str(Path(folder) / f"{rank % 2}"))
    importlib.invalidate_caches()
    registrar = Registrar(Origin("acme", "acme", "1"))
    registrar.add_modules({Path(folder).name: "aten::mm"})
    registry = Registry()
    registry.accept(registrar)
    if rank == 2:
        registry.lookup(torch.ops.aten.mm.default)
    return registry


def refusal_by_module(folder):
    try:
        return refusal(partial(by_module, folder))
    finally:
        sys.path.pop(0)
        sys.modules.pop(Path(folder).name, None)


MODULE = """
import torch
from shardwise.rule import rule
RULES = [rule(torch.ops.aten.mm.default, "{notation}")]
"""


def write(folder, *texts):
    for number, text in enumerate(texts):
        (folder / f"{number}").mkdir()
        (folder / f"{number}" / f"{folder.name}.py").write_text(text)
    return str(folder)


def many(rank):
    registry = registry_of("1")
    for i in range(12):
        registry.origins.append(Origin(f"p{i}", f"p{i}", str(rank)))
    return registry


def test_every_rank_raises_and_names_what_differs(pool):
    answers = pool.run(refusal, by_version)
    assert len(set(answers)) == 1
    assert "plugin acme: acme 1 on ranks 0, 1, 2, acme 2 on rank 3" in answers[0]


def test_a_rule_that_reads_otherwise_in_one_version_differs(pool):
    (differences,) = set(pool.run(refusal, by_notation))
    (line,) = differences
    assert line.startswith("rule aten.mm.default: acme 1: R, R -> R on ranks 0, 2, acme 1: m n, R -> m n on ranks 1, 3")


def test_a_module_of_rules_that_reads_otherwise_on_a_rank_differs_by_its_rules(pool, tmp_path):
    folder = write(tmp_path, MODULE.format(notation="R, R -> R"), MODULE.format(notation="m n, R -> m n"))
    (differences,) = set(pool.run(refusal_by_module, folder))
    assert differences == (
        "rule aten.mm.default: acme 1: R, R -> R on ranks 0, 2, acme 1: m n, R -> m n on ranks 1, 3",
    )


def test_a_module_that_cannot_be_imported_on_a_rank_differs_and_the_cause_is_named(pool, tmp_path):
    folder = write(tmp_path, MODULE.format(notation="R, R -> R"), "import no_such_library")
    (differences,) = set(pool.run(refusal_by_module, folder))
    cause = "cannot be had: ModuleNotFoundError: No module named 'no_such_library' on ranks 1, 3"
    assert differences == (f"rule aten.mm.default: acme 1: R, R -> R on ranks 0, 2, {cause}",)


def test_a_module_with_other_words_and_the_same_rules_is_no_difference(pool, tmp_path):
    text = MODULE.format(notation="R, R -> R")
    assert pool.run(refusal_by_module, write(tmp_path, text, f"{text}# a comment\n")) == [()] * 4


def test_a_module_that_only_some_ranks_have_imported_is_no_difference(pool, tmp_path):
    text = MODULE.format(notation="R, R -> R")
    assert pool.run(refusal_by_module, write(tmp_path, text, text)) == [()] * 4


def test_equal_ranks_go_on(pool):
    assert pool.run(refusal, alike) == [()] * 4


def test_all_differences_are_kept_for_programs(pool):
    assert {len(d) for d in pool.run(refusal, many)} == {12}


def again():
    rule_agreement.forget()
    grid = mesh((2, 2))
    sw.ones(4, device_mesh=grid)
    seen = []
    with events.observe(seen.append):
        sw.ones(4, device_mesh=init_device_mesh("cpu", (2, 2)))
    return len(rule_agreement._meshes), len(seen)


def test_a_mesh_agrees_once_and_an_equal_one_not_again(pool):
    assert pool.run(again) == [(1, 0)] * 4


def alone(odd):
    """One rank's look-up raises something that is no error of ours, as a warning turned into an error does."""
    rule_agreement.forget()
    before = rule_agreement.default_registry

    def raising():
        raise RuntimeWarning("left out the plugin acme")

    if dist.get_rank() == odd:
        rule_agreement.default_registry = raising
    try:
        sw.ones(4, device_mesh=mesh((2, 2)))
    except (sw.ShardingError, RuntimeWarning) as error:
        return type(error).__name__, str(error)
    finally:
        rule_agreement.default_registry = before
        rule_agreement.forget()


def test_whatever_a_rank_raises_while_loading_it_takes_the_others_along(pool):
    answers = pool.run(alone, 2)
    kinds = [kind for kind, _ in answers]
    assert kinds == ["RankDisagreementError", "RankDisagreementError", "RuntimeWarning", "RankDisagreementError"]
    assert "rank 2 failed loading its plugins: RuntimeWarning: left out the plugin acme" in answers[0][1]
