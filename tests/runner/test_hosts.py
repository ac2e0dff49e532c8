"""Host strings, host files, slots, and which names mean this machine."""

from __future__ import annotations

import socket
import tracemalloc
from pathlib import Path

import pytest
from error_codes import ends_with

from horovod.base.errors import SettingCode
from horovod.rendezvous.hosts import HostSlots, fill, in_lsf_job, lsf_hosts, parse_hostfile, parse_hosts, remote


def test_hosts_keep_their_order_and_slots() -> None:
    assert parse_hosts("b:2, a-1.example:4,c_3:1") == (
        HostSlots("b", 2),
        HostSlots("a-1.example", 4),
        HostSlots("c_3", 1),
    )


def test_a_host_named_twice_has_the_slots_of_both() -> None:
    assert parse_hosts("a:1,b:1,a:2") == (HostSlots("a", 3), HostSlots("b", 1))


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("a", "'a'"),
        ("a:", "'a:'"),
        ("a:x", "'a:x'"),
        ("a:2,", "''"),
        ("a:2,b b:1", "'b b:1'"),
        (":2", "':2'"),
        ("a:-1", "'a:-1'"),
        ("", "''"),
    ],
)
def test_a_malformed_host_string_names_the_piece_and_the_form(text: str, piece: str) -> None:
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_HOSTS, f"{piece} ", "h1:2,h2:4")):
        parse_hosts(text)


def test_no_slots_are_refused() -> None:
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_HOSTS, "'a' ", "'a:0'", "0 slots")):
        parse_hosts("a:0")


def test_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# our machines\nh1 slots=2\n\n  h2   slots = 4  # the big one\n")
    assert parse_hostfile(path) == (HostSlots("h1", 2), HostSlots("h2", 4))


def test_a_file_of_a_batch_system_has_a_line_for_each_slot(tmp_path: Path) -> None:
    path = tmp_path / "nodefile"
    path.write_text("h1\nh1\nh2.example\nh1\n")
    assert parse_hostfile(path) == (HostSlots("h1", 3), HostSlots("h2.example", 1))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("h1 4 h2 2", (HostSlots("h1", 4), HostSlots("h2", 2))),
        ("h1 1", (HostSlots("h1", 1),)),
        ("h1 1 h2 1", (HostSlots("h1", 1), HostSlots("h2", 1))),
        ("batch1 1 n1 42 n2 42", (HostSlots("n1", 42), HostSlots("n2", 42))),
    ],
)
def test_lsf_tells_the_hosts_of_its_job(text: str, hosts: tuple[HostSlots, ...]) -> None:
    environ = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": text}
    assert in_lsf_job(environ)
    assert lsf_hosts(environ) == hosts


@pytest.mark.parametrize("text", ["h1", "h1 2 h2", "h1 two"])
def test_what_lsf_would_not_write(text: str) -> None:
    with pytest.raises(ValueError, match=ends_with(SettingCode.LAUNCHER_VARIABLES, f"LSB_MCPU_HOSTS={text!r}")):
        lsf_hosts({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": text})


def test_without_lsf_there_are_no_hosts_of_its() -> None:
    assert not in_lsf_job({"LSB_JOBID": "7"})
    assert not in_lsf_job({"LSB_MCPU_HOSTS": "h1 2"})


@pytest.mark.parametrize("line", ["h1 2", "h1:2", "h1 slots=", "h1 slots=two", "h1 slots=2 max=3"])
def test_a_malformed_hostfile_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"h0 slots=1\n{line}\n")
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_HOSTS, "Line 2 ", str(path), repr(line))):
        parse_hostfile(path)


def test_a_hostfile_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=ends_with(SettingCode.UNUSABLE_FILE, tmp_path / "none", "No such file")):
        parse_hostfile(tmp_path / "none")
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_HOSTS, tmp_path / "empty")):
        parse_hostfile(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=ends_with(SettingCode.UNUSABLE_FILE, tmp_path / "binary", "UTF-8")):
        parse_hostfile(tmp_path / "binary")


def test_processes_fill_host_by_host() -> None:
    assert fill(parse_hosts("a:2,b:2"), 3) == ("a", "a", "b")


def test_slots_that_no_process_takes_cost_nothing() -> None:
    tracemalloc.start()
    assert fill(parse_hosts("a:100000000"), 2) == ("a", "a")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_too_few_slots() -> None:
    with pytest.raises(ValueError, match=ends_with(SettingCode.TOO_FEW_SLOTS, "(5)", "(4)")):
        fill(parse_hosts("a:2,b:2"), 5)


def test_names_of_this_machine_are_local() -> None:
    local = ["localhost", "127.0.0.1", "127.1.2.3", socket.gethostname(), socket.gethostname().upper()]
    assert remote([*local, "no-such-host.invalid", "no-such-host.invalid"]) == ["no-such-host.invalid"]
