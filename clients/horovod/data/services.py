"""How long a service that keeps files may take, and what it says when it refuses: for reading and for writing."""

from __future__ import annotations

from typing import Final

# How long a service may take to answer one request. Where no service listens at the address, s3fs, gcsfs and adlfs give
# up earlier, after 90 s at most.
ANSWER_SECONDS: Final = 300.0
_SLOWEST_BYTES_PER_SECOND: Final = 1_000_000
_LONGEST: Final = 500  # characters of a reason: some services answer with a page


def answer_limit_seconds(content_bytes: int) -> float:
    """How long a request may take whose content has so many bytes, on a slow network too."""
    return ANSWER_SECONDS + content_bytes / _SLOWEST_BYTES_PER_SECOND


def reason_in_words(why: object) -> str:
    """An exception or text of a service in one line without a full stop, for another sentence; may be empty."""
    return " ".join(str(why).split())[:_LONGEST].rstrip(".")
