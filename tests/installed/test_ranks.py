"""Ranks with different plugins: real processes over gloo, from environments that differ. All raise, none hangs."""

import contextlib
import json
import socket
import subprocess

import pytest

# Everyday runs leave it to tests/comm/test_rule_agreement.py, on the pool.
pytestmark = pytest.mark.slow  # environments take seconds each: .ci/run takes those that are marked

RANK = """
    import datetime, json, os, sys, warnings
    import torch
    import torch.distributed as dist
    import shardwise as sw
    from torch.distributed.device_mesh import init_device_mesh
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2))
    try:
        {use}
        answer = ["went on", ""]
    except sw.ShardingError as error:
        answer = [type(error).__name__, str(error)]
    print(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()
"""
DISTRIBUTE = "x = sw.distribute_tensor(torch.arange(6.0), mesh, [sw.Shard(0), sw.Replicate()])"
FROM_LOCAL = "x = sw.MeshTensor.from_local(torch.ones(2), mesh, [sw.Shard(0), sw.Replicate()]); x + x"


def start(envs, use, settings):
    """One process per rank, each from its environment with its settings; what each said, by rank."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "4"}
    processes = [
        subprocess.Popen(
            env.command(RANK.replace("{use}", use)),
            env=env.environ(**common, RANK=str(rank), **settings.get(rank, {})),
            cwd=env.cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, env in enumerate(envs)
    ]
    try:
        ended = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, ended, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


@pytest.fixture(scope="module")
def envs(tmp_path_factory, shardwise_wheel, installed):
    """Two environments, with version 1.0 and 1.1 of one plugin, and one that lacks it."""
    folder = tmp_path_factory.mktemp("ranks")

    def made(name, *wheels):
        return installed.Environment(folder / name).install(shardwise_wheel, *wheels)

    old = installed.make_wheel(folder, "acme-kernels")
    new = installed.make_wheel(folder, "acme-kernels", version="1.1")
    return made("old", old), made("new", new), made("none")


def test_ranks_with_the_same_plugins_go_on(envs):
    assert start([envs[0]] * 4, DISTRIBUTE, {}) == [["went on", ""]] * 4


@pytest.mark.sample
@pytest.mark.parametrize(
    "use",
    [DISTRIBUTE, FROM_LOCAL],
    ids=["distribute_tensor", "from_local"],
)
def test_ranks_with_other_versions_or_without_the_plugin_all_raise(envs, use):
    old, new, none = envs
    answers = start([old, old, new, none], use, {})
    assert [kind for kind, _ in answers] == ["RankDisagreementError"] * 4
    for _, message in answers:
        assert "acme-kernels 1.0 on ranks 0, 1" in message
        assert "acme-kernels 1.1 on rank 2" in message
        assert "none on rank 3" in message


def test_a_rank_with_another_setting_is_named_with_the_op_whose_rule_differs(envs):
    answers = start([envs[0]] * 4, DISTRIBUTE, {2: {"SHARDWISE_DISABLE_PLUGINS": "acme-kernels"}})
    assert [kind for kind, _ in answers] == ["RankDisagreementError"] * 4
    assert "plugin acme-kernels: acme-kernels 1.0 on ranks 0, 1, 3, none on rank 2" in answers[0][1]
    assert "rule aten._copy_from_and_resize.default: " in answers[0][1]


def test_a_rank_that_cannot_load_its_plugins_takes_the_others_along(envs):
    answers = start([envs[0]] * 4, DISTRIBUTE, {1: {"SHARDWISE_PLUGINS": "acme-misspelt"}})
    assert [kind for kind, _ in answers] == ["RankDisagreementError", "SettingsError"] + ["RankDisagreementError"] * 2
    assert "rank 1 failed loading its plugins: SettingsError: read SHARDWISE_PLUGINS" in answers[0][1]
