"""The sentences of settings that can't be, whole, with their codes. Other tests name the code and the facts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from horovod import _core
from horovod.base.proofs import job_token
from horovod.base.setting import split_address
from horovod.base.settings import ROWS, SETTINGS, resolve
from horovod.common import basics as hvd
from horovod.rendezvous import task_of
from horovod.rendezvous.clusters import first_node
from horovod.rendezvous.hosts import HostSlots, fill, parse_hostfile, parse_hosts
from horovod.worker.runtime.devices import background_cpu
from horovod.worker.runtime.plan import usable
from horovod.worker.runtime.timeline import Timeline
from horovod.worker.runtime.tls import ClientTls
from horovod.worker.runtime.token import given_token


def text_of(act: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers compare the whole text
        act(*arguments, **options)
    return str(caught.value)


# -- one value ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        (
            {"HOROVOD_SIZE": "two"},
            "HOROVOD_SIZE='two' is not usable: expected an integer from 1 to 65536. [invalid-setting]",
        ),
        (
            {"HOROVOD_TRANSPORT": "carrier-pigeon"},
            (
                "HOROVOD_TRANSPORT='carrier-pigeon' is not usable: expected one of auto, shm, tcp; leave it out for "
                "auto. [invalid-setting]"
            ),
        ),
        (
            {"HOROVOD_TIMELINE_MARK_CYCLES": "maybe"},
            (
                "HOROVOD_TIMELINE_MARK_CYCLES='maybe' is not usable: expected 1 or 0 (also true/false, yes/no, "
                "on/off); leave it out for 0. [invalid-setting]"
            ),
        ),
        (
            {"HOROVOD_COORDINATOR": "::1:29400"},
            (
                "HOROVOD_COORDINATOR='::1:29400' is not usable: write an IPv6 address in brackets, for example "
                "[::1]:29400. [invalid-setting]"
            ),
        ),
        (
            {"HOROVOD_TOKEN": "two words"},
            (
                "HOROVOD_TOKEN is not usable: expected one line of ASCII text without spaces, 4096 characters at most. "
                "[invalid-setting]"
            ),
        ),
    ],
)
def test_of_variables(environ: Mapping[str, str], sentence: str) -> None:
    assert text_of(resolve, environ) == sentence


def test_of_an_address() -> None:
    assert text_of(split_address, "h", "--listen") == (
        "--listen='h' is not usable: expected host:port with a port from 1 to 65535, for example 127.0.0.1:29400. "
        "[invalid-setting]"
    )


def test_of_an_option() -> None:
    assert (
        text_of(ROWS["spin_us"].from_option, "-1", "--spin-us") == "--spin-us must be >= 0, not -1. [invalid-setting]"
    )


def test_of_an_argument_that_there_is_not() -> None:
    known = ", ".join(setting.name for setting in SETTINGS)
    assert text_of(resolve, {}, {"sise": 2}) == (
        f"There is no setting named sise; settings are: {known}. [unknown-setting]"
    )


def test_of_processors() -> None:
    allowed = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
    assert text_of(background_cpu, ("x",), 0, 1) == (
        f"HOROVOD_THREAD_AFFINITY asks for processor 'x', which this process may not use; it may use {allowed}. "
        "[invalid-setting]"
    )
    assert text_of(background_cpu, ("0", "1", "2"), 0, 2) == (
        "HOROVOD_THREAD_AFFINITY names 3 processors for 2 ranks on this host; give one for each local rank, or one for "
        "all. [invalid-setting]"
    )


# -- several -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"size": 2},
            (
                "HOROVOD_SIZE=2, but no coordinator is given. Start the program with horovodrun, or start "
                'horovod-coordinator and give its address to hvd.init("host:port") or in HOROVOD_COORDINATOR. '
                "[missing-setting]"
            ),
        ),
        (
            {"coordinator": "h:1"},
            (
                "The coordinator h:1 is given, but not how many processes form the world. Set HOROVOD_SIZE or call "
                "hvd.init(..., size=n). [missing-setting]"
            ),
        ),
        (
            {"coordinator": "h:1", "size": 2, "rank": 2},
            "HOROVOD_RANK=2 is not a rank of a world of HOROVOD_SIZE=2 processes. [conflicting-settings]",
        ),
        (
            {"cpu_operations": "gloo", "transport": "shm"},
            (
                "HOROVOD_CPU_OPERATIONS=gloo works over TCP, but HOROVOD_TRANSPORT=shm asks for shared memory. Leave "
                "one of them out. [conflicting-settings]"
            ),
        ),
    ],
)
def test_of_settings_together(given: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "gloo_obstacle", lambda: "")
    assert text_of(usable, resolve({}, given), ()) == sentence


def test_of_tls_and_tokens(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one")
    file.chmod(0o600)
    assert text_of(ClientTls.of, resolve({}, {"tls_cert": "a.pem"})) == (
        "HOROVOD_TLS_CERT, HOROVOD_TLS_KEY and HOROVOD_TLS_SERVER_NAME need HOROVOD_TLS_CA, the file of the "
        "certificate authority by which the coordinator is known; without it there is no TLS. [missing-setting]"
    )
    assert text_of(given_token, resolve({"HOROVOD_TOKEN": "other", "HOROVOD_TOKEN_FILE": str(file)})) == (
        f"HOROVOD_TOKEN and HOROVOD_TOKEN_FILE={str(file)!r} hold two different tokens. Leave one of them out. "
        "[conflicting-settings]"
    )
    assert text_of(job_token, "x" * 16, "") == (
        "A job's token needs the name of the job (HOROVOD_JOB). [missing-setting]"
    )


def test_of_a_timeline_that_nobody_asked_for() -> None:
    timeline = Timeline(resolve({}), None, 0)  # type: ignore[arg-type]
    assert text_of(timeline.start, "file") == (
        "hvd.start_timeline() needs HOROVOD_TIMELINE to be set before hvd.init(): to a path, or to DYNAMIC. "
        "[missing-setting]"
    )


def test_of_arguments_of_init() -> None:
    assert text_of(hvd.init, "h:1", coordinator="h:2") == (
        "Two coordinators are given to hvd.init(): 'h:1' and coordinator='h:2'. [conflicting-settings]"
    )
    assert text_of(hvd.init, [1]) == (
        "hvd.init(comm=[1]) asks for a world of some ranks only, which needs MPI, and this build has none. Leave comm "
        "out to use all ranks (here [0]). [unsupported]"
    )


# -- lists of hosts ----------------------------------------------------------------------------------------------------
def test_of_hosts(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    assert text_of(parse_hostfile, file) == (
        f"The host file {str(file)!r} cannot be read: No such file or directory. [unusable-file]"
    )
    file.write_text("h1 slots=2\nh2 slots=x\n")
    assert text_of(parse_hostfile, file) == (
        f"Line 2 of the host file {str(file)!r} is 'h2 slots=x', which is not usable: expected host slots=count, for "
        "example h1 slots=2. [invalid-hosts]"
    )
    assert text_of(parse_hosts, "h1:2,h2") == (
        "'h2' in the host list 'h1:2,h2' is not usable: expected host:slots, as in h1:2,h2:4. [invalid-hosts]"
    )
    assert text_of(parse_hosts, "h1:0") == (
        "Host 'h1' in the host list 'h1:0' has 0 slots: expected at least 1, or leave the host out. [invalid-hosts]"
    )
    assert text_of(fill, [HostSlots("h1", 2)], 3) == (
        "Requested more processes (3) than there are available slots (2) on h1:2; ask for fewer with -np or give the "
        "hosts more slots. [too-few-slots]"
    )


# -- other launchers ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        (
            {"PMI_RANK": "one"},
            (
                "PMI_RANK='one' is not usable: a launcher sets it to a number. If no launcher did, unset it or set "
                "HOROVOD_CLUSTER=none. [launcher-variables]"
            ),
        ),
        (
            {"PMI_RANK": "2", "PMI_SIZE": "2"},
            (
                "mpiexec says that this process is rank 2 of 2, which cannot be. Set HOROVOD_CLUSTER=none, or "
                "HOROVOD_COORDINATOR, HOROVOD_RANK and HOROVOD_SIZE yourself. [launcher-variables]"
            ),
        ),
        (
            {"PMIX_RANK": "1"},
            (
                "This process was started as rank 1 by PMIx (PMIX_RANK), which does not tell how many there are. Start "
                "horovod-coordinator and set HOROVOD_COORDINATOR and HOROVOD_SIZE, start the program with horovodrun, "
                "or set HOROVOD_CLUSTER=none for processes that train alone. [launcher-variables]"
            ),
        ),
        (
            {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1", "KUBERNETES_SERVICE_HOST": "10.96.0.1"},
            (
                "This is the pod of index 1 in an indexed Job of Kubernetes (JOB_COMPLETION_INDEX), which is not told "
                "how many pods there are: set HOROVOD_SIZE to the Job's spec.completions (`env:` in the pod's "
                "template), or HOROVOD_CLUSTER=none for pods that train alone. [missing-setting]"
            ),
        ),
    ],
)
def test_of_variables_of_other_launchers(environ: Mapping[str, str], sentence: str) -> None:
    assert text_of(task_of, resolve({}), environ) == sentence


def test_of_a_launcher_that_is_demanded() -> None:
    assert text_of(task_of, resolve({}, {"cluster": "slurm"}), {}) == (
        "HOROVOD_CLUSTER=slurm, but this process has none of the variables by which such a launcher would tell its "
        "rank. [launcher-variables]"
    )
    assert text_of(first_node, "a[1-") == (
        "SLURM_STEP_NODELIST='a[1-' is not usable: expected names of hosts as Slurm writes them, for example "
        "node[01-04]. Set HOROVOD_COORDINATOR and HOROVOD_TOKEN, or HOROVOD_CLUSTER=none. [launcher-variables]"
    )
