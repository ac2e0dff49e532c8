"""The units of deploy/ as systemd itself reads them. None is started: that needs a host that systemd runs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from horovod.coordinator.__main__ import make_parser as coordinator_parser
from horovod.worker.agent.__main__ import make_parser as agent_parser

DEPLOY = Path(__file__).parents[3] / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd-analyze here: install systemd"
)


def verify(path: Path, content: str) -> str:
    """What systemd has to say; where the unit's program is to be, there is ours."""
    path.write_text(content.replace("/usr/local/bin/", f"{Path(sys.executable).parent}/"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout + done.stderr + ("" if done.returncode == 0 else f"exit code {done.returncode}")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_understands_every_line(unit: Path, tmp_path: Path) -> None:
    content = unit.read_text()
    assert verify(tmp_path / unit.name, content) == ""
    assert "Unknown key" in verify(tmp_path / unit.name, content.replace("Restart=", "Restarts="))
    assert "not executable" in verify(tmp_path / unit.name, content.replace("/horovod-", "/no-such-"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_options_are_those_of_the_programs(unit: Path) -> None:
    found = re.search(r"^ExecStart=\S+/(\S+) ((?:.*\\\n)*.*)$", unit.read_text(), re.MULTILINE)
    assert found is not None
    arguments = re.sub(r"%([dSH])", r"/\1", found[2].replace("\\\n", " ")).replace("/H:", "host:")
    parser = coordinator_parser() if found[1] == "horovod-coordinator" else agent_parser()
    parser.parse_args(shlex.split(arguments.replace("$ARGS", "--coordinator a:29400 --labels rack=4")))


def test_the_agent_leaves_its_ranks_running_when_it_is_restarted() -> None:
    """KillMode=control-group, the default, would end shims and ranks with the agent."""
    assert "KillMode=process\n" in (DEPLOY / "horovod-worker.service").read_text()
