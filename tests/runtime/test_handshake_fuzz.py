"""Whatever bytes come instead of a handshake, the answer is StrangerError: no other exception, no byte in return."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.worker.runtime.handshake import (
    CONFIRM_BYTES,
    GREETING_BYTES,
    WELCOME_BYTES,
    Connecting,
    Greeting,
    Listening,
    StrangerError,
)

SECRET = b"s" * 32
STAGES = ("greeting", "welcome", "confirm")
LENGTHS = {"greeting": GREETING_BYTES, "welcome": WELCOME_BYTES, "confirm": CONFIRM_BYTES}
NUMBERS = st.integers(0, 2**32 - 1)


class Conversation:
    """A good one, up to a stage. `seen` are the greetings that were looked at, which is after their proof only."""

    def __init__(self) -> None:
        self.seen: list[Greeting] = []
        self.connecting = Connecting(SECRET, 7, sender=3, receiver=1, index=2)
        self.listening = Listening(SECRET, self.seen.append)

    def before(self, stage: str) -> tuple[Connecting | Listening, bytes]:
        """Who is to be fed at this stage, and with what."""
        greeting = self.connecting.take_output()
        if stage == "greeting":
            return self.listening, greeting
        self.listening.feed(greeting)
        welcome = self.listening.take_output()
        if stage == "welcome":
            return self.connecting, welcome
        self.connecting.feed(welcome)
        return self.listening, self.connecting.take_output()


def refused(stage: str, bad: bytes | None, change: tuple[int, int] | None = None) -> None:
    """Feeds `bad`, or the good message with `change` (position, bits to flip)."""
    conversation = Conversation()
    side, good = conversation.before(stage)
    seen = list(conversation.seen)
    if change is not None:
        bad = good[: change[0]] + bytes([good[change[0]] ^ change[1]]) + good[change[0] + 1 :]
    assert bad is not None
    with pytest.raises(StrangerError):
        side.feed(bad)
    assert side.take_output() == b""
    assert conversation.seen == seen, "a greeting was parsed before it was proven"
    assert conversation.listening.greeting is None


@settings(deadline=None)
@given(stage=st.sampled_from(STAGES), data=st.binary(max_size=400))
def test_random_bytes(stage: str, data: bytes) -> None:
    refused(stage, data)


@settings(deadline=None)
@given(stage=st.sampled_from(STAGES), data=st.data())
def test_random_bytes_of_the_right_length(stage: str, data: st.DataObject) -> None:
    refused(stage, data.draw(st.binary(min_size=LENGTHS[stage], max_size=LENGTHS[stage])))


@settings(deadline=None)
@given(stage=st.sampled_from(STAGES), data=st.data(), bits=st.integers(1, 255))
def test_one_changed_byte(stage: str, data: st.DataObject, bits: int) -> None:
    refused(stage, None, (data.draw(st.integers(0, LENGTHS[stage] - 1)), bits))


@pytest.mark.parametrize("stage", STAGES)
def test_cut_off_at_every_offset(stage: str) -> None:
    for length in range(LENGTHS[stage]):
        conversation = Conversation()
        side, good = conversation.before(stage)
        with pytest.raises(StrangerError):
            side.feed(good[:length])
        assert side.take_output() == b""


@pytest.mark.parametrize("stage", STAGES)
def test_something_behind_the_message_is_not_ignored(stage: str) -> None:
    conversation = Conversation()
    side, good = conversation.before(stage)
    with pytest.raises(StrangerError):
        side.feed(good + b"\0")


@pytest.mark.parametrize(("stage", "instead"), list(itertools.permutations(STAGES, 2)))
def test_a_message_in_the_place_of_another(stage: str, instead: str) -> None:
    other = Conversation()
    refused(stage, other.before(instead)[1])


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_message_of_another_conversation(stage: str) -> None:
    other = Conversation()
    refused(stage, other.before(stage)[1])


@settings(deadline=None)
@given(epoch=st.integers(0, 2**64 - 1), sender=NUMBERS, receiver=NUMBERS, index=NUMBERS)
def test_who_knows_the_secret_may_say_any_numbers_and_they_arrive_as_they_are(
    epoch: int, sender: int, receiver: int, index: int
) -> None:
    seen: list[Greeting] = []
    connecting = Connecting(SECRET, epoch, sender, receiver, index)
    listening = Listening(SECRET, seen.append)
    listening.feed(connecting.take_output())
    (greeting,) = seen
    assert (greeting.epoch, greeting.sender, greeting.receiver, greeting.index) == (epoch, sender, receiver, index)


@settings(deadline=None)
@given(greeting=st.binary(min_size=struct.calcsize("!8sIQIII32s"), max_size=struct.calcsize("!8sIQIII32s")))
def test_a_proven_greeting_of_another_version_is_refused(greeting: bytes) -> None:
    """A member of this world that runs another release: it has the secret, its bytes mean something else."""
    import hmac

    side = Listening(SECRET, lambda _: pytest.fail("it was admitted"))
    with pytest.raises(StrangerError, match="it speaks"):
        side.feed(greeting + hmac.digest(SECRET, b"horovod mesh hello\0" + greeting, "sha256"))
    assert side.take_output() == b""
