"""The handshake without sockets: two sides that know the secret agree; everything else is a stranger."""

from __future__ import annotations

import pytest

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


def admit(greeting: Greeting) -> None:
    if greeting.epoch != 7:
        raise StrangerError("wrong epoch")


def sides(secret: bytes = SECRET, epoch: int = 7) -> tuple[Connecting, Listening]:
    return Connecting(secret, epoch, sender=3, receiver=1, index=2), Listening(SECRET, admit)


def test_both_sides_prove_themselves():
    connecting, listening = sides()
    greeting = connecting.take_output()
    assert len(greeting) == listening.needs == GREETING_BYTES
    listening.feed(greeting)
    assert listening.greeting is None  # nothing is certain before the third message
    welcome = listening.take_output()
    assert len(welcome) == connecting.needs == WELCOME_BYTES
    connecting.feed(welcome)
    confirm = connecting.take_output()
    assert (connecting.needs, len(confirm)) == (0, CONFIRM_BYTES)
    listening.feed(confirm)
    assert (listening.needs, listening.take_output()) == (0, b"")
    assert listening.greeting is not None
    assert (listening.greeting.epoch, listening.greeting.sender, listening.greeting.receiver) == (7, 3, 1)
    assert listening.greeting.index == 2


def test_another_secret_gets_no_answer():
    connecting, listening = sides(secret=b"t" * 32)
    with pytest.raises(StrangerError, match="secret"):
        listening.feed(connecting.take_output())
    assert listening.output == b""


def test_another_epoch_gets_no_answer_even_with_the_secret():
    connecting, listening = sides(epoch=6)
    with pytest.raises(StrangerError, match="wrong epoch"):
        listening.feed(connecting.take_output())
    assert listening.output == b""


@pytest.mark.parametrize("stage", ["greeting", "welcome", "confirm"])
def test_one_flipped_bit_anywhere_is_noticed(stage):
    length = {"greeting": GREETING_BYTES, "welcome": WELCOME_BYTES, "confirm": CONFIRM_BYTES}[stage]
    for offset in range(length):
        connecting, listening = sides()

        def deliver(
            target: Connecting | Listening, source: Connecting | Listening, name: str, at: int = offset
        ) -> None:
            data = bytearray(source.take_output())
            if name == stage:
                data[at] ^= 1 << (at % 8)
            target.feed(bytes(data))

        with pytest.raises(StrangerError):  # noqa: PT012
            deliver(listening, connecting, "greeting")
            deliver(connecting, listening, "welcome")
            deliver(listening, connecting, "confirm")


def test_a_replayed_conversation_fails_at_the_confirmation():
    connecting, listening = sides()
    greeting = connecting.take_output()
    listening.feed(greeting)
    connecting.feed(listening.take_output())
    confirm = connecting.take_output()
    second = Listening(SECRET, admit)
    second.feed(greeting)
    with pytest.raises(StrangerError, match="repeated"):
        second.feed(confirm)


def test_the_welcome_of_one_connection_is_not_good_for_another():
    first, listening = sides()
    listening.feed(first.take_output())
    second, _ = sides()
    with pytest.raises(StrangerError):
        second.feed(listening.take_output())
