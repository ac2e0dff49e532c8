"""Hosts that ssh reaches: a network namespace for each, with a real sshd that has keys of its own.

`ssh` on the PATH of `environ` is the real one with a configuration of this test, so that nothing of the user's is read
or written. Names are those of the namespaces; /etc/hosts is not touched.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.namespaces import Network, NetworkError, check_possible

PORT = 2222


class Hosts:
    """`with Hosts(tmp_path, 2) as hosts:` runs launchers on the first one, which reaches the others by ssh."""

    def __init__(self, folder: Path, count: int, nics: int = 1) -> None:
        try:
            check_possible()
        except NetworkError as error:
            pytest.skip(str(error))
        if shutil.which("sshd", path="/usr/sbin:/sbin") is None and shutil.which("sshd") is None:
            pytest.skip("no sshd here: install openssh-server")
        self.folder = folder
        self._network = Network(count, nics=nics)
        self._servers: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Hosts:
        self._network.__enter__()
        self.names = [host.name for host in self._network.hosts]
        self.addresses = {host.name: host.address for host in self._network.hosts}
        self._write()
        for name in self.names[1:]:
            self.start_sshd(name)
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self._servers):
            self.stop_sshd(name)
        self._network.__exit__(None, None, None)

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}

    def inside(self, name: str) -> list[str]:
        """What runs a command on that host."""
        return list(next(host.prefix for host in self._network.hosts if host.name == name))

    def cut(self, name: str) -> None:
        """The host's cable is pulled: nobody is told."""
        for link in ("eth0",):
            subprocess.run(["ip", "-n", name, "link", "set", link, "down"], check=True)

    def start_sshd(
        self, name: str, mounts: Mapping[Path, Path] | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """Returns when it listens. mounts: what that host has in place of what is here; by where it is seen.

        variables: in the environment of what it starts.
        """
        config = self.folder / f"sshd_config.{name}"
        given = [f"{variable}={value}" for variable, value in (variables or {}).items()]
        config.write_text(
            f"Port {PORT}\nListenAddress {self.addresses[name]}\nHostKey {self.folder}/host_key\n"
            f"AuthorizedKeysFile {self.folder}/authorized_keys\nPidFile none\nUsePAM no\nStrictModes no\n"
            "PermitRootLogin yes\nPasswordAuthentication no\n" + (f"SetEnv {' '.join(given)}\n" if given else "")
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        sshd = shutil.which("sshd", path="/usr/sbin:/sbin") or "sshd"
        server = subprocess.Popen(
            [*self.inside(name), *_with_mounts(mounts or {}), sshd, "-D", "-e", "-f", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self._servers[name] = server
        assert server.stderr is not None
        said = b""
        while b"Server listening" not in said:
            line = server.stderr.readline()
            assert line, f"sshd did not start: {said!r}"
            said += line

    def server(self, name: str) -> subprocess.Popen[bytes]:
        """That host's sshd."""
        return self._servers[name]

    def stop_sshd(self, name: str) -> None:
        """Also what it has started ends: connections break as when the host's sshd is killed."""
        server = self._servers.pop(name)
        server.terminate()
        server.wait()
        assert server.stderr is not None
        server.stderr.close()  # its sessions may hold the other end for a while

    def known_hosts(self, lines: str | None = None) -> None:
        """What ssh knows; without an argument, every host."""
        key = (self.folder / "host_key.pub").read_text().split()
        every = "".join(f"[{self.addresses[name]}]:{PORT} {key[0]} {key[1]}\n" for name in self.names)
        (self.folder / "known_hosts").write_text(every if lines is None else lines)

    def _write(self) -> None:
        for name in ("host_key", "user_key", "other_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        shutil.copy(self.folder / "user_key.pub", self.folder / "authorized_keys")
        self.known_hosts()
        blocks = "".join(f"Host {name}\n  HostName {self.addresses[name]}\n" for name in self.names)
        (self.folder / "config").write_text(
            f"{blocks}Host *\n  Port {PORT}\n  User root\n  IdentityFile {self.folder}/user_key\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
        )
        (self.folder / "bin").mkdir()
        wrapper = self.folder / "bin" / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/config "$@"\n')
        wrapper.chmod(0o755)


def _with_mounts(mounts: Mapping[Path, Path]) -> list[str]:
    """What runs a command with a file system of its own, which ends with it."""
    if not mounts:
        return []
    lines = [f"mount --bind {shlex.quote(str(there))} {shlex.quote(str(seen))}" for seen, there in mounts.items()]
    return ["unshare", "--mount", "sh", "-e", "-c", "\n".join([*lines, 'exec "$@"']), "sh"]
