"""What earlier versions had: accepted and checked, without effect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from horovod.base.setting import NO_CCL, NO_MPI, row

# What only builds of earlier versions read, and what tests read, without HOROVOD_: images set these, rightly.
OF_BUILD = frozenset(
    {"ALLOW_MIXED_GPU_IMPL", "CMAKE", "DEBUG", "GPU", "LOCAL_VERSION", "SKIP_COMPILE", "VERSION", "WERROR"}
)
OF_BUILD_AND_TESTS = ("BUILD_", "CUDA_", "NCCL_", "ROCM_", "SPARK_", "TEST_", "WITH_", "WITHOUT_")

# Each completes "HOROVOD_... has no effect: ...".
_NO_TUNING = "there are no cycles to tune, and algorithms are chosen by size and topology"
_COORDINATOR = "processes meet at a coordinator, which the launcher starts or HOROVOD_COORDINATOR names"

_TUNING: dict[str, Any] = {"section": "autotune", "no_effect": _NO_TUNING}


def _old_row(env: str, default: Any, why: str, **more: Any) -> Any:
    return row(env, default, "accepted; has no effect", no_effect=why, **more)


@dataclass(frozen=True, init=False, repr=False, eq=False)  # a part of Settings, which alone is made
class AutotuneSettings:
    """The tuner of cycles, with its options of horovodrun."""

    autotune: bool = row("HOROVOD_AUTOTUNE", False, "tune parameters while training", key="enabled", **_TUNING)
    autotune_log: str | None = row(
        "HOROVOD_AUTOTUNE_LOG", None, "CSV file of what autotune tried", flag="--autotune-log-file", **_TUNING
    )
    autotune_warmup_samples: int = row(
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", 3, "samples that autotune throws away first", limits=(0, None), **_TUNING
    )
    autotune_steps_per_sample: int = row(
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", 10, "steps in one sample of autotune", limits=(0, None), **_TUNING
    )
    autotune_bayes_opt_max_samples: int = row(
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", 20, "samples after which autotune stops", limits=(0, None), **_TUNING
    )
    autotune_gaussian_process_noise: float = row(
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        0.8,
        "noise that autotune assumes in its samples",
        limits=(0, 1),
        **_TUNING,
    )


@dataclass(frozen=True, init=False, repr=False, eq=False)  # a part of Settings, which alone is made
class EarlierSettings:
    """Variables that have no option of horovodrun."""

    controller: str | None = _old_row("HOROVOD_CONTROLLER", None, _COORDINATOR, choices=("mpi", "gloo"))
    gloo_rendezvous_addr: str | None = _old_row("HOROVOD_GLOO_RENDEZVOUS_ADDR", None, _COORDINATOR)
    gloo_rendezvous_port: int | None = _old_row("HOROVOD_GLOO_RENDEZVOUS_PORT", None, _COORDINATOR)
    gloo_iface: str | None = _old_row(
        "HOROVOD_GLOO_IFACE", None, "HOROVOD_NETWORK_INTERFACES (--network-interfaces) names the interfaces"
    )
    adasum_mpi_chunk_size_bytes: int = _old_row("HOROVOD_ADASUM_MPI_CHUNK_SIZE", 1 << 30, NO_MPI)
    ccl_cache: bool = _old_row("HOROVOD_CCL_CACHE", False, NO_CCL)
    disable_nvtx_ranges: bool = _old_row("HOROVOD_DISABLE_NVTX_RANGES", False, "this version has no NVTX ranges")
    enable_xla_ops: bool = _old_row("HOROVOD_ENABLE_XLA_OPS", False, "XLA compiles the operations in any case")
