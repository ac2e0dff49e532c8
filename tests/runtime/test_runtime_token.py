"""The token of a coordinator that was started without one: kept in a file, found by members of the same user."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from error_codes import ends_with
from runtime_harness import Program, close_all, form_threads

from horovod.base import tokens
from horovod.base.errors import AccessCode, ClusterCode, SettingCode, code_of
from horovod.base.settings import resolve
from horovod.base.tokens import read_token
from horovod.coordinator import token as kept
from horovod.coordinator.address import is_free
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.launch.local.job import LocalJob, slots_of
from horovod.protos.v1.agents_pb2 import PlacedRank, StartShare
from horovod.worker.runtime import host
from horovod.worker.runtime import token as found
from horovod.worker.runtime.errors import StartError
from horovod.worker.runtime.host import owners

UNUSABLE = AccessCode.UNUSABLE_TOKEN


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files of this test are."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "horovod"


def metadata(address: str) -> tuple[tuple[str, str], ...]:
    return found.Credential(address, None).metadata()


# -- files of tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["/run/user/7", "relative", ""])
def test_the_runtime_directory_comes_first(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    assert (tokens.folders()[0] == Path("/run/user/7/horovod")) == (runtime == "/run/user/7")


def reading(path: Path) -> str:
    """What is in a token file, or the sentence why it can't be used."""
    try:
        return read_token(str(path))
    except OSError as error:
        return error.strerror


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("secret\n", "secret"),
        ("  spaced \r\n\n", "spaced"),
        ("x" * 4096, "x" * 4096),
        ("", UNUSABLE),
        ("\n", UNUSABLE),
        ("two words", UNUSABLE),
        ("two\nlines", UNUSABLE),
        ("caf\u00e9", UNUSABLE),
        ("x" * 4097, UNUSABLE),
        ("x" * 100_000, UNUSABLE),
    ],
)
def test_what_is_in_a_token_file(content: str, expected: str | AccessCode, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(content, encoding="utf-8")
    path.chmod(0o600)
    said = reading(path)
    assert (code_of(said) or said) == expected


def test_a_directory_and_a_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        assert re.search(ends_with(UNUSABLE, path), reading(path))
        with pytest.raises(StartError, match=ends_with(UNUSABLE, path, "(HOROVOD_TOKEN_FILE)")):
            found.given_token(resolve({"HOROVOD_TOKEN_FILE": str(path)}))


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    """As the shell makes of --token-file <(pass show horovod)."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("secret\n",))
    writer.start()
    assert read_token(str(path)) == "secret"
    writer.join()


def test_a_file_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "token"
    path.write_text("secret")
    for mode, words in ((0o644, "Other users may read the token file"), (0o620, "Other users may change"), (0o600, "")):
        path.chmod(mode)
        caplog.clear()
        assert reading(path) == "secret"
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == (1 if words else 0)
        assert all(words in one and f"mode {mode:04o}" in one for one in said)


# -- found -------------------------------------------------------------------------------------------------------------


def test_members_find_the_token_and_strangers_do_not_get_in(folder: Path) -> None:
    with EmbeddedCoordinator() as coordinator:
        (file,) = folder.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert file.read_text().strip() == coordinator.token
        close_all(form_threads(coordinator.address, 2))
        with pytest.raises(StartError, match=ends_with(AccessCode.WRONG_TOKEN, coordinator.address)):
            form_threads(coordinator.address, 1, token="guessed")
    assert list(folder.iterdir()) == []


def test_every_address_of_a_name_has_its_file(folder: Path) -> None:
    with EmbeddedCoordinator("localhost:0") as coordinator:
        port = coordinator.address.rpartition(":")[2]
        names = {file.name.partition("-")[0] for file in folder.iterdir()}
        assert names == {str(row[4][0]) for row in socket.getaddrinfo("localhost", int(port))}
        assert metadata(f"localhost:{port}") == metadata(f"127.0.0.1:{port}") == metadata(coordinator.address) != ()


def test_without_a_token_where_none_is_wanted(folder: Path) -> None:
    with EmbeddedCoordinator(insecure=True) as coordinator:
        assert coordinator.token is None
        assert not folder.exists()
        close_all(form_threads(coordinator.address, 1))


def test_a_given_token_is_in_no_file(folder: Path) -> None:
    with EmbeddedCoordinator(token="given") as coordinator:
        assert coordinator.token == "given"
        assert not folder.exists()
        with pytest.raises(StartError, match=ends_with(AccessCode.WRONG_TOKEN, "HOROVOD_TOKEN_FILE")):
            form_threads(coordinator.address, 1)


@pytest.mark.parametrize("token", ["", "two words", "caf\u00e9", "x" * 4097])
def test_a_token_that_no_header_can_carry_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match=ends_with(AccessCode.UNUSABLE_TOKEN)) as error:
        EmbeddedCoordinator(token=token).start()
    assert not token or token not in str(error.value)


def coordinator_program(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "horovod.coordinator", *arguments], stdout=subprocess.PIPE, text=True
    )


def test_two_terminals_and_one_command_each(folder: Path) -> None:
    with coordinator_program("--listen", "127.0.0.1:0") as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        common = {"HOROVOD_COORDINATOR": address, "HOROVOD_SIZE": "2"}
        script = "\nhvd.init()\nprint(hvd.size(), allreduce('x'))"
        with Program(script, **common) as one, Program(script, **common) as other:
            assert (one.finish(), other.finish()) == ("2 2.0", "2 2.0")
        assert len(list(folder.iterdir())) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert list(folder.iterdir()) == []


def test_the_file_of_a_killed_coordinator_is_replaced_and_others_are_cleared_away(folder: Path) -> None:
    with (
        coordinator_program("--listen", "127.0.0.1:0") as first,
        coordinator_program("--listen", "127.0.0.1:0") as other,
    ):
        assert first.stdout is not None
        assert other.stdout is not None
        address = first.stdout.readline().split()[-1]
        other.stdout.readline()
        first.kill()
        other.kill()
    stale = metadata_in(folder)
    assert len(stale) == 2
    assert metadata(address) == (), "nothing listens there"
    with EmbeddedCoordinator(address) as coordinator:
        assert metadata_in(folder) == {coordinator.token}
        assert stale.isdisjoint({coordinator.token})
        close_all(form_threads(address, 1))


def metadata_in(folder: Path) -> set[str]:
    return {file.read_text().strip() for file in folder.iterdir()}


def test_a_coordinator_that_can_not_listen_leaves_the_file_of_the_one_that_does(folder: Path) -> None:
    with EmbeddedCoordinator() as coordinator:
        with pytest.raises(OSError, match=ends_with(ClusterCode.PORT_IN_USE)):
            EmbeddedCoordinator(coordinator.address).start()
        assert metadata_in(folder) == {coordinator.token}
        with EmbeddedCoordinator():
            assert len(metadata_in(folder)) == 2, "the file of one that runs is not stale"


def test_a_member_that_came_before_the_coordinator_was_replaced_finds_the_new_token() -> None:
    """Its first attempt carries the token of the coordinator that was there when it looked."""
    with EmbeddedCoordinator() as coordinator:
        address = coordinator.address
        credential = found.Credential(address, None)
        first = credential.metadata()
        assert not credential.is_outdated()
    with EmbeddedCoordinator(address):
        assert credential.is_outdated()
        assert credential.metadata() not in ((), first)
        assert not credential.is_outdated()


def test_a_file_that_was_cleaned_away_is_written_again(folder: Path) -> None:
    with EmbeddedCoordinator(keep_token_s=0.01) as coordinator:
        expected = metadata(coordinator.address)
        shutil.rmtree(folder)
        deadline = time.monotonic() + 20
        while metadata(coordinator.address) != expected:
            assert time.monotonic() < deadline
    assert list(folder.iterdir()) == []


def test_a_file_that_is_used_does_not_grow_old(folder: Path) -> None:
    """Programs that clean directories for temporary files go by the time of the last change."""
    files = kept.TokenFiles("secret")
    files.write(["127.0.0.1"], 1)
    (file,) = folder.iterdir()
    os.utime(file, (0, 0))
    files.keep()
    assert file.stat().st_mtime > 0
    assert file.read_text() == "secret\n"


# -- what must not be believed -----------------------------------------------------------------------------------------


def link(file: Path) -> None:
    file.rename(file.with_suffix(".moved"))
    file.symlink_to(file.with_suffix(".moved"))


def open_to_others(file: Path) -> None:
    file.chmod(0o644)


def directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("spoil", [link, open_to_others, directory])
def test_a_file_that_others_may_have_made_is_not_used(spoil: Callable[[Path], None], folder: Path) -> None:
    with EmbeddedCoordinator() as coordinator:
        (file,) = folder.iterdir()
        spoil(file)
        with pytest.raises(StartError, match=ends_with(AccessCode.NOT_PRIVATE, file)):
            metadata(coordinator.address)


def test_a_link_in_place_of_the_file_is_replaced_and_not_followed(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "precious"
    victim.write_text("mine")
    with EmbeddedCoordinator() as coordinator:
        (file,) = folder.iterdir()
        address = coordinator.address
    for name in (file.name, f".{file.name}"):
        (folder / name).symlink_to(victim)
    with EmbeddedCoordinator(address) as coordinator:
        assert not file.is_symlink()
        assert file.read_text().strip() == coordinator.token
    assert victim.read_text() == "mine"


def test_a_folder_that_is_none_is_refused_in_words(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.symlink_to(elsewhere)
    with pytest.raises(OSError, match=ends_with(AccessCode.TOKEN_NOT_KEPT, "not a directory")):
        EmbeddedCoordinator().start()
    assert list(elsewhere.iterdir()) == []


def test_a_folder_that_is_open_to_others_is_closed(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with EmbeddedCoordinator():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_an_answer_from_where_nobody_is_seen_to_listen_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the kernel forwards a port to another host."""
    with EmbeddedCoordinator(insecure=True) as coordinator:
        monkeypatch.setattr(found, "owners", lambda addresses, port: set())
        with pytest.raises(StartError, match=ends_with(AccessCode.UNKNOWN_OWNER, coordinator.address)):
            form_threads(coordinator.address, 1)


def test_a_given_token_goes_where_the_kernel_passes_connections_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As to a published port of a container: nobody is seen to listen, and connections are accepted."""
    with EmbeddedCoordinator(token="given") as coordinator:
        monkeypatch.setattr(found, "owners", lambda addresses, port: set())
        close_all(form_threads(coordinator.address, 1, token="given"))


def test_a_given_token_is_not_sent_while_nobody_listens() -> None:
    """Another user could begin to, between the look and the call."""
    with EmbeddedCoordinator(token="given") as coordinator:
        address = coordinator.address
    credential = found.Credential(address, "given")
    assert credential.metadata() == ()
    assert credential.is_outdated()
    with pytest.raises(StartError, match=ends_with(AccessCode.UNKNOWN_OWNER, address)):
        credential.confirm()
    with EmbeddedCoordinator(address, token="given"):
        assert credential.metadata() == (("authorization", "Bearer given"),)
        assert not credential.is_outdated()
        credential.confirm()


def test_a_given_token_is_shown_to_root_and_to_who_has_a_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = (("authorization", "Bearer given"),)
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    monkeypatch.setattr(found, "owners", lambda addresses, port: {0})
    assert found.Credential("127.0.0.1:1", "given").metadata() == shown
    monkeypatch.setattr(found, "owners", lambda addresses, port: {0, 2})
    assert found.Credential("127.0.0.1:1", "given", has_tls=True).metadata() == shown
    for token in (None, "given"):
        with pytest.raises(StartError, match=ends_with(AccessCode.OTHER_USER, "127.0.0.1:1", "HOROVOD_TLS_CA")):
            found.Credential("127.0.0.1:1", token).metadata()


def test_owners_of_sockets() -> None:
    me = os.geteuid()
    with socket.socket() as one, socket.socket(socket.AF_INET6) as every:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        assert owners(["127.0.0.1"], port) == set(), "bound is not listening"
        one.listen()
        assert owners(["127.0.0.1", "::1"], port) == {me}
        assert owners(["127.0.0.2"], port) == set()
        assert not is_free("127.0.0.1", port)
        assert is_free("127.0.0.2", port)
        every.bind(("::", 0))
        every.listen()
        port = every.getsockname()[1]
        assert owners(["127.0.0.9"], port) == owners(["::1"], port) == {me}


# -- settings ----------------------------------------------------------------------------------------------------------


def given(**environ: str) -> str | None:
    return found.given_token(resolve(environ))


def test_the_token_may_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    file.chmod(0o600)
    with EmbeddedCoordinator(token="secret") as coordinator:
        common = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "1"}
        with Program("\nhvd.init()\nprint(hvd.size())", **common, HOROVOD_TOKEN_FILE=str(file)) as program:
            assert program.finish() == "1"
    assert given() is None
    assert given(HOROVOD_TOKEN="secret", HOROVOD_TOKEN_FILE=str(file)) == "secret"
    with pytest.raises(StartError, match=ends_with(SettingCode.CONFLICTING_SETTINGS, file)) as error:
        given(HOROVOD_TOKEN="another", HOROVOD_TOKEN_FILE=str(file))
    assert "secret" not in str(error.value)
    assert "another" not in str(error.value)
    assert found.given_token(resolve({"HOROVOD_TOKEN_FILE": str(file)}, {"token": "argument"})) == "argument"


def test_ranks_of_a_launcher_get_its_token_and_no_file() -> None:
    job = LocalJob(["true"], ["localhost"], {"HOROVOD_TOKEN_FILE": "/the/user's", "HOROVOD_TOKEN": "of-the-user"})
    share = StartShare(size=1, token="of another", ranks=[PlacedRank(local_size=1, cross_size=1)])
    (slot,) = slots_of(job, "127.0.0.1:1", "of the job", {"localhost": share})
    assert slot.environ["HOROVOD_TOKEN"] == "of the job"
    assert "HOROVOD_TOKEN_FILE" not in slot.environ


@pytest.mark.parametrize("token", ["two words", "caf\u00e9", "tab\there", "line\nbreak", "x" * 4097])
def test_a_malformed_token_is_named_and_not_shown(token: str) -> None:
    for make in (lambda: resolve({"HOROVOD_TOKEN": token}), lambda: resolve({}, {"token": token})):
        with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING)) as error:
            make()
        assert token not in str(error.value)


def test_connections_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of a world looks, and a host has as many connections as ranks have with each other."""
    columns = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
    row = "  {}: 0100007F:72D8 00000000:0000 {} 00000000:00000000 00:00000000 00000000  {}  0 12345 1 0 100 0 0 10 0"
    table = tmp_path / "tcp"
    table.write_text(
        "\n".join([columns, row.format(0, "0A", 7), row.format(1, "03", 0), row.format(2, "0A", 8)]) + "\n"
    )
    monkeypatch.setattr(host, "_TABLES", (str(table), str(tmp_path / "tcp6")))
    assert owners(["127.0.0.1"], 0x72D8) == {7, 8}
    with table.open("a") as file:
        file.write(row.format(3, "01", 9) + "\nwhat is behind the first connection is not even parsed\n")
    assert owners(["127.0.0.1"], 0x72D8) == {7, 8}


def test_sockets_that_listen_come_first_in_the_table_of_the_kernel() -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        stack.enter_context(socket.create_connection(listener.getsockname()))
        later = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        assert owners(["127.0.0.1"], later.getsockname()[1]) == {os.geteuid()}
