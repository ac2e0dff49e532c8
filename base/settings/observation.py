"""What a person sees of a job."""

from __future__ import annotations

from dataclasses import dataclass

from horovod.base.setting import row


@dataclass(frozen=True, init=False, repr=False, eq=False)  # a part of Settings, which alone is made
class ObservationSettings:
    """Logs, the timeline, and warnings about operations that wait."""

    log_level: str = row(
        "HOROVOD_LOG_LEVEL",
        "warning",
        "least important message that is logged",
        section="logging",
        key="level",
        choices=("trace", "debug", "info", "warning", "error", "fatal"),
        aliases={"warn": "warning", "critical": "fatal"},
    )
    log_hide_time: bool = row(
        "HOROVOD_LOG_HIDE_TIME",
        False,
        "log lines carry no time",
        section="logging",
        flag="--log-without-timestamp",
        key="with_timestamp",
        yaml_inverted=True,
    )
    log_format: str = row(
        "HOROVOD_LOG_FORMAT",
        "text",
        "how log lines are written: text, or json, one object a line with job, epoch and rank",
        section="logging",
        choices=("text", "json"),
    )
    timeline: str | None = row(
        "HOROVOD_TIMELINE",
        None,
        "file in which rank 0 writes the timeline, or DYNAMIC to start it from the program",
        section="timeline",
        flag="--timeline-filename",
    )
    timeline_mark_cycles: bool = row(
        "HOROVOD_TIMELINE_MARK_CYCLES", False, "mark each batch in the timeline", section="timeline"
    )
    stall_check_disable: bool = row(  # this and the next two are for the coordinator, which watches for stalls
        "HOROVOD_STALL_CHECK_DISABLE",
        False,
        "no warning about tensors that some ranks did not submit",
        section="stall_check",
        flag="--no-stall-check",
        key="enabled",
        yaml_inverted=True,
        agreed=True,
    )
    stall_check_seconds: float = row(
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        60.0,
        "warn about a tensor that waits longer than this; 0 is never",
        section="stall_check",
        flag="--stall-check-warning-time-seconds",
        unit="seconds",
        limits=(0, None),
        agreed=True,
    )
    stall_shutdown_seconds: float = row(
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        0.0,
        "shut down when a tensor waits longer than this; 0 is never, and so is less than the time of the warning",
        section="stall_check",
        flag="--stall-check-shutdown-time-seconds",
        unit="seconds",
        limits=(0, None),
        agreed=True,
    )

    check_call_sites: bool = row(
        "HOROVOD_CHECK_CALL_SITES",
        False,
        "ranks that call an operation without a name from different lines of their scripts get an error; for "
        "debugging, as it takes as long as the operation itself, and not for scripts with hvd.join()",
        section="stall_check",
        agreed=True,
    )

    deadlock_check_disable: bool = row(  # for the coordinator as well
        "HOROVOD_DEADLOCK_CHECK_DISABLE",
        False,
        "ranks that wait for each other in different operations get no error",
        section="stall_check",
        flag="--no-deadlock-check",
        key="deadlock_enabled",
        yaml_inverted=True,
        agreed=True,
    )
