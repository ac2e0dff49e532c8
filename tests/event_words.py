"""The words by which tests find an event in a log, in a job's sentence or in a warning: texts that carry no error code.

A test that waits for an event, or asserts that there was none, takes the words from here, so that a reworded line
changes this file and the sentence files alone. `tests/packaging/test_event_words.py` finds each of them in the product:
when nothing writes a word any more, "not in" would be true of everything.
"""

from __future__ import annotations

# Members of a world
WAS_LOST = "was lost"
NOT_BACK = "has not come back for"
ATTACHED_AGAIN = "is attached again"
EPOCH_BEGAN = "began with"
REPLACED = "another process takes its place"
REPLACED_BY_ANOTHER = "another process was started instead of it"
UNKNOWN_WHICH_SIDE = "it can't be told which"
LEFT_THE_JOB = "has left the job"
NO_WORLD_YET = "ended before it had its world"
ACKNOWLEDGES_NOTHING = "acknowledges nothing"
HAVE_NOT_JOINED = "have not joined"
ENDS_FOR_ALL = "the job ends for all"

# Jobs and hosts
WAITS_FOR_ROOM = "It waits for room"
WAITS_FOR_HOSTS = "It waits for more hosts"
WOULD_WAIT = "It would wait"
SLOTS_COME_BACK = "Other jobs are giving slots back."
SET_ASIDE = "Set aside for now"
DRAINED = "was drained"
STOPPED_BY_LAUNCHER = "stopped by this launcher"
NO_RANK_IS_LEFT = "no rank is left"
AGAIN_TO_END_SOONER = "press Ctrl-C again"
STDIN_IS_EMPTY = "ranks on other hosts have an empty stdin"

# Coordinators and agents
LISTENING = "is listening on"
AGENT_SERVES = "horovod-worker serves"
TAKEN_OVER = "was taken over"
NO_COORDINATOR_THERE = "the address of another coordinator of this store"
IN_THE_CLEAR = "travels in the clear"
SERVES_EVERYBODY = "serves everybody"
PAGES_ARE_OPEN = "may read which jobs run"
STOPPED_FOR_A_WHILE = "was stopped for a while; its time limits start again"
OWN_CERTIFICATE = "of the coordinator itself"
OLD_CERTIFICATE_STAYS = "The certificate from before stays in use."

# Backends
NO_GLOO = "has no Gloo"
NO_NCCL = "There is no NCCL on this host"
THROUGH_HOST_MEMORY = "through the host's memory"

# Options
NO_EFFECT = "no effect"
DEPRECATED = "is deprecated"

# Optimizers
DISTRIBUTED_ALREADY = "distributed already"
NOTHING_IS_TRAINED = "nothing is trained"
SAME_GRADIENTS = "every rank computed the same gradients"
NO_SAMPLES = "has no samples now"


def tells(text: str, *facts: object) -> bool:
    """Whether the text holds all these facts (a name, a rank, a number), in any order."""
    return all(str(fact) in text for fact in facts)
