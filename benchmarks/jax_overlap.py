"""The overlap part of benchmarks/jax.py: does a backward pass go on while the gradients of its last layers travel?

Rank 1 begins the step later than rank 0. What rank 0 sends first waits for it all that time; if the backward pass of
rank 0 has ended before rank 1 began, then it went on meanwhile. One callback, on the gradient of the first layer, tells
when that was.

The timeline is that of jax.profiler on rank 0, of steps without the callback, where rank 1 is a little late only.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LATE_SECONDS, LATE_IN_TIMELINE_SECONDS = 3.0, 0.06
_LAYERS, _WIDTH, _ROWS = 12, 512, 256
_DEADLINE_SECONDS = 200
_GROUPS, _THREADS = (1, 4), (1, 2)
Bars = list[tuple[float, float]]  # (begin, length) in ms


def run(threads: Mapping[str, str], timeline: Path | None, failures: list[str]) -> list[dict[str, Any]]:
    """Prints the table, and draws the timeline; the rows for the JSON. What went wrong is added to `failures`."""
    print(
        f"| one step, rank 1 is {LATE_SECONDS * 1e3:,.0f} ms late | backward pass ended | step ended |\n|---|---|---|"
    )
    rows = []
    with tempfile.TemporaryDirectory(prefix="horovod-jax-trace-") as folder:
        for count in _THREADS:
            traced = timeline is not None and count == 1
            found = _measured({**threads, "PJRT_NPROC": str(count)}, ["--trace", folder] if traced else [])
            if not found:
                failures.append(f"The overlap with {count} threads has failed.")
            for row in found:
                row["threads"] = count
                what = f"XLA's threads: {count}, calls: {row['groups']}"
                print(f"| {what} | {row['backward'] * 1e3:,.0f} ms | {row['step'] * 1e3:,.0f} ms |", flush=True)
            rows += found
        if timeline is not None:
            _draw({groups: _bars(Path(folder) / str(groups)) for groups in _GROUPS}, timeline)
    return rows


def _measured(threads: Mapping[str, str], options: list[str]) -> list[dict[str, Any]]:
    """What rank 0 says of its steps; nothing where a rank has failed."""
    command = [sys.executable, "-m", "horovod.launch", "-np", "2", sys.executable, "-m", "benchmarks.jax_overlap"]
    environment = {**os.environ, **threads, "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryFile("w+") as output:
        try:
            done = subprocess.run(
                command + options, check=False, stdout=output, env=environment, timeout=_DEADLINE_SECONDS
            )
        except subprocess.TimeoutExpired:
            return []
        output.seek(0)
        found = [json.loads(line[line.index("{") :]) for line in output if '"groups"' in line]
    return found if done.returncode == 0 else []


# -- a rank ------------------------------------------------------------------------------------------------------------
def main() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import horovod.jax as hvd

    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
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

    def compiled(groups: int, tells: bool) -> Any:
        """A step without arguments, which ends when all is computed."""
        optimizer = hvd.DistributedOptimizer(optax.sgd(0.1), groups=groups)
        state = optimizer.init(params)

        @jax.jit
        def step(params: Any, state: Any, rows: Any) -> Any:
            gradients = jax.grad(loss_of)(params, rows)
            told = gradients[0][0, 0]
            if tells:
                told = jax.pure_callback(tell, jax.ShapeDtypeStruct((), np.float32), told)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, told

        def call() -> None:
            jax.block_until_ready(step(params, state, rows))

        call()  # compiled, agreed on
        hvd.barrier()
        return call

    for groups in _GROUPS:
        call = compiled(groups, tells=True)
        ended.clear()
        begin = time.perf_counter()
        if hvd.rank() == 1:
            time.sleep(LATE_SECONDS)
        call()
        if hvd.rank() == 0:
            found = {"groups": groups, "backward": ended[-1] - begin, "step": time.perf_counter() - begin}
            print(json.dumps(found), flush=True)
        if options.trace is not None:
            _trace(compiled(groups, tells=False), options.trace / str(groups))
    hvd.shutdown()


def _trace(call: Any, folder: Path) -> None:
    import jax

    import horovod.jax as hvd

    hvd.barrier()
    if hvd.rank() == 1:
        time.sleep(LATE_IN_TIMELINE_SECONDS)
        call()
    else:
        with jax.profiler.trace(str(folder)):
            call()


# -- the timeline ------------------------------------------------------------------------------------------------------
def _bars(folder: Path) -> tuple[Bars, Bars]:
    """What a trace says of XLA's operations, and of Horovod's calls, of which each has an event at its end."""
    (file,) = folder.rglob("*.trace.json.gz")
    with gzip.open(file, "rt") as text:
        events = [event for event in json.load(text)["traceEvents"] if event.get("ph") == "X"]
    ends = {event["name"]: event["ts"] for event in events if event["name"].startswith("end: ")}
    operations = [event for event in events if f"end: {event['name']}" in ends]
    begin = min(event["ts"] for event in operations)

    def bar(event: dict[str, Any], end: float) -> tuple[float, float]:
        return (event["ts"] - begin) / 1e3, (end - event["ts"]) / 1e3

    calls = [event for event in operations if event["name"].startswith("horovod")]
    others = [event for event in operations if event not in calls]
    return (
        [bar(event, event["ts"] + event.get("dur", 0)) for event in others],
        [bar(event, ends[f"end: {event['name']}"]) for event in calls],
    )


def _draw(found: Mapping[int, tuple[Bars, Bars]], to: Path) -> None:
    from matplotlib import pyplot

    figure, plots = pyplot.subplots(len(found), sharex=True, figsize=(9, 1.5 * len(found)), layout="constrained")
    for plot, (groups, (operations, calls)) in zip(plots, found.items(), strict=True):
        plot.broken_barh(operations, (0.1, 0.8), color="tab:blue")
        for place, one in enumerate(calls):
            plot.broken_barh([one], (1.1, 0.8), color=("tab:orange", "tab:red")[place % 2])
        plot.set_yticks([0.5, 1.5], ["XLA computes", "Horovod's calls"])
        plot.set_title("gradients in one call" if groups == 1 else f"groups={groups}", fontsize="medium")
    plots[-1].set_xlabel(f"ms since the step of rank 0 began; rank 1 is {LATE_IN_TIMELINE_SECONDS * 1e3:.0f} ms late")
    figure.savefig(to, dpi=100)


if __name__ == "__main__":
    main()
