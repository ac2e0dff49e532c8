"""A user of etcd who is no coordinator, against jobs of agents: reads them, and replaces their commands.

test_interrupted_leaders.py takes the leader's key away; tests/coordinator/test_sealed_store.py has the rest.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import etcd_server
import pytest
from etcd_server import READY_S, Etcd, ctl, ctl_command
from launching import Launched
from replicated import TOKEN, Replicated, replicated
from resources import eventually

from horovod.base.errors import ClusterCode
from horovod.coordinator.store.seal import MAGIC, Place, Seal
from horovod.protos.v1 import jobs_pb2

pytestmark = pytest.mark.skipif(bool(etcd_server.missing()), reason=etcd_server.missing())

SUBMITTED = "horovod/submitted/"
SECRET = "a-key-of-the-user"


class Attacker:
    def __init__(self, etcd: Etcd) -> None:
        self._endpoint = etcd.endpoints[0]

    def records(self) -> dict[str, tuple[bytes, Place]]:
        """The name of each submitted job, and what stands there of it."""
        pairs = json.loads(ctl(self._endpoint, "get", SUBMITTED, "--prefix", "-w", "json")).get("kvs", [])
        return {
            base64.b64decode(pair["key"]).decode().removeprefix(SUBMITTED): (
                base64.b64decode(pair["value"]),
                Place(pair["create_revision"], pair["version"]),
            )
            for pair in pairs
        }

    def put(self, job: str, value: bytes) -> None:
        command = [*ctl_command(self._endpoint), "put", SUBMITTED + job]
        subprocess.run(command, input=value, check=True, capture_output=True, timeout=READY_S)

    def reads(self, words: str) -> bool:
        """Whether they stand in clear, anywhere, or did and are not compacted yet."""
        latest = json.loads(ctl(self._endpoint, "get", "", "--prefix", "-w", "json"))["header"]["revision"]
        for revision in range(2, latest + 1):
            found = json.loads(ctl(self._endpoint, "get", "", "--prefix", "-w", "json", f"--rev={revision}"))
            if any(words.encode() in base64.b64decode(pair["value"]) for pair in found.get("kvs", [])):
                return True
        return False


def submit(stack: ExitStack, cluster: Replicated, attacker: Attacker, name: str, source: str) -> tuple[Launched, str]:
    """A launcher whose job waits in the queue, and the job's id."""
    program = [sys.executable, "-c", source]
    options = ["--coordinator", cluster.addresses, "--job-name", name, "-np", "1", *program]
    launched = Launched(*options, environ={"HOROVOD_TOKEN": TOKEN, "API_KEY": SECRET})
    stack.callback(launched.clean_up)

    def found() -> list[str]:
        """Its id. The record is written once it is created, where it is sealed."""
        return [
            one
            for one, (value, place) in attacker.records().items()
            if one.startswith(name) and (place.version > 1 or not value.startswith(MAGIC))
        ]

    assert eventually(lambda: bool(found()))
    return launched, found()[0]


@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_command_that_was_replaced_in_etcd_is_never_run(tmp_path: Path, is_sealed: bool) -> None:
    """Without a token, and so without a seal, it is: that is what --insecure-store accepts."""
    stolen = tmp_path / "stolen"
    with ExitStack() as stack:
        etcd = stack.enter_context(Etcd(tmp_path / "etcd"))
        cluster = stack.enter_context(replicated(etcd.url, tmp_path, has_token=is_sealed))
        attacker = Attacker(etcd)
        victim, victim_id = submit(stack, cluster, attacker, "victim", "print('trained')")
        other, _ = submit(stack, cluster, attacker, "other", "print('trained')")

        assert attacker.reads(SECRET) is not is_sealed
        value, place = attacker.records()[victim_id]
        assert value.startswith(MAGIC) is is_sealed
        # The test knows the key, so that the forged record is as good as it can be.
        record = Seal([TOKEN]).open(SUBMITTED + victim_id, value, place) if is_sealed else value
        forged = jobs_pb2.JobRecord.FromString(record)
        del forged.spec.command[:]
        forged.spec.command.extend([sys.executable, "-c", f"open({str(stolen)!r}, 'w')"])
        attacker.put(victim_id, forged.SerializeToString())

        cluster.kill_first()  # the other one begins with what stands in etcd
        cluster.start_agent("h1", 1)
        code, out, err = other.finish()
        assert (code, out) == (0, "[0]<stdout>:trained\n"), err
        code, out, err = victim.finish()
        assert stolen.exists() is not is_sealed
        if is_sealed:
            assert code != 0
            assert out == ""
            assert ClusterCode.UNKNOWN_JOB in err
            said = [line for line in cluster.log.splitlines() if ClusterCode.STORE_TAMPERED in line]
            assert said
            assert all(SUBMITTED + victim_id in line for line in said)
