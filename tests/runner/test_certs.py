"""`horovodrun certs` and `horovodrun token`: what they make, what they refuse, and that it works with a coordinator."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest
from error_codes import ends_with

from horovod.base import certificates
from horovod.base.errors import AccessCode, ErrorCode, LaunchCode, SettingCode
from horovod.base.proofs import job_of
from horovod.base.protocol import PROTOCOL_VERSION
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.coordinator.tls import ServerTls
from horovod.launch import commands
from horovod.protos.v1 import membership_pb2
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.session import Session
from horovod.worker.runtime.tls import ClientTls

pytest.importorskip("cryptography", reason="cryptography makes the certificates")


def joins(folder: Path, address: str) -> None:
    tls = ClientTls(f"{folder}/ca.pem", f"{folder}/client.pem", f"{folder}/client.key")
    session = Session(address, "t", tls=tls)
    host = membership_pb2.HostIdentity(name="node-a")
    try:
        session.join(
            lambda: membership_pb2.JoinRequest(
                protocol_version=PROTOCOL_VERSION, job="j", member_id=str(time.monotonic_ns()), size=1, host=host, pid=1
            ),
            time.monotonic() + 20,
        )
    finally:
        session.close()


def run(*arguments: str) -> int:
    return commands.run(arguments)


def test_they_work_and_are_renewed_while_they_are_used(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "tls"
    assert run("certs", str(folder), "--hosts", "127.0.0.1, node-a") == 0
    modes = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert modes == {
        f"{name}.{end}": 0o600 if end == "key" else 0o644
        for name in ("ca", "coordinator", "client")
        for end in ("pem", "key")
    }
    assert folder.stat().st_mode & 0o777 == 0o700
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    tls = ServerTls(f"{folder}/coordinator.pem", f"{folder}/coordinator.key", f"{folder}/ca.pem")
    with EmbeddedCoordinator(tls=tls, token="t") as coordinator:
        joins(folder, coordinator.address)
        assert run("certs", str(folder), "--renew") == 0
        after = {file.name: file.read_bytes() for file in folder.iterdir()}
        assert {name for name in before if before[name] == after[name]} == {"ca.pem", "ca.key"}
        joins(folder, coordinator.address)
        assert run("certs", str(folder), "--renew", "--hosts", "node-b") == 0
        with pytest.raises(StartError, match=ends_with(AccessCode.UNTRUSTED_CERTIFICATE, "'127.0.0.1'")):
            joins(folder, coordinator.address)


def test_the_authority_is_replaced_while_both_are_used(tmp_path: Path) -> None:
    """In the three steps of docs/certificates.md, without a restart."""
    used, old, new = (tmp_path / name for name in ("used", "old", "new"))
    for folder in (old, new):
        assert run("certs", str(folder), "--hosts", "127.0.0.1") == 0
    shutil.copytree(old, used)
    tls = ServerTls(f"{used}/coordinator.pem", f"{used}/coordinator.key", f"{used}/ca.pem")
    with EmbeddedCoordinator(tls=tls, token="t") as coordinator:
        both = (new / "ca.pem").read_bytes() + (old / "ca.pem").read_bytes()
        (used / "ca.pem").write_bytes(both)
        joins(used, coordinator.address)
        for name in ("coordinator.key", "coordinator.pem"):
            shutil.copy(new / name, used / name)
        joins(used, coordinator.address)  # a member that has its old pair still
        for name in ("client.key", "client.pem"):
            shutil.copy(new / name, used / name)
        joins(used, coordinator.address)
        shutil.copy(new / "ca.pem", used / "ca.pem")
        joins(used, coordinator.address)
        (old / "ca.pem").write_bytes(both)
        with pytest.raises(StartError, match=ends_with(AccessCode.REFUSED_CERTIFICATE)):
            joins(old, coordinator.address)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "error", "fact"),
    [
        (["certs", "DIR"], 2, LaunchCode.WRONG_COMMAND_LINE, "--hosts"),
        (["certs", "DIR", "--hosts", "node-a:29400"], 2, SettingCode.INVALID_SETTING, "'node-a:29400'"),
        (["certs", "DIR", "--hosts", "a", "--days", "0"], 2, SettingCode.INVALID_SETTING, "--days"),
        (["certs", "DIR", "--renew"], 2, LaunchCode.CERTIFICATE_FILES, "ca.key"),
        (["token", "digits", "--token-file", "/no/such"], 1, AccessCode.UNUSABLE_TOKEN, "'/no/such'"),
        (["token", "digits", "--token-file", "SHORT"], 2, AccessCode.WEAK_TOKEN, "openssl rand -hex 32"),
    ],
)
def test_refusals(
    arguments: list[str],
    exit_code: int,
    error: ErrorCode,
    fact: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = tmp_path / "short"
    short.write_text("short")
    short.chmod(0o600)
    names = {"DIR": str(tmp_path / "tls"), "SHORT": str(short)}
    assert run(*(names.get(argument, argument) for argument in arguments)) == exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"horovodrun: .*\n", captured.err)
    assert re.search(ends_with(error, fact), captured.err)
    assert not (tmp_path / "tls").exists()


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "client.key").write_text("precious")
    assert run("certs", str(tmp_path), "--hosts", "a") == 2
    assert re.search(ends_with(LaunchCode.CERTIFICATE_FILES, "client.key", "--renew"), capsys.readouterr().err)
    assert [file.name for file in tmp_path.iterdir()] == ["client.key"]
    assert (tmp_path / "client.key").read_text() == "precious"


def test_an_authority_that_ends_earlier_signs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "AUTHORITY_DAYS", 10)
    certificates.make(tmp_path, ["a"], 5)
    before = (tmp_path / "client.pem").read_bytes()
    with pytest.raises(ValueError, match=ends_with(LaunchCode.CERTIFICATE_FILES, "9 days", "for 20.")):
        certificates.renew(tmp_path, [], 20)
    assert (tmp_path / "client.pem").read_bytes() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_can_not_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    assert run("certs", str(tmp_path / "tls"), "--hosts", "a") == 1
    assert re.search(ends_with(LaunchCode.CERTIFICATE_FILES, "Permission denied"), capsys.readouterr().err)


def test_the_token_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    file.write_text("the-token-of-the-cluster\n")
    file.chmod(0o600)
    assert run("token", "digits", "--token-file", str(file)) == 0
    assert job_of(capsys.readouterr().out.strip(), "the-token-of-the-cluster") == "digits"
