"""Processor time of every test file: ``--cpu-costs`` (see docs/testing.md).

Processor time is what a test costs on a machine that does other things too; wall time is not. A
child process counts for the test during which it is waited for, so one that a fixture of a module
keeps running counts for the module's last test: files can be compared, single tests only where
they start no process.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import forked_commands
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PROPERTY = "cpu_seconds"


def cpu_seconds() -> float:
    """Return user and system seconds of this process and of all its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return own + forked_commands.cpu_seconds()


class CpuCosts:
    """Measures tests where they run (a worker of xdist, or the only process) and adds them up.

    ``shown`` is how many files and how many tests the summary names.
    """

    def __init__(self, shown: int) -> None:
        self._shown = shown
        self._begin = 0.0
        self._tests: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._begin = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if call.when == "teardown":
            report.user_properties = [(PROPERTY, cpu_seconds() - self._begin)]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._tests[report.nodeid] = dict(report.user_properties)[PROPERTY]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        files: defaultdict[str, float] = defaultdict(float)
        for test, seconds in self._tests.items():
            files[test.partition("::")[0]] += seconds
        terminalreporter.section("processor time")
        for costs in (files, self._tests):
            dearest = sorted(costs.items(), key=lambda item: -item[1])[: self._shown]
            for name, seconds in dearest:
                terminalreporter.write_line(f"{seconds:8.1f} s  {name}")
            terminalreporter.write_line("")
        total = sum(files.values())
        terminalreporter.write_line(f"{total:8.1f} s  in tests, without starting and collecting")
