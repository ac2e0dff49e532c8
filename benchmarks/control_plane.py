#!/usr/bin/env python3
"""What forming and running a large world costs the coordinator: a real one, and members that only speak its protocol.

    python benchmarks/control_plane.py                       64, 256, 1,024 and 4,096 members
    python benchmarks/control_plane.py --members 256 --plot docs/img/control_plane.png
    python benchmarks/control_plane.py --members 1024 --profile profile.txt
    python benchmarks/control_plane.py --relay               eight members behind the relay of one agent

The coordinator is a process of its own, `horovod-coordinator` as users start it. Members are asyncio tasks in other
processes, each with its own gRPC channel and so its own TCP connection, as a training process has. They say what real
members say (a join request of a cluster's usual size, 8 to a host, two interfaces; the announcements of 500 gradients)
and move no tensors. With --relay the eight members of a host go through a relay as an agent has it, so the coordinator
has one connection for each host; the relays run in the members' processes. All share this machine's processors with the
coordinator, so seconds are an upper bound; "cpu" is what the coordinator itself used.

  formed  from the first join request until the last member has its world
  plans   from the first announcement until every member has the ids of all tensors
  network bytes over IP from the first join request until then, of all programs of this machine
  lost    from the moment one member's connection breaks and a peer says so until every other member has heard of it

Exit codes: 0, or 1 when something did not happen in --limit seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import multiprocessing
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import grpc
import psutil

from horovod.base.protocol import PROTOCOL_VERSION
from horovod.protos.v1 import membership_pb2, negotiation_pb2, types_pb2
from horovod.worker.agent.relay import Relay
from horovod.worker.runtime.probe import headers as relay_headers

HOST_MEMBERS = 8
TENSORS = 500
RETRY_S = 0.25
# A coordinator to which too many come at once, as gRPC tells it; INTERNAL for one that was writing at that moment.
SENT_AWAY = (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
TICKS = os.sysconf("SC_CLK_TCK")
WORLD, GONE, REFUSED = b"\x12", b"\x1a", b"\x22"  # first bytes of a MembershipEvent


@dataclass(frozen=True)
class Figures:
    """Seconds, and what the coordinator used for them."""

    members: int
    formed_s: float
    formed_cpu_s: float
    plans_s: float
    plans_cpu_s: float
    lost_s: float
    lost_cpu_s: float
    memory_mb: float
    world_bytes: int
    formed_network_mb: float  # that this machine sent over IP until the world was formed


SECONDS = ("formed_s", "formed_cpu_s", "plans_s", "plans_cpu_s", "lost_s", "lost_cpu_s")


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found: list[Figures] = []
    names = ("formed", "cpu", "plans", "cpu", "lost", "cpu")
    print(f"{'members':>8} {' '.join(f'{name:>8}' for name in names)} {'memory':>9} {'world':>9} {'network':>9}")
    for count in options.members:
        try:
            figures = measure(count, options)
        except TimeoutError as error:
            print(f"{count:>8} {error}", flush=True)
            return 1
        found.append(figures)
        seconds = [getattr(figures, name) for name in SECONDS]
        columns = " ".join(f"{value:>7.2f}s" for value in seconds)
        sizes = f"{figures.memory_mb:>6.0f} MB {figures.world_bytes / 1024:>6.0f} KB"
        print(f"{count:>8} {columns} {sizes} {figures.formed_network_mb:>6.1f} MB", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    if options.plot:
        plot(found, options.plot)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures the coordinator with simulated members.")
    parser.add_argument("--members", type=_counts, default=(64, 256, 1024, 4096), help="default: 64,256,1024,4096")
    parser.add_argument(
        "--tensors", type=int, default=TENSORS, help="that each member announces (default: %(default)s)"
    )
    parser.add_argument("--relay", action="store_true", help="eight members behind the relay of one agent")
    parser.add_argument("--processes", type=int, default=1, help="that the members share (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=120.0, metavar="S", help="for each phase (default: %(default)g)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="PNG", help="needs matplotlib")
    parser.add_argument("--profile", metavar="FILE", help="cProfile of the coordinator, of the last number of members")
    return parser.parse_args(argv)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


# -- the coordinator -------------------------------------------------------------------------------------------------


class Coordinator:
    def __init__(self, profile: str | None) -> None:
        how = ["-m", "cProfile", "-o", profile] if profile else []
        command = [sys.executable, *how, "-m", "horovod.coordinator", "--listen", "127.0.0.1:0", "--insecure"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().split()[-1]
        self._ps = psutil.Process(self._process.pid)

    def cpu_s(self) -> float:
        times = self._ps.cpu_times()
        return times.user + times.system

    def memory_mb(self) -> float:
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+) kB", text)[0]) / 1024

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# -- members ---------------------------------------------------------------------------------------------------------


def join_request(job: str, index: int, size: int) -> membership_pb2.JoinRequest:
    """What a member of a cluster says of itself."""
    host = f"gpu-node-{index // HOST_MEMBERS:05}.cluster.example"
    domain = f"0123abcd-4567-89ab-cdef-{index // HOST_MEMBERS:012}/4026531836"
    return membership_pb2.JoinRequest(
        protocol_version=PROTOCOL_VERSION,
        job=job,
        member_id=f"memberid{index:08}",
        size=size,
        host=membership_pb2.HostIdentity(name=host, shared_memory_domain=f"{domain}/1000"),
        requested_rank=index,
        pid=4_000_000 + index,  # of no process here
        endpoints=[
            types_pb2.Endpoint(
                address=f"10.{interface}.{index // HOST_MEMBERS // 250}.{index // HOST_MEMBERS % 250}",
                port=40_000 + index % 20_000,
                interface=f"eth{interface}",
            )
            for interface in range(2)
        ],
        segment_address=f"memfd:{100_000 + index}:12:0123456789abcdef",
        options={"fusion_threshold_bytes": "134217728", "transport": "auto"},
        process=membership_pb2.ProcessIdentity(namespace=domain, start_time=123_456_789),
    )


def gradients(tensors: int) -> list[types_pb2.Operation]:
    return [
        types_pb2.Operation(
            name=f"allreduce.encoder.layer.{index // 16}.attention.output.dense.{index % 16}.weight",
            tensors=[types_pb2.TensorSpec(dtype=types_pb2.DATA_TYPE_FLOAT32, shape=[1024, 1024])],
            prescale_factor=1.0,
            postscale_factor=1.0,
        )
        for index in range(tensors)
    ]


class Member:
    def __init__(self, address: str, job: str, index: int, size: int, relay: str) -> None:
        # Connections of one process are shared unless each channel has a pool of its own.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 << 20)]
        self.channel = grpc.aio.insecure_channel(f"unix:{relay}" if relay else address, options=options)
        self.metadata = relay_headers(address, 20.0, 5.0) if relay else ()
        self.request = join_request(job, index, size)
        self.index = index
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.membership: Any = None
        self.negotiation: Any = None
        self._reader: asyncio.Task[None] | None = None

    async def join_until_done(self) -> bytes:
        """As `join`. If it is sent away, it comes again, as a real member does."""
        while True:
            try:
                return await self.join()
            except grpc.aio.AioRpcError as error:
                if error.code() not in SENT_AWAY:
                    raise
                await asyncio.sleep(RETRY_S)

    async def join(self) -> bytes:
        """The world as bytes: a real member would parse it, on its own machine."""
        # No deserializer: events are told apart by their first byte.
        method = self.channel.stream_stream(
            "/horovod.v1.Membership/Join", membership_pb2.MemberMessage.SerializeToString, None
        )
        self.membership = method(metadata=self.metadata)
        await self.membership.write(membership_pb2.MemberMessage(join=self.request))
        while not (event := await self._event()).startswith(WORLD):
            pass
        self._reader = asyncio.create_task(self._listen())
        received = membership_pb2.WorldReceived(epoch=_epoch_of(event))
        await self.membership.write(membership_pb2.MemberMessage(received=received))
        return event

    async def _listen(self) -> None:
        while not (await self._event()).startswith(GONE):
            pass
        self.gone.set_result(None)

    async def _event(self) -> bytes:
        event = await self.membership.read()
        if event is grpc.aio.EOF or event.startswith(REFUSED):
            raise RuntimeError(f"Member {self.index} was sent away: {event!r}")
        return bytes(event)

    async def negotiate(self, epoch: int, term: int, job: str, announce: bytes, tensors: int) -> None:
        """announce: a NegotiationMessage without its hello, serialized once for all members."""
        method = self.channel.stream_stream(
            "/horovod.v1.Negotiation/Negotiate", None, negotiation_pb2.Decisions.FromString
        )
        self.negotiation = method(metadata=self.metadata)
        hello = negotiation_pb2.Hello(job=job, member_id=self.request.member_id, rank=self.index, term=term)
        first = negotiation_pb2.NegotiationMessage(epoch=epoch, hello=hello).SerializeToString()
        await self.negotiation.write(first + announce)  # messages that are put together are one message
        plans = 0
        while plans < tensors:
            plans += len((await self.negotiation.read()).plans)

    async def negotiate_until_done(self, epoch: int, term: int, job: str, announce: bytes, tensors: int) -> None:
        """A stream that breaks is opened again, as a real member does."""
        while True:
            try:
                return await self.negotiate(epoch, term, job, announce, tensors)
            except grpc.aio.AioRpcError as error:
                if error.code() not in SENT_AWAY:
                    raise
                await asyncio.sleep(RETRY_S)

    async def report_lost(self, epoch: int, rank: int) -> None:
        report = membership_pb2.PeerLost(epoch=epoch, rank=rank, process_ended=False)
        await self.membership.write(membership_pb2.MemberMessage(peer_lost=report))

    async def vanish(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        await self.channel.close(None)


@functools.cache
def _epoch_of(event: bytes) -> int:
    """Equal events are parsed once for all members of this process."""
    return membership_pb2.MembershipEvent.FromString(event).world.epoch


async def _relays(folder: Path, indices: range) -> dict[int, Relay]:
    """One for each host, by its number."""
    relays = {}
    for host in dict.fromkeys(index // HOST_MEMBERS for index in indices):
        own = folder / str(host)
        own.mkdir(mode=0o700)
        relays[host] = Relay(own, None)
        await relays[host].start()
    return relays


async def _crowd(
    address: str, indices: range, size: int, tensors: int, orders: Connection, folder: Path | None
) -> None:
    """Some members, who do together what the parent says and answer when all have done it."""
    loop = asyncio.get_running_loop()
    job = "large"
    relays = await _relays(folder, indices) if folder is not None else {}
    paths = {host: relay.path for host, relay in relays.items()}
    members = [Member(address, job, index, size, paths.get(index // HOST_MEMBERS, "")) for index in indices]
    announce = negotiation_pb2.NegotiationMessage(announce=gradients(tensors)).SerializeToString()
    epoch = term = 0
    while True:
        order, argument = await loop.run_in_executor(None, orders.recv)
        if order == "join":
            worlds = await asyncio.gather(*(member.join_until_done() for member in members))
            event = membership_pb2.MembershipEvent.FromString(worlds[0])
            epoch, term = event.world.epoch, event.term
            orders.send(max(map(len, worlds)))
        elif order == "negotiate":
            await asyncio.gather(
                *(member.negotiate_until_done(epoch, term, job, announce, tensors) for member in members)
            )
            orders.send(0)
        elif order == "lose":
            gone = next((member for member in members if member.index == argument), None)
            others = [member for member in members if member is not gone]
            if gone is not None:
                await gone.vanish()
                await others[0].report_lost(epoch, argument)
            await asyncio.gather(*(member.gone for member in others))
            orders.send(0)
        else:
            await asyncio.gather(*(member.vanish() for member in members))
            await asyncio.gather(*(relay.close() for relay in relays.values()))
            return


def _serve_crowd(address: str, indices: range, size: int, tensors: int, orders: Connection, relayed: bool) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        asyncio.run(_crowd(address, indices, size, tensors, orders, Path(folder) if relayed else None))


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(count: int, options: argparse.Namespace) -> Figures:
    coordinator = Coordinator(options.profile if count == options.members[-1] else None)
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    pipes, processes = [], []
    try:
        for indices in _shares(count, options.processes):
            ours, theirs = context.Pipe()
            arguments = (coordinator.address, indices, count, options.tensors, theirs, options.relay)
            processes.append(context.Process(target=_serve_crowd, args=arguments, daemon=True))
            processes[-1].start()
            pipes.append(ours)

        def phase(order: str, argument: int = 0) -> tuple[float, float, int]:
            cpu_s, began = coordinator.cpu_s(), time.monotonic()
            for pipe in pipes:
                pipe.send((order, argument))
            answers = []
            for pipe, process in zip(pipes, processes, strict=True):
                left_s = max(0.0, began + options.limit - time.monotonic())
                if pipe not in wait([pipe, process.sentinel], left_s):
                    why = "the members ended" if process.exitcode is not None else f"not done after {options.limit:g} s"
                    raise TimeoutError(f"{order}: {why}")
                answers.append(pipe.recv())
            return time.monotonic() - began, coordinator.cpu_s() - cpu_s, max(answers)

        before = _sent_bytes()
        formed_s, formed_cpu_s, world_bytes = phase("join")
        network_mb = (_sent_bytes() - before) / 1e6
        plans_s, plans_cpu_s, _ = phase("negotiate")
        lost_s, lost_cpu_s, _ = phase("lose", count // 2)
        memory_mb = coordinator.memory_mb()
        for pipe in pipes:
            pipe.send(("end", 0))
        phases = formed_s, formed_cpu_s, plans_s, plans_cpu_s, lost_s, lost_cpu_s
        return Figures(count, *phases, memory_mb, world_bytes, network_mb)
    finally:
        coordinator.stop()
        for process in processes:
            process.join(20)
            process.kill()


def _sent_bytes() -> int:
    """By all programs of this machine, over IP; what goes to a relay's socket is not in it."""
    lines = Path("/proc/net/netstat").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("IpExt:"))
    return int(values[names.index("OutOctets")])


def _shares(count: int, processes: int) -> Iterator[range]:
    for number in range(processes):
        yield range(count * number // processes, count * (number + 1) // processes)


def plot(found: Sequence[Figures], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    counts = [one.members for one in found]
    for name in ("formed_s", "formed_cpu_s", "plans_s", "plans_cpu_s", "lost_s"):
        axes.plot(counts, [getattr(one, name) for one in found], marker="o", label=name.removesuffix("_s"))
    axes.plot(counts, [found[-1].formed_s * count / counts[-1] for count in counts], "k:", label="proportional")
    axes.set(xscale="log", yscale="log", xlabel="members", ylabel="seconds", title="control plane, one coordinator")
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    sys.exit(main())
