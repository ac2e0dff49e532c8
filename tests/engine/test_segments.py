"""Segment addresses come from the coordinator and segments from other processes: both may be anything."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest
from error_codes import ends_with
from hypothesis import given, settings
from hypothesis import strategies as st
from world import EngineWorld

from horovod import _core
from horovod.base.errors import EngineCode

OPTIONS = {"staging_buffer_bytes": 4096, "staging_buffer_count": 2}
HEADER = struct.Struct("<QQQ")  # magic, nonce, bytes: csrc/transport/segment.h


def open_peer(address: str) -> None:
    """Makes rank 0 of a world of two whose other member says that its segment is at `address`."""
    own = _core.Segment(in_process=True, options=OPTIONS)
    engine = _core.Engine(
        rank=0,
        size=2,
        epoch=1,
        labels=["rank 0 here", "rank 1 on host there"],
        segment=own,
        segment_addresses=[own.address, address],
        options=OPTIONS,
    )
    engine.close()


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def refused(address: str) -> str:
    before = descriptors()
    with pytest.raises(RuntimeError, match=ends_with(EngineCode.SHARED_MEMORY, "rank 1 on host there")) as caught:
        open_peer(address)
    assert descriptors() <= before, "a descriptor was left open"
    return str(caught.value)


FIELD = st.one_of(st.integers(-(2**70), 2**70).map(str), st.text(max_size=10))
PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=200)


@settings(deadline=None, max_examples=200)
@given(
    address=st.one_of(
        PLAIN,
        st.builds("{}:{}".format, st.sampled_from(["inproc", "memfd"]), PLAIN),
        st.builds("inproc:{}".format, FIELD),
        st.builds("memfd:{}:{}:{}".format, FIELD, FIELD, FIELD),
        st.builds("memfd:{}:{}:{:016x}".format, st.just(os.getpid()), st.integers(-5, 5), st.integers(0, 2**64 - 1)),
    )
)
def test_garbled_addresses(address: str) -> None:
    refused(address.replace("\n", " ").replace("\0", " "))


def test_no_address() -> None:
    assert "''" in refused("")


def test_a_process_that_is_gone() -> None:
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    sentence = refused(f"memfd:{process}:3:{1:016x}")
    assert f"/proc/{process}/fd/3" in sentence
    assert "HOROVOD_TRANSPORT=tcp" in sentence


def test_an_in_process_segment_whose_owner_has_left() -> None:
    segment = _core.Segment(in_process=True, options=OPTIONS)
    address = segment.address
    del segment
    assert address in refused(address)


@pytest.fixture
def genuine() -> Iterator[tuple[str, bytes, int]]:
    """The address of a real segment of this process, and its first page."""
    segment = _core.Segment(options=OPTIONS)
    _, pid, fd, _ = segment.address.split(":")
    assert int(pid) == os.getpid()
    with mmap.mmap(int(fd), 0, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
        yield segment.address, memory[:4096], len(memory)


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def fake(page: bytes, size: int, seals: int = SEALS) -> tuple[int, str]:
    """A memfd with this first page, size and seals, and its address with the nonce that the page says."""
    fd = os.memfd_create("horovod-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.pwrite(fd, page, 0)
    os.truncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    nonce = HEADER.unpack_from(page)[1]
    return fd, f"memfd:{os.getpid()}:{fd}:{nonce:016x}"


def test_an_unchanged_copy_is_accepted(genuine: tuple[str, bytes, int]) -> None:
    """Else the refusals below would prove nothing."""
    fd, address = fake(*genuine[1:])
    open_peer(address)
    open_peer(genuine[0])
    os.close(fd)


@pytest.mark.parametrize("field", ["magic", "nonce", "bytes"])
@pytest.mark.parametrize("bit", [0, 17, 63])
def test_a_wrong_header(genuine: tuple[str, bytes, int], field: str, bit: int) -> None:
    page = bytearray(genuine[1])
    magic, nonce, size = HEADER.unpack_from(page)
    changed = {"magic": magic, "nonce": nonce, "bytes": size}
    changed[field] ^= 1 << bit
    HEADER.pack_into(page, 0, changed["magic"], changed["nonce"], changed["bytes"])
    fd, address = fake(bytes(page), genuine[2])
    if field == "nonce":
        address = address.rsplit(":", 1)[0] + f":{nonce:016x}"
    assert address in refused(address)
    os.close(fd)


@pytest.mark.parametrize("change", [-(10**9), -4096, -1, 1, 4096])
def test_a_wrong_size(genuine: tuple[str, bytes, int], change: int) -> None:
    _, page, size = genuine
    fd, address = fake(page, max(0, size + change))
    sentence = refused(address)
    assert f" {max(0, size + change)} bytes" in sentence
    assert f" {size} " in sentence
    os.close(fd)


@pytest.mark.parametrize("missing", ["F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL"])
def test_a_segment_that_its_owner_could_resize(genuine: tuple[str, bytes, int], missing: str) -> None:
    """It would end this process with SIGBUS."""
    fd, address = fake(*genuine[1:], SEALS & ~getattr(fcntl, missing))
    assert f"/fd/{fd} " in refused(address)
    os.close(fd)


def test_our_own_segments_keep_their_size(genuine: tuple[str, bytes, int]) -> None:
    fd = int(genuine[0].split(":")[2])
    for size in (0, genuine[2] - 4096, genuine[2] + 4096):
        with pytest.raises(PermissionError):
            os.truncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)  # nor can anybody take the peers' right to write


def test_another_kind_of_file(tmp_path: object) -> None:
    """What the address names may be a pipe, a socket, a folder or a device: refused without blocking."""
    reading, writing = os.pipe()
    for fd in (reading, writing, os.open(str(tmp_path), os.O_RDONLY), os.open("/dev/null", os.O_RDWR)):
        refused(f"memfd:{os.getpid()}:{fd}:{1:016x}")
        os.close(fd)


def test_without_a_descriptor_left_there_is_a_sentence() -> None:
    """In a child, whose limit is what it has open already; with one more it goes on."""
    code = f"""
import os, resource
from horovod import _core

lowest = os.dup(0)
os.close(lowest)  # the first number that is free, so every one below is taken
before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
try:
    _core.Segment(options={OPTIONS})
except RuntimeError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
_core.Segment(options={OPTIONS})
print("made")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    sentence, after = ended.stdout.splitlines()
    assert re.search(ends_with(EngineCode.TOO_MANY_OPEN_FILES, "this process", "ulimit -n"), sentence)
    assert after == "made"


def test_after_all_that_worlds_form_as_ever() -> None:
    with EngineWorld(2, "shm", **OPTIONS) as world:
        world.run(lambda member: member.barrier())
