"""What another user of the host can do to a job whose coordinator was started without a token, and what not."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Authority
from error_codes import ends_with
from other_user import OTHER_USER, start_as_other_user
from runtime_harness import Program

from horovod.base.errors import AccessCode
from horovod.base.settings import resolve
from horovod.base.tokens import folders, make_private
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.worker.agent.bound import remove_leftovers
from horovod.worker.runtime.epoch import begin, end
from horovod.worker.runtime.errors import StartError

# Joins as a member would that has read the code, first without a token and then with whatever it can find.
INTRUDER = """
import os, sys, pathlib, grpc, socket
from horovod.protos.v1 import membership_pb2 as pb, membership_pb2_grpc
address, *folders = sys.argv[1:]
print("uid", os.getuid())
found = []
for folder in folders:
    try:
        found += [path.read_text() for path in pathlib.Path(folder).iterdir()]
    except OSError as error:
        print("files:", error.strerror)
for token in [None, "guessed", *found]:
    metadata = (("authorization", f"Bearer {token}"),) if token else None
    with grpc.insecure_channel(address) as channel:
        join = pb.JoinRequest(protocol_version=1, job="default", member_id="intruder", size=2,
                              host=pb.HostIdentity(name=socket.gethostname()), pid=os.getpid())
        call = membership_pb2_grpc.MembershipStub(channel).Join(
            iter([pb.MemberMessage(join=join)]), metadata=metadata, timeout=60)
        try:
            print("joined:", next(call))
        except grpc.RpcError as error:
            print("refused:", error.code().name, error.details())
"""

# Reads all that the pages of a coordinator show, with the members' ways to get in and without.
READER = """
import sys, os, urllib.error, urllib.request
address, *tokens = sys.argv[1:]
print("uid", os.getuid())
for page in ("/", "/metrics", "/readyz", "/healthz", "/?token=", "/?token=guessed"):
    for token in [None, "guessed", *tokens]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            with urllib.request.urlopen(urllib.request.Request(address + page, headers=headers), timeout=60) as answer:
                print("read:", page, answer.read().decode())
        except urllib.error.HTTPError as error:
            print("refused:", page, error.code, error.read().decode())
"""

IMPOSTOR = """
import asyncio, sys
from horovod.coordinator.server import CoordinatorServer
async def main():
    server = CoordinatorServer()
    print(await server.start(), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


# Serves every method, and prints what each call shows.
RECORDER = """
from concurrent.futures import ThreadPoolExecutor
class Handlers(grpc.GenericRpcHandler):
    def service(self, details):
        print(details.method, details.invocation_metadata, flush=True)
server = grpc.server(ThreadPoolExecutor(2), handlers=[Handlers()])
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
sys.stdin.readline()
"""

# A coordinator with a token and a certificate.
SERVICE = """
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.coordinator.tls import ServerTls
with EmbeddedCoordinator(token="a-secret-of-this-job", tls=ServerTls(*sys.argv[1:])) as coordinator:
    print(coordinator.address.rpartition(":")[2], flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def impostor() -> Iterator[str]:
    """The address of a coordinator that another user runs and that asks for no token."""
    with start_as_other_user(IMPOSTOR) as process:
        assert process.stdout is not None
        yield f"127.0.0.1:{process.stdout.readline().strip()}"
        process.kill()


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """As /tmp is. (The folders above tmp_path are closed to others.)"""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


def test_another_user_can_not_join_first(coordinator: EmbeddedCoordinator) -> None:
    """Whoever joins first is rank 0, whose objects the others unpickle."""
    process = start_as_other_user(INTRUDER, coordinator.address, *map(str, folders()))
    out, err = process.communicate(timeout=60)
    assert f"uid {OTHER_USER}" in out, err
    assert "files: Permission denied" in out
    assert "joined:" not in out
    assert out.count("refused: UNAUTHENTICATED ") == out.count("HOROVOD_TOKEN_FILE") == 2  # no token, another one
    # The user's own processes come in without a word about tokens.
    common = {"HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "2"}
    script = "\nhvd.init()\nprint(hvd.rank(), hvd.size(), allreduce('x'))"
    with Program(script, **common) as one, Program(script, **common) as other:
        assert sorted([one.finish(), other.finish()]) == ["0 2 2.0", "1 2 2.0"]


def test_another_user_sees_no_pages() -> None:
    """They name jobs, hosts and process ids; the members' token does not open them."""
    with EmbeddedCoordinator(web_listen="127.0.0.1:0") as coordinator:
        process = start_as_other_user(READER, coordinator.web_address, coordinator.token or "")
        out, err = process.communicate(timeout=60)
    assert f"uid {OTHER_USER}" in out, err
    read = [line for line in out.splitlines() if line.startswith("read:")]
    assert sorted(read) == ["read: /healthz ok"] * 3 + ["read: /readyz ok"] * 3
    assert out.count("refused: ") == out.count(f"[{AccessCode.WRONG_TOKEN}]") == 12
    assert "horovod coordinator" not in out


def test_a_member_joins_no_coordinator_of_another_user(impostor: str) -> None:
    others = ends_with(AccessCode.OTHER_USER, impostor, f"uid {OTHER_USER}", "user root", "HOROVOD_TOKEN_FILE")
    with pytest.raises(StartError, match=others):
        begin(resolve({}, {"coordinator": impostor, "size": 1}))


def test_another_user_who_listens_first_is_not_sent_a_token_that_was_given() -> None:
    """As where HOROVOD_TOKEN is set, and the coordinator is not there yet, or not any more."""
    with start_as_other_user(RECORDER) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        address = f"127.0.0.1:{process.stdout.readline().strip()}"
        others = ends_with(AccessCode.OTHER_USER, address, f"uid {OTHER_USER}", "was not sent", "HOROVOD_TLS_CA")
        with pytest.raises(StartError, match=others):
            begin(resolve({}, {"coordinator": address, "size": 1, "token": "a-secret-of-this-user"}))
        agent = [sys.executable, "-m", "horovod.worker.agent", "--coordinator", address, "--name", "h1"]
        for command in (agent, [sys.executable, "-m", "horovod.launch", "ps", "--coordinator", address]):
            environ = {**os.environ, "HOROVOD_TOKEN": "a-secret-of-this-user"}
            run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
            assert run.returncode != 0
            assert re.search(others, run.stderr), run.stderr
        out, err = process.communicate("end\n", timeout=60)
        assert (out, err) == ("", "")


def test_a_certificate_shows_whose_coordinator_it_is(public_folder: Path) -> None:
    """Another user's, such as one of a service, in whose job this user is to take part."""
    ours = Authority(public_folder / "tls")
    pair = ours.issue("coordinator", "127.0.0.1")
    (public_folder / "tls").chmod(0o755)
    for file in (pair.cert, pair.key):
        os.chmod(file, 0o644)
    given = {"size": 1, "token": "a-secret-of-this-job", "tls_ca": ours.file}
    with start_as_other_user(SERVICE, pair.cert, pair.key) as process:
        assert process.stdout is not None
        context = begin(resolve({}, {"coordinator": f"127.0.0.1:{process.stdout.readline().strip()}", **given}))
        assert context.world.size == 1
        end(context)
        process.kill()


def test_a_name_with_two_addresses_is_not_shared_with_another_user(impostor: str) -> None:
    """The user's coordinator has localhost's first address, another user's the second one on the same port."""
    port = impostor.rpartition(":")[2]
    try:
        mine = EmbeddedCoordinator(f"[::1]:{port}").start()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    try:
        with pytest.raises(StartError, match=ends_with(AccessCode.OTHER_USER, f"uid {OTHER_USER}")):
            begin(resolve({}, {"coordinator": f"localhost:{port}", "size": 1}))
    finally:
        mine.stop()


PREPARE = """
folder, own = map(pathlib.Path, sys.argv[1:])
(folder / "made/agents").mkdir(parents=True)
(folder / "made").chmod(0o777)
(folder / "whole/agents/h1").mkdir(parents=True)
(folder / "link").symlink_to(own)
(folder / "file").write_text("")
"""


@pytest.mark.parametrize("state", ["made", "made/agents/h1", "whole/agents/h1", "link", "link/agents/h1", "file"])
def test_an_agent_keeps_nothing_in_a_folder_that_another_user_made_first(
    state: str, public_folder: Path, tmp_path: Path
) -> None:
    """As /tmp/horovod-UID, which is the place of an agent without a home: its sockets and commands would be theirs."""
    _, err = start_as_other_user(PREPARE, str(public_folder), str(tmp_path)).communicate(timeout=60)
    assert not err
    before = sorted(public_folder.rglob("*"))
    agent = [sys.executable, "-m", "horovod.worker.agent", "--coordinator", "127.0.0.1:1", "--name", "h1"]
    run = subprocess.run(
        [*agent, "--state-dir", str(public_folder / state)], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 1, run.stderr
    first = public_folder / Path(state).parts[0]
    assert re.search(ends_with(AccessCode.NOT_PRIVATE, repr(str(first)), f"uid {OTHER_USER}"), run.stderr)
    assert (sorted(public_folder.rglob("*")), list(tmp_path.iterdir())) == (before, [])


def test_what_is_this_users_is_made_private(public_folder: Path) -> None:
    deep = public_folder / "horovod-0" / "agents" / "h1"
    make_private(deep)
    assert [stat.S_IMODE(one.stat().st_mode) for one in (deep, *deep.parents[:2])] == [0o700] * 3
    deep.chmod(0o755)
    link = public_folder / "link"
    link.symlink_to(deep)
    make_private(link)
    assert stat.S_IMODE(deep.stat().st_mode) == 0o700
    (public_folder / "file").touch()
    with pytest.raises(OSError, match=ends_with(AccessCode.NOT_PRIVATE, "no directory")):
        make_private(public_folder / "file")


def test_a_launchers_agent_removes_no_folder_of_another_user(
    public_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only root could; by the name it is one that an agent of this user has left."""
    name = f"horovod-agent-{os.geteuid()}-x"
    script = "left = pathlib.Path(sys.argv[1]); left.mkdir(); (left / 'lock').touch()"
    assert not start_as_other_user(script, str(public_folder / name)).communicate(timeout=60)[1]
    (own := public_folder / f"{name}y").mkdir()
    (own / "lock").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(public_folder))
    remove_leftovers()
    assert [path.name for path in public_folder.iterdir()] == [name]


@pytest.mark.skipif(os.path.isdir(f"/run/user/{os.geteuid()}"), reason="this user has a directory of its own")
def test_a_folder_that_another_user_made_first_is_not_used(public_folder: Path) -> None:
    """In a directory for temporary files anybody can make a folder of any name."""
    made = public_folder / f"horovod-{os.geteuid()}"
    out, err = start_as_other_user("os.mkdir(sys.argv[1], 0o777)", str(made)).communicate(timeout=60)
    assert made.stat().st_uid == OTHER_USER, out + err
    environ = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    run = subprocess.run(
        [sys.executable, "-m", "horovod.coordinator", "--listen", "127.0.0.1:0"],
        env={**environ, "TMPDIR": str(public_folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 1
    assert repr(str(made)) in run.stderr
    assert f"uid {OTHER_USER}" in run.stderr
    assert "--token-file FILE" in run.stderr
    assert run.stderr.count("\n") == 1
