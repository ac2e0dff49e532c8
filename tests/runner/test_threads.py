"""Each process of a host gets its share of the cores that the launcher may use, unless the user decided."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from event_words import tells

import horovod
from horovod.worker.agent.cores_and_gpus import thread_variables, usable_cores

Run = Callable[..., CompletedProcess[str]]
Program = Callable[[str], list[str]]

SHOW = "print(os.environ.get('OMP_NUM_THREADS'), os.environ.get('MKL_NUM_THREADS'))"
UNSET = {"OMP_NUM_THREADS": "", "MKL_NUM_THREADS": ""}


@pytest.mark.parametrize(
    ("processes", "cores", "threads"),
    [(1, 8, "8"), (2, 8, "4"), (3, 8, "2"), (16, 8, "1"), (2, 3.5, "1"), (1, 0.5, "1")],
)
def test_the_share(processes: int, cores: float, threads: str) -> None:
    assert thread_variables({}, processes, cores) == {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_who_has_set_one_has_decided(name: str) -> None:
    assert thread_variables({name: "3"}, 2, 8) == {}


# -- usable cores ------------------------------------------------------------------------------------------------------
def machine(root: Path, cores: list[int], cgroup: str = "", **files: str) -> Path:
    """A host whose processor number i is part of cores[i]; `files` are below /sys/fs/cgroup, with / as __."""
    for processor, core in enumerate(cores):
        topology = root / f"sys/devices/system/cpu/cpu{processor}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text(f"{core}\n")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("cpu_", "cpu.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_hyperthreads_of_a_core_count_once_and_the_affinity_mask_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, [0, 1, 0, 1])
    assert usable_cores(range(4), root) == 2
    assert usable_cores([0, 2], root) == 1
    assert usable_cores([0, 1], root) == 2


def test_without_a_topology_each_processor_is_a_core(tmp_path: Path) -> None:
    assert usable_cores([3, 5, 7], tmp_path) == 3


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("0::/job/step\n", {"job__step__cpu_max": "150000 100000\n"}, 1.5),
        ("0::/job/step\n", {"job__step__cpu_max": "max 100000\n", "job__cpu_max": "200000 100000\n"}, 2),
        ("0::/job/step\n", {"job__step__cpu_max": "max 100000\n"}, 4),
        ("0::/outside/of/the/container\n", {"cpu_max": "300000 100000\n"}, 3),
        ("0::/\n", {"cpu_max": "900000 100000\n"}, 4),
        (
            "4:cpu,cpuacct:/job\n0::/\n",
            {"cpu,cpuacct__job__cpu_cfs_quota_us": "250000\n", "cpu,cpuacct__job__cpu_cfs_period_us": "100000\n"},
            2.5,
        ),
        (
            "1:cpu:/job\n",
            {"cpu__job__cpu_cfs_quota_us": "-1\n", "cpu__job__cpu_cfs_period_us": "100000\n"},
            4,
        ),
        ("not a control group\n", {}, 4),
    ],
)
def test_the_control_groups_quota_counts(tmp_path: Path, cgroup: str, files: dict[str, str], cores: float) -> None:
    assert usable_cores(range(4), machine(tmp_path, [0, 1, 2, 3], cgroup, **files)) == cores


# -- what the processes get --------------------------------------------------------------------------------------------
def test_the_launcher_sets_and_says_it(horovodrun: Run, program: Program) -> None:
    share = str(max(1, int(usable_cores() // 2)))
    done = horovodrun("-np", "2", "--verbose", *program(SHOW), environ=UNSET)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}]<stdout>:{share} {share}" for rank in (0, 1)]
    assert tells(done.stderr, f"OMP_NUM_THREADS={share}", f"MKL_NUM_THREADS={share}")


@pytest.mark.parametrize(
    ("flags", "environ", "shown"),
    [
        (["--no-set-num-threads"], {}, "None None"),
        ([], {"HOROVOD_SET_NUM_THREADS": "0"}, "None None"),
        ([], {"OMP_NUM_THREADS": "7"}, "7 None"),
    ],
)
def test_the_user_decides(
    horovodrun: Run,
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    environ: dict[str, str],
    shown: str,
) -> None:
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
    done = horovodrun("-np", "1", *flags, *program(SHOW), environ=environ)
    assert done.stdout == f"[0]<stdout>:{shown}\n"


def test_horovod_run_sets_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
    share = str(max(1, int(usable_cores() // 2)))
    assert horovod.run(os.getenv, args=("OMP_NUM_THREADS",), num_proc=2) == [share, share]
