"""The loop of elastic training and its state, without any framework or world."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from error_codes import ends_with
from event_words import HAVE_NOT_JOINED

from horovod.base.errors import OperationCode, TrainingCode, coded
from horovod.common import elastic
from horovod.common.elastic import VAIN_ROUNDS, HostUpdateResult, ObjectState, State, notification_manager, run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.host_news import Announced


class Recorder(State):
    """Notes what the loop calls."""

    def __init__(self) -> None:
        super().__init__(lambda obj, root_rank=0: obj, lambda: 0)
        self.calls: list[str] = []

    def save(self) -> None:
        self.calls.append("save")

    def restore(self) -> None:
        self.calls.append("restore")

    def sync(self) -> None:
        self.calls.append("sync")

    def reset(self) -> None:
        self.calls.append("reset")


def _raise_in_turn(*errors: Exception | None) -> Callable[..., str]:
    waiting = list(errors)

    def func(state: Recorder, *args: Any, **kwargs: Any) -> str:
        state.calls.append("func")
        if (error := waiting.pop(0)) is not None:
            raise error
        return f"{args} {kwargs}"

    return func


@pytest.mark.parametrize(
    ("error", "undone"),
    [
        (HorovodInternalError("rank 1 was lost"), ["restore"]),
        (HostsUpdatedInterrupt(False), []),
        (HostsUpdatedInterrupt(True), []),  # all sync all the same: a new process would wait for the others
    ],
)
def test_the_loop(error: Exception, undone: list[str]) -> None:
    state = Recorder()
    state.register_reset_callbacks([lambda: state.calls.append("first"), lambda: state.calls.append("second")])
    state.register_reset_callbacks([lambda: state.calls.append("third")])
    run = run_fn(_raise_in_turn(error, None), lambda: state.calls.append("new world"))
    assert run(state, 1, two=2) == "(1,) {'two': 2}"
    again = ["new world", "reset", "first", "second", "third", "sync", "func"]
    assert state.calls == ["sync", "func", *undone, *again]


WRONG_SHAPE = HorovodInternalError(coded(OperationCode.MISMATCHED, "Mismatched allreduce tensor shapes."))
LOST = HorovodInternalError(coded(OperationCode.PEER_LOST, "Rank 1 was lost."))


def test_an_error_of_the_script_does_not_go_round_for_ever() -> None:
    state = Recorder()
    with pytest.raises(HorovodInternalError, match=ends_with(OperationCode.MISMATCHED)):
        run_fn(_raise_in_turn(*[WRONG_SHAPE] * (VAIN_ROUNDS + 1)), lambda: None)(state)
    assert state.calls.count("func") == VAIN_ROUNDS


def test_lost_ranks_and_rounds_with_a_commit_end_no_loop() -> None:
    state = Recorder()
    func = _raise_in_turn(*[LOST] * 3 * VAIN_ROUNDS, *[WRONG_SHAPE] * 3 * VAIN_ROUNDS, None)

    def commits(state: Recorder) -> str:
        state.commit()
        return func(state)

    assert run_fn(commits, lambda: None)(state) == "() {}"
    state = Recorder()
    assert run_fn(_raise_in_turn(*[LOST] * 3 * VAIN_ROUNDS, None), lambda: None)(state) == "() {}"


class OnDevice(Recorder):
    """Has values on a device, whose work fails after this thread has gone on."""

    def __init__(self, *failures: bool) -> None:
        super().__init__()
        self._failures = list(failures)

    def _settle(self) -> None:
        self.calls.append("settle")
        if self._failures.pop(0):
            raise HorovodInternalError("rank 1 was lost")


@pytest.mark.parametrize("error", [None, HostsUpdatedInterrupt(False)])
def test_steps_that_fail_on_a_device_after_they_were_queued_are_undone(error: Exception | None) -> None:
    state = OnDevice(True, False)
    run = run_fn(_raise_in_turn(error, None), lambda: state.calls.append("new world"))
    run(state)
    again = ["new world", "reset", "sync", "func", "settle"]
    assert state.calls == ["sync", "func", "settle", "restore", *again]


def test_a_failure_in_a_callback_or_in_sync_starts_over() -> None:
    state = Recorder()
    errors: list[Exception | None] = [HorovodInternalError("in the callback"), None]

    def callback() -> None:
        if (error := errors.pop(0)) is not None:
            raise error

    state.register_reset_callbacks([callback])
    run_fn(_raise_in_turn(HorovodInternalError("first"), None), lambda: state.calls.append("new world"))(state)
    assert state.calls == [
        *("sync", "func", "restore", "new world", "reset"),
        *("restore", "new world", "reset", "sync", "func"),
    ]


def test_other_errors_propagate_and_nobody_listens_afterwards() -> None:
    state = Recorder()
    run = run_fn(_raise_in_turn(KeyError("mine"), None), lambda: None)
    with pytest.raises(KeyError, match="mine"):
        run(state)
    notification_manager.handle_hosts_updated(1.0, HostUpdateResult.added)
    state.check_host_updates()
    assert run(state) == "() {}"


def test_only_news_interrupts() -> None:
    state = Recorder()
    removed, added = HostUpdateResult.removed, HostUpdateResult.added
    for news, skip_sync in [
        ([(1.0, removed)], True),
        ([(2.0, added)], False),
        ([(3.0, removed), (4.0, added)], False),
        ([(5.0, removed), (6.0, removed)], True),
    ]:
        for timestamp, update_res in news:
            state.on_hosts_updated(timestamp, update_res)
        with pytest.raises(HostsUpdatedInterrupt) as caught:
            state.commit()
        assert caught.value.skip_sync is skip_sync
        state.check_host_updates()  # told once
    state.on_hosts_updated(6.0, added)
    state.check_host_updates()  # old news
    state.on_hosts_updated(7.0, added)
    state.on_reset()
    state.check_host_updates()  # of an earlier world
    assert removed | added == HostUpdateResult.mixed == 3


def test_an_announcement_interrupts_only_with_what_it_announces() -> None:
    state = Recorder()
    state.on_hosts_updated(Announced(1.0), HostUpdateResult.added)
    state.commit()
    state.check_host_updates()
    assert not state._host_messages.empty()
    state.on_hosts_updated(2.0, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()
    state.check_host_updates()  # told once
    state.on_hosts_updated(Announced(3.0), HostUpdateResult.added)
    state.on_reset()
    assert state._host_messages.empty()


def test_after_a_look_a_commit_waits_for_what_was_announced() -> None:
    state = Recorder()
    state.on_hosts_updated(Announced(1.0), HostUpdateResult.added)
    assert not state._host_messages.empty()
    comes = threading.Timer(0.05, state.on_hosts_updated, (2.0, HostUpdateResult.added))
    comes.start()
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()
    comes.join()


def test_what_was_announced_and_does_not_come_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(elastic, "AWAITED_SECONDS", 0.01)
    state = Recorder()
    state.on_hosts_updated(Announced(1.0), HostUpdateResult.added)
    assert not state._host_messages.empty()
    state.commit()
    assert HAVE_NOT_JOINED in caplog.text
    caplog.clear()
    state.commit()
    assert not caplog.text


def _object_state(**values: Any) -> Any:
    return ObjectState(lambda obj, root_rank=0: obj, lambda: 0, **values)


def test_saved_values_do_not_change_with_the_live_ones() -> None:
    losses = [1.0]
    state = _object_state(losses=losses, best=losses, epoch=0)
    state.losses.append(2.0)
    state.epoch = 1
    state.restore()
    assert (state.losses, state.epoch) == ([1.0], 0)
    assert state.losses is state.best
    state.losses.append(3.0)
    state.restore()
    assert state.losses == [1.0]


def test_sync_sends_live_values_and_saves_them() -> None:
    state = _object_state(epoch=0)
    state.epoch = 5
    state.sync()
    state.epoch = 6
    state.restore()
    assert state.epoch == 5


def test_what_cannot_be_copied_is_named() -> None:
    with pytest.raises(ValueError, match=ends_with(TrainingCode.UNCOPYABLE_STATE, "'batches'", "generator")):
        _object_state(epoch=0, batches=(i for i in range(3)))


def test_a_state_must_say_how() -> None:
    state = State(lambda obj: obj, lambda: 0)
    for method in (state.save, state.restore, state.sync, state.commit):
        with pytest.raises(NotImplementedError, match="State must define"):
            method()
    state.on_reset()
