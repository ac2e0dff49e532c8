"""The threads in which gRPC works for a stream are waited for, however early the stream ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from runtime_harness import threads_of_streams

from horovod.worker.runtime.membership_stream import GrpcThreads


@pytest.fixture
def channel() -> Iterator[grpc.Channel]:
    """One to a server that never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        channel = grpc.insecure_channel(f"127.0.0.1:{listener.getsockname()[1]}")
        yield channel
        channel.close()


def test_threads_of_a_stream_that_stands(channel: grpc.Channel):
    threads, ended = GrpcThreads(), threading.Event()
    call = threads.start(channel.stream_stream("/test/stream"), iter(ended.wait, True))
    assert len(threads_of_streams()) == 2
    call.cancel()
    ended.set()
    threads.join(30)
    assert not threads_of_streams()


def test_threads_of_a_stream_that_is_over_as_soon_as_it_has_begun(channel: grpc.Channel):
    # As with a name that cannot be resolved: the thread of the events has told of the end, but is not through itself.
    threads, over, let_go = GrpcThreads(), threading.Event(), threading.Event()

    def hold() -> None:
        over.set()
        let_go.wait(30)

    def brief(requests: Iterator[bytes], metadata: Any) -> grpc.Call:
        call = channel.stream_stream("/test/stream")(requests, metadata=metadata)
        assert call.add_callback(hold)
        call.cancel()
        assert over.wait(30)
        return call

    threads.start(brief, iter(()))
    waiting = threading.Thread(target=threads.join, args=(30,))
    waiting.start()
    waiting.join(0.2)
    waited = waiting.is_alive()
    let_go.set()
    waiting.join()
    assert waited
    assert not threads_of_streams()


def test_another_thread_that_begins_meanwhile_is_not_waited_for(channel: grpc.Channel):
    threads, over, end = GrpcThreads(), threading.Event(), threading.Event()
    other = threading.Thread(target=end.wait, daemon=True)

    def brief(requests: Iterator[bytes], metadata: Any) -> grpc.Call:
        call = channel.stream_stream("/test/stream")(requests, metadata=metadata)
        assert call.add_callback(over.set)
        call.cancel()
        assert over.wait(30)
        other.start()
        return call

    threads.start(brief, iter(()))
    waiting = threading.Thread(target=threads.join, args=(60,), daemon=True)
    waiting.start()
    waiting.join(30)
    was_through = not waiting.is_alive()
    end.set()
    assert was_through
    assert not threads_of_streams()
