#!/usr/bin/env python3
"""What somebody without a token can cost a coordinator, and what its members notice of it.

    python benchmarks/strangers.py                            each attack for 5 s beside 100 members
    python benchmarks/strangers.py --attacks calls,watches --seconds 20

The coordinator is `horovod-coordinator` as users start it, with a token. The members negotiate one new operation after
another: each announces it, and the round ends when all have its id. The attacker is a process of its own that speaks
HTTP/2 with plain sockets, so that it can leave a message unfinished and read nothing. All share this machine's
processors, so figures beside "none" also show what the attacker itself takes from the members.

  silent    connections that say nothing
  idle      connections that begin HTTP/2 and then say nothing
  requests  calls without a token that begin a request of 8 MiB and leave it unfinished
  health    the same for the health service, which asks for no token
  calls     whole calls without a token, one after another
  watches   watches of the health service
  gzip      calls of the health service whose compressed message expands to 500 MiB
  probes    silent connections to the port of pages

  rounds    of the members during the attack; median and slowest of 100 rounds in ms (99th percentile)
  memory    by how much the coordinator's resident memory grew at most, in MB
  held      connections of the attacker that still stood at the end
  healthz   how long GET /healthz took during the attack, the slowest of ten, in ms
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import re
import resource
import select
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from multiprocessing.synchronize import Event
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.control_plane import Member
from horovod.protos.v1 import membership_pb2, negotiation_pb2, types_pb2

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, WINDOW_UPDATE = 0, 1, 3, 4, 8
END_STREAM, END_HEADERS = 1, 4
LARGE = 8 << 20
FRAME_BYTES = 16 << 10
CONNECTIONS = 2000
STREAMS = 50  # of each connection
ADDRESSES = 8  # of the attacker; all of 127.0.0.0/8 is this host
TOKEN = "0123456789abcdef0123456789abcdef"
HEALTH = "/grpc.health.v1.Health/"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload


def headers(path: str) -> bytes:
    """Of a call of gRPC, as HPACK's literals (RFC 7541, 6.2.2)."""
    fields = ((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "a"), ("te", "trailers"))
    found = b""
    for name, value in (*fields, ("content-type", "application/grpc")):
        found += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return found


class Attacker:
    """One connection. It reads only to learn how much it may send."""

    def __init__(self, port: int, number: int = 0, begins: bool = True) -> None:
        source = (f"127.0.2.{number % ADDRESSES + 1}", 0)
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20, source_address=source)
        self._window = 65_535
        self._windows: dict[int, int] = {}
        self._unsent: dict[int, int] = {}  # by stream: bytes of a message that nobody will complete
        self.ended: set[int] = set()  # streams that the coordinator has ended
        self._next = 1
        self._read = b""
        if begins:
            self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0))

    def call(self, path: str, message: bytes = b"") -> None:
        stream, self._next = self._next, self._next + 2
        data = struct.pack("!BI", 0, len(message)) + message
        begin = frame(HEADERS, END_HEADERS, stream, headers(path))
        self.socket.sendall(begin + frame(DATA, END_STREAM, stream, data))

    def begin(self, path: str, size: int = LARGE) -> None:
        """A call whose message never gets its last byte; `go_on` sends what the coordinator takes."""
        stream, self._next = self._next, self._next + 2
        begin = frame(HEADERS, END_HEADERS, stream, headers(path))
        self.socket.sendall(begin + frame(DATA, 0, stream, struct.pack("!BI", 0, size)))
        self._windows[stream], self._unsent[stream] = 65_535 - 5, size - 1
        self._window -= 5

    def unsent(self) -> int:
        """How many bytes of unfinished messages the coordinator has not taken."""
        return sum(self._unsent.values())

    def go_on(self) -> None:
        self._hear()
        for stream in self._unsent:
            while (size := min(self._unsent[stream], FRAME_BYTES, self._window, self._windows[stream])) > 0:
                self.socket.sendall(frame(DATA, 0, stream, bytes(size)))
                self._window -= size
                self._windows[stream] -= size
                self._unsent[stream] -= size

    def _hear(self) -> None:
        waiting = select.poll()
        waiting.register(self.socket, select.POLLIN)
        while waiting.poll(0):
            if not (read := self.socket.recv(1 << 16)):
                raise ConnectionResetError
            self._read += read
        while len(self._read) >= 9 and len(self._read) >= 9 + (length := int.from_bytes(self._read[:3], "big")):
            kind, flags, stream = struct.unpack("!BBI", self._read[3:9])
            payload, self._read = self._read[9 : 9 + length], self._read[9 + length :]
            if kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
                self.ended.add(stream)
            if kind == WINDOW_UPDATE:
                more = int.from_bytes(payload, "big")
                if stream:
                    self._windows[stream] = self._windows.get(stream, 0) + more
                else:
                    self._window += more
            elif kind == SETTINGS and not flags & 1:
                for at in range(0, length, 6):
                    name, value = struct.unpack("!HI", payload[at : at + 6])
                    if name == 4:  # the initial window of a stream
                        self._windows = {one: left + value - 65_535 for one, left in self._windows.items()}
                self.socket.sendall(frame(SETTINGS, 1, 0))

    def stands(self) -> bool:
        try:
            self._hear()
        except OSError:
            return False
        return True


# -- attacks -----------------------------------------------------------------------------------------------------------
def attack(kind: str, port: int, web: int, began: Event, ends: Event, held: multiprocessing.Queue[int]) -> None:
    """Attacks until `ends`; how many connections stand then goes into `held`."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    bomb = bytes(500 << 20) if kind == "gzip" else b""
    standing: list[Attacker] = []
    began.set()
    for number in itertools.count():
        if ends.is_set():
            break
        with contextlib.suppress(OSError):
            if kind in ("silent", "idle", "probes"):
                if number < CONNECTIONS:
                    standing.append(Attacker(web if kind == "probes" else port, number, begins=kind == "idle"))
                else:
                    ends.wait()
            elif kind in ("requests", "health"):
                path = f"{HEALTH}Check" if kind == "health" else "/horovod.v1.Jobs/Submit"
                if number < 100:
                    standing.append(Attacker(port, number))
                    for _ in range(STREAMS):
                        standing[-1].begin(path)
                standing[number % len(standing)].go_on()
            elif kind == "watches":
                if number < 100:
                    standing.append(Attacker(port, number))
                    for _ in range(STREAMS):
                        standing[-1].call(f"{HEALTH}Watch")
                else:
                    ends.wait()
            elif kind == "gzip":
                options = [("grpc.max_send_message_length", -1)]
                with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel, contextlib.suppress(grpc.RpcError):
                    channel.unary_unary(f"{HEALTH}Check")(bomb, compression=grpc.Compression.Gzip, timeout=20)
            else:
                one = Attacker(port, number)
                for _ in range(STREAMS):
                    one.call("/horovod.v1.Jobs/Submit", bytes(1000))
                one.stands()
                standing = [*standing[-50:], one]
    held.put(sum(one.stands() for one in standing))


# -- members and what they notice --------------------------------------------------------------------------------------
class Members:
    def __init__(self, address: str, count: int) -> None:
        self._members = [Member(address, "victim", index, count, "") for index in range(count)]
        for one in self._members:
            one.metadata = (("authorization", f"Bearer {TOKEN}"),)
        self._epoch = 0
        self._rounds = 0

    async def join(self) -> None:
        worlds = await asyncio.gather(*(one.join() for one in self._members))
        event = membership_pb2.MembershipEvent.FromString(worlds[0])
        self._epoch = event.world.epoch
        await asyncio.gather(
            *(one.negotiate(self._epoch, event.term, "victim", self._announced(), 1) for one in self._members)
        )

    def _announced(self) -> bytes:
        tensor = types_pb2.TensorSpec(dtype=types_pb2.DATA_TYPE_FLOAT32, shape=[1024])
        op = types_pb2.Operation(
            name=f"round.{self._rounds}", tensors=[tensor], prescale_factor=1.0, postscale_factor=1.0
        )
        return negotiation_pb2.NegotiationMessage(epoch=self._epoch, announce=[op]).SerializeToString()

    async def round(self) -> float:
        """Milliseconds until all have the id of a new operation."""
        self._rounds += 1
        announced, began = self._announced(), time.perf_counter()
        await asyncio.gather(*(one.negotiation.write(announced) for one in self._members))
        await asyncio.gather(*(self._plan(one) for one in self._members))
        return (time.perf_counter() - began) * 1000

    async def vanish(self) -> None:
        await asyncio.gather(*(one.vanish() for one in self._members))

    async def _plan(self, one: Member) -> None:
        while not (await one.negotiation.read()).plans:
            pass


def memory_mb(pid: int) -> float:
    return int(re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0]) / 1024


def healthz_ms(web: int) -> float:
    began = time.perf_counter()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{web}/healthz", timeout=10) as answer:
            answer.read()
    except OSError:
        return float("inf")
    return (time.perf_counter() - began) * 1000


def start(token: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "horovod.coordinator", "--listen", "127.0.0.1:0", "--web-listen", ":0"]
    return subprocess.Popen([*command, "--token-file", token], stdout=subprocess.PIPE, text=True)


async def beside(kind: str, options: argparse.Namespace, token: str) -> str:
    """The row of one attack, against a coordinator of its own."""
    with start(token) as coordinator:
        try:
            assert coordinator.stdout is not None
            web, address = (coordinator.stdout.readline().split()[-1] for _ in range(2))
            port, web_port = int(address.rpartition(":")[2]), urllib.parse.urlsplit(web).port or 0
            members = Members(address, options.members)
            await members.join()
            for _ in range(30):
                await members.round()
            context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
            began, ends, held = context.Event(), context.Event(), context.Queue()
            process = context.Process(target=attack, args=(kind, port, web_port, began, ends, held), daemon=True)
            if kind != "none":
                process.start()
                await asyncio.to_thread(began.wait)
            before_mb = most_mb = memory_mb(coordinator.pid)
            until, rounds, healthz = time.monotonic() + options.seconds, [], []
            while time.monotonic() < until or len(rounds) < 30:
                rounds.append(await members.round())
                most_mb = max(most_mb, memory_mb(coordinator.pid))
                if len(healthz) < 10 and len(rounds) % 20 == 0:
                    healthz.append(await asyncio.to_thread(healthz_ms, web_port))
            stands = 0
            if kind != "none":
                ends.set()
                stands = await asyncio.to_thread(held.get)
                process.join(20)
            await members.vanish()
            median, slow = statistics.median(rounds), statistics.quantiles(rounds, n=100)[-1]
            return (
                f"{kind:>9} {median:>8.1f} {slow:>8.1f} {most_mb - before_mb:>8.0f} {stands:>6} "
                f"{max(healthz, default=0.0):>8.1f}"
            )
        finally:
            coordinator.kill()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Attacks a coordinator without a token, beside members.")
    parser.add_argument("--attacks", default="none,silent,idle,requests,health,calls,watches,gzip,probes")
    parser.add_argument("--members", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack (default: %(default)g)")
    options = parser.parse_args(argv)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.NamedTemporaryFile("w") as token:
        print(TOKEN, file=token, flush=True)
        print(f"{'attack':>9} {'median':>8} {'slowest':>8} {'memory':>8} {'held':>6} {'healthz':>8}")
        asyncio.run(all_of(options, token.name))
    return 0


async def all_of(options: argparse.Namespace, token: str) -> None:
    for kind in options.attacks.split(","):
        print(await beside(kind, options, token), flush=True)


if __name__ == "__main__":
    sys.exit(main())
