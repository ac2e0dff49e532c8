"""What children of a rank say; a module, because multiprocessing's spawned children import it."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from horovod.base.errors import code_of
from horovod.common import basics as hvd
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.worker.runtime.context import current


def facts(given: ProcessSet | None = None) -> dict[str, Any]:
    """given: a process set of the parent, that came with a pickle."""
    if not hvd.is_initialized():
        return {"is_initialized": False}
    found = {
        "is_initialized": True,
        "place": [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()],
        "everyone": [global_process_set.rank(), global_process_set.size(), global_process_set.ranks],
        "refused": [refusal(current), refusal(hvd.init)],
    }
    if given is not None:
        found["given"] = [given.process_set_id, given.size(), given.included(), given.rank() if given.included() else 0]
    return found


def refusal(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(code_of(error))
    return ""


def send(pipe: Connection, given: ProcessSet | None = None) -> None:
    pipe.send(facts(given))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        os.environ[name.partition("=")[0]] = name.partition("=")[2]
    print(facts(), flush=True)
