"""When plugins are loaded: at the first look-up, once per process, whatever forks, spawns, threads and reloads do."""

import pytest

pytestmark = pytest.mark.slow  # environments take seconds each: .ci/run takes those that are marked

COUNTING = """
    import os, pathlib, time
    pathlib.Path(os.environ["ACME_LOG"]).open("a").write(f"{os.getpid()}\\n")
    time.sleep(0.3)
"""
LOOK = "from shardwise.discovery.process import default_registry; import torch\n"
OP = "torch.ops.aten._copy_from_and_resize.default"


@pytest.fixture(scope="module")
def env(tmp_path_factory, shardwise_wheel, installed):
    """With a plugin that writes a line whenever its module is executed, and takes its time."""
    folder = tmp_path_factory.mktemp("counting")
    wheel = installed.make_wheel(folder, "acme-kernels", COUNTING + installed.source_of())
    return installed.Environment(folder / "env").install(shardwise_wheel, wheel)


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


def lines(log):
    return log.read_text().split() if log.exists() else []


def test_importing_shardwise_imports_no_plugin(env, log):
    code = """
        import json, sys
        import shardwise
        print(json.dumps(sorted(m for m in sys.modules if m.startswith(("acme", "shardwise_", "importlib_metadata")))))
    """
    assert env.answer(code, ACME_LOG=str(log)) == []
    assert lines(log) == []


@pytest.mark.sample
def test_the_first_look_up_loads_once_also_from_many_threads(env, log):
    code = """
        import json, torch
        from concurrent.futures import ThreadPoolExecutor
        from shardwise.discovery.process import default_registry
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: id(default_registry()), range(8)))
        origin = str(default_registry().lookup(torch.ops.aten._copy_from_and_resize.default).origin)
        print(json.dumps([len(set(found)), origin]))
    """
    assert env.answer(code, ACME_LOG=str(log)) == [1, "acme-kernels 1.0"]
    assert len(lines(log)) == 1


@pytest.mark.sample
def test_a_fork_keeps_the_registry_and_one_in_the_middle_of_loading_does_not_hang(env, log):
    code = """
        import json, multiprocessing, threading, time, torch
        from shardwise.discovery.process import default_registry

        def child(queue):
            queue.put(str(default_registry().lookup(torch.ops.aten._copy_from_and_resize.default).origin))

        context = multiprocessing.get_context("fork")

        def ask():
            queue = context.SimpleQueue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            process.join(60)
            return queue.get() if process.exitcode == 0 else f"exit code {process.exitcode}"

        loading = threading.Thread(target=default_registry)
        loading.start()
        time.sleep(0.1)
        found = [ask()]
        loading.join()
        print(json.dumps([*found, ask()]))
    """
    assert env.answer(code, ACME_LOG=str(log)) == ["acme-kernels 1.0"] * 2
    assert len(lines(log)) == 1


def test_a_spawned_process_loads_for_itself(env, log):
    script = env.cwd / "spawns.py"
    script.write_text(
        "import json, multiprocessing\n" + LOOK + "def origin(_):\n"
        f"    return str(default_registry().lookup({OP}).origin)\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(json.dumps([origin(0), *pool.map(origin, [0])]))\n"
    )
    code = "import runpy; runpy.run_path('spawns.py', run_name='__main__')"
    assert env.answer(code, ACME_LOG=str(log)) == ["acme-kernels 1.0"] * 2
    assert len(set(lines(log))) == 2


def test_reloads_make_no_second_registry_and_register_nothing_twice(env, log):
    code = """
        import importlib, json, sys, torch
        import torch.distributed as dist
        import shardwise as sw
        from shardwise.discovery import process
        from torch.distributed.device_mesh import init_device_mesh

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        x = sw.ones(3, device_mesh=mesh)
        first, before = process.default_registry(), (x + x).to_local().tolist()
        ops = len(list(first.ops()))
        for name in ("shardwise", "shardwise.discovery", "acme_kernels_plugin", "shardwise_pointwise.plugin"):
            importlib.reload(sys.modules[name])
        again = process.default_registry()
        after = (x + x * 1).to_local().tolist()
        print(json.dumps([again is first, len(list(again.ops())) == ops, before == after]))
        dist.destroy_process_group()
    """
    assert env.answer(code, ACME_LOG=str(log)) == [True, True, True]


def test_a_plugin_module_is_light_each_first_party_one_pulls_in_itself_alone(env, log):
    code = """
        import json, sys, importlib
        from importlib.metadata import entry_points
        import torch, shardwise, shardwise.rule, shardwise.hookspecs
        pulled = {}
        for entry in entry_points(group="shardwise.plugins.v1"):
            before = set(sys.modules)
            entry.load()
            own = entry.value.partition(".")[0]
            pulled[entry.name] = sorted({m.partition(".")[0] for m in set(sys.modules) - before} - {own, "shardwise"})
        print(json.dumps(pulled))
    """
    pulled = env.answer(code, ACME_LOG=str(log))
    assert len(pulled) == 14
    standard = {"__future__", "math"}
    assert {name: set(modules) - standard for name, modules in pulled.items() if set(modules) - standard} == {}
