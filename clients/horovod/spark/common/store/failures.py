"""Questions to a file system: each has an answer, or ends with an OSError that has a code.

Packages of fsspec raise the exceptions of the libraries below them: many are no OSError, some have no text, and some
can't be pickled on their way from a rank to the driver. Some packages wait forever: an upload of s3fs waits for the
service to say that it may begin, and no timeout of botocore counts until it has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from horovod.base.errors import DataCode, coded
from horovod.data.services import answer_limit_seconds, reason_in_words


def call(filesystem: Any, method: str, *arguments: Any, content_bytes: int = 0, **options: Any) -> Any:
    """filesystem.method(*arguments, **options). Where it waits for a service, TimeoutError after the time that a
    content of `content_bytes` may take (answer_limit_seconds); what the method was about to do is cancelled then.
    """
    if not getattr(filesystem, "async_impl", False):
        return getattr(filesystem, method)(*arguments, **options)
    from fsspec.asyn import FSTimeoutError, sync

    coroutine = getattr(filesystem, f"_{method}")
    seconds = answer_limit_seconds(content_bytes)
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
    reason = reason_in_words(why)
    if isinstance(why, Exception):
        reason = f"{type(why).__name__}: {reason}" if reason else type(why).__name__
    return kind(coded(DataCode.DATA_STORE_FAILED, f"{path} can't be used: {reason}."))
