"""The operations of horovod.common.ops know no framework: an adapter for NumPy runs all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from horovod.common.gradients import name_of_group

SCRIPT = Path(__file__).with_name("numpy_framework.py")


def test_two_ranks_run_every_operation_on_numpy_arrays(coordinator) -> None:
    environment = {**os.environ, "HOROVOD_COORDINATOR": coordinator.address, "HOROVOD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            env={**environment, "HOROVOD_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [rank.communicate(timeout=60) for rank in ranks]
    assert [out.strip() for out, _ in ended] == ["all of them"] * 2, [err for _, err in ended]


def test_importing_the_operations_imports_no_framework() -> None:
    found = (
        "import sys; import horovod.common.ops.grouped, horovod.common.ops.sparse, horovod.common.ops.objects; "
        "import horovod.common.ops.all_made, horovod.common.ops.buckets; "
        "print([name for name in ('torch', 'numpy', 'tensorflow', 'jax', 'grpc') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", found], text=True).strip() == "[]"


def test_groups_of_different_gradients_have_different_names() -> None:
    few = ["gradient.0.kernel", "gradient.2.bias"]
    assert name_of_group(few[:1]) == "gradient.0.kernel"
    assert name_of_group(few) == "gradient.0.kernel,gradient.2.bias"
    many = [f"gradient.{place}.kernel" for place in range(60)]
    others = [*many[:-1], "gradient.60.kernel"]
    assert name_of_group(many).startswith("gradient.0.kernel,and_59_more_")
    assert name_of_group(many) != name_of_group(others)
