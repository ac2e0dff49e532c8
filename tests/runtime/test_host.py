"""Which interfaces are chosen, and that this host can be described at all."""

from __future__ import annotations

import errno
import os
import socket

import psutil
import pytest
from error_codes import ends_with

from horovod.base.errors import WorldCode
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.host import Interface, choose_interfaces, interfaces, is_loopback, shared_memory_domain

LO = Interface("lo", ("127.0.0.1", "::1"))
ETH0 = Interface("eth0", ("10.0.0.1", "fd00::1"))
ETH1 = Interface("eth1", ("10.1.0.1",))
DOWN = Interface("eth2", ("10.2.0.1",), is_up=False)
BARE = Interface("eth3", ())
DOCKER = Interface("docker0", ("172.17.0.1",))
VIRT = Interface("virbr0", ("192.168.122.1",))
ALL = (LO, ETH0, ETH1, DOWN, BARE, DOCKER, VIRT)


def names(chosen: tuple[Interface, ...]) -> list[str]:
    return [i.name for i in chosen]


def test_every_interface_that_leads_to_other_hosts_is_chosen():
    assert names(choose_interfaces(ALL)) == ["eth0", "eth1"]


def test_loopback_is_chosen_when_the_coordinator_is_there_or_nothing_else_exists():
    assert names(choose_interfaces(ALL, coordinator_on_loopback=True)) == ["lo"]
    assert names(choose_interfaces((LO, DOWN, DOCKER))) == ["lo"]
    assert names(choose_interfaces((ETH0,), coordinator_on_loopback=True)) == ["eth0"]


def test_wanted_ones_win_in_the_order_given():
    assert names(choose_interfaces(ALL, ("eth1", "docker0", "eth1"), coordinator_on_loopback=True)) == [
        "eth1",
        "docker0",
    ]


@pytest.mark.parametrize("wanted", ["ib0", "eth2", "eth3"])
def test_a_wanted_one_that_is_not_usable_is_refused_with_those_that_are(wanted):
    with pytest.raises(
        StartError, match=ends_with(WorldCode.NO_INTERFACE, repr(wanted), "lo, eth0, eth1, docker0, virbr0")
    ):
        choose_interfaces(ALL, ("eth0", wanted))


def test_no_interface_at_all():
    with pytest.raises(StartError, match=ends_with(WorldCode.NO_INTERFACE, socket.gethostname())):
        choose_interfaces((DOWN, BARE))


def test_this_host():
    assert any(i.is_loopback for i in interfaces())
    assert not any("%" in a or a.startswith("fe80") for i in interfaces() for a in i.addresses)
    assert shared_memory_domain() == shared_memory_domain()
    assert str(os.getuid()) in shared_memory_domain()


def test_interfaces_are_known_where_their_drivers_tell_no_speed(monkeypatch):
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}

    def fail():
        raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")

    monkeypatch.setattr(psutil, "net_if_stats", fail)
    assert {i.name for i in interfaces() if i.is_up} == up & set(psutil.net_if_addrs())


@pytest.mark.parametrize(
    ("host", "answer"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("192.0.2.1", False), ("a b", False)]
)
def test_is_loopback(host, answer):
    assert is_loopback(host) is answer
