"""Runs examples in one process, one after the other and each in a world of its own.

    python one_by_one.py MODULE SIZE COMMAND...     MODULE: horovod.torch or the like. SIZE: of every world. COMMAND: an
                                                    example and its options

To import a framework takes longer than most examples. Rank 0 prints a line before each, and whoever starts this takes
the output apart with `outputs`.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Sequence

_NEXT = "THE NEXT EXAMPLE\n"


def command(module: str, size: int, examples: Sequence[str], python: str = sys.executable) -> list[str]:
    """What a rank runs, and a process alone."""
    return [python, __file__, module, str(size), *examples]


def outputs(said: str) -> list[str]:
    """What each example has printed."""
    nothing, *found = said.split(_NEXT)
    assert nothing == ""
    return found


def main(module: str, size: str, *examples: str) -> None:
    hvd = importlib.import_module(module)
    for example in examples:
        sys.argv = example.split()
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        if os.environ.get("HOROVOD_RANK", "0") == "0":
            print(_NEXT, end="", flush=True)
        runpy.run_path(sys.argv[0], run_name="__main__")
        if hvd.is_initialized():  # some leave by themselves
            assert hvd.size() == int(size)
            hvd.shutdown()
        del sys.path[0]


if __name__ == "__main__":
    del sys.path[0]  # an example finds its neighbours, and none of the modules of tests
    main(*sys.argv[1:])
