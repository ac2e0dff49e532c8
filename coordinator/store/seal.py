"""What stands in etcd is sealed: it can be read, and made, only with a key that etcd's users do not have.

Whoever can write to etcd could otherwise change the command of a job that waits, and an agent would run it; whoever can
read it would find the secrets of worlds and the environments of jobs. Each value is encrypted with AES-256-GCM, whose
tag also covers the key of the entry and, for some entries, their place in its history:

    0xff "hvdseal1"   MAGIC: no message of protobuf begins like that, nor does a value that is not sealed
    id                4 bytes that tell which key was used
    nonce             12 random bytes; a key may seal 2^32 values (NIST SP 800-38D), and values are sealed on changes of
                      membership and of jobs only
    ciphertext, tag

So a value can't be put under another key, of this or another cluster. An older value of the same key would open, and
that is refused for entries in BOUND: their seal names the revision in which etcd created the entry and how often it has
been written. Both are counted by etcd, and never go back. Since neither is known before an entry exists, it is created
empty (`BLANK`) and then written (etcd.py). A writer who is no coordinator can delete, and no more.

Keys: HKDF-SHA256 (RFC 5869) of the cluster's token, or of the lines of a file (`--store-key-file`); the words
"horovod store" keep them apart from the keys of job tokens, wires and meshes. docs/adr/0114-open-stores.md says why so.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass

from horovod.base.errors import AccessCode, LaunchCode, coded
from horovod.base.proofs import MIN_CLUSTER_TOKEN_LENGTH
from horovod.base.tokens import read_secrets

from .records import SUBMITTED

MAGIC = b"\xffhvdseal1"
BOUND = (SUBMITTED,)  # whose replay would run something: the records of jobs, with their commands
_ID_BYTES = 4
_NONCE_BYTES = 12
_TAG_BYTES = 16
_HEAD_BYTES = len(MAGIC) + _ID_BYTES + _NONCE_BYTES
OVERHEAD_BYTES = _HEAD_BYTES + _TAG_BYTES


class UnsealedError(Exception):
    """A value was not sealed for its place with any of the keys that this coordinator has. Holds the reason."""


@dataclass(frozen=True)
class Place:
    """Where in the history of a key a value is: the revision that created it, and how often it was written."""

    created: int
    version: int


NO_PLACE = Place(0, 0)


class Seal:
    def __init__(self, secrets: Sequence[str]) -> None:
        """secrets: the first one seals, all of them open. ValueError with a sentence if one can't be used."""
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            sentence = (
                "A store in etcd is sealed with a key made of the token, which takes the package cryptography: "
                "`pip install 'horovod[tls]'`."
            )
            raise ValueError(coded(LaunchCode.MISSING_PROGRAM, sentence)) from None
        self._ciphers = {}
        for secret in secrets:
            if len(secret) < MIN_CLUSTER_TOKEN_LENGTH:
                sentence = (
                    f"A key for the store has {len(secret)} characters, so anybody who can read the store "
                    f"could guess it. Use a random one of {MIN_CLUSTER_TOKEN_LENGTH} or more, for example of "
                    "`openssl rand -hex 32`."
                )
                raise ValueError(coded(AccessCode.WEAK_TOKEN, sentence))
            extracted = hmac.digest(b"horovod store", secret.encode(), "sha256")
            identity = hmac.digest(extracted, b"horovod store key id\x01", "sha256")[:_ID_BYTES]
            self._ciphers[identity] = AESGCM(hmac.digest(extracted, b"horovod store seal\x01", "sha256"))
        self._first = next(iter(self._ciphers))

    @classmethod
    def from_file(cls, path: str) -> Seal:
        """Raises OSError, or ValueError, with a sentence."""
        return cls(read_secrets(path, "--store-key-file"))

    def close(self, key: str, value: bytes, place: Place = NO_PLACE) -> bytes:
        """The sealed form of `value` for `key`, which is the whole one, with the prefix of the cluster."""
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._ciphers[self._first].encrypt(nonce, value, _associated(key, place))
        return MAGIC + self._first + nonce + sealed

    def open(self, key: str, stored: bytes, place: Place = NO_PLACE) -> bytes:
        """Raises UnsealedError."""
        from cryptography.exceptions import InvalidTag

        if not is_sealed(stored) or len(stored) < OVERHEAD_BYTES:
            raise UnsealedError("it is not sealed")
        identity, nonce = stored[len(MAGIC) : len(MAGIC) + _ID_BYTES], stored[_HEAD_BYTES - _NONCE_BYTES : _HEAD_BYTES]
        if (cipher := self._ciphers.get(identity)) is None:
            raise UnsealedError("it is sealed with another key")
        try:
            return cipher.decrypt(nonce, stored[_HEAD_BYTES:], _associated(key, place))
        except InvalidTag:
            pass
        raise UnsealedError("it was changed, copied from another key, or is an older value of this one")

    def is_latest(self, stored: bytes) -> bool:
        """Whether it was sealed with the key that seals now."""
        return stored[len(MAGIC) :].startswith(self._first)


def is_sealed(stored: bytes) -> bool:
    return stored.startswith(MAGIC)


def _associated(key: str, place: Place) -> bytes:
    return f"horovod store entry\0{place.created}\0{place.version}\0{key}".encode()
