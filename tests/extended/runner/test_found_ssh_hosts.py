"""Hosts that a program finds, which only ssh reaches: they come, go, are lost and can't be reached."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching_fixtures import HEADER
from sshd_hosts import Hosts
from test_found_hosts import FOLLOWS
from test_ssh_hosts import Launch


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path, 3) as hosts:
        yield hosts


@pytest.fixture
def follow(hosts: Hosts) -> Callable[..., tuple[int, str, str]]:
    """follow(found, sizes, then) runs the program of test_found_hosts.py on hosts as found at first."""

    def run(found: str, sizes: list[int], then: list[str], *options: str) -> tuple[int, str, str]:
        path = hosts.folder / "found"
        path.write_text(found.replace(" ", "\n"))
        values = {"SIZES": sizes, "NEXT": then, "HOSTS": str(path)}
        source = HEADER + "".join(f"{name} = {value!r}\n" for name, value in values.items()) + FOLLOWS
        launched = Launch(hosts, source, *options, "--host-discovery-script", f"cat {path}")
        out, err = launched.process.communicate(timeout=90)
        return launched.process.returncode, out, err

    return run


def test_hosts_come_and_go(hosts: Hosts, follow: Callable[..., tuple[int, str, str]]) -> None:
    _, one, two = hosts.names
    then = [f"hvd.rank() or find('{one}:1 {two}:1')", f"hvd.rank() or find('{two}:1')"]
    code, out, err = follow(f"{one}:1", [1, 2, 1], then, "-np", "1")
    assert code == 0, err
    assert re.findall(r"took \d (.*)", out) == [f"0 1 1 {two} 2"]


def test_a_host_that_cannot_be_reached_is_done_without(
    hosts: Hosts, follow: Callable[..., tuple[int, str, str]]
) -> None:
    _, one, two = hosts.names
    hosts.stop_sshd(two)
    code, out, err = follow(f"{two}:1 {one}:1", [1], [], "-np", "1")
    assert code == 0, err
    assert re.findall(r"took \d (.*)", out) == [f"0 1 0 {one} 1"]
    assert f"Host {two} can't be used yet: it can't be reached" in err
