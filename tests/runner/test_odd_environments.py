"""Closed standard streams, names that no host can have, proxies, and hosts without a loopback interface or IPv4."""

from __future__ import annotations

import os
import re
import shlex
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


_UNPREPARED = 77
ONLY_IPV6 = "ip link set lo up && ip address del 127.0.0.1/8 dev lo && ip address add fd00::5/128 dev lo"
# A rank that tells its place, in one piece: ranks that no launcher reads share one pipe. No framework is imported.
JOIN = r"import os, horovod.common.basics as hvd; hvd.init(); os.write(1, f'{hvd.rank()} of {hvd.size()}\n'.encode())"
JOINED = ["[0]<stdout>:0 of 2", "[1]<stdout>:1 of 2"]


def without_loopback(*command: str, setup: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs it in a network namespace of its own, in which the loopback interface is down.

    setup: a command for a shell that changes that first; the test is skipped if it can't.
    """
    try:
        able = subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        able = False
    if not able:
        pytest.skip("`unshare -n` needs util-linux and the permission to make a network namespace")
    environ = {**os.environ, **variables}
    prepared = ["sh", "-c", f'{{ {setup or ":"}; }} || exit {_UNPREPARED}; exec "$@"', "sh", *command]
    done = subprocess.run(
        ["unshare", "-n", *prepared], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode == _UNPREPARED:
        pytest.skip(f"`{setup}` failed: {done.stderr}")
    return done


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


@pytest.mark.parametrize("rank_0", [None, "::1", "fd00::5"])
def test_processes_of_hosts_with_ipv6_only_find_each_other(rank_0: str | None) -> None:
    """By horovodrun, and by the variables of another launcher, where rank 0 opens the coordinator.

    rank_0: its address: None for horovodrun, that of loopback for one host, another one for several.
    """
    if rank_0 is None:
        command = [*LAUNCHER, "-np", "2", sys.executable, "-c", JOIN]
    else:
        ranks = [f"RANK={rank} {shlex.join([sys.executable, '-c', JOIN])}" for rank in (0, 1)]
        command = ["sh", "-c", f"{ranks[1]} & {ranks[0]}; wait"]
    variables = {"HOROVOD_TRANSPORT": "tcp", "HOROVOD_TOKEN": "0123456789abcdef" * 2}
    variables |= {"WORLD_SIZE": "2", "MASTER_ADDR": rank_0, "MASTER_PORT": "29411"} if rank_0 else {}
    done = without_loopback(*command, setup=ONLY_IPV6, **variables)
    assert done.returncode == 0, done.stderr
    expected = JOINED if rank_0 is None else [line.partition(":")[2] for line in JOINED]
    assert sorted(done.stdout.splitlines()) == expected


def test_an_address_of_ipv4_on_a_host_with_ipv6_only_is_named() -> None:
    command = [sys.executable, "-m", "horovod.coordinator", "--listen", "127.0.0.1:0"]
    done = without_loopback(*command, setup=ONLY_IPV6)
    assert re.search(ends_with(ClusterCode.CANNOT_LISTEN, "127.0.0.1:0", "[::1]"), done.stderr)
    variables = {"HOROVOD_COORDINATOR": "127.0.0.1:29400", "HOROVOD_SIZE": "2", "HOROVOD_START_TIMEOUT": "600"}
    done = without_loopback(sys.executable, "-c", JOIN, setup=ONLY_IPV6, **variables)
    assert re.search(ends_with(WorldCode.NO_INTERFACE, "127.0.0.1:29400", "[::1]"), done.stderr)


def test_no_proxy_is_asked_for_the_way_to_the_coordinator() -> None:
    proxies = dict.fromkeys(
        ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://192.0.2.1:9"
    )
    command = [*LAUNCHER, "-np", "2", sys.executable, "-c", JOIN]
    environ = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    done = subprocess.run(command, env={**environ, **proxies}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == JOINED
