"""Agents on other hosts, started by ssh: what is run there, and what it means when it does not run.

The agent gets where to go and its credential in one line on its stdin, never in an argument, which every user of the
host could read. It lives as long as that stdin is open: when this launcher or the connection ends, however that
happens, the agent ends its ranks and leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from horovod.base.errors import LaunchCode, code_of, coded, without_code
from horovod.base.version import __version__
from horovod.base.words import printable

CONNECT_TIMEOUT_S = 10
LEAVE_TIMEOUT_S = 20.0  # seconds for an agent that was told to leave to end
_ALIVE_S = 5  # seconds between ssh's own keepalives; three without an answer end the connection
NO_PYTHON, NO_HOROVOD, OTHER_VERSION = 93, 94, 95  # exit codes of the program on the other host
_KEPT_LINES = 20
_UNREACHABLE = ("timed out", "refused", "no route", "unreachable", "closed by", "not responding", "reset by")
HOST_KEYS = ("yes", "accept-new", "no")  # values of ssh's StrictHostKeyChecking

# Runs there. Nothing is imported from the directory that ssh begins in.
_PROGRAM = f"""
import sys
sys.path[:] = [entry for entry in sys.path if entry]
try:
    from horovod import __version__
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit({NO_HOROVOD})
if __version__ != {__version__!r}:
    print(__version__, file=sys.stderr)
    sys.exit({OTHER_VERSION})
from horovod.worker.agent.__main__ import main
sys.exit(main(["--stdin"]))
"""


@dataclass(frozen=True)
class SshOptions:
    port: int | None = None
    identity_file: str | None = None
    host_keys: str | None = None  # None: what ssh is configured to do; it never asks

    def command(self, host: str, remote: str) -> list[str]:
        """The command that runs `remote`, a line for a POSIX shell, on `host`."""
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
        return [*command, "--", host, remote]


def remote_command(python: str, environ: Mapping[str, str]) -> str:
    """Starts the agent with this Python, or whatever is called python3 where that does not exist."""
    script = (
        'p=$0; command -v "$p" >/dev/null 2>&1 || p=python3; '
        f'command -v "$p" >/dev/null 2>&1 || {{ echo "$0" >&2; exit {NO_PYTHON}; }}; exec "$p" -c "$1"'
    )
    variables = [f"{name}={shlex.quote(environ[name])}" for name in ("PYTHONPATH",) if environ.get(name)]
    return shlex.join(["env"]) + " " + " ".join([*variables, shlex.join(["sh", "-c", script, python, _PROGRAM])])


@dataclass
class RemoteAgent:
    """One agent that was started, here or there. `ended` is set when its process is over."""

    host: str
    is_remote: bool
    process: asyncio.subprocess.Process
    said: list[str] = field(default_factory=list)  # the last lines that it wrote to stderr
    registered: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @classmethod
    async def start(
        cls, host: str, command: Sequence[str], order: Mapping[str, Any], heard: Callable[[str], None], is_remote: bool
    ) -> RemoteAgent:
        """Starts `command`, which is to become an agent, and tells it its order. heard: gets what it says on stderr."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher, which passes it on
        )
        agent = cls(host, is_remote, process)
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(json.dumps(dict(order)).encode() + b"\n")
            await process.stdin.drain()
        agent.tasks = [asyncio.create_task(agent._read_stdout()), asyncio.create_task(agent._read_stderr(heard))]
        agent.tasks.append(asyncio.create_task(agent._wait()))
        return agent

    def set_slots(self, slots: int) -> None:
        """Tells the agent that its host has so many slots from now on."""
        if self.process.stdin is not None and not self.process.stdin.is_closing():
            self.process.stdin.write(json.dumps({"slots": slots}).encode() + b"\n")

    def leave(self) -> None:
        """Tells the agent to end its ranks and itself."""
        if self.process.stdin is not None:
            self.process.stdin.close()

    async def left(self) -> None:
        """Waits for its end, which `leave` has asked for; not for ever."""
        try:
            await asyncio.wait_for(self.ended.wait(), LEAVE_TIMEOUT_S)
        except asyncio.TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.ended.wait()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def why(self) -> str:
        """Why it did not start, or is gone, without a full stop, but with a code."""
        code = self.process.returncode
        return explain(self.host, code, self.said) if self.is_remote else _ended(code, self.said)

    async def _read_stdout(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            if line.startswith(b"horovod-worker serves "):
                self.registered.set()

    async def _read_stderr(self, heard: Callable[[str], None]) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            text = printable(line.decode(errors="replace").rstrip())
            if text:
                self.said = [*self.said, text][-_KEPT_LINES:]
                heard(text)

    async def _wait(self) -> None:
        await self.process.wait()
        await asyncio.wait(self.tasks[:2], timeout=1)
        self.ended.set()


def explain(host: str, code: int | None, said: Sequence[str]) -> str:
    """One clear line for an agent that could not be started by ssh, without a full stop, but with a code."""
    last = said[-1] if said else "ssh said nothing"
    if code == NO_PYTHON:
        return coded(LaunchCode.HOST_INSTALLATION, f"there is no Python there: neither {last} nor python3")
    if code == NO_HOROVOD:
        why = f"Horovod is not installed there: {last}. Install version {__version__} for the Python that ssh finds"
        return coded(LaunchCode.HOST_INSTALLATION, why)
    if code == OTHER_VERSION:
        why = f"Horovod has version {last} there, but {__version__} here: install the same on both"
        return coded(LaunchCode.HOST_INSTALLATION, why)
    if code == 255:
        return _of_ssh(host, " / ".join(said[-3:]), last)
    return _ended(code, said)


def _ended(code: int | None, said: Sequence[str]) -> str:
    """An agent that had begun to run says itself why it has ended, and with which code."""
    text = " / ".join(said[-3:])
    why = f"its agent ended with {code}: {without_code(text) or 'it said nothing'}"
    return coded(code_of(text) or LaunchCode.NO_AGENT_ON_HOST, why)


def _of_ssh(host: str, text: str, last: str) -> str:
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
    if any(
        word in lower for word in ("timed out", "refused", "no route", "unreachable", "closed by", "not responding")
    ):
        return coded(LaunchCode.UNKNOWN_HOST, f"it can't be reached ({last}). -p names another port of sshd")
    return coded(LaunchCode.NO_AGENT_ON_HOST, f"ssh failed: {text or last}")


def check_ssh() -> None:
    """ValueError where this host has no ssh."""
    if shutil.which("ssh") is None:
        sentence = "There is no `ssh` on this host, which starts processes on others: install openssh-client."
        raise ValueError(coded(LaunchCode.MISSING_PROGRAM, sentence))


def local_command() -> list[str]:
    """An agent on this host, which needs no ssh."""
    return [sys.executable, "-c", _PROGRAM]


def working_directory() -> str:
    """Where ranks are to run; a sentence where it is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        sentence = "The current directory does not exist any more: change to another one."
        raise ValueError(coded(LaunchCode.PROCESS_NOT_STARTED, sentence)) from None
