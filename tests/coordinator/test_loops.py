"""Wake-ups that gRPC meant for another event loop are not reported; everything else is."""

from __future__ import annotations

import asyncio
import logging

import pytest

from horovod.coordinator.server import EmbeddedCoordinator, quiet

WAKE_UP = "Exception in callback PollerCompletionQueue._handle_events(<_UnixSelecto...e debug=False>)()"


@pytest.mark.parametrize(
    ("message", "error", "is_reported"),
    [
        (WAKE_UP, BlockingIOError(11, "Resource temporarily unavailable"), False),
        (WAKE_UP, ValueError("of gRPC itself"), True),
        ("Exception in callback print()", BlockingIOError(11, "Resource temporarily unavailable"), True),
    ],
)
def test_only_wake_ups_of_others_are_left_out(
    message: str, error: Exception, is_reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def report() -> None:
        loop = asyncio.get_running_loop()
        quiet(loop)
        loop.call_exception_handler({"message": message, "exception": error})

    with caplog.at_level(logging.ERROR, "asyncio"):
        asyncio.run(report())
    assert (message in caplog.text) is is_reported


def test_the_embedded_coordinator_s_loop_is_one_of_several(caplog: pytest.LogCaptureFixture) -> None:
    with EmbeddedCoordinator() as coordinator:
        assert coordinator._loop is not None
        coordinator._loop.call_exception_handler({"message": WAKE_UP, "exception": BlockingIOError()})
    assert "PollerCompletionQueue" not in caplog.text
