"""A gRPC channel that takes new certificates while it is used.

gRPC's channel keeps the credentials that it was made with. This one makes another when the files have changed, for the
calls that begin from then on, and closes the older one when nothing runs on it any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from horovod.base.errors import without_code
from horovod.worker.runtime.errors import StartError

UNARY_SECONDS = (
    60.0  # an older channel lives on for so long at least: only streams are counted, and other calls are short
)

log = logging.getLogger(__name__)


@dataclass
class _Generation:
    channel: grpc.Channel
    streams: int = 0
    replaced_at: float = 0.0


class RenewedChannel(grpc.Channel):
    """As the channels that `make` makes; `stamp` is a value that is another one when a new channel is to be made."""

    def __init__(self, stamp: Callable[[], Any], make: Callable[[], grpc.Channel]) -> None:
        self._stamp = stamp
        self._make = make
        self._lock = threading.Lock()  # guards what follows
        self._seen = stamp()
        self._latest = _Generation(make())
        self._older: list[_Generation] = []
        self._closed = False

    def unary_unary(self, *form: Any, **more: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            return self._for_call().channel.unary_unary(*form, **more)(*arguments, **options)

        return call

    def unary_stream(self, *form: Any, **more: Any) -> Any:
        return self._streams("unary_stream", form, more)

    def stream_unary(self, *form: Any, **more: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            return self._for_call().channel.stream_unary(*form, **more)(*arguments, **options)

        return call

    def stream_stream(self, *form: Any, **more: Any) -> Any:
        return self._streams("stream_stream", form, more)

    def subscribe(self, callback: Any, try_to_connect: bool | None = False) -> None:
        self._latest.channel.subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: Any) -> None:
        self._latest.channel.unsubscribe(callback)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            generations = [*self._older, self._latest]
        for generation in generations:
            generation.channel.close()

    def __enter__(self) -> RenewedChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _streams(self, kind: str, form: tuple[Any, ...], more: dict[str, Any]) -> Any:
        def begin(*arguments: Any, **options: Any) -> Any:
            generation = self._for_call(1)
            try:
                call = getattr(generation.channel, kind)(*form, **more)(*arguments, **options)
            except BaseException:
                self._ended(generation)
                raise
            call.add_done_callback(lambda _: self._ended(generation))
            return call

        return begin

    def _for_call(self, streams: int = 0) -> _Generation:
        unused: list[_Generation] = []
        with self._lock:
            stamp = self._stamp()
            if stamp != self._seen and not self._closed:
                self._renew(stamp)
            if self._older:
                before = time.monotonic() - UNARY_SECONDS
                unused = [older for older in self._older if not older.streams and older.replaced_at < before]
                self._older = [older for older in self._older if older not in unused]
            self._latest.streams += streams
            latest = self._latest
        for older in unused:
            older.channel.close()
        return latest

    def _renew(self, stamp: Any) -> None:
        try:
            channel = self._make()
        except StartError as error:  # a pair of files that is half written; it is looked at again when it changes
            log.warning("%s The certificate from before stays in use.", without_code(error))
        else:
            self._latest.replaced_at = time.monotonic()
            self._older.append(self._latest)
            self._latest = _Generation(channel)
        self._seen = stamp

    def _ended(self, generation: _Generation) -> None:
        with self._lock:
            generation.streams -= 1
