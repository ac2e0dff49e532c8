"""A key for services of scripts of earlier releases. Only they use it, so it lives here."""

from __future__ import annotations

import secrets

SECRET_LENGTH = 32  # bytes


def make_secret_key() -> bytes:
    """A new random key."""
    return secrets.token_bytes(SECRET_LENGTH)
