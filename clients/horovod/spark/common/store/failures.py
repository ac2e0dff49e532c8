"""Questions to a file system: each has an answer, or ends with an OSError that has a code.

Packages of fsspec raise the exceptions of the libraries below them: many are no OSError, some have no text, and some
can't be pickled on their way from a rank to the driver. Some packages wait forever: an upload of s3fs waits for the
service to say that it may begin, and no timeout of botocore counts until it has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from horovod.base.errors import DataCode, coded

# How long a service may take to answer one request. Where no service listens at the address, s3fs, gcsfs and adlfs give
# up earlier, after 90 s at most.
ANSWER_SECONDS: Final = 300.0
_SLOWEST_BYTES_PER_SECOND: Final = 1_000_000
_LONGEST: Final = 500  # characters of a reason: some services answer with a page


def call(filesystem: Any, method: str, *arguments: Any, content_bytes: int = 0, **options: Any) -> Any:
    """filesystem.method(*arguments, **options). Where it waits for a service, TimeoutError after ANSWER_SECONDS and the
    time that a slow network needs for a content of `content_bytes`; what the method was about to do is cancelled then.
    """
    if not getattr(filesystem, "async_impl", False):
        return getattr(filesystem, method)(*arguments, **options)
    from fsspec.asyn import FSTimeoutError, sync

    coroutine = getattr(filesystem, f"_{method}")
    seconds = ANSWER_SECONDS + content_bytes / _SLOWEST_BYTES_PER_SECOND
    try:
        return sync(filesystem.loop, coroutine, *arguments, timeout=seconds, **options)
    except FSTimeoutError as error:  # of ours, or of the package
        raise TimeoutError("there was no answer in time") from error


@contextlib.contextmanager
def asked(path: str) -> Iterator[None]:
    """What the block raises becomes an OSError that names the path, the reason and a code. FileNotFoundError and
    PermissionError stay what they are.
    """
    try:
        yield
    except Exception as error:
        raise failed(path, error) from error


def failed(path: str, why: Exception | str) -> OSError:
    """The error for a path of a store that can't be used."""
    kind = next((one for one in (FileNotFoundError, PermissionError) if isinstance(why, one)), OSError)
    reason = " ".join(str(why).split())[:_LONGEST].rstrip(".")
    if isinstance(why, Exception):
        reason = f"{type(why).__name__}: {reason}" if reason else type(why).__name__
    return kind(coded(DataCode.DATA_STORE_FAILED, f"{path} can't be used: {reason}."))
