"""The tables of docs/from-0.28.md, made from the settings and the options of today.

`python tests/earlier_settings.py docs/from-0.28.md` writes them between the marks of the page.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from horovod.base.setting import Setting, environment_text
from horovod.base.settings import SETTINGS
from horovod.launch.command_line import flags

BEGIN: Final = "<!-- made by `python tests/earlier_settings.py docs/from-0.28.md` -->"
END: Final = "<!-- until here -->"

# The variables of 0.28 that a person sets, with their defaults there; "": none.
DEFAULTS: Final = {
    "HOROVOD_FUSION_THRESHOLD": "134217728",
    "HOROVOD_CYCLE_TIME": "1.0",
    "HOROVOD_CACHE_CAPACITY": "1024",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "",
    "HOROVOD_TORUS_ALLREDUCE": "",
    "HOROVOD_BATCH_D2D_MEMCOPIES": "1",
    "HOROVOD_NUM_NCCL_STREAMS": "1",
    "HOROVOD_ENABLE_ASYNC_COMPLETION": "0",
    "HOROVOD_DISABLE_GROUP_FUSION": "0",
    "HOROVOD_DISABLE_NVTX_RANGES": "0",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "0",
    "HOROVOD_ENABLE_XLA_OPS": "0",
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": "1073741824",
    "HOROVOD_CCL_CACHE": "0",
    "HOROVOD_CONTROLLER": "",
    "HOROVOD_CPU_OPERATIONS": "",
    "HOROVOD_THREAD_AFFINITY": "",
    "HOROVOD_MPI_THREADS_DISABLE": "0",
    "HOROVOD_TIMELINE": "",
    "HOROVOD_TIMELINE_MARK_CYCLES": "0",
    "HOROVOD_STALL_CHECK_DISABLE": "0",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "60.0",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0.0",
    "HOROVOD_AUTOTUNE": "0",
    "HOROVOD_AUTOTUNE_LOG": "",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "3",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "10",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "20",
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.8",
    "HOROVOD_LOG_LEVEL": "warning",
    "HOROVOD_LOG_HIDE_TIME": "0",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "30",
    "HOROVOD_GLOO_IFACE": "",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "",
    "HOROVOD_ELASTIC_TIMEOUT": "600.0",
    "HOROVOD_START_TIMEOUT": "30.0",
    "HOROVOD_SPARK_START_TIMEOUT": "600.0",
    "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX": "0",
}
# The options of 0.28 that are no variables.
OPTIONS: Final = (
    "--version",
    "--num-proc",
    "--check-build",
    "--disable-cache",
    "--network-interfaces",
    "--network-interface",
    "--output-filename",
    "--verbose",
    "--config-file",
    "--ssh-port",
    "--ssh-identity-file",
    "--min-np",
    "--max-np",
    "--slots-per-host",
    "--reset-limit",
    "--blacklist-cooldown-range",
    "--mpi-args",
    "--tcp",
    "--binding-args",
    "--prefix-output-with-timestamp",
    "--hosts",
    "--hostfile",
    "--host-discovery-script",
    "--gloo",
    "--mpi",
    "--jsrun",
)
_AS_BEFORE: Final = "as before"
# What the tables of today do not say.
REMARKS: Final = {
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "ranks of one host always share memory first; `0` turns that off",
    "HOROVOD_CPU_OPERATIONS": "`mpi` and `ccl` mean `native`, the default, with a warning; so does `gloo` in a build "
    "without Gloo",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "concerns `HOROVOD_CPU_OPERATIONS=gloo` alone; otherwise "
    "`HOROVOD_PROGRESS_TIMEOUT` (300 s)",
    "HOROVOD_THREAD_AFFINITY": "as before, for the threads of the new engine",
    "--network-interface": "as before; several names with commas in one are deprecated",
    "--tcp": "sets `NCCL_IB_DISABLE=1`; connections of Horovod itself are TCP anyway",
    "--reset-limit": "the default is 3 failures for each of `-np` without progress; it was no limit",
    "--ssh-identity-file": "as before; keys of hosts are verified, see below",
}


def tables() -> str:
    """What acts otherwise than in 0.28, in two tables, and in one line each what is as it was."""
    settings = {one.env: one for one in SETTINGS}
    variables = {_names(settings[env]): _variable(settings[env], was) for env, was in DEFAULTS.items()}
    parser = flags.make_parser()
    known = {spelling: action for action in parser._actions for spelling in action.option_strings}
    options = {f"`{option}`": _option(known[option]) for option in OPTIONS}
    parts = []
    for title, rows in (("variable, option", variables), ("option", options)):
        by_meaning: dict[str, list[str]] = {}
        for name, what in rows.items():
            by_meaning.setdefault(what, []).append(name)
        same = by_meaning.pop(_AS_BEFORE)
        changed = [f"| {'<br>'.join(names)} | {what} |" for what, names in by_meaning.items()]
        parts.append("\n".join([f"| {title} | what happens |", "|---|---|", *changed]))
        parts.append(f"As before: {', '.join(same)}.")
    return "\n\n".join(["", *parts, ""])


def _names(setting: Setting) -> str:
    return f"`{setting.env}`" + (f" (`{setting.flag}`)" if setting.flag else "")


def _variable(setting: Setting, was: str) -> str:
    if setting.no_effect:
        return f"no effect: {setting.no_effect}"
    if setting.env in REMARKS:
        return REMARKS[setting.env]
    default = "" if setting.default in (None, ()) else environment_text(setting.default)
    return _AS_BEFORE if default == was else f"the default is `{default}`, it was `{was}`"


def _option(action: argparse.Action) -> str:
    option = next((one for one in action.option_strings if one in REMARKS), None)
    if option is not None:
        return REMARKS[option]
    if (reason := flags._REFUSED.get(action.dest)) is not None:
        return f"refused: {reason}"
    return f"no effect: {flags._IDLE[action.dest]}" if action.dest in flags._IDLE else _AS_BEFORE


def with_tables(page: str) -> str:
    """The page with the tables of today."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"the page needs the lines {BEGIN} and {END}"
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text()))
