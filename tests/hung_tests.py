"""What ends a run of tests that pytest-timeout can't end.

Its signal is served by Python on the main thread, so it never reaches a test that keeps the GIL in native code, nor a
process that is stopped; and while one process of pytest-xdist answers nothing, all others wait for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Generator
from typing import Any

import psutil
import pytest
import tiers
from _pytest.faulthandler import fault_handler_stderr_fd_key  # the standard error that pytest has put aside

MARGIN_S = 60.0  # for pytest-timeout, and for what a test cleans up after it
SILENT_S = tiers.pick(900.0, 2000.0)  # longer than the longest test may take, its margin included


def _limit_s(item: pytest.Item) -> float:
    """The limit of pytest-timeout; 0 is none."""
    marker = item.get_closest_marker("timeout")
    given = item.config.getoption("timeout", None)
    return float((marker.args[0] if marker else item.config.getini("timeout") if given is None else given) or 0)


class StuckTest:
    """In a process that runs tests: a thread that needs no GIL writes all stacks and ends the process."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        limit_s = _limit_s(item)
        if not limit_s:
            return (yield)
        stderr = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(limit_s + MARGIN_S, file=stderr, exit=True)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()


class SilentRun:
    """In the process that hands tests to others: ends a run in which no test has ended for long, and says where it was.

    The main thread alone writes `_heard`, the time of the last news; the watching thread reads it.
    """

    def __init__(self, config: pytest.Config, silent_s: float) -> None:
        self._config = config
        self._silent_s = silent_s
        self._heard = time.monotonic()

    def pytest_xdist_node_collection_finished(self) -> None:
        self._heard = time.monotonic()

    def pytest_runtest_logreport(self) -> None:
        self._heard = time.monotonic()

    def pytest_sessionstart(self) -> None:
        threading.Thread(target=self._watch, name="silent-run", daemon=True).start()

    def _watch(self) -> None:
        while (left_s := self._heard + self._silent_s - time.monotonic()) > 0:
            time.sleep(left_s)
        os.write(self._config.stash[fault_handler_stderr_fd_key], f"\n{self._report()}\n".encode())
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        os._exit(3)

    def _report(self) -> str:
        lines = [f"No test has ended for {self._silent_s:.0f} s, so this run ends. Tests that were next:"]
        scheduler: Any = self._config.pluginmanager.getplugin("dsession").sched
        for node, pending in getattr(scheduler, "node2pending", {}).items():
            lines.append(f"  {node.gateway.id}: {scheduler.collection[pending[0]] if pending else 'none'}")
        lines.append("Processes:")
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                lines.append(f"  {process.pid} {process.status()} {' '.join(process.cmdline())[:200]}")
        return "\n".join(lines)


def register(config: pytest.Config, silent_s: float = SILENT_S) -> None:
    """Watches this process of a run."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(StuckTest())
    else:
        config.pluginmanager.register(SilentRun(config, silent_s))
