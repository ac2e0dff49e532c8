"""What a launcher shows at the end of a job: the last lines of its output, one sentence, one exit code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from horovod.base.errors import ClusterCode, LaunchCode, code_of, coded, coded_like, without_code
from horovod.coordinator.core.cluster.job import OVER
from horovod.protos.v1 import jobs_pb2
from horovod.worker.agent.output import Console

_OUTPUT_GRACE_S = 1.0
_POLL_S = 0.05
_REPEATED = (LaunchCode.FAILED_AT_START, LaunchCode.RESET_LIMIT)


def outcome_of(record: jobs_pb2.JobRecord, last_words: Callable[[int], str] = lambda rank: "") -> tuple[int, str]:
    """The exit code of a launcher for a job that is over, and what to say about it.

    last_words: the last line that a rank has written to stderr; "" if none is known. It is shown where processes
    have failed again and again, or at once, since its last lines on the screen may be of other ranks.
    """
    if record.state == jobs_pb2.JOB_STATE_SUCCEEDED:
        return 0, ""
    if record.state not in OVER:
        sentence = f"The coordinator ended the stream before job {record.id} was over: see `horovodrun ps`."
        return 1, coded(ClusterCode.CLUSTER_SILENT, sentence)
    sentence = record.sentence
    # Coordinators of earlier releases tell no code.
    if record.state == jobs_pb2.JOB_STATE_FAILED and sentence and code_of(sentence) is None:
        sentence = coded(LaunchCode.RANK_FAILED, sentence)
    if code_of(sentence) in _REPEATED:
        ends = reversed(record.outcomes)
        said = ((one.rank, words) for one in ends if one.code and (words := last_words(one.rank)))
        for rank, words in said:
            sentence = coded_like(sentence, f"{without_code(sentence)} The last line of rank {rank}: {words}")
            break
    return record.exit_code or 1, sentence


async def last_lines(console: Console, stopping: Callable[[], bool]) -> None:
    """Waits until a slow reader has taken the last lines; not for long once a person asked to stop.

    Signals must still be seen meanwhile, so this waits in small steps.
    """
    loop = asyncio.get_running_loop()
    give_up_at: float | None = None
    while not console.close(timeout_s=0):
        if stopping() and give_up_at is None:
            give_up_at = loop.time() + _OUTPUT_GRACE_S
        if give_up_at is not None and loop.time() > give_up_at:
            break
        await asyncio.sleep(_POLL_S)
