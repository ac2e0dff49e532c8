"""Where the hosts of an elastic job come from: a program, a fixed list, or a class of the user's own.

HostDiscovery          what such a class defines: which hosts there are now, and how many slots each has
HostDiscoveryScript    a program that prints them
FixedHosts             a list that the caller changes

Programs import them from horovod.runner.elastic.discovery, as in earlier releases.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from horovod.base.addresses import wrong_host_name
from horovod.base.errors import LaunchCode, SettingCode, coded
from horovod.base.words import printable

SCRIPT_TIMEOUT_S = 30.0  # after which a program that finds hosts is killed
_MOST_BYTES = 1 << 20  # of what such a program prints
_LOOK_S = 0.1  # between two looks whether the program has ended, while something else holds its output open
_LINE = re.compile(r"([\w.-]+)(?:\s*:\s*([0-9]+))?", re.ASCII)


class HostDiscovery:
    """Says which hosts there are. Subclasses define `find_available_hosts_and_slots`."""

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """The slots of each host that is there now, by its name; called again and again, in any thread.

        An exception means that nobody can tell now: a job that runs stays as it is.
        """
        raise NotImplementedError(f"{type(self).__name__} must define find_available_hosts_and_slots().")


class HostDiscoveryScript(HostDiscovery):
    """A program that prints a line `host:slots`, or `host`, for each host.

    Args:
        discovery_script: the program, with arguments if it has any.
        slots: of a host that it prints without a number.
    """

    def __init__(self, discovery_script: str, slots: int | None = None) -> None:
        self._script = discovery_script
        self._slots = slots
        self._running: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The hosts in the order in which they are printed; of a host that is printed twice the last line counts.

        Raises:
            ValueError: it prints a line that names no host; the sentence has the line and its number.
            RuntimeError: it can't be run, fails, or has not ended after 30 s.
        """
        found: dict[str, int] = {}
        for number, line in enumerate(self._execute_discovery_script().splitlines(), 1):
            text = line.strip()
            if not text:
                continue
            match = _LINE.fullmatch(text)
            if match is None:
                sentence = (
                    f"Line {number} that {self._script!r} printed is {printable(text, 100)!r}, which is not usable: "
                    "expected host or host:slots."
                )
                raise ValueError(coded(SettingCode.INVALID_HOSTS, sentence))
            if wrong := wrong_host_name(match[1]):
                sentence = (
                    f"Line {number} that {self._script!r} printed names no host: {printable(text, 100)!r}; {wrong}."
                )
                raise ValueError(coded(SettingCode.INVALID_HOSTS, sentence))
            if match[2] is None and self._slots is None:
                sentence = (
                    f"Line {number} that {self._script!r} printed is {text!r}, without a number of slots: print "
                    f"{text}:2, or say how many each host has (--slots-per-host)."
                )
                raise ValueError(coded(SettingCode.INVALID_HOSTS, sentence))
            found[match[1]] = int(match[2]) if match[2] is not None else int(self._slots or 0)
        return found

    def _execute_discovery_script(self) -> str:
        """What the program prints. RuntimeError where there is no telling."""
        try:
            process = self._start()
        except OSError as error:
            raise self._failed(f"can't be run: {error.strerror}", LaunchCode.COMMAND_UNUSABLE) from error
        try:
            output, said = _output_of(process)
        finally:
            self.stop()
        last = printable(said.decode(errors="replace").strip().rpartition("\n")[2], 200)
        words = f" It said: {last}" if last else ""
        if output is None:
            raise self._failed(f"had not ended after {SCRIPT_TIMEOUT_S:g} s and was killed.{words}")
        if len(output) > _MOST_BYTES:
            raise self._failed(f"prints more than {_MOST_BYTES >> 20} MiB, which is no list of hosts.")
        if process.returncode != 0:
            how = f"ended with exit code {process.returncode}"
            if process.returncode < 0:
                how = f"was ended by signal {-process.returncode}"
            raise self._failed(f"{how}.{words or ' It said nothing on stderr.'}")
        return output.decode(errors="replace")

    def _start(self) -> subprocess.Popen[bytes]:
        command = command_of(self._script)
        try:
            return self._popen(command)
        except OSError as error:
            if error.errno != errno.ENOEXEC or not (script := shutil.which(command[0])):
                raise
            return self._popen(["sh", script, *command[1:]])  # as a shell runs a script without a first line `#!`

    def _popen(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._lock:
            self._running = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that what it starts can be ended with it
            )
            return self._running

    def stop(self) -> None:
        """Kills the program, if it runs, and all processes that it has started."""
        with self._lock:
            process, self._running = self._running, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()

    def _failed(self, how: str, code: LaunchCode = LaunchCode.DISCOVERY_FAILED) -> RuntimeError:
        return RuntimeError(coded(code, f"The program that finds hosts, {self._script!r}, {how.rstrip('.')}."))


class FixedHosts(HostDiscovery):
    """A list of hosts that changes when the caller calls `set`."""

    def __init__(self, available_hosts: Mapping[str, int]) -> None:
        self._hosts = dict(available_hosts)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Those of the constructor or of the last `set`."""
        return dict(self._hosts)

    def set(self, available_hosts: Mapping[str, int]) -> None:
        """These are the hosts from now on."""
        self._hosts = dict(available_hosts)


def command_of(script: str) -> list[str]:
    """The program and its arguments. A path with spaces is a path if there is such a program."""
    return [script] if shutil.which(script) else shlex.split(script) or [script]


def _output_of(process: subprocess.Popen[bytes]) -> tuple[bytes | None, bytes]:
    """What the program prints on stdout, None where it does not end in time, and the last of what it says on stderr.

    Ends with the program, even if something that it has started holds its output open.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    pipes: dict[IO[bytes], bytes] = {process.stdout: b"", process.stderr: b""}
    give_up_at_s = time.monotonic() + SCRIPT_TIMEOUT_S
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            has_ended = process.poll() is not None
            ready = selector.select(0 if has_ended else min(_LOOK_S, max(0.0, give_up_at_s - time.monotonic())))
            if has_ended and not ready:
                break
            for key, _ in ready:
                pipe = key.fileobj  # type: ignore[assignment]
                data = pipe.read(1 << 16)
                if data:
                    pipes[pipe] = (pipes[pipe] + data)[-_MOST_BYTES - 1 :]
                elif data == b"":
                    selector.unregister(pipe)
            if len(pipes[process.stdout]) > _MOST_BYTES:
                break
            if time.monotonic() >= give_up_at_s and process.poll() is None:
                return None, pipes[process.stderr]
    if len(pipes[process.stdout]) <= _MOST_BYTES:
        try:
            process.wait(max(0.0, give_up_at_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None, pipes[process.stderr]
    return pipes[process.stdout], pipes[process.stderr]
