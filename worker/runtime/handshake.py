"""Mutual proof of the world's secret between two members, before a byte of the data plane is read.

    connecting side                                   listening side
    greeting (64 bytes) + HMAC("hello", greeting)  ->
                                                   <- nonce + HMAC("welcome", greeting, nonce)
    HMAC("confirm", greeting, nonce)               ->

    a connection that served the last world: both sides begin at the same time
    marker + nonce + HMAC("resume", marker, nonce) -> <- marker + nonce + HMAC("resume", marker, nonce)
    HMAC("resumed", both nonces)                   ->

Every message has a fixed size, so nothing is parsed that is not proven: the listening side answers nothing at all to
who cannot make the first HMAC, and a replayed greeting fails at the third message because the nonce is fresh. The words
keep one message from being used as another. On a connection that is kept, bytes of the last world may come first, in
both directions: so each side says where the new world begins, with a marker that only its members can make. Pure: bytes
in, bytes out; the sockets are in mesh.py.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass

MAGIC = b"HVDMESH\0"
VERSION = 1

_GREETING = struct.Struct("!8sIQIII32s")
_RESUMED = struct.Struct("!QII")  # epoch, sender, receiver
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
GREETING_BYTES = _GREETING.size + _PROOF_BYTES
WELCOME_BYTES = _NONCE_BYTES + _PROOF_BYTES
CONFIRM_BYTES = _PROOF_BYTES


class StrangerError(Exception):
    """The other side did not prove that it is the expected member; the text says what was wrong, for a log line."""


@dataclass(frozen=True)
class Greeting:
    """Who connects to whom, and as which of their connections."""

    epoch: int
    sender: int
    receiver: int
    index: int
    nonce: bytes

    def pack(self) -> bytes:
        return _GREETING.pack(MAGIC, VERSION, self.epoch, self.sender, self.receiver, self.index, self.nonce)

    @classmethod
    def unpack(cls, data: bytes) -> Greeting:
        magic, version, epoch, sender, receiver, index, nonce = _GREETING.unpack(data)
        if magic != MAGIC or version != VERSION:
            raise StrangerError(f"it speaks {magic!r} version {version}, not {MAGIC!r} version {VERSION}")
        return cls(epoch, sender, receiver, index, nonce)


def _proof(secret: bytes, word: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"horovod mesh " + word + b"\0" + b"".join(parts), "sha256")


def _wire_keys(secret: bytes, greeting: bytes, nonce: bytes) -> tuple[bytes, bytes]:
    """HKDF-SHA256 (RFC 5869): for what the connecting side sends, and for what the listening one sends.

    Both nonces are in it, so no connection has the keys of another.
    """
    extracted = hmac.digest(greeting + nonce, secret, "sha256")
    one, other = (
        hmac.digest(extracted, b"horovod wire from " + side + b"\x01", "sha256")
        for side in (b"connecting", b"listening")
    )
    return one, other


class Handshake:
    """One side. Send `output` whenever it is not empty, then feed exactly `needs` bytes; done when both are empty."""

    def __init__(self) -> None:
        self.output = b""
        self.needs = 0
        # Set when the handshake is done: the keys for sending and for receiving (csrc/transport/sealed_stream.h).
        self.wire_keys = b""

    def feed(self, data: bytes) -> None:
        raise NotImplementedError

    def take_output(self) -> bytes:
        output, self.output = self.output, b""
        return output


class Connecting(Handshake):
    def __init__(self, secret: bytes, epoch: int, sender: int, receiver: int, index: int) -> None:
        super().__init__()
        self._secret = secret
        self._greeting = Greeting(epoch, sender, receiver, index, os.urandom(_NONCE_BYTES)).pack()
        self.output = self._greeting + _proof(secret, b"hello", self._greeting)
        self.needs = WELCOME_BYTES

    def feed(self, data: bytes) -> None:
        nonce, proof = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._secret, b"welcome", self._greeting, nonce)):
            raise StrangerError("it did not prove that it belongs to this world")
        self.output = _proof(self._secret, b"confirm", self._greeting, nonce)
        self.wire_keys = b"".join(_wire_keys(self._secret, self._greeting, nonce))
        self.needs = 0


class Listening(Handshake):
    """`admit` looks at a proven greeting and raises StrangerError when no such connection is expected."""

    def __init__(self, secret: bytes, admit: Callable[[Greeting], None]) -> None:
        super().__init__()
        self._secret = secret
        self._admit = admit
        self._packed = b""
        self._nonce = b""
        self.greeting: Greeting | None = None  # set once its sender has proven itself
        self.needs = GREETING_BYTES

    def feed(self, data: bytes) -> None:
        if not self._packed:
            packed, proof = data[: _GREETING.size], data[_GREETING.size :]
            if not hmac.compare_digest(proof, _proof(self._secret, b"hello", packed)):
                raise StrangerError("it does not know the secret of this world")
            self._admit(Greeting.unpack(packed))
            self._packed = packed
            self._nonce = os.urandom(_NONCE_BYTES)
            self.output = self._nonce + _proof(self._secret, b"welcome", packed, self._nonce)
            self.needs = CONFIRM_BYTES
            return
        if not hmac.compare_digest(data, _proof(self._secret, b"confirm", self._packed, self._nonce)):
            raise StrangerError("it repeated the greeting of another connection")
        self.greeting = Greeting.unpack(self._packed)
        self.wire_keys = b"".join(reversed(_wire_keys(self._secret, self._packed, self._nonce)))
        self.needs = 0


class Resuming(Handshake):
    """One side of a connection that is kept. What comes before `marker` is of the last world. It is not fed, nor is the
    marker itself.

    The higher rank is the one that connects. It alone may give up a kept connection that has not ended, because the
    lower one is not done before it hears that the higher one is.
    """

    def __init__(self, secret: bytes, epoch: int, own_rank: int, peer: int) -> None:
        super().__init__()
        self._secret = secret
        self._connects = own_rank > peer
        self._nonce = os.urandom(_NONCE_BYTES)
        self._both = b""  # both nonces, that of the connecting side first
        mine, self.marker = (
            _proof(secret, b"marker", _RESUMED.pack(epoch, *ranks)) for ranks in ((own_rank, peer), (peer, own_rank))
        )
        self.output = mine + self._nonce + _proof(secret, b"resume", mine, self._nonce)
        self.needs = WELCOME_BYTES

    def feed(self, data: bytes) -> None:
        if self._both:
            if not hmac.compare_digest(data, _proof(self._secret, b"resumed", self._both)):
                raise StrangerError("it did not prove that it has seen this side's nonce")
            self.needs = 0
            return
        nonce, proof = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._secret, b"resume", self.marker, nonce)):
            raise StrangerError("it did not prove that it belongs to this world")
        first, second = (self._nonce, nonce) if self._connects else (nonce, self._nonce)
        keys = _wire_keys(self._secret, first, second)
        self._both = first + second
        self.wire_keys = b"".join(keys if self._connects else reversed(keys))
        if self._connects:
            self.output += _proof(self._secret, b"resumed", self._both)
            self.needs = 0
        else:
            self.needs = CONFIRM_BYTES
