"""HOROVOD_CPU_OPERATIONS: which values are possible where, and what is said when one is not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from error_codes import ends_with
from event_words import NO_GLOO
from runtime_harness import allreduce_all, await_first, close_all, form_threads, world

from horovod import _core
from horovod.base.errors import EngineCode, SettingCode, WorldCode
from horovod.base.settings import resolve
from horovod.common import basics as hvd
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.worker.runtime import context as context_module
from horovod.worker.runtime.epoch import begin
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.offers import engine_options

needs_gloo = pytest.mark.skipif(
    NO_GLOO in _core.gloo_obstacle(), reason="built without Gloo (libgloo-dev was not there)"
)


@pytest.fixture(autouse=True)
def _shut_down() -> Iterator[None]:
    yield
    hvd.shutdown()


def test_what_never_was_a_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "smoke")
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, "HOROVOD_CPU_OPERATIONS='smoke' ")):
        hvd.init()


@pytest.mark.parametrize("value", ["mpi", "CCL", "gloo"])
def test_what_is_not_there_is_told_and_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, coordinator: EmbeddedCoordinator, value: str
) -> None:
    """An image may set it on some hosts: their ranks agree with the others."""
    monkeypatch.setattr(_core, "gloo_obstacle", lambda: f"This build of Horovod {NO_GLOO}. [no-gloo]")
    monkeypatch.setattr(context_module, "_told", set())
    with ThreadPoolExecutor(2) as pool:
        settings = [
            resolve({}, {"coordinator": coordinator.address, "size": 2, "cpu_operations": operations})
            for operations in (value, "native")
        ]
        close_all([join.result(60) for join in [pool.submit(begin, one) for one in settings]])
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", value)
    hvd.init()
    assert hvd.gloo_built()  # whether it runs without MPI
    said = [record.getMessage() for record in caplog.records if "CPU_OPERATIONS" in record.getMessage()]
    assert [one.partition(" (")[0].partition(" has no effect: ")[0] for one in said] == [
        f"HOROVOD_CPU_OPERATIONS={value.lower()}"
    ]
    assert (NO_GLOO in said[0]) == (value == "gloo")


def test_the_engine_without_its_gloo_library_loads_and_says_why(tmp_path: Path) -> None:
    """What a build without libgloo-dev is: the same module, without the file beside it."""
    copy = shutil.copy(_core.__file__, tmp_path)
    script = """
import importlib.util, socket, sys
spec = importlib.util.spec_from_file_location("_core", sys.argv[1])
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
print(core.gloo_obstacle())
mine, theirs = socket.socketpair()
world = {"rank": 0, "size": 2, "epoch": 1, "labels": ["rank 0", "rank 1"], "sockets": {1: [mine.detach()]}}
try:
    core.Engine(**world, options={"gloo": 1})
except ValueError as error:
    assert str(error) == core.gloo_obstacle()
    assert theirs.recv(1) == b""  # the connection was closed
    print("refused")
"""
    said = subprocess.run([sys.executable, "-c", script, copy], check=True, capture_output=True, text=True).stdout
    assert said.startswith(f"This build of Horovod {NO_GLOO}")
    assert f"[{EngineCode.MISSING_LIBRARY}]" in said
    assert "libgloo-dev" in said
    assert said.endswith("refused\n")
    (tmp_path / "libhorovod_gloo.so").write_bytes(b"not a library")
    said = subprocess.run([sys.executable, "-c", script, copy], check=True, capture_output=True, text=True).stdout
    assert said.startswith("Horovod was built with Gloo, but it can't be loaded here (")


@needs_gloo
def test_gloo_needs_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
    with pytest.raises(ValueError, match=ends_with(SettingCode.CONFLICTING_SETTINGS, "HOROVOD_TRANSPORT=shm")):
        hvd.init(transport="shm")


@needs_gloo
def test_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
    hvd.init()
    assert hvd.size() == 1


@needs_gloo
def test_a_world_over_gloo(coordinator: EmbeddedCoordinator) -> None:
    with world(coordinator.address, 3, cpu_operations="gloo") as contexts:
        assert [context.transport for context in contexts] == ["tcp"] * 3
        assert allreduce_all(contexts, "x") == [3.0] * 3


@needs_gloo
def test_ranks_must_agree(coordinator: EmbeddedCoordinator) -> None:
    def join(operations: str) -> None:
        form_threads(coordinator.address, 1, size=2, cpu_operations=operations, transport="tcp")

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, "gloo")
        assert await_first(coordinator)
        with pytest.raises(StartError, match=ends_with(WorldCode.MEMBERS_DISAGREE, "cpu_operations")):
            join("native")
        coordinator.give_up("default", "The other one was refused.")
        assert isinstance(first.exception(60), StartError)


def test_the_deadline_is_that_of_gloo_when_gloo_is_used() -> None:
    def milliseconds(**explicit: object) -> int:
        return engine_options(resolve({}, {"progress_timeout_seconds": 100.0, **explicit}))["progress_timeout_ms"]

    assert milliseconds(gloo_timeout_seconds=7) == 100_000
    assert milliseconds(gloo_timeout_seconds=7, cpu_operations="gloo") == 7_000
    assert milliseconds(gloo_timeout_seconds=0, cpu_operations="gloo") == 100_000
