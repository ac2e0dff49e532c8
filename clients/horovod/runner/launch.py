"""Where scripts of earlier releases import the command `horovodrun` from, which is horovod.launch.__main__."""

from horovod.launch.__main__ import parse_args as parse_args
from horovod.launch.__main__ import run_commandline as run_commandline

__all__ = ["parse_args", "run_commandline"]

if __name__ == "__main__":
    run_commandline()
