#!/usr/bin/env python3
"""JAX on two ranks of this host: Horovod and JAX's own collectives over Gloo in one run.

    python benchmarks/jax.py                     six minutes; needs JAX, Optax, PyTorch and a C compiler
    python benchmarks/jax.py --parts operations  under a minute
    python benchmarks/jax.py --quick             does everything work? The figures mean nothing

The peer is what a script without Horovod has: jax.distributed, jax.shard_map and jax.lax.psum, with
jax_cpu_collectives_implementation="gloo" (or "mpi", by --peer, where MPITRAMPOLINE_LIB names a library for jaxlib). One
pair of processes is in both worlds, so all take turns there.

Operations, beside the engine called from C; each figure is the median of the rounds on rank 0:

    call, eager       one call after the other
    call, jit         the slope of a chain in one jitted function: the call of a function costs more than a collective
    ResNet-50         its 161 gradients in one jitted function that is given its own results (donated): the whole call.
                      "just computed" in the function, as in a backward pass: less that function without collectives

A rank has one thread of XLA unless XLA_FLAGS and PJRT_NPROC say otherwise: two ranks share few processors.

Training, in jitted steps: the columns are those of benchmarks/training.py, which also tells how parameters are checked.
The same processes train in each way, in turns of a few steps.

Overlap: when a backward pass has ended whose first gradients wait for the other rank (benchmarks/jax_overlap.py).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not this folder, whose jax.py is this file

from benchmarks.cases import resnet50_shapes  # noqa: E402
from benchmarks.operations import Figures, Rounds, engine_call, print_figures, seconds_of  # noqa: E402

SMALL, LARGE, CHAIN = 256, 1 << 18, 100  # float32: 1 KB and 1 MB; collectives in a chain
WORLD = 2
DEADLINE_SECONDS = 400
THREADS = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "PJRT_NPROC": "1"}
PARTS = ("operations", "training", "overlap")
PEERS = ("gloo", "mpi")
RESULTS = ROOT / "benchmarks/results"
ENGINE, HOROVOD, GROUPED, PEER = COLUMNS = ("engine from C", "Horovod", "Horovod, grouped", "psum")


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    if options.rank_of is not None:
        return _rank(options.rank_of, options.peer, options.rounds)
    from benchmarks import report

    return report.until_interrupted(lambda: _run(options))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--peer", choices=PEERS, default="gloo", help="JAX's own collectives (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="of the operations (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round, tiny models")
    parser.add_argument("--timeline", type=Path, help="PNG for the overlap; needs matplotlib")
    parser.add_argument("--json", type=Path, default=RESULTS / "jax.json", help="default: %(default)s")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)  # the address at which JAX's processes meet
    options = parser.parse_args(argv)
    options.parts = options.parts.split(",")
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"--parts: {part!r} is none of the parts; there are {', '.join(PARTS)}.")
    if options.rounds < 1:
        parser.error(f"--rounds: {options.rounds} is no number of rounds; expected 1 or more.")
    if options.quick:
        options.rounds = 1
    return options


def _run(options: argparse.Namespace) -> int:
    from benchmarks import report

    about = report.machine({})
    print(f"load of this machine: {about['load_at_start']:.1f}, {about['cores']} processors", flush=True)
    found: Figures = {}
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    if "operations" in options.parts:
        try:
            found = _operations(options.peer, options.rounds)
            print_figures(found, COLUMNS)
        except RuntimeError as error:
            failures.append(str(error))
            print(error)
    if "training" in options.parts:
        from benchmarks import jax_training

        rows = jax_training.run(options.quick, options.peer, THREADS, about["versions"], failures)
    overlap: list[dict[str, Any]] = []
    if "overlap" in options.parts:
        from benchmarks import jax_overlap

        overlap = jax_overlap.run(THREADS, options.timeline, failures)
    document = {
        "machine": about,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "peer": options.peer,
        "operations": found,
        "rows": rows,
        "overlap": overlap,
        "failures": failures,
    }
    report.write_json(options.json, document)
    print(f"written to {options.json}; load of this machine: {os.getloadavg()[0]:.1f}")
    return 1 if failures else 0


def _operations(peer: str, rounds: int) -> Figures:
    """Two processes; rank 0 prints its figures. RuntimeError if one failed."""
    from benchmarks.ports import free_ports

    address = f"127.0.0.1:{free_ports(1)[0]}"
    command = [sys.executable, "-m", "horovod.launch", "-np", str(WORLD), sys.executable, str(Path(__file__).resolve())]
    command += ["--rank-of", address, "--peer", peer, "--rounds", str(rounds)]
    with tempfile.TemporaryFile("w+") as output:
        environment = {**THREADS, **os.environ, "JAX_PLATFORMS": "cpu"}
        try:
            done = subprocess.run(command, check=False, stdout=output, env=environment, timeout=DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"The operations took more than {DEADLINE_SECONDS} seconds.") from None
        if done.returncode != 0:
            raise RuntimeError(f"The operations ended with {done.returncode}.")
        output.seek(0)
        lines = [line[line.index("{") :] for line in output if '"figures"' in line]
    figures: Figures = json.loads(lines[0])["figures"]
    return figures


# -- a rank ------------------------------------------------------------------------------------------------------------
def _rank(address: str, peer: str, rounds: int) -> int:
    import jax
    import jax.numpy as jnp

    import horovod.jax as hvd

    hvd.init()
    jax.config.update("jax_cpu_collectives_implementation", peer)
    jax.distributed.initialize(address, hvd.size(), hvd.rank())
    measured = Rounds()
    for row, elements, times in (("1 KB", SMALL, 300), ("1 MB", LARGE, 20)):
        x = jnp.ones(elements)
        title = f"call of {row}, eager"
        measured.add(title, ENGINE, engine_call(f"e{row}", [elements], times))
        measured.add(title, HOROVOD, lambda x=x, n=times: seconds_of(lambda: _ended(hvd.allreduce(x, op=hvd.Sum)), n))
        title = f"call of {row}, jit"
        measured.add(title, ENGINE, engine_call(f"j{row}", [elements], times))
        measured.add(title, HOROVOD, _slope(lambda x: hvd.allreduce(x, op=hvd.Sum), elements, _Local))
        measured.add(title, PEER, _slope(lambda x: jax.lax.psum(x, "ranks"), elements, _Together))

    def single(gradients: list[Any]) -> list[Any]:
        return [hvd.allreduce(one, op=hvd.Sum) for one in gradients]

    def grouped(gradients: list[Any]) -> list[Any]:
        return hvd.grouped_allreduce(gradients, op=hvd.Sum)

    def reduced_by_jax(gradients: list[Any]) -> Any:
        return jax.lax.psum(gradients, "ranks")

    sizes = [int(jnp.zeros(shape).size) for shape in resnet50_shapes()]
    for title, measure in (("ResNet-50", _donated), ("ResNet-50, just computed", _added)):
        measured.add(title, ENGINE, engine_call("resnet", sizes, 5))
        measured.add(title, HOROVOD, measure(single, _Local))
        measured.add(title, GROUPED, measure(grouped, _Local))
        measured.add(title, PEER, measure(reduced_by_jax, _Together, 1))
    found = measured.run(rounds)
    if hvd.rank() == 0:
        print(json.dumps({"figures": found}), flush=True)
    hvd.shutdown()
    jax.distributed.shutdown()
    return 0


def _ended(result: Any) -> Any:
    import jax

    return jax.block_until_ready(result)


class _Local:
    """Compiles functions for this process's device."""

    @staticmethod
    def compiled(function: Callable[[Any], Any], **options: Any) -> Any:
        import jax

        return jax.jit(function, **options)

    @staticmethod
    def given(arrays: Any) -> Any:
        return arrays


class _Together:
    """Compiles functions for the devices of all processes, as a script without Horovod does."""

    @staticmethod
    def _placed() -> tuple[Any, Any]:
        import jax
        from jax.sharding import Mesh, PartitionSpec

        return Mesh(jax.devices(), ("ranks",)), PartitionSpec("ranks")

    @staticmethod
    def compiled(function: Callable[[Any], Any], **options: Any) -> Any:
        import jax

        mesh, spec = _Together._placed()
        mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(mapped, **options)

    @staticmethod
    def given(arrays: Any) -> Any:
        """Arrays of which each process's is a part."""
        import jax
        from jax.sharding import NamedSharding

        sharding = NamedSharding(*_Together._placed())
        return jax.tree.map(lambda one: jax.make_array_from_process_local_data(sharding, one), arrays)


Where = type[_Local] | type[_Together]


def _slope(collective: Callable[[Any], Any], elements: int, where: Where) -> Callable[[], float]:
    """Seconds that one more collective in a chain takes."""
    import jax.numpy as jnp

    def chain(length: int) -> Any:
        def run(x: Any) -> Any:
            for _ in range(length):
                x = collective(x)
            return x

        return where.compiled(run)

    short, long = chain(1), chain(1 + CHAIN)
    x = where.given(jnp.zeros(elements))
    times = 10 if elements == SMALL else 2
    return lambda: (seconds_of(lambda: _ended(long(x)), times) - seconds_of(lambda: _ended(short(x)), times)) / CHAIN


def _gradients(where: Where) -> Any:
    import jax.numpy as jnp

    return where.given([jnp.zeros(shape) for shape in resnet50_shapes()])


def _donated(operation: Callable[[list[Any]], Any], where: Where, times: int = 5) -> Callable[[], float]:
    """Seconds of a function that reduces its arguments in their memory."""
    reduced = where.compiled(operation, donate_argnums=0)
    gradients = [_gradients(where)]

    def call() -> None:
        gradients.append(_ended(reduced(gradients.pop())))

    return lambda: seconds_of(call, times)


def _computed(gradients: list[Any]) -> list[Any]:
    return [one * 0.5 for one in gradients]


def _added(operation: Callable[[list[Any]], Any], where: Where, times: int = 5) -> Callable[[], float]:
    """Seconds that the operation adds to a function that computes the gradients."""
    with_it, without = where.compiled(lambda given: operation(_computed(given))), where.compiled(_computed)
    gradients = _gradients(where)
    return lambda: (
        seconds_of(lambda: _ended(with_it(gradients)), times) - seconds_of(lambda: _ended(without(gradients)), times)
    )


if __name__ == "__main__":
    sys.exit(main())
