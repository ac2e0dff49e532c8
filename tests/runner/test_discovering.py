"""A launcher asks which hosts there are: what comes of answers that fail, are empty, make no sense or never come."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from error_codes import ends_with
from event_words import tells

from horovod.base.errors import ErrorCode, LaunchCode, SettingCode, code_of
from horovod.launch.elastic import discovering
from horovod.launch.elastic.discovering import Discovering
from horovod.runner.elastic.discovery import HostDiscovery


class Answers(HostDiscovery):
    """Gives one answer after the other, and raises those that are exceptions."""

    def __init__(self, *answers: Any) -> None:
        self.answers = iter(answers)

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]


def asked(source: HostDiscovery, times: int) -> tuple[list[dict[str, int] | None], list[str]]:
    """So many answers, and what was told."""
    told: list[str] = []

    async def ask() -> list[dict[str, int] | None]:
        found = Discovering(source, told.append)
        return [await found.ask() for _ in range(times)]

    return asyncio.run(ask()), told


def test_no_answer_is_told_once_of_each_kind() -> None:
    a, b = {"a": 1}, {"a": 1, "b": 2}
    odd = [OSError("no cloud"), OSError("no cloud at 12:01"), {}, a, {}, ValueError("odd"), StopIteration()]
    answers, told = asked(Answers(a, *odd, b), 9)
    assert answers == [a, None, None, None, a, None, None, None, b]
    assert [code_of(sentence) for sentence in told] == [LaunchCode.DISCOVERY_FAILED] * 4
    failed = ["OSError: no cloud", "", "ValueError: odd", "StopIteration"]
    assert all(tells(sentence, fact) for sentence, fact in zip(told, failed, strict=True))
    assert ["Answers" in sentence for sentence in told] == [True, False, True, True], "no host is found in the second"


@pytest.mark.parametrize(
    ("answer", "code", "facts"),
    [
        (KeyError("cloud"), LaunchCode.DISCOVERY_FAILED, ["Answers", "KeyError"]),
        (None, SettingCode.INVALID_HOSTS, ["None", "dict"]),
        (["a:1"], SettingCode.INVALID_HOSTS, ["a:1"]),
        ({"a b": 1}, SettingCode.INVALID_HOSTS, ["'a b'"]),
        ({"-oProxyCommand=x": 1}, SettingCode.INVALID_HOSTS, ["-oProxyCommand"]),
        ({7: 1}, SettingCode.INVALID_HOSTS, ["7"]),
        ({"a": -1}, SettingCode.INVALID_HOSTS, ["-1", "host a"]),
        ({"a": True}, SettingCode.INVALID_HOSTS, ["True"]),
        ({"a": 1 << 20}, SettingCode.INVALID_HOSTS, ["1048576"]),
    ],
)
def test_the_first_answer_must_be_one(answer: Any, code: ErrorCode, facts: list[str]) -> None:
    with pytest.raises((ValueError, RuntimeError), match=ends_with(code, *facts)):
        asyncio.run(Discovering(Answers(answer), print).first())


def test_an_answer_that_does_not_come_is_waited_for_and_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovering, "ANSWER_TIMEOUT_S", 0.05)
    asks: list[int] = []
    go = threading.Event()

    class Hangs(HostDiscovery):
        def find_available_hosts_and_slots(self) -> dict[str, int]:
            asks.append(1)
            assert go.wait(60)
            return {"a": 1}

    async def ask() -> dict[str, int] | None:
        found = Discovering(Hangs(), print)
        with pytest.raises(RuntimeError, match=ends_with(LaunchCode.DISCOVERY_FAILED, "Hangs", "0.05 s")):
            await found.first()
        assert await found.ask() is None
        go.set()
        monkeypatch.setattr(discovering, "ANSWER_TIMEOUT_S", 60)
        return await found.ask()

    assert asyncio.run(ask()) == {"a": 1}
    assert len(asks) == 1
