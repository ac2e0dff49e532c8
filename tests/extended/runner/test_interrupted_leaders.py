"""A coordinator loses its leadership in the middle of jobs, or gets it again: every job ends, with all its output."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import etcd_server
import pytest
from etcd_server import Etcd, ctl
from launching import Launched
from replicated import TOKEN, replicated

from horovod.protos.v1 import membership_pb2

pytestmark = pytest.mark.skipif(bool(etcd_server.missing()), reason=etcd_server.missing())

KEY = "horovod/cluster/leader"
RANKS = 6
JOBS = 8
PROGRAM = "import os; print('rank', os.environ['HOROVOD_RANK'])"


def end_lease(endpoint: str, pair: dict[str, int]) -> None:
    """As etcd does when it has heard nothing for a while."""
    ctl(endpoint, "lease", "revoke", f"{pair['lease']:x}")


def take_key(endpoint: str, pair: dict[str, int]) -> None:
    """Its lease lives on: the coordinator hears of it with the next record that it writes."""
    ctl(endpoint, "del", KEY)


def forge_key(endpoint: str, pair: dict[str, int]) -> None:
    """By somebody without a key of the cluster, for ever, and with an address to which agents shall go."""
    forged = membership_pb2.Serving(replica="evil", address="127.0.0.1:9")
    ctl(endpoint, "put", KEY, forged.SerializeToString().decode())


def leader(endpoint: str) -> dict[str, int]:
    pairs: list[dict[str, int]] = json.loads(ctl(endpoint, "get", KEY, "-w", "json")).get("kvs", [])
    return pairs[0] if pairs else {}


@pytest.mark.parametrize("interrupt", [end_lease, take_key, forge_key])
def test_jobs_end_whole(tmp_path: Path, interrupt: Callable[[str, dict[str, int]], None]) -> None:
    generator = random.Random(7)
    interrupted: set[int] = set()
    with Etcd(tmp_path / "etcd") as etcd, replicated(etcd.url, tmp_path) as cluster:
        for number in range(RANKS):
            cluster.start_agent(f"h{number}", 1)
        for _ in range(JOBS):
            command = ["--coordinator", cluster.addresses, "-np", str(RANKS), sys.executable, "-c", PROGRAM]
            launched = Launched(*command, environ={"HOROVOD_TOKEN": TOKEN})
            try:
                time.sleep(generator.uniform(0.2, 1.5))  # anywhere in the job's life
                if pair := leader(etcd.endpoints[0]):  # nobody leads yet since the last one
                    interrupt(etcd.endpoints[0], pair)
                    interrupted.add(pair["mod_revision"])
                code, out, err = launched.finish()
                expected = [f"[{rank}]<stdout>:rank {rank}" for rank in range(RANKS)]
                assert (code, sorted(out.splitlines())) == (0, expected), err
            finally:
                launched.clean_up()
    assert len(interrupted) > JOBS // 2
