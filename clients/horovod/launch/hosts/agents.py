"""Agents on hosts, started for one run: what is run there, and what it means when it does not run.

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
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from horovod.base.errors import LaunchCode, code_of, coded, without_code
from horovod.base.protocol import __version__
from horovod.base.words import printable, reason_of
from horovod.launch.console.report import Progress, hosts_sentence
from horovod.rendezvous.hosts import HostSlots, remote
from horovod.worker.agent.bound import remove_leftovers

LEAVE_TIMEOUT_S = 20.0  # seconds for an agent that was told to leave to end
NO_PYTHON, NO_HOROVOD, OTHER_VERSION = 93, 94, 95  # exit codes of the program on the other host
_KEPT_LINES = 20
_AT_ONCE = 64  # connections that are being made at one time

# Runs there. Nothing is imported from the directory in which the remote shell begins.
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


class RemoteShell(Protocol):
    """How a line for a POSIX shell is run on another host, and what it means where it is not: all that is asked of what
    starts agents."""

    @property
    def name(self) -> str: ...  # as users know it: "ssh"

    def check(self) -> None:
        """ValueError: this machine lacks what the launcher needs, such as the program `ssh`."""

    def command(self, host: str, line: str) -> list[str]:
        """The command that runs `line` on `host`, with its own standard streams as those of the line."""

    def refusal(self, host: str, code: int | None, said: Sequence[str]) -> str:
        """Why the command, which ended with `code` and wrote `said` to stderr, ran nothing there: without a full stop,
        but with a code. "" where it did."""


def remote_command(python: str, environ: Mapping[str, str]) -> str:
    """Starts the agent with this Python, or whatever is called python3 where that does not exist."""
    script = (
        'p=$0; command -v "$p" >/dev/null 2>&1 || p=python3; '
        f'command -v "$p" >/dev/null 2>&1 || {{ echo "$0" >&2; exit {NO_PYTHON}; }}; exec "$p" -c "$1"'
    )
    variables = [f"{name}={shlex.quote(environ[name])}" for name in ("PYTHONPATH",) if environ.get(name)]
    return shlex.join(["env"]) + " " + " ".join([*variables, shlex.join(["sh", "-c", script, python, _PROGRAM])])


@dataclass
class HostAgent:
    """One agent that was started, here or there. `ended` is set when its process is over."""

    host: str
    shell: RemoteShell | None  # by which it was started; None: it is on this host
    process: asyncio.subprocess.Process
    said: list[str] = field(default_factory=list)  # the last lines that it wrote to stderr
    registered: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @classmethod
    async def start(
        cls,
        host: str,
        command: Sequence[str],
        order: Mapping[str, Any],
        heard: Callable[[str], None],
        shell: RemoteShell | None,
    ) -> HostAgent:
        """Starts `command`, which is to become an agent, and sends the agent its order. heard: gets its stderr."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher, which passes it on
        )
        agent = cls(host, shell, process)
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
        return explain(self.shell, self.host, self.process.returncode, self.said)

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


def explain(shell: RemoteShell | None, host: str, code: int | None, said: Sequence[str]) -> str:
    """One clear line for an agent that could not be started, without a full stop, but with a code. shell: None where it
    was to be started on this host."""
    if shell is None:
        return _ended(code, said)
    last = said[-1] if said else f"{shell.name} said nothing"
    if code == NO_PYTHON:
        return coded(LaunchCode.HOST_INSTALLATION, f"there is no Python there: neither {last} nor python3")
    if code == NO_HOROVOD:
        remedy = f"Install version {__version__} for the Python that {shell.name} finds"
        why = f"Horovod is not installed there: {last}. {remedy}"
        return coded(LaunchCode.HOST_INSTALLATION, why)
    if code == OTHER_VERSION:
        why = f"Horovod has version {last} there, but {__version__} here: install the same on both"
        return coded(LaunchCode.HOST_INSTALLATION, why)
    return shell.refusal(host, code, said) or _ended(code, said)


def _ended(code: int | None, said: Sequence[str]) -> str:
    """An agent that had begun to run says itself why it has ended, and with which code."""
    text = " / ".join(said[-3:])
    why = f"its agent ended with {code}: {without_code(text) or 'it said nothing'}"
    return coded(code_of(text) or LaunchCode.NO_AGENT_ON_HOST, why)


def local_command() -> list[str]:
    """An agent on this host."""
    return [sys.executable, "-c", _PROGRAM]


def working_directory() -> str:
    """Where ranks are to run; a sentence where it is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        sentence = "The current directory does not exist any more: change to another one."
        raise ValueError(coded(LaunchCode.PROCESS_NOT_STARTED, sentence)) from None


def shown_name(name: str) -> str:
    """`localhost` says nothing to other hosts, nor to a later reader of a log."""
    return socket.gethostname() if name == "localhost" else name


class HostAgents:
    """`async with HostAgents(...) as agents:` has an agent on every host, or raises RuntimeError with a line for each
    host that has none."""

    def __init__(
        self,
        hosts: Sequence[HostSlots],
        order: Mapping[str, Any],
        shell: RemoteShell,
        python: str,
        environ: Mapping[str, str],
        start_timeout_s: float,
        note: Callable[[str], None],
        progress: Progress | None = None,
    ) -> None:
        """order: what every agent is told. note: gets what agents say on stderr, a line each."""
        self._progress = progress
        self._ready: set[str] = set()
        self._hosts = hosts
        self._order = order
        self._shell = shell
        self._remote_command = remote_command(python, environ)
        self._start_timeout_s = start_timeout_s
        self._note = note
        self._agents: list[HostAgent] = []
        self._has_local = False  # whether one of them is, or was, on this host
        self._at_once = asyncio.Semaphore(_AT_ONCE)

    async def __aenter__(self) -> HostAgents:
        try:
            await self._start()
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._leave()

    async def _start(self) -> None:
        names = [host.name for host in self._hosts]
        elsewhere = set(remote(names))
        shown = self._progress.show_text(lambda: hosts_sentence(self._ready, names)) if self._progress else None
        showing = asyncio.create_task(shown) if shown is not None else None
        try:
            await self._bring_all_up(elsewhere)
        finally:
            if showing is not None:
                showing.cancel()
                await asyncio.wait([showing])

    async def _bring_all_up(self, elsewhere: Collection[str]) -> None:
        found = await asyncio.gather(
            *(self._bring_up(host, host.name in elsewhere, self._at_once) for host in self._hosts)
        )
        failed = [(host.name, why) for host, why in zip(self._hosts, found, strict=True) if isinstance(why, str)]
        if failed:
            lines = "".join(f"\n  {name}: {without_code(why)}." for name, why in failed)
            count = f"{len(failed)} of {len(self._hosts)} hosts" if len(self._hosts) > 1 else "the host"
            how = f"could not connect to some hosts via {self._shell.name}"
            sentence = f"{how}: no agent on {count}, so nothing was run:{lines}"
            codes = {code_of(why) for _, why in failed}
            code = codes.pop() if len(codes) == 1 else None
            raise RuntimeError(coded(code or LaunchCode.NO_AGENT_ON_HOST, sentence))

    async def bring_up(self, host: HostSlots) -> HostAgent | str:
        """Starts an agent that registers under the host's name as it is given. Returns it, or why there is none, with a
        code.
        """
        is_remote = bool(await asyncio.to_thread(remote, [host.name]))
        try:
            found = await self._bring_up(host, is_remote, self._at_once, host.name)
        except OSError as error:
            program = self._shell.name if is_remote else "its agent"
            return coded(LaunchCode.MISSING_PROGRAM, f"{program} can't be started here: {reason_of(error)}")
        if isinstance(found, str):  # it must not register later
            await asyncio.gather(*(self.let_go(agent) for agent in self._agents if agent.host == host.name))
        return found

    async def let_go(self, agent: HostAgent) -> None:
        """Has the agent end its ranks and leave, and waits for that."""
        agent.leave()
        await agent.left()
        if agent in self._agents:
            self._agents.remove(agent)

    async def _bring_up(
        self, host: HostSlots, is_remote: bool, at_once: asyncio.Semaphore, name: str = ""
    ) -> HostAgent | str:
        """Starts an agent and waits until it is registered. Returns it, or why there is none, with a code."""
        order = {**self._order, "name": name or shown_name(host.name), "slots": host.slots}
        command = self._shell.command(host.name, self._remote_command) if is_remote else local_command()
        async with at_once:
            shell = self._shell if is_remote else None
            heard = lambda line: self._note(f"{host.name}: {line}")  # noqa: E731
            agent = await HostAgent.start(host.name, command, order, heard, shell)
            self._agents.append(agent)
            self._has_local = self._has_local or not is_remote
            waits = [asyncio.create_task(agent.registered.wait()), asyncio.create_task(agent.ended.wait())]
            try:
                await asyncio.wait(waits, timeout=self._start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if agent.registered.is_set():
                self._ready.add(host.name)
                return agent
            if agent.ended.is_set():
                return agent.why()
        why = f"its agent did not register within {self._start_timeout_s:g} s (--start-timeout gives it more)"
        return coded(LaunchCode.NO_AGENT_ON_HOST, why + (f"; it said: {agent.said[-1]}" if agent.said else ""))

    async def _leave(self) -> None:
        for agent in self._agents:
            agent.leave()
        await asyncio.gather(*(agent.left() for agent in self._agents))
        if self._has_local:  # one that was killed has left its folder; on other hosts the next agent deletes it
            await asyncio.to_thread(remove_leftovers)
