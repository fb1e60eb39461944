"""What every test has: the worker pool, a skip with its reason for tests that need a GPU, and two processes that share
the whole run.
"""

import gc
import importlib.util
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from shardwise.testing.report import Report

# What somebody measured on this machine must not decide what tests see; worker processes inherit it.
os.environ["SHARDWISE_LINKS"] = "off"

# Processes of many tests run many programs: none must go by what was learned of an earlier one. The tests of learning
# set it, and `SHARDWISE_LEARN=auto pytest` runs all of them as programs run by default.
os.environ.setdefault("SHARDWISE_LEARN", "off")

# Nor must the server that runs them: where CI is set, `shardwise lock` writes nothing. The tests of that set it.
# There hypothesis draws the same examples in each run, which its worker processes could not know.
if os.environ.pop("CI", None):
    os.environ["TESTS_DRAW_ALIKE"] = "1"

# Nor must the width of a terminal, which workers of pytest-xdist are given: in a pipe tables would be as wide.
os.environ.pop("COLUMNS", None)

# Tests start many processes, each of which would compile the whole tree where byte code must not be kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A busy machine is slow, not wrong.
settings.register_profile("shardwise", deadline=None, derandomize="TESTS_DRAW_ALIKE" in os.environ)
settings.load_profile("shardwise")

pytest_plugins = ["shardwise.testing.pytest_plugin"]

gc.disable()  # until all tests are collected: what is made until then stays

# How often the collector looks for garbage afterwards, here and on the ranks. As often as Python says takes a twentieth
# of a run's processor time; tests that ask whether something is gone collect themselves.
SELDOM = (10_000, 20, 50)


def pytest_configure(config):
    """Import torch where tests run, and register the fixtures of environments.py, which no search path leads to."""
    config.stash[REPORTS] = {}
    shares_out = getattr(config.option, "numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ
    if not shares_out:  # the process that shares the tests out needs no torch
        import torch

        # As on the ranks: the cores are busy with the other processes, and a second thread for a few elements waits.
        torch.set_num_threads(1)
    if not config.pluginmanager.has_plugin("environments"):
        spec = importlib.util.spec_from_file_location("environments", Path(__file__).with_name("environments.py"))
        module = sys.modules["environments"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config.pluginmanager.register(module, "environments")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is there before the first test stays: the garbage collector need not look at it."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*SELDOM)
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def kept_from_the_collector():
    """What earlier files left in caches stays, too: looking at all of it takes a quarter of a second each time."""
    gc.collect()
    gc.freeze()


CASES = 2


def pytest_collection_modifyitems(config, items):
    """Of a test with many cases .ci/run's sample has two, or ``sample(cases=n)``, far from each other in the list."""
    if "sample" not in config.option.markexpr:
        return
    cases = {}
    for item in items:
        if item.get_closest_marker("sample"):
            cases.setdefault((item.path, item.originalname), []).append(item)
    left_out = set()
    for every in cases.values():
        n = max(item.get_closest_marker("sample").kwargs.get("cases", CASES) for item in every)
        left_out.update(every)
        left_out.difference_update(every[i * len(every) // n] for i in range(n))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_runtest_setup(item):
    if item.get_closest_marker("cuda") and not sys.modules["torch"].cuda.is_available():
        pytest.skip("needs a CUDA device, and torch finds none here")


def patient_pool(*args, **options):
    """A pool that waits for five minutes, not for one: a machine that many use may stand still for a while, and ranks
    that wait for each other end by themselves.
    """
    from shardwise.testing import WorkerPool

    class PatientPool(WorkerPool):
        def run(self, fn, *args, timeout=300.0):
            return super().run(fn, *args, timeout=timeout)

    return PatientPool(*args, **options)


@pytest.fixture(scope="session")
def pool(request):
    """The four ranks of most tests. Every day they are copies of one process that has torch and the plugins, so they
    start at once; in .ci/run's sample they have hash seeds of their own, as the ranks of a program do.
    """
    every_day = request.config.option.markexpr == "not slow"
    with patient_pool(4, start_method="forkserver" if every_day else "spawn") as workers:
        workers.run(gc.set_threshold, *SELDOM)
        yield workers


@pytest.fixture(scope="session")
def two_ranks():
    """Two gloo workers, copies of one process that has torch and the plugins."""
    with patient_pool(2, start_method="forkserver") as pool:
        pool.run(gc.set_threshold, *SELDOM)
        yield pool


@pytest.fixture(params=["two_ranks", pytest.param("pool", marks=[pytest.mark.slow, pytest.mark.sample])])
def ranks(request):
    """For tests on one mesh dim: two ranks every day, half the work; the four of ``pool`` in .ci/run's sample."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def fresh(monkeypatch):
    """The next look-up finds and loads the plugins again; afterwards all is as before."""
    from shardwise.discovery import process

    def forget():
        monkeypatch.setattr(process._process, "registry", None)
        monkeypatch.setattr(process._process, "statuses", [])

    forget()
    return forget


# -- two processes -----------------------------------------------------------------------------------------------

# What takes seconds to start, once for a whole run: all files that use it are run by the same process. In each pattern,
# arguments of a test or a fixture; the tests that PluginTests brings along take the pool, too. Tests on two ranks are
# for one process, too, the one that is free.
SHARED = {
    "pool": re.compile(r"def \w+\([^)]*\b(pool|pool_of|ranks)\b|\(PluginTests\):|\"forkserver\""),
    "environments": re.compile(r"def \w+\([^)]*\b(shardwise_wheel|environment|zoo)\b"),
}


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Two processes for a run of everything, where pytest-xdist is installed and nobody says another number: one with
    the pool, whose ranks often wait for each other, beside the rest. What somebody picks runs in one, which starts
    faster.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:  # one of the two, or a test that runs pytest itself
        return
    option = config.option
    nobody_says = getattr(option, "numprocesses", 0) is None and not option.usepdb and not option.collectonly
    if nobody_says and config.args_source is config.ArgsSource.TESTPATHS:
        option.numprocesses = 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByWhatTheyShare(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path, _, test = nodeid.partition("::")
            name, _, parameters = test.partition("[")
            if "two_ranks" in parameters or name in tests_on_two_ranks(config.rootpath / path):
                return "two_ranks"
            return shared_by(config.rootpath / path) or (path if keeps_something(config.rootpath / path) else nodeid)

    return ByWhatTheyShare(config, log)


@cache
def keeps_something(path):
    """Whether the tests of a file share what one of them has made."""
    return re.search(r"scope=\"module\"|^@cache$", path.read_text(), re.MULTILINE) is not None


@cache
def tests_on_two_ranks(path):
    source = path.read_text()
    # Random programs are drawn from samples of all ops, which take seconds to make: all in the process with the pool.
    return set() if "made_programs" in source else set(re.findall(r"def (test_\w+)\([^)]*\btwo_ranks\b", source))


@cache
def shared_by(path):
    source = path.read_text()
    return next((name for name, pattern in SHARED.items() if pattern.search(source)), None)


# -- the oracle's counts -----------------------------------------------------------------------------------------

REPORTS = pytest.StashKey[dict[str, Report]]()


@pytest.fixture
def record(request) -> Iterator[Callable[[str, Report], None]]:
    """``record(plugin, report)`` adds to the counts that are shown at the end of the run."""
    return lambda plugin, report: add_report(request.config, plugin, report)


def add_report(config, plugin, report):
    reports = config.stash[REPORTS]
    reports[plugin] = reports.get(plugin, Report()) + report


def pytest_sessionfinish(session):
    """Where several processes share the run, each sends its counts to the one that shows them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["oracle"] = pickle.dumps(session.config.stash[REPORTS])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    for plugin, report in pickle.loads(getattr(node, "workeroutput", {}).get("oracle", pickle.dumps({}))).items():
        add_report(node.config, plugin, report)


def pytest_terminal_summary(terminalreporter, config):
    reports = config.stash[REPORTS]
    if not reports:
        return
    terminalreporter.section("oracle")
    total = Report()
    for plugin, report in sorted(reports.items()):
        total += report
        terminalreporter.write_line(f"{plugin:24} {report}")
        for what in ("unexercised", "unsampled"):
            for line in getattr(report, what):
                terminalreporter.write_line(f"    {what}: {line}")
    terminalreporter.write_line(f"{'all':24} {total}")
