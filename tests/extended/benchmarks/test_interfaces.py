"""Which interfaces of a host an allreduce between hosts uses, by the kernel's own counters.

The hosts are those of benchmarks/network.py, with two interfaces each; nothing limits their rate.
"""

from __future__ import annotations

import subprocess

import pytest

from benchmarks.cases import MIB, Case
from benchmarks.namespaces import Network, NetworkError, check_possible
from benchmarks.world import Host, Layout, World

CALLS = 4
CASE = Case("allreduce", 2, 16 * MIB)
INTERFACES = ("eth0", "eth1")


def sent_bytes(host: Host) -> list[int]:
    """What each interface has sent; a namespace of the network sees its own /sys/class/net only."""
    files = [f"/sys/class/net/{name}/statistics/tx_bytes" for name in INTERFACES]
    done = subprocess.run([*host.prefix, "cat", *files], check=True, capture_output=True, text=True)
    return [int(line) for line in done.stdout.split()]


def shares_of_interfaces(environment: dict[str, str]) -> list[list[float]]:
    """For each host the share of its bytes that each interface sent while allreduces ran."""
    try:
        check_possible()
    except NetworkError as error:
        pytest.skip(str(error))
    with (
        Network(2, nics=len(INTERFACES)) as network,
        World("horovod", Layout(network.hosts, environment=environment)) as world,
    ):
        world.ask("prepare", **CASE.to_json())
        before = [sent_bytes(host) for host in network.hosts]
        world.ask("run", blocks=1, calls=CALLS)
        after = [sent_bytes(host) for host in network.hosts]
    shares = []
    for old, new in zip(before, after, strict=True):
        sent = [late - early for early, late in zip(old, new, strict=True)]
        assert sum(sent) > CALLS * CASE.bytes  # each of two ranks sends 2 (n - 1) / n of the message, and headers
        shares.append([one / sum(sent) for one in sent])
    return shares


def test_both_interfaces_of_a_host_carry_a_large_allreduce() -> None:
    for host in shares_of_interfaces({}):
        assert min(host) > 1 / 3, host


def test_an_interface_that_was_not_chosen_carries_next_to_nothing() -> None:
    for host in shares_of_interfaces({"HOROVOD_NETWORK_INTERFACES": "eth1"}):
        assert host[0] < 0.05, host  # the coordinator's address is that of eth0
