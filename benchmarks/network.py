#!/usr/bin/env python3
"""Measures horovod, torch.distributed with Gloo and Open MPI (its TCP transport) between hosts, in one run.

The hosts are network namespaces of this one (namespaces.py; needs root): 2 and 4 of them with 1 and 2 ranks each, at
1 Gbit/s and unshaped. "of wire" compares with the least time in which the bytes that each host must send, 2(n-1)/n
times the message for an allreduce over n hosts, pass at the rate with not a byte for headers (which take 4.4% at an MTU
of 1500). "sockets" is an allreduce in C over plain sockets and memory that the ranks of a host share (sockets.cc): what
the kernel and the copies take for themselves.

Exit codes: 0, or 1 when a library failed or gave wrong values, 2 when the network can't be made here.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import cases, report
from benchmarks.cases import FLOAT_BYTES, KIB, MIB, Case
from benchmarks.measure import Budget, Row, measure, settle
from benchmarks.namespaces import DEFAULT_CONGESTION, Network, NetworkError, check_possible
from benchmarks.peers import NAMES, TITLES
from benchmarks.peers.sockets import compile_sockets
from benchmarks.world import Host, Layout, World, WorldError, why_missing

SIZES = (4, 16 * KIB, MIB, 16 * MIB, 64 * MIB)
QUICK_SIZES = (4, MIB)
QUICK = Budget(rounds=2, round_seconds=0.03, block_seconds=0.01, large_rounds=2, settle_seconds=0)
FULL = Budget(rounds=5, round_seconds=0.1, block_seconds=0.02, large_rounds=3, large_bytes=16 * MIB)
LIBRARIES = (*NAMES, "sockets")
RESULTS = Path(__file__).resolve().parent / "results"


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    try:
        check_possible()
        with contextlib.ExitStack() as stack:
            return report.until_interrupted(lambda: _run(options, stack))
    except NetworkError as error:
        print(error, file=sys.stderr)
        return 2


def _run(options: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    libraries = []
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="horovod-benchmark-"))
    for name in options.libraries:
        missing = _compile(Path(folder)) if name == "sockets" else why_missing(name)
        if name == "mpi" and options.ipv6:
            missing = "Open MPI is left out: its mpirun takes no IPv6 addresses for hosts."
        if name == "sockets" and options.ipv6:
            missing = "Plain sockets are left out: they know IPv4 only."
        if missing:
            print(missing)
        else:
            libraries.append(name)
    about = report.machine({}) | {"tcp_congestion_control": options.congestion_control}
    failures: list[str] = []
    results: list[dict[str, Any]] = []
    print(report.header(("wire GB/s", "sockets", "x", "of wire")))
    for rate in options.rate:
        for hosts in options.hosts:
            for per_host in options.ranks_per_host:
                nics = "" if options.nics == 1 else f", {options.nics} interfaces each"
                print(f"{hosts} hosts with {per_host} ranks each, {rate or 'unshaped'}{nics}")
                made = Network(hosts, rate, options.nics, options.ipv6, options.congestion_control)
                with made as network, contextlib.ExitStack() as running:
                    worlds = _start(libraries, network, per_host, running, failures)
                    about["versions"] |= {TITLES[world.library]: world.version for world in worlds}
                    chosen = cases.cases(hosts * per_host, options.ops, options.sizes)
                    settle(chosen[0], _able(chosen[0], worlds), options.budget)
                    for case in chosen:
                        row = measure(case, _able(case, worlds), options.budget)
                        failures.extend(row.refused.values())
                        worlds = [world for world in worlds if world.library not in row.refused]
                        results.append(_show(row, hosts, per_host, rate, options.nics))
    document = {"machine": about, "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}
    report.write_json(options.json, {**document, "rows": results, "failures": failures})
    print(f"Values of every block checked; written to {options.json}")
    return 1 if failures else 0


def _able(case: Case, worlds: Sequence[World]) -> list[World]:
    return [world for world in worlds if world.library != "sockets" or case.operation == "allreduce"]


def _start(
    libraries: Sequence[str], network: Network, per_host: int, stack: contextlib.ExitStack, failures: list[str]
) -> list[World]:
    worlds = []
    for library in libraries:
        try:
            worlds.append(stack.enter_context(World(library, _layout(library, network, per_host, stack))))
        except WorldError as error:
            failures.append(str(error))
            print(report.brief(str(error)))
    return worlds


def _layout(library: str, network: Network, per_host: int, stack: contextlib.ExitStack) -> Layout:
    hosts = network.hosts
    mpi: tuple[str, ...] = ()
    # Every "host" believes that the cores are its own.
    crowded = len(hosts) * per_host > len(os.sched_getaffinity(0))
    environment: dict[str, str] = {}
    if library == "horovod" and crowded:
        environment["HOROVOD_SPIN_US"] = "0"
    if library == "horovod" and "BENCHMARK_FULL_MESH_MEMBERS" in os.environ:
        environment["HOROVOD_FULL_MESH_MEMBERS"] = os.environ["BENCHMARK_FULL_MESH_MEMBERS"]
    if library == "sockets":
        environment["BENCHMARK_SOCKETS"] = os.environ["BENCHMARK_SOCKETS"]
        environment["BENCHMARK_RANKS_PER_HOST"] = str(per_host)
    if library == "mpi":
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="horovod-benchmark-"))
        agent = _rsh_agent(Path(folder, "agent"), hosts)
        places = ",".join(f"{host.address}:{per_host}" for host in hosts)
        settings = {
            "plm": "rsh",
            "plm_rsh_agent": str(agent),
            "pml": "ob1",
            "btl": "self,vader,tcp",
            "btl_tcp_if_include": hosts[0].interface,
            "oob_tcp_if_include": "eth0",
            "mpi_yield_when_idle": str(int(crowded)),
        }
        mpi = ("--host", places, "--bind-to", "none", *(word for item in settings.items() for word in ("--mca", *item)))
    return Layout(hosts, per_host, mpi, environment)


def _compile(folder: Path) -> str | None:
    """Makes what the ranks of `sockets` load; why it can't be made, as a sentence."""
    try:
        os.environ["BENCHMARK_SOCKETS"] = str(compile_sockets(folder))
    except FileNotFoundError as error:
        return f"Plain sockets are left out: no C++ compiler ({error.filename}); apt-get install g++, or set CXX."
    except subprocess.CalledProcessError as error:
        return f"Plain sockets are left out: sockets.cc can't be compiled: {error.stderr.strip()}"
    return None


def _rsh_agent(path: Path, hosts: Sequence[Host]) -> Path:
    """What mpirun calls in place of ssh: enters the namespace of the host with the given address."""
    branches = [f'{shlex.quote(host.address)}) shift; exec {shlex.join(host.prefix)} sh -c "$*" ;;' for host in hosts]
    path.write_text("\n".join(["#!/bin/sh", 'case "$1" in', *branches, "esac", 'echo "no host $1" >&2; exit 1', ""]))
    path.chmod(0o700)
    return path


def wire_bytes(case: Case, hosts: int, per_host: int) -> float:
    """The least that each host must send for one call (the root's host, for a broadcast)."""
    size = sum(case.elements) * FLOAT_BYTES
    away = (hosts - 1) / hosts
    if case.operation == "barrier":
        return 0.0
    if case.operation == "broadcast":
        return float(size)
    if case.operation == "allgather":  # the input is one rank's part; every host's part must reach some other host
        return size * per_host * (hosts - 1)
    if case.operation == "alltoall":
        return size * per_host * away
    return size * away * (1 if case.operation == "reducescatter" else 2)


def _show(row: Row, hosts: int, per_host: int, rate: str | None, nics: int) -> dict[str, Any]:
    moved = wire_bytes(row.case, hosts, per_host)
    shares = {}
    ours = row.figures.get("horovod")
    plain = row.figures.get("sockets")
    extra = [
        report.rate_text(moved / ours.seconds if ours else 0.0),
        report.time_text(plain.seconds if plain else None),
        f"{plain.seconds / ours.seconds:.2f}" if plain and ours else "-",
    ]
    if rate and moved:
        least = moved / (_bytes_per_second(rate) * nics)
        shares = {library: least / figure.seconds for library, figure in row.figures.items()}
        extra.append(" / ".join(f"{100 * shares[name]:.0f}%" if name in shares else "-" for name in NAMES))
    print(report.line(row, extra), flush=True)
    place = {"hosts": hosts, "ranks_per_host": per_host, "rate": rate, "interfaces": nics}
    return {**row.to_json(), **place, "wire_bytes": moved, "of_wire_bound": shares}


def _bytes_per_second(rate: str) -> float:
    text = rate.lower().removesuffix("bit")
    factor = {"k": 1e3, "m": 1e6, "g": 1e9}.get(text[-1:], 1.0)
    return float(text.rstrip("kmg")) * factor / 8


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures collectives between hosts that are network namespaces.")
    parser.add_argument("--hosts", default="2,4", help="default: %(default)s")
    parser.add_argument("--ranks-per-host", default="1,2", help="default: %(default)s")
    parser.add_argument("--rate", default="1gbit,none", help="rates of tc, none for unshaped (default: %(default)s)")
    parser.add_argument("--nics", type=int, default=1, help="interfaces of each host (default: %(default)s)")
    parser.add_argument("--ipv6", action="store_true", help="hosts have IPv6 addresses only")
    parser.add_argument(
        "--congestion-control", default=DEFAULT_CONGESTION, help="of TCP on the hosts (default: %(default)s)"
    )
    parser.add_argument("--sizes", help="such as 4,16K,64M")
    parser.add_argument("--ops", default="allreduce", help="default: %(default)s")
    parser.add_argument("--libraries", default=",".join(LIBRARIES), help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="two sizes, 2 hosts, short rounds")
    parser.add_argument("--json", type=Path, default=RESULTS / "network.json", help="default: %(default)s")
    parser.add_argument("--full-mesh-members", type=int, help="as HOROVOD_FULL_MESH_MEMBERS; 1: sparse meshes")
    options = parser.parse_args(argv)
    if options.full_mesh_members is not None:
        os.environ["BENCHMARK_FULL_MESH_MEMBERS"] = str(options.full_mesh_members)
    try:
        sizes = [cases.parse_size(text) for text in options.sizes.split(",")] if options.sizes else None
        options.hosts = [int(text) for text in ("2" if options.quick else options.hosts).split(",")]
        options.ranks_per_host = [int(text) for text in options.ranks_per_host.split(",")]
        options.ops = cases.parse_names(options.ops, "operation", cases.OPERATIONS)
        options.libraries = cases.parse_names(options.libraries, "library", LIBRARIES)
        options.rate = [None if text == "none" else text for text in options.rate.split(",")]
        for rate in options.rate:
            if rate is not None:
                _bytes_per_second(rate)
    except ValueError as error:
        parser.error(str(error))
    options.sizes = tuple(sizes or (QUICK_SIZES if options.quick else SIZES))
    options.budget = QUICK if options.quick else FULL
    return options


if __name__ == "__main__":
    sys.exit(main())
