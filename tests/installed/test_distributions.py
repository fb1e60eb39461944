"""Families as distributions of their own: what an environment has is what was installed into it, and nothing else."""

import pytest

from shardwise.kernel.first_party import FAMILIES
from shardwise.kernel.known_rules import ops_of_families

pytestmark = [pytest.mark.slow]
# Seconds each: the other ones are for `pytest -m slow`.
sample = pytest.mark.sample

LISTED = """
    import json
    from importlib.metadata import PackageNotFoundError, version
    from shardwise.discovery.process import default_registry, statuses
    from shardwise.kernel.signature import op_name
    registry = default_registry()
    ops = sorted({op_name(entry.op) for entry in registry.ops()} | {name for name, _ in registry.later()})
    print(json.dumps([[(s.plugin.origin.plugin, s.plugin.origin.distribution, s.status) for s in statuses()], ops]))
"""
WITHOUT = """
    import json
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    import shardwise as sw
    from shardwise.errors import NoRuleError

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    x = sw.distribute_tensor(torch.eye(4) * 2, mesh, [sw.Shard(0)])
    found = []
    for function in (torch.linalg.cholesky, torch.linalg.svdvals, torch.cdist):
        try:
            function(*([x, x] if function is torch.cdist else [x]))
        except NoRuleError as error:
            found.append([error.known, "pip install shardwise-linalg==" in str(error)])
    rest = [(x @ x).softmax(-1).sum().item()]
    dist.destroy_process_group()
    print(json.dumps([found, rest]))
"""
COMMAND = """
    import sys
    from shardwise.cli import main
    sys.argv = ["shardwise", *{arguments}]
    main()
"""


def wheel_of(wheels, name):
    (path,) = (wheel for wheel in wheels if wheel.name.startswith(name.replace("-", "_") + "-"))
    return path


def of_family(*families):
    return sorted(name for name, family in ops_of_families().items() if family in families)


def command(env, *arguments):
    return env.run(COMMAND.format(arguments=arguments))


@sample
def test_core_and_one_family_have_the_ops_of_the_family_and_no_other(tmp_path_factory, distributions, installed):
    env = installed.Environment(tmp_path_factory.mktemp("one") / "env")
    env.install(wheel_of(distributions, "shardwise-core"), wheel_of(distributions, "shardwise-matmul"))
    statuses, ops = env.answer(LISTED)
    assert statuses == [["shardwise-matmul", "shardwise-matmul", "loaded"]]
    assert ops == of_family("shardwise-matmul")


def test_core_has_no_rule_and_each_family_adds_its_ops(tmp_path_factory, distributions, installed):
    env = installed.Environment(tmp_path_factory.mktemp("families") / "env")
    env.install(wheel_of(distributions, "shardwise-core"))
    assert env.answer(LISTED) == [[], []]
    for count, family in enumerate(reversed(FAMILIES), start=1):
        env.install(wheel_of(distributions, family))
        statuses, ops = env.answer(LISTED)
        assert statuses == [[name, name, "loaded"] for name in FAMILIES[-count:]]
        assert ops == of_family(*FAMILIES[-count:])


@pytest.fixture(scope="module")
def without_linalg(tmp_path_factory, distributions, installed):
    """Everything but one family; pip refuses the distribution that requires them all."""
    wheels = [wheel for wheel in distributions if "linalg" not in wheel.name]
    env = installed.Environment(tmp_path_factory.mktemp("without") / "env")
    with pytest.raises(AssertionError, match="shardwise-linalg"):
        env.install(*wheels)
    return env.install(*(wheel for wheel in wheels if not wheel.name.startswith("shardwise-")))


@sample
def test_a_family_that_is_left_out_is_not_there_and_everything_else_is(without_linalg):
    found, rest = without_linalg.answer(WITHOUT)
    assert found == [[["shardwise-linalg"], True]] * 3
    assert rest == pytest.approx([4.0])
    statuses, ops = without_linalg.answer(LISTED)
    others = [name for name in FAMILIES if name != "shardwise-linalg"]
    assert statuses == [[name, name, "loaded"] for name in others]
    assert ops == of_family(*others)


def test_commands_work_without_the_distribution_that_requires_them_all(without_linalg):
    assert command(without_linalg, "--version").stdout.startswith("shardwise, version ")
    doctor = command(without_linalg, "doctor")
    assert doctor.returncode == 0, doctor.stdout
    assert "shardwise-core" in doctor.stdout
    demo = command(without_linalg, "demo", "--steps=2", "--layers=1", "--width=16", "--context=16", "--mesh=2x1")
    assert demo.returncode == 0, demo.stdout + demo.stderr


@pytest.fixture(scope="module")
def everything(tmp_path_factory, distributions, installed):
    return installed.Environment(tmp_path_factory.mktemp("all") / "env").install(*distributions)


@sample
def test_all_of_them_are_what_the_checkout_is(everything):
    statuses, ops = everything.answer(LISTED)
    assert statuses == [[name, name, "loaded"] for name in FAMILIES]
    assert ops == of_family(*FAMILIES)


def test_the_setting_shardwise_means_all_families(everything):
    statuses, _ = everything.answer(LISTED, SHARDWISE_DISABLE_PLUGINS="shardwise")
    assert [status for *_, status in statuses] == ["blocked"] * len(FAMILIES)


def test_a_family_of_another_release_is_refused(tmp_path_factory, distributions, installed, wheel):
    env = installed.Environment(tmp_path_factory.mktemp("mixed") / "env")
    env.install(wheel_of(distributions, "shardwise-core"))
    env.install("--no-deps", wheel("shardwise-norm", version="9.0", requires=("shardwise-core==9.0",)))
    statuses, _ = env.answer(LISTED)
    assert statuses == [["shardwise-norm", "shardwise-norm", "refused"]]


def test_a_checkout_beside_the_parts_is_one_plugin_each_and_a_failure_of_the_doctor(
    tmp_path_factory, shardwise_wheel, distributions, installed
):
    env = installed.Environment(tmp_path_factory.mktemp("both") / "env").install(shardwise_wheel)
    env.install(wheel_of(distributions, "shardwise-core"), wheel_of(distributions, "shardwise-matmul"))
    statuses, ops = env.answer(LISTED)
    assert [name for name, *_ in statuses] == list(FAMILIES)
    assert ["shardwise-matmul", "shardwise-matmul", "loaded"] in statuses
    assert ops == of_family(*FAMILIES)
    doctor = command(env, "doctor")
    assert doctor.returncode == 1
    assert "shardwise-core 0.1.0.dev0 is installed beside it" in doctor.stdout
