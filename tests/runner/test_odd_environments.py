"""Closed standard streams, names that no host can have, and a loopback interface that is down."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from error_codes import ends_with
from launching import LAUNCHER

from horovod.base.addresses import wrong_host_name
from horovod.base.errors import ClusterCode, ErrorCode, SettingCode, WorldCode
from horovod.base.setting import split_address
from horovod.coordinator.address import ListenAddress
from horovod.rendezvous.hosts import parse_hostfile, parse_hosts, remote
from horovod.runner.elastic.discovery import HostDiscoveryScript

TOO_LONG = "a" * 64


SHOWN = {"2>&-": ("[0]<stdout>:out\n", ""), ">&-": ("", "[0]<stderr>:err\n"), "<&- >&- 2>&-": ("", "")}


@pytest.mark.parametrize(("closed", "shown"), SHOWN.items())
def test_closed_standard_streams(closed: str, shown: tuple[str, str]) -> None:
    program = "import sys; print('out'); print('err', file=sys.stderr)"
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *LAUNCHER, "-np", "1", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, *shown)


@pytest.mark.parametrize("name", ["h1", "gpu_1.cluster.local", "fqdn.", "10.0.0.1", "::1", "a" * 63])
def test_names_of_hosts(name: str) -> None:
    assert wrong_host_name(name) == ""


WRONG = {TOO_LONG: "64 characters", f"h.{TOO_LONG}": "64", "a..b": "empty", ".a": "empty", "hö": "ASCII"}


@pytest.mark.parametrize(("name", "why"), [*WRONG.items(), (".".join(["abcdefghi"] * 30), "299 characters")])
def test_names_that_no_host_can_have(tmp_path: Path, name: str, why: str) -> None:
    hostfile, script = tmp_path / "hosts", tmp_path / "script"
    hostfile.write_text(f"{name} slots=1\n")
    script.write_text(f"#!/bin/sh\necho {name}:1\n")
    script.chmod(0o755)
    places: list[tuple[Callable[[], object], ErrorCode]] = [
        (lambda: parse_hosts(f"{name}:1"), SettingCode.INVALID_HOSTS),
        (lambda: parse_hostfile(hostfile), SettingCode.INVALID_HOSTS),
        (HostDiscoveryScript(str(script)).find_available_hosts_and_slots, SettingCode.INVALID_HOSTS),
        (lambda: split_address(f"{name}:29400", "HOROVOD_COORDINATOR"), SettingCode.INVALID_SETTING),
        (lambda: ListenAddress.parse(f"{name}:29400"), SettingCode.INVALID_SETTING),
    ]
    for number, (place, code) in enumerate(places):
        facts = [why] if name.isascii() or number > 2 else []
        with pytest.raises(ValueError, match=ends_with(code, *facts)):
            place()
    assert remote([name]) == [name]  # found by an object of the program, for example


def without_loopback(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs it in a network namespace of its own, in which the loopback interface is down."""
    try:
        able = subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        able = False
    if not able:
        pytest.skip("`unshare -n` needs util-linux and the permission to make a network namespace")
    environ = {**os.environ, **variables}
    return subprocess.run(
        ["unshare", "-n", *command], env=environ, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_launcher_without_a_loopback_interface_says_so_at_once() -> None:
    done = without_loopback(*LAUNCHER, "-np", "2", "echo", "started")
    assert done.returncode != 0
    assert done.stdout == ""
    assert re.search(ends_with(ClusterCode.CANNOT_LISTEN, "loopback", "ip link set lo up"), done.stderr)


@pytest.mark.parametrize("address", ["127.0.0.1:29400", "localhost:29400"])
def test_a_process_without_a_loopback_interface_does_not_wait_for_its_coordinator(address: str) -> None:
    code = "import horovod.common.basics as hvd; hvd.init()"
    variables = {"HOROVOD_COORDINATOR": address, "HOROVOD_SIZE": "2", "HOROVOD_START_TIMEOUT": "600"}
    done = without_loopback(sys.executable, "-c", code, **variables)
    assert re.search(ends_with(WorldCode.NO_INTERFACE, "loopback", "ip link set lo up"), done.stderr)
    alone = without_loopback(sys.executable, "-c", f"{code}; print(hvd.size())")
    assert (alone.stdout, alone.stderr) == ("1\n", "")
