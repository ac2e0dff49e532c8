"""The code of a job file: what is packed, which names .horovodignore means, and what an agent unpacks."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import os
import random
import shutil
import subprocess
import tarfile
import tracemalloc
from pathlib import Path

import pytest
from error_codes import ends_with

from horovod.base.errors import ClusterCode, ErrorCode
from horovod.launch.cluster.job_file import archive as archives
from horovod.launch.cluster.job_file.archive import IGNORE_FILE, Ignored, pack
from horovod.worker.agent.code import CodeCache, unpack

PATTERNS = [
    "a", "/a", "a/", "*.txt", "!a.txt", "b/*.txt", "**/c", "a/**", "a/**/c", "/*", "!/b", "?", "[ab]", "[!a]",
    "[a-c].txt", "# comment", "\\#x", "\\!b", "a b ", "a b\\ ", "", "b/c", "*b*", "[", "a\\", "[]a]", "**", "***",
    "a**b", "[[:digit:]]", "!a/", "c/**/", "/b/", "[^b]", "[z-a]", "//a", "a//", "/", "!", "a\\*",
]  # fmt: skip
NAMES = ["a", "b", "c", "a.txt", "b.txt", "ab", "#x", "!b", "a b", "a b ", "1", "]", "a*", "[", "x"]


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()}


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed (Debian: git)")
def test_patterns_mean_what_they_mean_to_git(tmp_path: Path) -> None:
    """Lists of patterns over a tree: what git would add is what is packed."""
    chance = random.Random(7)
    tree = tmp_path / "tree"
    for first in NAMES:
        for second in NAMES[:6]:
            (tree / f"{first}.d" / second).mkdir(parents=True)
            for third in ("a", "c", "b.txt"):
                (tree / f"{first}.d" / second / third).write_text("")
    for top in ("a", "b"):
        (tree / top / "x" / "c").mkdir(parents=True)
        for name in NAMES:
            (tree / top / name).write_text("") if name != "x" else (tree / top / "x" / "c" / "a").write_text("")
    for name in NAMES[2:]:
        (tree / name).write_text("") if name != "x" else None
    environ = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "HOME": str(tmp_path)}
    subprocess.run(["git", "init", "-q"], cwd=tree, env=environ, check=True)
    lists = [[one] for one in PATTERNS] + [chance.choices(PATTERNS, k=chance.randint(2, 4)) for _ in range(8)]
    for patterns in lists:
        (tmp_path / "patterns").write_text("\n".join(patterns) + "\n")
        command = ["git", "ls-files", "-z", "--others", f"--exclude-from={tmp_path / 'patterns'}"]
        said = subprocess.run(command, cwd=tree, env=environ, check=True, capture_output=True, text=True).stdout
        ours = {name for path, name in archives._walk(tree, "", Ignored(patterns)) if not path.is_dir()}
        assert ours == set(said.split("\0")) - {""}, patterns


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 1 << 20)
    with (tmp_path / "data").open("wb") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=ends_with(ClusterCode.CODE_TOO_LARGE, "job.yaml, line 1:", " 1 MiB")):
            pack(tmp_path, "job.yaml, line 1")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_file_that_shrinks_while_it_is_packed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log").write_bytes(b"x" * 100)
    entry = archives._entry

    def and_shrinks(path: Path, name: str, where: str) -> tarfile.TarInfo:
        info = entry(path, name, where)
        path.write_bytes(b"")
        return info

    monkeypatch.setattr(archives, "_entry", and_shrinks)
    facts = ["job.yaml, line 1:", f"'{tmp_path}/log'", "unexpected end of data"]
    with pytest.raises(ValueError, match=ends_with(ClusterCode.CODE_NOT_PACKED, *facts)):
        pack(tmp_path, "job.yaml, line 1")


def test_the_same_files_make_the_same_archive(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tmp_path / name
        (folder / "sub").mkdir(parents=True)
        for file in ("b.py", "a.py") if name == "one" else ("a.py", "b.py"):
            (folder / file).write_text(f"print({file!r})")
        (folder / "sub" / "run.sh").write_text("#!/bin/sh\n")
        (folder / "sub" / "run.sh").chmod(0o700)
        (folder / "link").symlink_to("sub/run.sh")
        os.utime(folder / "a.py", (1, 1 if name == "one" else 2))
    one, two = (pack(tmp_path / name, "job.yaml, line 1") for name in ("one", "two"))
    assert one.sha256 == two.sha256 == hashlib.sha256(one.content).hexdigest()
    (tmp_path / "one" / "a.py").write_text("another")
    assert pack(tmp_path / "one", "job.yaml, line 1").sha256 != one.sha256
    (tmp_path / "archive").write_bytes(two.content)
    (tmp_path / "to").mkdir()
    unpack(tmp_path / "archive", tmp_path / "to")
    assert files_of(tmp_path / "to") == {"a.py", "b.py", "link", "sub/run.sh"}
    assert (tmp_path / "to" / "link").read_text() == "#!/bin/sh\n"
    assert os.access(tmp_path / "to" / "sub" / "run.sh", os.X_OK)
    assert not os.access(tmp_path / "to" / "a.py", os.X_OK)


def test_what_is_ignored_is_not_packed(tmp_path: Path) -> None:
    for name in ("keep.py", "data/big.bin", ".git/config", "__pycache__/x.pyc", "logs/a.log", "logs/keep.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / IGNORE_FILE).write_text("data/\n*.log\n!keep.log\n")
    content = gzip.decompress(pack(tmp_path, "job.yaml, line 1").content)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert tar.getnames() == [IGNORE_FILE, "keep.py", "logs", "logs/keep.log"]


def test_what_can_not_be_packed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(code: ErrorCode, *facts: str) -> None:
        with pytest.raises(ValueError, match=ends_with(code, "job.yaml, line 4:", *facts)):
            pack(tmp_path / "code", "job.yaml, line 4")

    refused(ClusterCode.CODE_NOT_PACKED, f"'{tmp_path}/code'")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "out").symlink_to("../../etc")
    refused(ClusterCode.CODE_NOT_PACKED, "'out'", "'../../etc'", IGNORE_FILE)
    (tmp_path / "code" / "out").unlink()
    os.mkfifo(tmp_path / "code" / "pipe")
    refused(ClusterCode.CODE_NOT_PACKED, "'pipe'", IGNORE_FILE)
    (tmp_path / "code" / "pipe").unlink()
    (tmp_path / "code" / "noise").write_bytes(os.urandom(1 << 20))
    monkeypatch.setattr(archives, "MAX_CODE_BYTES", 1 << 19)
    refused(ClusterCode.CODE_TOO_LARGE, "0 MiB when packed", IGNORE_FILE)
    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 1 << 19)
    refused(ClusterCode.CODE_TOO_LARGE, "100,000 entries", "0 MiB.", IGNORE_FILE)


def tar_of(*entries: tuple[str, bytes, str]) -> bytes:
    """Entries of name, type and content or target."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for name, kind, text in entries:
            info = tarfile.TarInfo(name)
            info.type = kind
            data = text.encode() if kind == tarfile.REGTYPE else b""
            info.size = len(data)
            if not data:
                info.linkname = text
            tar.addfile(info, io.BytesIO(data))
    return content.getvalue()


@pytest.mark.parametrize(
    ("entries", "facts"),
    [
        ([("/etc/passwd", tarfile.REGTYPE, "x")], ["'/etc/passwd'", "below"]),
        ([("../x", tarfile.REGTYPE, "x")], ["'../x'", "below"]),
        ([("a/../../x", tarfile.REGTYPE, "x")], ["'a/../../x'", "below"]),
        ([("a", tarfile.SYMTYPE, "/etc")], ["'a'", "link to '/etc'"]),
        ([("a", tarfile.SYMTYPE, "../b")], ["'a'", "link to '../b'"]),
        ([("e/f/d", tarfile.SYMTYPE, "../.."), ("x", tarfile.SYMTYPE, "e/f/d/../y")], ["'x'", "link to 'e/f/d/../y'"]),
        ([("a", tarfile.LNKTYPE, "b")], ["'a'", "nor a link"]),
        ([("a", tarfile.CHRTYPE, "")], ["'a'", "nor a link"]),
        ([("a", tarfile.FIFOTYPE, "")], ["'a'", "nor a link"]),
        ([(str(number), tarfile.REGTYPE, "x") for number in range(9)], ["8 entries"]),
        ([("a", tarfile.REGTYPE, "x" * 2000)], ["8 entries", "0 MiB"]),
    ],
)  # fmt: skip
def test_an_archive_that_leads_elsewhere_leaves_nothing(
    tmp_path: Path, entries: list[tuple[str, bytes, str]], facts: list[str]
) -> None:
    leaves_nothing(tmp_path, entries, ValueError, ends_with(ClusterCode.CODE_DAMAGED, *facts))


@pytest.mark.parametrize(
    "entries",
    [
        [("a", tarfile.SYMTYPE, "b"), ("a/x", tarfile.REGTYPE, "x")],
        [("a", tarfile.REGTYPE, "x"), ("a", tarfile.REGTYPE, "y")],
    ],
)
def test_an_archive_with_a_name_twice_leaves_nothing(tmp_path: Path, entries: list[tuple[str, bytes, str]]) -> None:
    leaves_nothing(tmp_path, entries, FileExistsError, "File exists")


def leaves_nothing(tmp_path: Path, entries: list[tuple[str, bytes, str]], kind: type[Exception], pattern: str) -> None:
    (tmp_path / "archive").write_bytes(tar_of(*entries))
    (tmp_path / "to").mkdir()
    with pytest.raises(kind, match=pattern):
        unpack(tmp_path / "archive", tmp_path / "to", max_entries=8, max_bytes=1000)
    assert list((tmp_path / "to").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "to"]


def test_heads_of_an_archive_are_bounded_too(tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(tar_of(("a" * 3_000_000, tarfile.REGTYPE, "x")))
    (tmp_path / "to").mkdir()
    with pytest.raises(ValueError, match=ends_with(ClusterCode.CODE_DAMAGED, "longer")):
        unpack(tmp_path / "archive", tmp_path / "to", max_entries=8, max_bytes=1000)


@pytest.mark.parametrize("cut", [0, 10, 40])
def test_an_archive_that_is_cut_off_is_refused(tmp_path: Path, cut: int) -> None:
    content = tar_of(("a", tarfile.REGTYPE, "some text that is compressed"))
    (tmp_path / "archive").write_bytes(content[:cut])
    (tmp_path / "to").mkdir()
    with pytest.raises(ValueError, match=ends_with(ClusterCode.CODE_DAMAGED)):
        unpack(tmp_path / "archive", tmp_path / "to")
    assert list((tmp_path / "to").iterdir()) == []


def test_code_is_fetched_once_and_verified(tmp_path: Path) -> None:
    content = tar_of(("a", tarfile.REGTYPE, "text"))
    name = hashlib.sha256(content).hexdigest()
    chunks = [content[start : start + 50] for start in range(0, len(content), 50)]
    asked: list[int] = []

    async def fetch(_: str, index: int) -> bytes:
        asked.append(index)
        return chunks[index]

    def get(*folders: str) -> None:
        for folder in folders:
            (tmp_path / folder).mkdir()
        cache = CodeCache(tmp_path / "state", fetch)
        asyncio.run(cache.unpack(name, len(content), [tmp_path / folder for folder in folders], lambda: True))

    get("one", "two")
    assert (tmp_path / "one" / "a").read_text() == (tmp_path / "two" / "a").read_text() == "text"
    assert asked == list(range(len(chunks)))
    get("three")
    assert len(asked) == len(chunks)
    (tmp_path / "state" / "code" / name).write_bytes(b"damaged on the disk")
    get("four")
    assert len(asked) == 2 * len(chunks)
    chunks[0] = bytes(50)
    (tmp_path / "state" / "code" / name).unlink()
    with pytest.raises(ValueError, match=ends_with(ClusterCode.CODE_DAMAGED, "its name")):
        get("five")
    assert list((tmp_path / "state" / "code").iterdir()) == []


def test_the_cache_has_an_end_and_the_oldest_goes(tmp_path: Path) -> None:
    contents = [tar_of(("a", tarfile.REGTYPE, f"text {number}")) for number in range(3)]
    names = [hashlib.sha256(content).hexdigest() for content in contents]

    async def fetch(name: str, index: int) -> bytes:
        return contents[names.index(name)]

    cache = CodeCache(tmp_path, fetch, most_bytes=2 * max(map(len, contents)))
    for number, name in enumerate(names):
        (tmp_path / str(number)).mkdir()
        asyncio.run(cache.unpack(name, len(contents[number]), [tmp_path / str(number)], lambda: True))
        os.utime(tmp_path / "code" / name, (number, number))
    assert {path.name for path in (tmp_path / "code").iterdir()} == set(names[1:])
