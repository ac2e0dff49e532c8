"""Jobs on hosts that ssh reaches: an agent on each for one run (hosts/launch.py)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod.base.errors import LaunchCode, coded
from horovod.launch.asked import Asked, AskedFunction, InThread
from horovod.rendezvous.hosts import remote

CONNECT_TIMEOUT_S = 10
_ALIVE_S = 5  # seconds between ssh's own keepalives; three without an answer end the connection
_FAILED = 255  # ssh's own exit code; any other is that of what it has run
_UNREACHABLE = ("timed out", "refused", "no route", "unreachable", "closed by", "not responding")


def takes(asked: Asked) -> bool:
    """Whether a program finds the hosts of the job, or not all of them are this machine."""
    return asked.args.host_discovery_script is not None or bool(remote(asked.hosts))


def launch(asked: Asked) -> int:
    """Runs the job; the exit code of the launcher."""
    from horovod.launch.hosts.launch import launch_on_hosts

    args, hosts = asked.args, asked.hosts_for_agents()
    shell = Ssh(args.ssh_port, args.ssh_identity_file, args.ssh_host_keys)
    return launch_on_hosts(args, asked.environ, hosts, shell)


def takes_function(asked: AskedFunction) -> bool:
    """Whether the job is elastic, or not all of its ranks are on this machine."""
    return asked.replacement is not None or bool(remote(asked.names))


def run_function(asked: AskedFunction, in_thread: InThread) -> list[Any]:
    """Runs the job; the results by rank."""
    from horovod.launch.hosts.function import FunctionOnHosts

    return FunctionOnHosts(asked, Ssh(asked.ssh_port, asked.ssh_identity_file)).run(in_thread)


@dataclass(frozen=True)
class Ssh:
    """A RemoteShell."""

    port: int | None = None
    identity_file: str | None = None
    host_keys: str | None = None  # None: what ssh is configured to do; it never asks
    name: str = "ssh"

    def check(self) -> None:
        """ValueError where this host has no ssh."""
        if shutil.which("ssh") is None:
            sentence = "There is no `ssh` on this host, which starts processes on others: install openssh-client."
            raise ValueError(coded(LaunchCode.MISSING_PROGRAM, sentence))

    def command(self, host: str, line: str) -> list[str]:
        """The command that runs `line` on `host`."""
        options = {
            "BatchMode": "yes",  # no questions: nobody could answer for many hosts
            "ConnectTimeout": CONNECT_TIMEOUT_S,
            "ServerAliveInterval": _ALIVE_S,
            "ServerAliveCountMax": 3,
            "LogLevel": "ERROR",
        }
        if self.host_keys is not None:
            options["StrictHostKeyChecking"] = self.host_keys
        command = ["ssh", "-T"]
        for name, value in options.items():
            command += ["-o", f"{name}={value}"]
        if self.port is not None:
            command += ["-p", str(self.port)]
        if self.identity_file is not None:
            command += ["-i", self.identity_file, "-o", "IdentitiesOnly=yes"]
        return [*command, "--", host, line]

    def refusal(self, host: str, code: int | None, said: Sequence[str]) -> str:
        """Why ssh ran nothing there, without a full stop, but with a code; "" where it did."""
        if code != _FAILED:
            return ""
        text, last = " / ".join(said[-3:]), said[-1] if said else "ssh said nothing"
        lower = text.lower()
        if "remote host identification has changed" in lower or ("host key for" in lower and "changed" in lower):
            return coded(
                LaunchCode.SSH_HOST_KEY,
                "its host key is another one than in known_hosts. If that is as it should be, "
                f"`ssh-keygen -R {host}` forgets the old one",
            )
        if "host key verification failed" in lower or "no matching host key" in lower:
            return coded(
                LaunchCode.SSH_HOST_KEY,
                f"its host key is not known. Connect once by `ssh {host}` and compare it, or take unknown keys with "
                "--ssh-host-keys accept-new",
            )
        if "permission denied" in lower or "too many authentication failures" in lower:
            why = f"it refuses the key ({last}). `ssh {host}` must work without a password; -i names another key"
            return coded(LaunchCode.SSH_LOGIN_REFUSED, why)
        if "could not resolve" in lower:
            return coded(LaunchCode.UNKNOWN_HOST, f"its name is not known here ({last})")
        if any(word in lower for word in _UNREACHABLE):
            return coded(LaunchCode.UNKNOWN_HOST, f"it can't be reached ({last}). -p names another port of sshd")
        return coded(LaunchCode.NO_AGENT_ON_HOST, f"ssh failed: {text or last}")
