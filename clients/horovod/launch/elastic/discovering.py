"""Asks a source of hosts repeatedly, without blocking the launcher while the source answers.

The first answer must come, or the job does not begin. Later, no answer means that nobody can tell now: what runs stays
as it is, and each kind of failure is told once.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from horovod.base.errors import LaunchCode, SettingCode, code_of, coded, without_code
from horovod.base.words import printable
from horovod.launch.elastic.discovery import HostDiscovery, HostDiscoveryScript

ANSWER_TIMEOUT_S = 60.0  # seconds for an answer; HostDiscoveryScript kills a script earlier
_NAME = re.compile(r"[\w.-]{1,255}", re.ASCII)


class Discovering:
    """Used in one event loop. Each question is asked in a thread of its own: a discovery may block."""

    def __init__(self, source: HostDiscovery, tell: Callable[[str], None]) -> None:
        """tell: gets each sentence for the user."""
        self._source = source
        self._tell = tell
        self._asked: asyncio.Future[tuple[Any, Exception | None]] | None = None
        self._told: set[tuple[str, str]] = set()  # kinds of failures that the user was told of

    async def first(self) -> dict[str, int]:
        """The slots of each host that the source finds. ValueError or RuntimeError with a sentence when it fails."""
        try:
            return await self._answer()
        except (ValueError, RuntimeError) as error:
            if code_of(str(error)) is not None:
                raise
            raise RuntimeError(self._in_words(error)) from error
        except Exception as error:
            raise RuntimeError(self._in_words(error)) from error

    async def ask(self) -> dict[str, int] | None:
        """As `first`, while the job runs; None when the source fails or finds no host: the job keeps its hosts then."""
        try:
            if found := await self._answer():
                return found
            sentence = coded(LaunchCode.DISCOVERY_FAILED, "No host is found any more.")
            kind = ("", "")
        except Exception as error:
            sentence = str(error) if code_of(str(error)) is not None else self._in_words(error)
            kind = (type(error).__name__, str(code_of(str(error)) or ""))
        if kind not in self._told:
            self._told.add(kind)
            again = "The job stays on the hosts that it has, and the next answer counts; this is said once."
            self._tell(coded(code_of(sentence) or LaunchCode.DISCOVERY_FAILED, f"{without_code(sentence)} {again}"))
        return None

    def stop(self) -> None:
        """Stops asking. A script that still runs is killed."""
        if isinstance(self._source, HostDiscoveryScript):
            self._source.stop()

    async def _answer(self) -> dict[str, int]:
        loop = asyncio.get_running_loop()
        if self._asked is None:
            self._asked = loop.create_future()
            thread = threading.Thread(target=self._ask, args=(loop, self._asked), name="horovod-discovery", daemon=True)
            thread.start()
        done, _ = await asyncio.wait({self._asked}, timeout=ANSWER_TIMEOUT_S)
        if not done:
            sentence = f"{_name(self._source)} has not answered for {ANSWER_TIMEOUT_S:g} s, and is waited for."
            raise RuntimeError(coded(LaunchCode.DISCOVERY_FAILED, sentence))
        (found, error), self._asked = self._asked.result(), None
        if error is not None:
            raise error
        return checked(found, _name(self._source))

    def _ask(self, loop: asyncio.AbstractEventLoop, asked: asyncio.Future[tuple[Any, Exception | None]]) -> None:
        found: Any = None
        failure: Exception | None = None
        try:
            found = self._source.find_available_hosts_and_slots()
        except StopIteration:  # it would end the coroutine that raises it
            failure = RuntimeError("there was no further answer (StopIteration)")
        except Exception as error:
            failure = error

        def answer() -> None:
            if not asked.done():
                asked.set_result((found, failure))

        with contextlib.suppress(RuntimeError):  # the loop is closed: the job is over
            loop.call_soon_threadsafe(answer)

    def _in_words(self, error: Exception) -> str:
        text = printable(f"{type(error).__name__}: {error}".rstrip(".: "))
        return coded(LaunchCode.DISCOVERY_FAILED, f"{_name(self._source)} failed: {text}.")


def checked(found: Any, name: str) -> dict[str, int]:
    """The answer of a discovery, if it can be one; else ValueError."""
    if not isinstance(found, Mapping):
        sentence = f"{name} answered {printable(repr(found), 100)}: expected a dict of hosts with their slots."
        raise ValueError(coded(SettingCode.INVALID_HOSTS, sentence))
    for host, slots in found.items():
        if not isinstance(host, str) or not _NAME.fullmatch(host) or host.startswith("-"):
            sentence = f"{name} found a host named {printable(repr(host), 100)}, which is no name of a host."
            raise ValueError(coded(SettingCode.INVALID_HOSTS, sentence))
        if isinstance(slots, bool) or not isinstance(slots, int) or not 0 <= slots <= 1 << 16:
            sentence = f"{name} found {printable(repr(slots), 100)} slots on host {host}: expected a number from 0 on."
            raise ValueError(coded(SettingCode.INVALID_HOSTS, sentence))
    return dict(found)


def _name(source: HostDiscovery) -> str:
    return f"The discovery of hosts, {type(source).__name__},"
