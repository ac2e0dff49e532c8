"""`horovod-coordinator --store etcd://...`: what it must not forget outlives the process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import etcd_server
import pytest
from error_codes import ends_with
from etcd_server import Etcd, ctl
from resources import eventually
from runtime_harness import Program

from horovod.base.errors import SettingCode

pytestmark = pytest.mark.skipif(bool(etcd_server.missing()), reason=etcd_server.missing())

SCRIPT = """
for _ in range(3):
    hvd.init()
    assert allreduce("x") == 2.0
    print(current().world.epoch, flush=True)
    sys.stdin.readline()
    hvd.shutdown()
"""


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    with Etcd(tmp_path) as running:
        yield running


class Coordinator:
    def __init__(self, etcd: Etcd, listen: str = "127.0.0.1:0") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "horovod.coordinator", "--listen", listen, "--store", etcd.url],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def finish(*programs: Program) -> list[list[str]]:
    """What else they print; none waits for a line any more."""
    for program in programs:
        for _ in range(3):
            program.tell()
    ended = [program.end() for program in programs]
    assert all(code == 0 for code, _, _ in ended), [err for _, _, err in ended]
    return [out.split() for _, out, _ in ended]


def keys(etcd: Etcd) -> list[str]:
    return ctl(etcd.endpoints[0], "get", "horovod/jobs", "--prefix", "--keys-only").split()


def test_epochs_go_on_behind_those_of_a_coordinator_that_was_killed(etcd: Etcd) -> None:
    with Coordinator(etcd) as first:
        environment = {"HOROVOD_COORDINATOR": first.address, "HOROVOD_SIZE": "2"}
        with Program(SCRIPT, **environment) as one, Program(SCRIPT, **environment) as other:
            for epoch in ("1", "2"):
                assert one.line() == other.line() == epoch
                assert "horovod/jobs/default/world" in keys(etcd)
                for program in (one, other):
                    program.tell()
            assert one.line() == other.line() == "3"
            first.process.kill()
            first.process.wait()
    with (
        Coordinator(etcd, first.address) as second,
        Program(SCRIPT, **environment) as one,
        Program(SCRIPT, **environment) as other,
    ):
        assert second.address == first.address
        assert one.line() == other.line() == "4"
        assert finish(one, other) == [["5", "6"]] * 2


def test_an_ended_world_leaves_nothing_but_its_number(etcd: Etcd) -> None:
    with Coordinator(etcd) as coordinator:
        environment = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "2"}
        with Program(SCRIPT, **environment) as one, Program(SCRIPT, **environment) as other:
            assert finish(one, other) == [["1", "2", "3"]] * 2
        assert eventually(lambda: keys(etcd) == ["horovod/jobs/default/epoch"]), keys(etcd)


def test_a_store_that_can_not_be_reached_forms_no_world_and_is_named(tmp_path: Path) -> None:
    """It says so again and again, and forms the world when the store is there."""
    etcd = Etcd(tmp_path)
    with Coordinator(etcd) as coordinator:
        environment = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "2"}
        with Program(SCRIPT, **environment) as one, Program(SCRIPT, **environment) as other, etcd:
            assert finish(one, other) == [["1", "2", "3"]] * 2


def test_a_store_that_makes_no_sense_is_a_usage_error() -> None:
    command = [sys.executable, "-m", "horovod.coordinator", "--store", "etcd://h1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert re.search(ends_with(SettingCode.INVALID_SETTING, "'etcd://h1'", "'h1'", "HOST:PORT"), ended.stderr)
