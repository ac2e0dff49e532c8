"""The overlap part of benchmarks/jax.py: does a backward pass go on while the gradients of its last layers travel?

Rank 1 begins the step later than rank 0. What rank 0 sends first waits for it all that time; if the backward pass of
rank 0 has ended before rank 1 began, then it went on meanwhile. One callback, on the gradient of the first layer, tells
when that was.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

LATE_SECONDS = 3.0
_LAYERS, _WIDTH, _ROWS = 12, 512, 256
_DEADLINE_SECONDS = 200
_GROUPS, _THREADS = (1, 4), (1, 2)


def run(threads: Mapping[str, str], failures: list[str]) -> list[dict[str, Any]]:
    """Prints the table; the rows for the JSON. What went wrong is added to `failures`."""
    print(
        f"| one step, rank 1 is {LATE_SECONDS * 1e3:,.0f} ms late | backward pass ended | step ended |\n|---|---|---|"
    )
    rows = []
    for count in _THREADS:
        command = [sys.executable, "-m", "horovod.launch", "-np", "2", sys.executable, "-m", "benchmarks.jax_overlap"]
        environment = {**os.environ, **threads, "PJRT_NPROC": str(count), "JAX_PLATFORMS": "cpu"}
        with tempfile.TemporaryFile("w+") as output:
            try:
                done = subprocess.run(
                    command, check=False, stdout=output, env=environment, timeout=_DEADLINE_SECONDS
                ).returncode
            except subprocess.TimeoutExpired:
                done = -1
            if done != 0:
                failures.append(f"The overlap with {count} threads ended with {done}.")
                continue
            output.seek(0)
            found = [json.loads(line[line.index("{") :]) for line in output if '"groups"' in line]
        for row in found:
            row["threads"] = count
            what = f"XLA's threads: {count}, calls: {row['groups']}{', clipped' if row['clipped'] else ''}"
            print(f"| {what} | {row['backward'] * 1e3:,.0f} ms | {row['step'] * 1e3:,.0f} ms |", flush=True)
        rows += found
    return rows


def main() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import horovod.jax as hvd

    hvd.init()
    ended: list[float] = []

    def tell(_: Any) -> Any:
        ended.append(time.perf_counter())
        return np.float32(0)

    def loss_of(params: Any, x: Any) -> Any:
        for layer in params:
            x = jnp.tanh(x @ layer)
        return (x**2).mean()

    params = [jnp.eye(_WIDTH) for _ in range(_LAYERS)]
    rows = jnp.ones((_ROWS, _WIDTH))
    sgd = optax.sgd(0.1)
    for clipped, groups in itertools.product((False, True), _GROUPS):
        inner = optax.chain(optax.clip_by_global_norm(1.0), sgd) if clipped else sgd
        optimizer = hvd.DistributedOptimizer(inner, groups=groups)
        state = optimizer.init(params)

        @jax.jit
        def step(params: Any, state: Any, rows: Any, optimizer: Any = optimizer) -> Any:
            gradients = jax.grad(loss_of)(params, rows)
            told = jax.pure_callback(tell, jax.ShapeDtypeStruct((), np.float32), gradients[0][0, 0])
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, told

        jax.block_until_ready(step(params, state, rows))
        hvd.barrier()
        if hvd.rank() == 1:
            time.sleep(LATE_SECONDS)
        begin = time.perf_counter()
        jax.block_until_ready(step(params, state, rows))
        seconds = time.perf_counter() - begin
        if hvd.rank() == 0:
            row = {"groups": groups, "clipped": clipped, "backward": ended[-1] - begin, "step": seconds}
            print(json.dumps(row), flush=True)
        hvd.barrier()
    hvd.shutdown()


if __name__ == "__main__":
    main()
