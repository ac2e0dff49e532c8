"""The training part of benchmarks/jax.py: the harness of benchmarks/training.py with models of JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from benchmarks import report, training
from benchmarks.measure import Budget
from benchmarks.models import MODELS, TrainingCase
from benchmarks.ports import free_ports
from benchmarks.world import WorldError

PEER = "pmean"  # jax.lax.pmean under jax.shard_map
_RANKS = 2
_FULL = Budget(rounds=60, round_seconds=0.2, block_seconds=0.2)
_QUICK = Budget(rounds=2, round_seconds=0.02, block_seconds=0.02)


def run(
    quick: bool, peer: str, threads: Mapping[str, str], versions: dict[str, str], failures: list[str]
) -> list[dict[str, Any]]:
    """Prints the table; the rows for the JSON. What went wrong is added to `failures`.

    peer: what carries pmean: "gloo" or "mpi". threads: environment variables for XLA.
    """
    rows = []
    print(f"training, {_RANKS} ranks of one thread\n{training.header(PEER)}", flush=True)
    with contextlib.ExitStack() as stack:
        ways: dict[str, training.Way] = {}
        environment = {
            **threads,
            "BENCHMARK_CLUSTER": f"127.0.0.1:{free_ports(1)[0]}",
            "BENCHMARK_PEER": peer,
            "JAX_PLATFORMS": "cpu",
        }
        try:
            ways = training.start(
                stack, (PEER, "horovod"), _RANKS, environment, versions, module="benchmarks.jax_trainer"
            )
        except WorldError as error:
            failures.append(str(error))
            print(report.brief(str(error)))
        for model in MODELS:
            case = TrainingCase(model, _RANKS, tiny=quick)
            row, document = training.measure_training(case, ways, _QUICK if quick else _FULL, PEER)
            print(training.line(case, row, PEER), flush=True)
            rows.append(document)
            failures.extend(row.refused.values())
            ways = {name: way for name, way in ways.items() if name not in row.refused}
    return rows
