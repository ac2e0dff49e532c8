"""horovodrun on hosts that only ssh reaches: real sshd's, each in a network namespace of its own."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from error_codes import ends_with
from event_words import EPOCH_BEGAN, tells
from launching import DEADLINE_S, still_alive
from resources import eventually
from sshd_hosts import Hosts

from horovod import __version__
from horovod.base.errors import ClusterCode, LaunchCode, code_of, without_code
from horovod.base.run_certificate import ADVICE

SOURCES = Path(__file__).parents[3] / "clients" / "horovod"
LAUNCHER = [sys.executable, "-m", "horovod.launch"]
WORLD = """
import os, sys
import numpy, horovod.torch as hvd, torch
hvd.init()
print(hvd.rank(), hvd.local_rank(), hvd.cross_rank(), hvd.allreduce(torch.tensor(float(hvd.rank())), op=hvd.Sum).item())
"""
UP = "import os, signal, sys\nprint('up', os.getpid(), flush=True)\nwhile True: signal.pause()\n"


@pytest.fixture
def hosts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    with Hosts(tmp_path, getattr(request, "param", 3)) as hosts:
        yield hosts


class Launch:
    """A launcher on the first host."""

    def __init__(self, hosts: Hosts, source: str, *options: str, **variables: str) -> None:
        program = hosts.folder / "program.py"
        program.write_text(source)
        self.process = subprocess.Popen(
            [*hosts.inside(hosts.names[0]), *LAUNCHER, *options, sys.executable, str(program)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**hosts.environ, **variables},
        )

    def ranks(self, count: int) -> list[psutil.Process]:
        """Waits until so many have said that they are up."""
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(count)]
        assert all(lines), self.process.communicate()
        return [psutil.Process(int(line.split()[-1])) for line in sorted(lines)]

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err


def spec(hosts: Hosts, slots: int = 2) -> str:
    return ",".join(f"{name}:{slots}" for name in hosts.names[1:])


def without_progress(err: str) -> list[str]:
    """Lines but those that say how many hosts are ready, which a launcher writes when that takes long."""
    return [line for line in err.splitlines() if "hosts are ready; waiting for" not in line]


@pytest.mark.parametrize("hosts", [3, 5], indirect=True)
def test_a_world_on_other_hosts(hosts: Hosts) -> None:
    slots = 4 // (len(hosts.names) - 1)
    code, out, err = Launch(hosts, WORLD, "--verbose", "-np", "4", "-H", spec(hosts, slots)).finish()
    assert code == 0, err
    expected = [f"[{rank}]<stdout>:{rank} {rank % slots} {rank // slots} 6.0" for rank in range(4)]
    assert sorted(out.splitlines(), key=lambda line: int(line[1 : line.index("]")])) == expected
    assert f"on {hosts.names[1]}, over eth0" in err
    assert re.search(
        rf"^horovodrun: [\d:.]+ World 1 {EPOCH_BEGAN} 4 members on hosts? {hosts.names[1]}", err, re.MULTILINE
    )


def test_this_host_needs_no_ssh(hosts: Hosts) -> None:
    source = "import os; print(os.environ['HOROVOD_HOSTNAME'], os.environ.get('SSH_CONNECTION', 'no ssh'))"
    code, out, err = Launch(hosts, source, "-np", "2", "-H", f"localhost:1,{hosts.names[1]}:1").finish()
    assert code == 0, err
    assert f"[0]<stdout>:{hosts.names[0]} no ssh" in out
    assert f"[1]<stdout>:{hosts.names[1]} {hosts.addresses[hosts.names[0]]} " in out


def test_one_line_for_each_host_that_fails(hosts: Hosts) -> None:
    fine, dead = hosts.names[1:]
    hosts.stop_sshd(dead)
    started = Launch(hosts, UP, "-np", "3", "-H", f"{fine}:1,{dead}:1,nowhere.invalid:1")
    code, out, err = started.finish()
    assert (code, out) == (1, "")
    lines = without_progress(err)
    assert tells(lines[0], "horovodrun: ", "2 of 3 hosts")
    facts = [f"\n  {dead}: ", "Connection refused", "\n  nowhere.invalid: "]
    assert re.search(ends_with(LaunchCode.UNKNOWN_HOST, *facts), err)
    assert len(lines) == 3


@pytest.mark.parametrize(("known", "fact"), [("", "--ssh-host-keys accept-new"), ("another", "`ssh-keygen -R ")])
def test_host_keys_are_verified(hosts: Hosts, known: str, fact: str) -> None:
    other = " ".join((hosts.folder / "other_key.pub").read_text().split()[:2])
    address = hosts.addresses[hosts.names[1]]
    hosts.known_hosts(f"[{address}]:2222 {other}\n" if known else "")
    code, _, err = Launch(hosts, UP, "-np", "1", "-H", f"{hosts.names[1]}:1").finish()
    assert code == 1
    assert re.search(ends_with(LaunchCode.SSH_HOST_KEY, f"{hosts.names[1]}: ", fact), err)


def test_unless_told_otherwise(hosts: Hosts) -> None:
    hosts.known_hosts("")
    options = ["-np", "1", "-H", f"{hosts.names[1]}:1"]
    code, out, err = Launch(hosts, "print('ran')", "--ssh-host-keys", "accept-new", *options).finish()
    assert (code, out) == (0, "[0]<stdout>:ran\n"), err
    assert Launch(hosts, "print('ran')", *options).finish()[0] == 0  # from now on it is known


def test_a_key_that_is_refused(hosts: Hosts) -> None:
    other = str(hosts.folder / "other_key")
    config = hosts.folder / "config"
    config.write_text(config.read_text().replace("user_key", "no_such_key"))
    code, _, err = Launch(hosts, UP, "-i", other, "-np", "1", "-H", f"{hosts.names[1]}:1").finish()
    assert code == 1
    assert re.search(ends_with(LaunchCode.SSH_LOGIN_REFUSED, f"{hosts.names[1]}: "), err)
    options = ["-i", str(hosts.folder / "user_key"), "-p", "2222", "-np", "1", "-H", f"{hosts.names[1]}:1"]
    assert Launch(hosts, "pass", *options).finish()[0] == 0


def test_the_credential_is_in_no_argument(hosts: Hosts) -> None:
    source = f"""
import os, psutil
token = os.environ["HOROVOD_TOKEN"]
seen = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
print(len(token) > 20, any(token in word for words in seen for word in words))
{UP.splitlines()[0]}
"""
    code, out, err = Launch(hosts, source, "-np", "1", "-H", f"{hosts.names[1]}:1").finish()
    assert (code, out) == (0, "[0]<stdout>:True False\n"), err


@pytest.mark.parametrize("relay", ["--relay", "--no-relay"])
def test_the_launcher_has_a_certificate_and_nothing_is_warned_of(hosts: Hosts, relay: str) -> None:
    """What a host says of TLS in its own environment is for other coordinators."""
    name = hosts.names[1]
    hosts.stop_sshd(name)
    hosts.start_sshd(name, variables={"HOROVOD_TLS_CERT": "/nowhere", "HOROVOD_TLS_CA": "/nowhere"})
    source = f"""{WORLD}
believed = open(os.environ["HOROVOD_TLS_CA"]).read()
print(believed.count("BEGIN CERTIFICATE"), "HOROVOD_TLS_CERT" in os.environ, "HOROVOD_RELAY_SOCKET" in os.environ)
"""
    code, out, err = Launch(hosts, source, relay, "-np", "2", "-H", spec(hosts, 1)).finish()
    assert code == 0, err
    assert without_progress(err) == []
    assert out.count(f"1 False {relay == '--relay'}") == 2


def test_without_a_certificate_a_sentence_says_what_to_install(hosts: Hosts) -> None:
    openssl = hosts.folder / "bin" / "openssl"
    openssl.write_text("#!/bin/sh\nexit 1\n")
    openssl.chmod(0o755)
    hidden = hosts.folder / "hidden"
    hidden.mkdir()
    (hidden / "cryptography.py").write_text("raise ImportError('hidden')\n")
    launched = Launch(hosts, "print('ran')", "-np", "1", "-H", f"{hosts.names[1]}:1", PYTHONPATH=str(hidden))
    code, out, err = launched.finish()
    assert (code, out) == (0, "[0]<stdout>:ran\n"), err
    (line,) = without_progress(err)
    assert re.match(r"The coordinator at \[::\]:[1-9]\d+ asks for a token, but without TLS", line), line
    assert line.endswith(f"can take it. {ADVICE}")


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGKILL], [signal.SIGTSTP, signal.SIGKILL]])
def test_nothing_is_left_when_the_launcher_ends(hosts: Hosts, signals: list[signal.Signals]) -> None:
    launched = Launch(hosts, UP, "-np", "4", "-H", spec(hosts))
    ranks = launched.ranks(4)
    agents = [parent for rank in ranks for parent in rank.parents()[:1]]
    launcher = psutil.Process(launched.process.pid)
    assert "horovod.launch" in " ".join(launcher.cmdline())
    for signum in signals:
        launcher.send_signal(signum)
        if signum == signal.SIGTSTP:
            assert eventually(lambda: all(rank.status() == psutil.STATUS_STOPPED for rank in ranks))
    launched.finish()
    assert still_alive(ranks + agents) == []


def test_nothing_is_left_when_ssh_ends(hosts: Hosts) -> None:
    launched = Launch(hosts, UP, "-np", "2", "-H", spec(hosts, 1))
    ranks = launched.ranks(2)
    for child in psutil.Process(launched.process.pid).children():
        if child.name() == "ssh":
            child.kill()
    code, _, _ = launched.finish()
    assert code != 0
    assert still_alive(ranks) == []


def test_a_host_whose_cable_is_pulled(hosts: Hosts) -> None:
    """The others are told which host is lost; the ranks there are ended by their own agent."""
    options = ["--keepalive-timeout-seconds", "2", "--reattach-grace-seconds", "2"]
    launched = Launch(hosts, UP, *options, "-np", "2", "-H", spec(hosts, 1))
    ranks = launched.ranks(2)
    lost = hosts.names[2]
    hosts.cut(lost)
    code, _, err = launched.finish()
    assert code == 255
    facts = [f"Rank 1 on host {lost} (pid {ranks[1].pid}) is lost", f"host {lost} has"]
    assert re.search(ends_with(LaunchCode.RANK_FAILED, *facts), err)
    assert still_alive(ranks) == []


def other_environment(folder: Path, horovod: str = "") -> dict[Path, Path]:
    """A real virtual environment in place of ours: without Horovod, or with the package of another version."""
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    subprocess.run([base, "-m", "venv", "--without-pip", folder], check=True, stdin=subprocess.DEVNULL)
    (folder / "bin" / Path(sys.executable).name).resolve(strict=True)
    if horovod:
        packages = next((folder / "lib").glob("python3*")) / "site-packages"
        package = packages / "horovod"
        package.mkdir()
        shutil.copy(SOURCES / "__init__.py", package)
        (package / "base").mkdir()
        shutil.copy(SOURCES.parents[1] / "base" / "protocol.py", package / "base")
        metadata = packages / f"horovod-{horovod}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: horovod\nVersion: {horovod}\n")
    return {Path(sys.prefix): folder}


def no_python(folder: Path) -> dict[Path, Path]:
    """Nothing where our environment is, and nothing that is called python3 on the way."""
    folder.mkdir()
    path = f"{os.environ['PATH']}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    account = pwd.getpwuid(os.getuid())  # whose shell may add to it: bash reads ~/.bashrc where ssh started it
    environ = {"HOME": account.pw_dir, "PATH": "/usr/local/bin:/usr/bin:/bin", "SSH_CLIENT": "127.0.0.1 1 22"}
    path += (
        ":"
        + subprocess.run(
            [account.pw_shell, "-c", "echo $PATH"], env=environ, capture_output=True, text=True, timeout=30
        )
        .stdout.strip()
        .rpartition("\n")[2]
    )
    names = [Path(part) / "python3" for part in path.split(":")]
    found = {name.resolve() for name in names if name.exists() and not name.is_relative_to(sys.prefix)}
    return {Path(sys.prefix): folder, **dict.fromkeys(found, Path("/dev/null"))}


@pytest.mark.parametrize("hosts", [6], indirect=True)
def test_hosts_on_which_no_agent_starts(hosts: Hosts) -> None:
    """Each has its own reason, and one line says it; the one that is in order runs nothing."""
    version, horovod, python, dead = hosts.names[2:]
    elsewhere = {
        version: other_environment(hosts.folder / "version", "0.99.1"),
        horovod: other_environment(hosts.folder / "horovod"),
        python: no_python(hosts.folder / "python"),
    }
    for name in (*elsewhere, dead):
        hosts.stop_sshd(name)
    for name, mounts in elsewhere.items():
        hosts.start_sshd(name, mounts)
    code, out, err = Launch(hosts, UP, "-np", "5", "-H", spec(hosts, 1)).finish()
    assert (code, out) == (1, "")
    assert code_of(err) is LaunchCode.NO_AGENT_ON_HOST  # as the reasons differ
    first, *lines = without_progress(without_code(err))
    assert tells(first, "horovodrun: ", "4 of 5 hosts")
    said = {name: next(line for line in lines if line.startswith(f"  {name}: ")) for name in (*elsewhere, dead)}
    assert len(lines) == 4
    assert re.search(f" 0.99.1 .* {re.escape(__version__)} ", said[version])
    assert re.search(f"No module named 'horovod'.* {re.escape(__version__)} ", said[horovod])
    assert re.search(f"{re.escape(sys.executable)} .*python3", said[python])
    assert "Connection refused" in said[dead]


def test_hosts_that_do_not_reach_each_other(hosts: Hosts) -> None:
    one, other = hosts.names[1:]
    for source, target in ((one, other), (other, one)):
        subprocess.run(["ip", "-n", source, "route", "add", "blackhole", f"{hosts.addresses[target]}/32"], check=True)
    code, _, err = Launch(hosts, UP, "-np", "2", "-H", spec(hosts, 1)).finish()
    assert code == 1
    facts = [f"{other} can't connect to {one} at {hosts.addresses[one]} (eth0)"]
    assert re.search(ends_with(ClusterCode.HOSTS_UNREACHABLE, *facts), err)
