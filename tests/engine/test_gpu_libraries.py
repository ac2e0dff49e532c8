"""Where NCCL and the NVIDIA driver are looked for, and what is said of them; the calls are in tests/native/gpu_*.cc."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from error_codes import ends_with
from native_builds import ROOT, gpu_libraries, run, tool

from horovod import _core
from horovod.base.errors import EngineCode, SettingCode
from horovod.base.settings import resolve
from horovod.worker.runtime.devices import cuda_file, gpu_operations, nccl_file, nvrtc_file


@pytest.fixture(scope="module")
def libraries() -> tuple[str, str]:
    cuda, nccl = gpu_libraries()
    return str(cuda), str(nccl)


def test_a_setting_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_NCCL_LIBRARY", "/opt/nccl.so")
    monkeypatch.setenv("HOROVOD_CUDA_LIBRARY", "/opt/cuda.so")
    assert (nccl_file(path=[str(tmp_path)]), cuda_file()) == ("/opt/nccl.so", "/opt/cuda.so")
    explicit = resolve(explicit={"nccl_library": "/mine/nccl.so", "cuda_library": "/mine/cuda.so"})
    assert (nccl_file(explicit), cuda_file(explicit)) == ("/mine/nccl.so", "/mine/cuda.so")


def test_pytorchs_own_comes_before_the_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_NCCL_LIBRARY", raising=False)
    monkeypatch.delenv("HOROVOD_CUDA_LIBRARY", raising=False)
    packages = tmp_path / "site-packages"
    assert nccl_file(path=[str(tmp_path), str(packages)]) == ""
    packaged = packages / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    packaged.parent.mkdir(parents=True)
    packaged.touch()
    assert nccl_file(path=[str(tmp_path), str(packages)]) == str(packaged)
    assert cuda_file() == ""


def test_versions(libraries: tuple[str, str]) -> None:
    cuda, nccl = libraries
    assert _core.nccl_version(nccl) == (22703, "")
    assert _core.cuda_obstacle(cuda) == ""


def test_what_can_not_be_loaded_is_told() -> None:
    version, why = _core.nccl_version("/nowhere/libnccl.so.2")
    assert version == 0
    assert re.search(ends_with(EngineCode.NO_NCCL, "/nowhere/libnccl.so.2", "HOROVOD_NCCL_LIBRARY"), why)
    why = _core.cuda_obstacle("/nowhere/libcuda.so.1")
    assert re.search(ends_with(EngineCode.NO_GPU, "/nowhere/libcuda.so.1", "HOROVOD_CUDA_LIBRARY"), why)


def test_pytorchs_own_compiler_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_NVRTC_LIBRARY", raising=False)
    assert nvrtc_file(path=[str(tmp_path)]) == ""
    for place in ("nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"):  # drivers know this better
        packaged = tmp_path / place
        packaged.parent.mkdir(parents=True)
        packaged.touch()
        assert nvrtc_file(path=["/nowhere", str(tmp_path)]) == str(packaged)
    monkeypatch.setenv("HOROVOD_NVRTC_LIBRARY", "/opt/nvrtc.so")
    assert nvrtc_file(path=[str(tmp_path)]) == "/opt/nvrtc.so"
    assert nvrtc_file(resolve(explicit={"nvrtc_library": "/mine/nvrtc.so"})) == "/mine/nvrtc.so"


@pytest.mark.longer  # make test-all installs what it needs
def test_the_real_compiler_where_it_is_installed() -> None:
    """It needs no GPU. The stand-in for the driver runs the very same text, so what is left to check is that NVIDIA's
    compiler takes it."""
    file = nvrtc_file()
    if not file:
        pytest.skip("no package nvidia-cuda-nvrtc-cu12 (or nvidia-cuda-nvrtc, for CUDA 13) is installed")
    capabilities = (80, 90) if file.endswith(".13") else (70, 80, 90)
    for capability in capabilities:
        image, why = _core.copy_kernel(file, capability)
        assert why == ""
        assert image.startswith(b"\x7fELF")
        assert b"horovod_copy_spans" in image
    image, why = _core.copy_kernel(file, 990)  # of the future: the driver translates it
    assert why == ""
    assert b".entry horovod_copy_spans" in image
    image, why = _core.copy_kernel(file, 35)
    assert image == b""
    assert re.search(ends_with(EngineCode.MISSING_LIBRARY, file, "3.5"), why)


def _in_another_process(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("STANDIN_NCCL_VERSION", "21304", ends_with(EngineCode.NO_NCCL, "2.13.4", "2.14")),
        ("STANDIN_NCCL_VERSION", "2804", ends_with(EngineCode.NO_NCCL, "2.8.4", "2.14")),
        ("STANDIN_CUDA_VERSION", "11010", ends_with(EngineCode.NO_GPU, "11.1,", "11.2")),
    ],
)
def test_what_is_too_old_is_told(libraries: tuple[str, str], variable: str, value: str, expected: str) -> None:
    code = "from horovod import _core; "
    code += f"print(_core.cuda_obstacle({libraries[0]!r}) or _core.nccl_version({libraries[1]!r})[1])"
    assert re.search(expected, _in_another_process(code, **{variable: value}))


def test_what_is_built(libraries: tuple[str, str]) -> None:
    """As a program sees it: nothing of CUDA was there when Horovod was built."""
    code = "from horovod.common import basics; print(basics.cuda_built(), basics.nccl_built())"
    given = {"HOROVOD_CUDA_LIBRARY": libraries[0], "HOROVOD_NCCL_LIBRARY": libraries[1]}
    assert _in_another_process(code, **given) == "True 22703"
    given = {"HOROVOD_CUDA_LIBRARY": "/nowhere/libcuda.so.1", "HOROVOD_NCCL_LIBRARY": "/nowhere/libnccl.so.2"}
    assert _in_another_process(code, **given) == "False 0"


def test_check_build(libraries: tuple[str, str]) -> None:
    code = "from horovod.launch.command_line import check_build; print(check_build._has('NCCL'))"
    nccl = {"HOROVOD_NCCL_LIBRARY": libraries[1]}
    assert _in_another_process(code, HOROVOD_CUDA_LIBRARY=libraries[0], **nccl) == "True"
    assert _in_another_process(code, HOROVOD_CUDA_LIBRARY="/nowhere/libcuda.so.1", **nccl) == "False"


@pytest.mark.longer  # make test-all installs what it needs
def test_the_real_one_where_it_is_installed() -> None:
    """It can be asked for its version without a GPU."""
    found = [
        Path(str(file.locate()))
        for package in ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
        if package in {distribution.name for distribution in importlib.metadata.distributions()}
        for file in importlib.metadata.files(package) or []
        if file.name == "libnccl.so.2"
    ]
    if not found:
        pytest.skip("no package nvidia-nccl is installed")
    version, why = _core.nccl_version(str(found[0]))
    assert (version >= 21400, why) == (True, "")


def _folder_of(header: str) -> Path | None:
    """Where a package of NVIDIA's has this header."""
    found = (file.parent for folder in sys.path for file in Path(folder or ".").glob(f"nvidia/*/include/{header}"))
    return next(found, None)


@pytest.mark.longer  # make test-all installs what it needs
def test_what_is_declared_is_what_the_real_headers_say(tmp_path: Path) -> None:
    """The engine declares what it calls by itself, so a wrong number or size would show on a GPU only."""
    folders = {header: _folder_of(header) for header in ("cuda.h", "nccl.h", "nvrtc.h")}
    if None in folders.values():
        pytest.skip("no packages nvidia-cuda-runtime, nvidia-nccl and nvidia-cuda-nvrtc are installed")
    # All that nccl.h takes from the runtime's headers, which need more packages.
    handles = "typedef struct CUstream_st* cudaStream_t;\ntypedef struct CUevent_st* cudaEvent_t;\n"
    (tmp_path / "cuda_runtime.h").write_text(f"#pragma once\n{handles}#define __CUDA_BF16_TYPES_EXIST__\n")
    (tmp_path / "cuda_fp16.h").touch()
    includes = [f"-isystem{folder}" for folder in (tmp_path, *folders.values())]
    program = tmp_path / "real_headers"
    source = ROOT / "tests" / "native" / "gpu" / "real_headers.cc"
    run(tool("c++"), "-std=c++20", f"-I{ROOT / 'csrc'}", *includes, str(source), "-o", str(program))
    run(str(program))


def test_settings_become_bits_by_operation() -> None:
    assert gpu_operations(resolve({})) == {"nccl_operations": 0, "host_operations": 0}
    given = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_GPU_BROADCAST": "MPI", "HOROVOD_GPU_ALLTOALL": "auto"}
    assert gpu_operations(resolve(given)) == {"nccl_operations": 0b10011, "host_operations": 0b00100}
    for variable in ("HOROVOD_GPU_OPERATIONS", "HOROVOD_GPU_REDUCESCATTER"):
        with pytest.raises(ValueError, match=ends_with(SettingCode.INVALID_SETTING, variable, "DDL", "nccl")):
            resolve({variable: "DDL"})
