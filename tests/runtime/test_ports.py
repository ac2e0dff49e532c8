"""HOROVOD_PORTS: on which ports ranks listen for each other."""

from __future__ import annotations

import socket

import pytest
from error_codes import ends_with
from ports import LOOPBACK, free_ports
from runtime_harness import allreduce_all, world

from horovod.base.errors import ClusterCode, SettingCode, WorldCode
from horovod.base.setting import split_ports
from horovod.base.settings import resolve
from horovod.coordinator.address import ListenAddress, everywhere
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.mesh import Listeners


@pytest.mark.parametrize(
    ("text", "ports"),
    [("29500-29502", range(29500, 29503)), ("29500", range(29500, 29501)), (" 1 - 65535 ", range(1, 65536))],
)
def test_a_range_of_ports(text: str, ports: range) -> None:
    settings = resolve({"HOROVOD_PORTS": text})
    assert settings.ports is not None
    assert split_ports(settings.ports) == ports


@pytest.mark.parametrize("text", ["0-5", "5-4", "65000-65536", "a-b", "1-2-3", "-5", "5-", "1,2"])
def test_what_is_no_range_of_ports(text: str) -> None:
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, "HOROVOD_PORTS", text)):
        resolve({"HOROVOD_PORTS": text})


def test_ranks_listen_on_these_ports_only(coordinator: EmbeddedCoordinator) -> None:
    """Also in a world after another, whose connections may be ending on the same ports."""
    ports = free_ports(3)
    given = f"{ports[0]}-{ports[-1]}"
    for _ in range(2):
        with world(coordinator.address, 3, transport="tcp", network_interfaces=["lo"], ports=given) as contexts:
            assert allreduce_all(contexts, "x") == [3.0] * 3
            members = contexts[0].world.members
            used = [one.port for member in members for one in member.endpoints if one.address == "127.0.0.1"]
            assert sorted(used) == list(ports)


def test_too_few_ports_are_told() -> None:
    ports = free_ports(2)
    listeners = [Listeners(LOOPBACK, ports=ports) for _ in ports]
    facts = f"{ports[0]} to {ports[-1]}", "more ports with HOROVOD_PORTS"
    with pytest.raises(StartError, match=ends_with(WorldCode.NO_INTERFACE, *facts)):
        Listeners(LOOPBACK, ports=ports)
    for one in listeners:
        one.close()


def test_a_coordinator_for_other_hosts_takes_one_that_is_free() -> None:
    ports = free_ports(2)
    with socket.create_server(("127.0.0.1", ports[0])):
        assert ListenAddress.parse(everywhere(ports)).port == ports[1]
        with pytest.raises(OSError, match=ends_with(ClusterCode.PORT_IN_USE, f"{ports[0]} to {ports[0]}")):
            everywhere(ports[:1])
