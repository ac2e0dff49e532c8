"""An agent that is stopped (SIGSTOP) keeps its relay's socket open and answers nobody: ranks do without it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from agents import Agents
from launching import Launched
from test_jobs_on_agents import RELAYED

from horovod.coordinator.config import Limits


def test_ranks_go_by_themselves_while_their_agent_is_stopped(tmp_path: Path) -> None:
    go, done = tmp_path / "go", tmp_path / "done"
    os.mkfifo(go)
    os.mkfifo(done)
    source = f"""
import os, sys
rank = int(os.environ["HOROVOD_RANK"])
{RELAYED}
open({str(go)!r}).read()
tell("after")
if rank == 0:
    open({str(done)!r}, "w").close()
"""
    script = tmp_path / "program.py"
    script.write_text(source)
    limits = Limits(keepalive_timeout_s=1.0, reattach_grace_s=60.0)
    with Agents(tmp_path, limits) as agents:
        agents.add("h1")
        environ = {**agents.environ, "HOROVOD_KEEPALIVE_TIMEOUT_SECONDS": "1", "HOROVOD_REATTACH_GRACE_SECONDS": "60"}
        launched = Launched(*agents.options, "-np", "2", sys.executable, str(script), environ=environ)
        try:
            assert sorted(launched.lines(2)) == [f"[{rank}]<stdout>:before 2 relayed" for rank in range(2)]
            agents.processes["h1"].send_signal(signal.SIGSTOP)
            try:
                with go.open("w"):
                    pass
                with done.open() as file:  # they have agreed on a name that was new to them
                    file.read()
            finally:
                agents.processes["h1"].send_signal(signal.SIGCONT)
            code, out, err = launched.finish()
            assert code == 0, err
            assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:after 2 direct" for rank in range(2)]
        finally:
            launched.clean_up()
