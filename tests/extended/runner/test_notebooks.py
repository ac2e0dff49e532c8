"""horovod.run and horovodrun in a real kernel of Jupyter: what ranks print is under the cell."""

from __future__ import annotations

import pytest

pytest.importorskip("ipykernel")
manager = pytest.importorskip("jupyter_client.manager")

DEADLINE_S = 120


def _outputs(cells: list[str]) -> list[dict[str, str]]:
    """What stands under each cell, by stream."""
    kernel, client = manager.start_new_kernel(kernel_name="python3", startup_timeout=DEADLINE_S)
    try:
        found = []
        for cell in cells:
            shown: dict[str, str] = {}

            def take(message: dict[str, dict[str, str]], shown: dict[str, str] = shown) -> None:
                content = message["content"]
                if "text" in content:
                    shown[content["name"]] = shown.get(content["name"], "") + content["text"]
                if "ename" in content:
                    shown[content["ename"]] = content["evalue"]

            client.execute_interactive(cell, timeout=DEADLINE_S, output_hook=take)
            found.append(shown)
        return found
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)


RUN = """
import horovod, sys
def work():
    import os, sys
    print("out", os.environ["HOROVOD_RANK"])
    print("err", os.environ["HOROVOD_RANK"], file=sys.stderr)
    return int(os.environ["HOROVOD_RANK"])
assert horovod.run(work, num_proc=2) == [0, 1]
"""
LAUNCH = """
from horovod.launch.__main__ import run_commandline
run_commandline(["-np", "2", sys.executable, "-c", "print('hello')"])
"""
FAIL = 'horovod.run(lambda: print("before") or 1 / 0)'


def test_a_kernel() -> None:
    first, second, third, fourth = _outputs([RUN, LAUNCH, FAIL, "print('its own')"])
    assert sorted(first["stdout"].splitlines()) == ["[0]<stdout>:out 0", "[1]<stdout>:out 1"]
    assert sorted(first["stderr"].splitlines()) == ["[0]<stderr>:err 0", "[1]<stderr>:err 1"]
    assert sorted(second["stdout"].splitlines()) == ["[0]<stdout>:hello", "[1]<stdout>:hello"]
    assert third["stdout"] == "[0]<stdout>:before\n"
    assert "ZeroDivisionError" in third["RuntimeError"]
    assert fourth == {"stdout": "its own\n"}
