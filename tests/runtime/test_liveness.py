"""Real processes that are stopped, cut off or busy in C, and whose job goes on: only evidence ends it.

The limits are short here, so that what would be long enough to be declared lost takes a second. Processes say that
their pid namespace is not known where the pidfd of the coordinator would save them anyway.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from event_words import ATTACHED_AGAIN, NOT_BACK, STOPPED_FOR_A_WHILE, WAS_LOST
from resources import descriptors, eventually
from runtime_harness import allreduce_all, close_all, form_threads, threads_of_streams, world
from stopped_jobs import ROUNDS, SHORT, UNSEEN, job, let_pass, port_of, stop_all
from tcp_proxy import Proxy

from horovod.base.errors import OperationCode
from horovod.base.settings import resolve
from horovod.coordinator.config import Limits
from horovod.coordinator.core.world.life import PROCESS_ENDED
from horovod.coordinator.server import EmbeddedCoordinator
from horovod.worker.runtime import membership_stream
from horovod.worker.runtime.epoch import begin
from horovod.worker.runtime.world import WorldChange


@pytest.fixture
def coordinator() -> Iterator[EmbeddedCoordinator]:
    with EmbeddedCoordinator(limits=SHORT) as running:
        yield running


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "horovod.coordinator")


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in message for message in caplog.messages)


def all_have_their_world(coordinator: EmbeddedCoordinator, size: int = 2) -> bool:
    """As the coordinator knows; a member whose connection breaks before it has said so is lost."""
    assert coordinator.server is not None
    assert coordinator.server._hub is not None
    jobs = list(coordinator.server._hub._membership._jobs.values())
    return sum(one.life.has_world for job in jobs for one in list(job.liveness.by_rank.values())) == size


# -- connections that break --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_connections_that_are_reset_are_no_news_for_anybody(transport: str, caplog: pytest.LogCaptureFixture) -> None:
    with (
        EmbeddedCoordinator() as coordinator,
        Proxy(coordinator.address) as proxy,
        # A busy machine answers no ping for longer than the short limits; a reset needs none to be seen.
        job(proxy.address, coordinator.token, Limits(), UNSEEN + ROUNDS, HOROVOD_TRANSPORT=transport) as ranks,
    ):
        assert eventually(lambda: all_have_their_world(coordinator))
        for cut in range(1, 4):
            assert proxy.cut() == 2
            assert eventually(lambda cut=cut: said(caplog, ATTACHED_AGAIN) == 2 * cut)  # type: ignore[misc]
            ranks.works()
        assert not said(caplog, WAS_LOST)


def test_connections_on_which_nothing_gets_through_any_more(caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(keepalive_timeout_s=1.0)
    with (
        EmbeddedCoordinator(limits=limits) as coordinator,
        Proxy(coordinator.address) as proxy,
        job(proxy.address, coordinator.token, limits=limits, script=UNSEEN + ROUNDS) as ranks,
    ):
        assert eventually(lambda: all_have_their_world(coordinator))
        assert proxy.mute() == 2
        for rank in range(2):  # on a busy machine a connection may miss such a short limit once more
            back = f"Rank {rank} of job 'default' {ATTACHED_AGAIN}"
            assert eventually(lambda back=back: said(caplog, back) >= 1)  # type: ignore[misc]
        ranks.works()
        assert not said(caplog, WAS_LOST)


def test_a_member_that_is_cut_off_for_longer_than_the_grace_is_lost(
    coordinator: EmbeddedCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        Proxy(coordinator.address) as proxy,
        job([coordinator.address, proxy.address], coordinator.token, script=UNSEEN + ROUNDS) as ranks,
    ):
        assert eventually(lambda: all_have_their_world(coordinator))
        proxy.refuse()
        assert eventually(lambda: said(caplog, NOT_BACK) == 1)
        ranks.tell(0, "after")
        text = ranks.programs[0].line()
        pid = ranks.programs[1].process.pid
    assert f"Rank 1 (pid {pid}) on host {os.uname().nodename}" in text
    assert f"[{OperationCode.PEER_LOST}]" in text


# -- processes that are silent -----------------------------------------------------------------------------------------
def test_a_c_call_that_holds_the_gil_for_longer_than_all_limits(caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(keepalive_timeout_s=2.0, reattach_grace_s=0.4)  # a busy machine breaks connections with less
    with (
        EmbeddedCoordinator(limits=limits) as coordinator,
        job(coordinator.address, coordinator.token, limits=limits, script=UNSEEN + ROUNDS) as ranks,
    ):
        ranks.works(0, 5)  # a ping every 2 s, and 2 s for its answer
        assert not said(caplog, ATTACHED_AGAIN), "a connection broke"
        assert not said(caplog, WAS_LOST)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rank_that_was_stopped_goes_on(
    coordinator: EmbeddedCoordinator, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    port = port_of(coordinator.address)
    with job(coordinator.address, coordinator.token, HOROVOD_TRANSPORT=transport) as ranks:
        ranks.send_signal(1, signal.SIGSTOP)
        ranks.tell(0, "during")
        assert eventually(lambda: ranks.is_cut_off(1, port)), "keepalive has not ended its connection"
        let_pass(3 * SHORT.reattach_grace_s)
        ranks.send_signal(1, signal.SIGCONT)
        ranks.tell(1, "during")
        assert [program.line() for program in ranks.programs] == ["2.0", "2.0"]
        ranks.works()
        assert eventually(lambda: said(caplog, f"Rank 1 of job 'default' {ATTACHED_AGAIN}") >= 1)
        assert not said(caplog, WAS_LOST)


def test_another_rank_of_its_host_vouches_for_one_that_was_stopped(caplog: pytest.LogCaptureFixture) -> None:
    """For a coordinator elsewhere, which can't see the process."""
    elsewhere = "from horovod.worker.runtime import witness; witness.process_namespace = lambda: 'elsewhere'\n"
    limits = Limits(keepalive_timeout_s=0.4, reattach_grace_s=1.0)
    with (
        EmbeddedCoordinator(limits=limits) as coordinator,
        job(coordinator.address, coordinator.token, script=elsewhere + ROUNDS) as ranks,
    ):
        ranks.send_signal(1, signal.SIGSTOP)
        assert eventually(lambda: ranks.is_cut_off(1, port_of(coordinator.address)))
        let_pass(2.5 * limits.reattach_grace_s)
        ranks.send_signal(1, signal.SIGCONT)
        ranks.works()
        assert not said(caplog, WAS_LOST)
        ranks.send_signal(1, signal.SIGKILL)
        assert eventually(lambda: said(caplog, f"{WAS_LOST}: {PROCESS_ENDED}") == 1)


def test_a_job_that_was_stopped_with_its_coordinator_goes_on() -> None:
    """First the ranks, so that the grace runs when the coordinator is stopped itself, for much longer than that."""
    errors = stop_all(grace_s=1.5, stall_s=3.0, stop_s=3.5)
    assert STOPPED_FOR_A_WHILE in errors
    assert not re.search(f"{WAS_LOST}|ERROR", errors)


# -- evidence ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_a_peer_sees_is_known_to_the_coordinator_without_a_grace(
    transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of ranks on other hosts than the coordinator: the engine tells that its peer is lost, and how it knows."""

    with (
        EmbeddedCoordinator(limits=Limits(reattach_grace_s=1000.0)) as coordinator,
        job(coordinator.address, coordinator.token, script=UNSEEN + ROUNDS, HOROVOD_TRANSPORT=transport) as ranks,
    ):
        ranks.tell(0, "never")
        ranks.send_signal(1, signal.SIGKILL)
        assert "ank 1" in ranks.programs[0].line()
        assert eventually(lambda: said(caplog, WAS_LOST) == 1)


# -- nothing is left ---------------------------------------------------------------------------------------------------
def test_coming_back_again_and_again_leaves_no_thread_and_no_descriptor(caplog: pytest.LogCaptureFixture) -> None:
    with EmbeddedCoordinator() as coordinator, Proxy(coordinator.address) as proxy:
        with world(proxy.address, 2, token=coordinator.token) as contexts:
            files = 0
            assert eventually(lambda: all_have_their_world(coordinator))
            for cut in range(1, 6):
                proxy.cut()
                assert eventually(lambda cut=cut: said(caplog, ATTACHED_AGAIN) >= 2 * cut)  # type: ignore[misc]
                assert allreduce_all(contexts, f"x{cut}") == [2.0, 2.0]
                files = files or descriptors()
            assert eventually(lambda: len(threads_of_streams()) <= 2 * 2 * len(contexts)), threads_of_streams()
            assert eventually(lambda: descriptors() <= files + 2)
        assert not threads_of_streams()
        assert not [thread.name for thread in threading.enumerate() if thread.name == "horovod-membership"]


def test_a_session_that_is_closed_while_it_is_cut_off_ends_at_once() -> None:
    with EmbeddedCoordinator() as coordinator, Proxy(coordinator.address) as proxy:
        contexts = form_threads(proxy.address, 2, token=coordinator.token)
        proxy.refuse()
        close_all(contexts)
        assert not threads_of_streams()
        assert not [thread.name for thread in threading.enumerate() if thread.name == "horovod-membership"]


def test_a_goodbye_is_said_though_the_stream_is_away(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both members wait before they try to come back when they leave. Without a goodbye they would count as lost."""
    monkeypatch.setattr(membership_stream, "FIRST_RETRY_SECONDS", 3600.0)
    with EmbeddedCoordinator() as coordinator, Proxy(coordinator.address) as proxy:
        contexts = form_threads(proxy.address, 2, token=coordinator.token)
        assert eventually(lambda: all_have_their_world(coordinator))
        assert proxy.cut() == 2
        assert eventually(lambda: not any(context.session.member.attached for context in contexts))
        close_all(contexts)
        assert eventually(lambda: said(caplog, ATTACHED_AGAIN) == 2)
        assert eventually(lambda: said(caplog, " left: ") == 2), caplog.messages
        assert not said(caplog, WAS_LOST)
        assert not threads_of_streams()


def test_a_member_says_that_it_will_leave_though_its_stream_is_away() -> None:
    heard: list[WorldChange] = []
    with EmbeddedCoordinator() as coordinator, Proxy(coordinator.address) as proxy:
        given = {"coordinator": proxy.address, "token": coordinator.token, "size": 2, "min_size": 1, "max_size": 2}
        settings = resolve({}, given)
        with ThreadPoolExecutor(2) as pool:
            starts = [pool.submit(begin, settings, on_change=heard.append) for _ in range(2)]
        contexts = [start.result() for start in starts]
        assert eventually(lambda: all_have_their_world(coordinator))
        proxy.refuse()
        assert eventually(lambda: not any(context.session.member.attached for context in contexts))
        contexts[0].session.member.say_leaving("it got SIGTERM")
        proxy.admit()
        assert eventually(lambda: len(heard) >= 2), heard
        assert set(heard) == {WorldChange(1, leavers=(contexts[0].world.rank,))}
        close_all(contexts)
