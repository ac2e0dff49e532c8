"""The software bill of materials of a wheel: what of others is compiled into it, as CycloneDX (PEP 770).

What pip installs beside it is not in the wheel, and stands in the wheel's metadata.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import subprocess
from pathlib import Path
from typing import Any


def _component(name: str, version: str, licence: str, purl: str, text: str) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "description": text,
        "licenses": [{"expression": licence}],
        "purl": purl,
    }


def sbom(version: str, pybind11: str, llvm: str, zig: str) -> dict[str, Any]:
    """Without a time or a random number, so that two builds have the same."""
    product = f"pkg:pypi/horovod@{version}"
    parts = [
        _component("pybind11", pybind11, "BSD-3-Clause", f"pkg:pypi/pybind11@{pybind11}", "Headers of the bindings"),
        _component(
            *("llvm", llvm, "Apache-2.0 WITH LLVM-exception", f"pkg:github/llvm/llvm-project@llvmorg-{llvm}"),
            "libc++, libc++abi and libunwind, linked statically",
        ),
        _component("zig", zig, "MIT", f"pkg:pypi/ziglang@{zig}", "compiler-rt, linked statically"),
    ]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": product,
                "name": "horovod",
                "version": version,
                "licenses": [{"expression": "Apache-2.0"}],
                "purl": product,
            }
        },
        "components": parts,
        "dependencies": [{"ref": product, "dependsOn": [part["bom-ref"] for part in parts]}],
    }


def llvm_version(zig_package: Path) -> str:
    """As the C++ library that Zig brings names it: 220108 is 22.1.8."""
    config = (zig_package / "lib" / "libcxx" / "include" / "__config").read_text()
    (number,) = re.findall(r"define _LIBCPP_VERSION (\d+)", config)
    return f"{int(number) // 10000}.{int(number) // 100 % 100}.{int(number) % 100}"


def written_sbom(version: str, python: Path, work: Path) -> Path:
    """The file for a wheel that this Python's tools build."""
    program = "import importlib.metadata; print(importlib.metadata.version('pybind11'))"
    pybind11 = subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.strip()
    found = importlib.util.find_spec("ziglang")
    assert found is not None
    assert found.origin is not None
    llvm = llvm_version(Path(found.origin).parent)
    content = sbom(version, pybind11, llvm, importlib.metadata.version("ziglang"))
    file = work / "horovod.cdx.json"
    file.write_text(json.dumps(content, indent=2) + "\n")
    return file
