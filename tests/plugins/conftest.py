"""What the oracle counted over all plugins, shown at the end of a test run."""

from collections.abc import Callable, Iterator

import pytest

from shardwise.testing.report import Report

_REPORTS = pytest.StashKey[dict[str, Report]]()


def pytest_configure(config):
    config.stash[_REPORTS] = {}


@pytest.fixture
def record(request) -> Iterator[Callable[[str, Report], None]]:
    """``record(plugin, report)`` adds to the counts."""
    reports = request.config.stash.setdefault(_REPORTS, {})

    def add(plugin, report):
        reports[plugin] = reports.get(plugin, Report()) + report

    return add


def pytest_terminal_summary(terminalreporter, config):
    reports = config.stash.get(_REPORTS, {})
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
