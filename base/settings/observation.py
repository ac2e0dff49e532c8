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
        "least severe log messages that are written",
        section="logging",
        key="level",
        choices=("trace", "debug", "info", "warning", "error", "fatal"),
        aliases={"warn": "warning", "critical": "fatal"},
    )
    log_hide_time: bool = row(
        "HOROVOD_LOG_HIDE_TIME",
        False,
        "write log lines without the time",
        section="logging",
        flag="--log-without-timestamp",
        key="with_timestamp",
        yaml_inverted=True,
    )
    log_format: str = row(
        "HOROVOD_LOG_FORMAT",
        "text",
        "format of log lines: text, or json (one object a line; its field epoch is the number of the world)",
        section="logging",
        choices=("text", "json"),
    )
    timeline: str | None = row(
        "HOROVOD_TIMELINE",
        None,
        "file to which rank 0 writes the timeline. DYNAMIC: the script starts the timeline itself",
        section="timeline",
        flag="--timeline-filename",
    )
    timeline_mark_cycles: bool = row(
        "HOROVOD_TIMELINE_MARK_CYCLES", False, "mark each batch in the timeline", section="timeline"
    )
    stall_check_disable: bool = row(  # this and the next two are for the coordinator, which watches for stalls
        "HOROVOD_STALL_CHECK_DISABLE",
        False,
        "do not warn about tensors that some ranks have not submitted",
        section="stall_check",
        flag="--no-stall-check",
        key="enabled",
        yaml_inverted=True,
        agreed=True,
    )
    stall_check_seconds: float = row(
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        60.0,
        "warn about a tensor that waits longer than this for some ranks. 0: never",
        section="stall_check",
        flag="--stall-check-warning-time-seconds",
        unit="seconds",
        limits=(0, None),
        agreed=True,
    )
    stall_shutdown_seconds: float = row(
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        0.0,
        "shut down if a tensor waits longer than this for some ranks. 0, or less than the time of the warning: never",
        section="stall_check",
        flag="--stall-check-shutdown-time-seconds",
        unit="seconds",
        limits=(0, None),
        agreed=True,
    )

    check_call_sites: bool = row(
        "HOROVOD_CHECK_CALL_SITES",
        False,
        "report an error if ranks call an operation without a name from different lines of their scripts. For "
        "debugging: each check takes as long as the operation itself. Not for scripts with hvd.join()",
        section="stall_check",
        agreed=True,
    )

    deadlock_check_disable: bool = row(  # for the coordinator as well
        "HOROVOD_DEADLOCK_CHECK_DISABLE",
        False,
        "report no error if ranks wait for each other in different operations",
        section="stall_check",
        flag="--no-deadlock-check",
        key="deadlock_enabled",
        yaml_inverted=True,
        agreed=True,
    )
