"""horovod.run with jobs whose size changes: the results of the last world, and what is raised where there is none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from error_codes import ends_with
from launching_fixtures import HEADER
from test_found_hosts import FOLLOWS, A, B

import horovod
from horovod.base.errors import LaunchCode, SettingCode
from horovod.runner.elastic import constants, driver
from horovod.runner.elastic.discovery import HostDiscovery

Result = tuple[int, int, int, str, str]


class FromFile(HostDiscovery):
    """Hosts as lines of a file, which the ranks write."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return {name: int(slots) for name, slots in (line.split(":") for line in self.path.read_text().split())}


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text(f"{A}:2")
    return path


def follow(path: Path, sizes: list[int], then: list[str], **arguments: Any) -> list[Result]:
    """The results of the program of test_found_hosts.py: of each, rank and size at the end, and what it began with."""
    values = {"SIZES": sizes, "NEXT": then, "HOSTS": str(path)}
    source = HEADER + "".join(f"{name} = {value!r}\n" for name, value in values.items()) + FOLLOWS

    def trains() -> Result:
        scope: dict[str, Any] = {"__name__": "program"}
        exec(source, scope)
        return scope["result"]  # type: ignore[no-any-return]

    # By value: this module can't be imported there.
    return horovod.run(cloudpickle.loads(cloudpickle.dumps(trains)), **arguments)


def test_a_failed_process_is_replaced(hosts: Path) -> None:
    """Here on a list of hosts, of which the first has room for all. The survivor is rank 0 of the next world."""
    dies = "if rank == 0 and os.environ['HOROVOD_INCARNATION'] == '1': os.kill(os.getpid(), signal.SIGKILL)"
    given = {"num_proc": 2, "min_num_proc": 2, "max_num_proc": 2, "hosts": f"{A}:2,{B}:2"}
    results = follow(hosts, [2, 2], [dies], **given)
    assert [(rank, size, slot) for rank, size, slot, *_ in results] == [(0, 2, 1), (1, 2, 0)]
    assert len({host for *_, host, _ in results}) == 1


def test_hosts_that_an_object_finds_come_and_go(hosts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "DISCOVER_HOSTS_FREQUENCY_SECS", 0.05)
    then = [f"hvd.rank() or find('{A}:2 {B}:2')", f"hvd.rank() or find('{B}:2')"]
    results = follow(hosts, [2, 4, 2], then, num_proc=2, host_discovery=FromFile(hosts))
    # Either of the two may have come a world earlier than the other.
    assert [(rank, size, host) for rank, size, _, host, _ in results] == [(0, 2, B), (1, 2, B)]
    assert {slot for _, _, slot, *_ in results} == {2, 3}


def test_too_many_changes_are_an_error_that_programs_know(hosts: Path) -> None:
    then = [f"hvd.rank() or find('{A}:2 {B}:2')"]
    script = f"cat {hosts}"
    with pytest.raises(RuntimeError, match=re.escape(constants.RESET_LIMIT_EXCEEDED_MESSAGE.format(0))):
        follow(hosts, [2, 4], then, num_proc=2, host_discovery_script=script, reset_limit=0)


def test_what_a_rank_raised_last_is_shown(hosts: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)localhost.*ZeroDivisionError.*\[too-few-processes\]$"):
        follow(hosts, [2, 1], ["1 / 0"], num_proc=2, min_num_proc=1, host_discovery_script=f"cat {hosts}")


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"hosts": "a:1", "host_discovery": FromFile(Path("x"))}, ["host_discovery", "hostfile"]),
        ({"host_discovery_script": "true", "host_discovery": FromFile(Path("x"))}, ["host_discovery_script"]),
        ({"host_discovery_script": "true", "min_num_proc": 2}, ["min_num_proc", "num_proc, 1"]),
    ],
)
def test_arguments_that_contradict_each_other(arguments: dict[str, Any], facts: list[str]) -> None:
    with pytest.raises(ValueError, match=ends_with(LaunchCode.CONFLICTING_OPTIONS, *facts)):
        horovod.run(print, **arguments)


def test_a_discovery_that_is_none() -> None:
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, "find_available_hosts_and_slots")):
        horovod.run(print, host_discovery={"a": 1})  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.DISCOVERY_FAILED, "FromFile", "FileNotFoundError")):
        horovod.run(print, host_discovery=FromFile(Path("/no/such/file")))
