"""What a wheel of ours must be: each check names what is wrong with it, and nothing where all is well.

The libraries are read with pyelftools, so that wheels for other machines are checked as well.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterable, Iterator
from email.parser import Parser
from pathlib import Path
from typing import Final

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

from release.targets import GLIBC, Target

MOST_BYTES: Final = 3_000_000
LIBRARIES: Final = ("_core", "libhorovod_tensorflow", "libhorovod_jax")
# Of glibc; libstdc++ is not among them, so that no C++ of ours meets that of a framework.
SYSTEM: Final = re.compile(r"lib(c|m|dl|rt|pthread)\.so\.\d|ld-linux[\w-]*\.so\.\d")
OURS: Final = re.compile(r"PyInit__core|horovod_\w+")
LICENCES: Final = ("LICENSE", "licenses/pybind11.txt", "licenses/llvm.txt", "licenses/zig.txt")


def problems(wheel: Path, target: Target, version: str, build_paths: Iterable[Path] = ()) -> list[str]:
    """What is wrong with the wheel. build_paths: folders of the build, no trace of which may be in it."""
    with zipfile.ZipFile(wheel) as content:
        info = f"horovod-{version}.dist-info"
        found = [*_of_the_file(wheel, target, version)]
        found += _of_the_metadata(content, info, target, version)
        found += _of_the_record(content, info)
        names = content.namelist()
        for library in LIBRARIES:
            suffix = target.extension_suffix if library == "_core" else ".so"
            name = f"horovod/{library}{suffix}"
            if name not in names:
                found.append(f"{name} is missing")
                continue
            data = content.read(name)
            found += [f"{name}: {problem}" for problem in _of_a_library(data, target)]
            for path in build_paths:
                if str(path).encode() in data:
                    found.append(f"{name} names {path}, a folder of the build")
        found += [f"{name} does not belong into a wheel" for name in names if _STRANGE.search(name)]
        if len({one.date_time for one in content.infolist()}) != 1:
            found.append("its files have different times: it was built without SOURCE_DATE_EPOCH")
    return found


_STRANGE: Final = re.compile(r"(^|/)(tests|__pycache__|release|benchmarks)/|\.(cc|h|cu|cmake|o|a|pyc)$")


def _is_for(platform: str, target: Target) -> bool:
    """Whether it is a manylinux of this machine whose glibc is the target's, or an older one."""
    found = re.fullmatch(rf"manylinux_(\d+)_(\d+)_{target.machine}", platform)
    return found is not None and (int(found[1]), int(found[2])) <= GLIBC


def _of_the_file(wheel: Path, target: Target, version: str) -> Iterator[str]:
    name, number, interpreter, abi, platforms = wheel.name.removesuffix(".whl").split("-")
    if (name, number) != ("horovod", version):
        yield f"it is {name} {number}, not horovod {version}"
    if (interpreter, abi) != (target.interpreter, target.abi):
        yield f"its tags say {interpreter}-{abi}, not {target.interpreter}-{target.abi}"
    if not any(_is_for(one, target) for one in platforms.split(".")):
        yield f"its tags say {platforms}, not {target.platform} or an older one"
    if wheel.stat().st_size >= MOST_BYTES:
        yield f"it has {wheel.stat().st_size} bytes, and {MOST_BYTES} are too many"


def _of_the_metadata(content: zipfile.ZipFile, info: str, target: Target, version: str) -> Iterator[str]:
    metadata = Parser().parsestr(content.read(f"{info}/METADATA").decode())
    expected = {"Name": "horovod", "Version": version, "Requires-Python": ">=3.10"}
    for field, value in expected.items():
        if metadata[field] != value:
            yield f"{field} is {metadata[field]}, not {value}"
    for field in ("Summary", "License-Expression", "Description-Content-Type"):
        if not metadata[field]:
            yield f"its metadata has no {field}"
    if not str(metadata.get_payload()).strip():
        yield "its metadata has no description"
    if sorted(metadata.get_all("License-File", [])) != sorted(LICENCES):
        yield f"its licences are {metadata.get_all('License-File')}, not {list(LICENCES)}"
    names = content.namelist()
    yield from (f"the licence {one} is missing" for one in LICENCES if f"{info}/licenses/{one}" not in names)
    tags = Parser().parsestr(content.read(f"{info}/WHEEL").decode()).get_all("Tag", [])
    start = f"{target.interpreter}-{target.abi}-"
    if not any(one.startswith(start) and _is_for(one.removeprefix(start), target) for one in tags):
        yield f"WHEEL says {tags}, which is not its name"
    try:
        sbom = json.loads(content.read(f"{info}/sboms/horovod.cdx.json"))
    except KeyError:
        yield "it has no software bill of materials"
        return
    if sbom["bomFormat"] != "CycloneDX" or sbom["metadata"]["component"]["version"] != version:
        yield "its bill of materials is not CycloneDX of this version"
    missing = {"pybind11", "llvm", "zig"} - {part["name"] for part in sbom["components"] if part["version"]}
    if missing:
        yield f"its bill of materials lacks {', '.join(sorted(missing))}"


def _of_the_record(content: zipfile.ZipFile, info: str) -> Iterator[str]:
    rows = {row[0]: row[1] for row in csv.reader(io.StringIO(content.read(f"{info}/RECORD").decode()))}
    for name in content.namelist():
        if name.endswith("/") or name == f"{info}/RECORD":
            continue
        digest = base64.urlsafe_b64encode(hashlib.sha256(content.read(name)).digest()).rstrip(b"=").decode()
        if rows.get(name) != f"sha256={digest}":
            yield f"RECORD does not know {name} as it is"


def _of_a_library(data: bytes, target: Target) -> Iterator[str]:
    elf = ELFFile(io.BytesIO(data))
    machine = elf.header["e_machine"]
    if machine != {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}[target.machine]:
        yield f"it is for {machine}"
    if elf.get_section_by_name(".symtab") or elf.get_section_by_name(".debug_info"):
        yield "it is not stripped"
    dynamic = elf.get_section_by_name(".dynamic")
    assert isinstance(dynamic, DynamicSection)
    tags = list(dynamic.iter_tags())
    for tag in tags:
        if tag.entry.d_tag == "DT_NEEDED" and not SYSTEM.fullmatch(tag.needed):
            yield f"it needs {tag.needed}, which not every system has"
        if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
            yield "it has a search path of its own"
    if not any(tag.entry.d_tag == "DT_FLAGS_1" and tag.entry.d_val & 1 for tag in tags):
        yield "addresses of functions stay writable (no BIND_NOW)"
    segments = {segment["p_type"]: segment["p_flags"] for segment in elf.iter_segments()}
    if "PT_GNU_RELRO" not in segments or segments.get("PT_GNU_STACK", 7) & 1:
        yield "it has no RELRO, or an executable stack"
    if (newest := newest_glibc(elf)) > GLIBC:
        yield f"it needs glibc {newest[0]}.{newest[1]}"
    if strangers := [name for name in exported(elf) if not OURS.fullmatch(name)]:
        yield f"it exports {len(strangers)} symbols that are not ours: {', '.join(sorted(strangers)[:5])}"


def newest_glibc(elf: ELFFile) -> tuple[int, int]:
    """The newest version of glibc that a symbol asks for."""
    section = elf.get_section_by_name(".gnu.version_r")
    if not isinstance(section, GNUVerNeedSection):
        return (0, 0)
    names = [auxiliary.name for _, auxiliaries in section.iter_versions() for auxiliary in auxiliaries]
    versions = [re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", name) for name in names]
    return max(((int(one[1]), int(one[2])) for one in versions if one), default=(0, 0))


def exported(elf: ELFFile) -> list[str]:
    """Names that other libraries of the process can see."""
    symbols = elf.get_section_by_name(".dynsym").iter_symbols()
    return [one.name for one in symbols if one.name and one["st_shndx"] != "SHN_UNDEF"]
