"""Where hosts come from: programs that print them, good and bad, and the names that users' programs import."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from error_codes import ends_with
from launching import still_alive

from horovod.base.errors import ErrorCode, LaunchCode, SettingCode
from horovod.common.elastic import HostUpdateResult
from horovod.coordinator.core.elastic.hosts import Cooldown
from horovod.launch.elastic import times
from horovod.runner.elastic import constants, discovery, driver
from horovod.runner.elastic.discovery import FixedHosts, HostDiscovery, HostDiscoveryScript, HostManager

Script = Callable[..., str]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    def write(body: str, name: str = "find hosts.sh") -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    return write


def test_a_script_prints_hosts_with_and_without_slots(script: Script) -> None:
    found = HostDiscoveryScript(script("echo h1:2; echo; echo '  h2  '; echo 10.0.0.3 : 4; echo h1:3"), 5)
    assert found.find_available_hosts_and_slots() == {"h1": 3, "h2": 5, "10.0.0.3": 4}
    assert list(found.find_available_hosts_and_slots()) == ["h1", "h2", "10.0.0.3"]


def test_a_script_may_have_arguments(script: Script) -> None:
    path = script('echo "$1:$2"', "hosts.sh")
    assert HostDiscoveryScript(f"{path} h1 '2'").find_available_hosts_and_slots() == {"h1": 2}


def test_a_script_without_a_first_line_is_run_by_sh(tmp_path: Path) -> None:
    path = tmp_path / "find hosts.sh"
    path.write_text('echo "$1:2"\n')
    path.chmod(0o755)
    assert HostDiscoveryScript(f"{str(path)!r} h1").find_available_hosts_and_slots() == {"h1": 2}


def test_a_script_may_print_nothing(script: Script) -> None:
    assert HostDiscoveryScript(script("true"), 1).find_available_hosts_and_slots() == {}


@pytest.mark.parametrize(
    ("body", "code", "facts"),
    [
        ("echo h1:2; echo 'h2 slots=2'", SettingCode.INVALID_HOSTS, ["Line 2", "'h2 slots=2'"]),
        ("echo h1:two", SettingCode.INVALID_HOSTS, ["Line 1", "'h1:two'"]),
        (r"printf '\033[31mh1\n'", SettingCode.INVALID_HOSTS, ["Line 1", r"\\x1b"]),
        ("echo h1", SettingCode.INVALID_HOSTS, ["Line 1", "h1:2", "--slots-per-host"]),
        ("echo no cloud >&2; exit 3", LaunchCode.DISCOVERY_FAILED, ["exit code 3", "no cloud"]),
        ("kill -9 $$", LaunchCode.DISCOVERY_FAILED, ["signal 9"]),
        ("yes h1:1 | head -c 1100000", LaunchCode.DISCOVERY_FAILED, ["1 MiB"]),
    ],
)
def test_what_a_script_may_not_do(script: Script, body: str, code: ErrorCode, facts: list[str]) -> None:
    with pytest.raises((ValueError, RuntimeError), match=ends_with(code, *facts)):
        HostDiscoveryScript(script(body)).find_available_hosts_and_slots()


def test_a_script_that_cannot_be_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.COMMAND_UNUSABLE, "nowhere")):
        HostDiscoveryScript(str(tmp_path / "nowhere")).find_available_hosts_and_slots()


def test_a_script_that_hangs_is_killed_with_all_that_it_started(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horovod.launch.elastic.discovery.SCRIPT_TIMEOUT_S", 0.5)
    pids = tmp_path / "pids"
    hangs = HostDiscoveryScript(script(f"sleep 600 & echo $! $$ > {pids}; echo asking >&2; wait"))
    with pytest.raises(RuntimeError, match=ends_with(LaunchCode.DISCOVERY_FAILED, "0.5 s", "asking")):
        hangs.find_available_hosts_and_slots()
    assert not any(_lives(int(pid)) for pid in pids.read_text().split())


def test_what_a_script_leaves_behind_is_not_waited_for(script: Script, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    leaves = HostDiscoveryScript(script(f"sleep 600 & echo $! > {pid}; echo h1:1"))
    assert leaves.find_available_hosts_and_slots() == {"h1": 1}
    assert not _lives(int(pid.read_text()))


def _lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and bool(still_alive([psutil.Process(pid)]))


def test_what_a_user_replaces_in_a_script_is_used() -> None:
    """Libraries replace how the text is got, and leave it to us what the text means."""

    class Recorded(HostDiscoveryScript):
        def _execute_discovery_script(self) -> str:
            return "\nh1:2\n\nh2\n"

    assert Recorded("unused", 3).find_available_hosts_and_slots() == {"h1": 2, "h2": 3}


def test_a_manager_follows_a_discovery() -> None:
    hosts = FixedHosts({"a": 2})
    manager = HostManager(hosts)
    assert manager.update_available_hosts() == HostUpdateResult.added
    before = manager.current_hosts
    hosts.set({"b": 4, "a": 2})
    assert manager.update_available_hosts() == HostUpdateResult.added
    assert manager.update_available_hosts() == HostUpdateResult.no_update
    assert before.available_hosts == {"a"}, "an earlier answer stays as it was"
    assert before.count_available_slots() == 2
    assert manager.current_hosts.host_assignment_order == ("a", "b")
    assert manager.current_hosts.count_available_slots() == 6
    manager.blacklist("a")
    assert manager.is_blacklisted("a")
    assert manager.current_hosts.available_hosts == {"b"}
    assert manager.current_hosts.get_slots("a") == 0
    hosts.set({"c": 1, "b": 2})
    assert manager.update_available_hosts() == HostUpdateResult.mixed


def test_a_manager_uses_a_host_again_after_its_cooldown(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = HostManager(FixedHosts({"a": 2}), (1, 2))
    manager.update_available_hosts()
    now_s = 50.0
    monkeypatch.setattr(discovery.time, "monotonic", lambda: now_s)
    manager.blacklist("a")
    assert manager.update_available_hosts() == HostUpdateResult.no_update
    now_s += Cooldown(1, 2).delay_s(0, 1)
    assert manager.update_available_hosts() == HostUpdateResult.added


def test_hosts_keep_their_order() -> None:
    assert HostManager.order_available_hosts({"a", "b", "c"}, ["b", "x", "a"]) == ["b", "a", "c"]
    assert HostManager.order_available_hosts(["c", "b"], []) == ["c", "b"]


def test_a_discovery_defines_its_one_method() -> None:
    with pytest.raises(NotImplementedError, match="find_available_hosts_and_slots"):
        HostDiscovery().find_available_hosts_and_slots()


def test_names_that_programs_import() -> None:
    assert constants.RESET_LIMIT_EXCEEDED_MESSAGE.format(3).endswith("exceeded limit: 3")
    assert driver.DISCOVER_HOSTS_FREQUENCY_SECS == 1.0
    assert driver.ELASTIC_TIMEOUT_SECS == 600


def test_what_programs_change_is_what_launchers_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod.runner.elastic.driver.DISCOVER_HOSTS_FREQUENCY_SECS", 0.25)
    assert times.period_s() == 0.25
    monkeypatch.setattr(driver, "DISCOVER_HOSTS_FREQUENCY_SECS", -1)
    assert times.period_s() == 0.0
