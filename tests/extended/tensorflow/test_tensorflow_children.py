"""TensorFlow's operations that tell the place of a rank tell it in a child of the rank as well."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import horovod.tensorflow as hvd, tensorflow as tf
places = hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()
print(hvd.is_initialized(), *(int(place) for place in places))
print(int(hvd.process_set_included_op()))
try:
    hvd.allreduce(tf.ones(1))
except (ValueError, tf.errors.FailedPreconditionError) as error:
    print("[child-of-rank]" in str(error))
"""


def test_rank_and_size_operations_in_a_child_of_a_rank():
    script = f"""
import subprocess, sys
from horovod.common import basics as hvd
hvd.init()
sys.exit(subprocess.run([sys.executable, "-c", {CHILD!r}]).returncode)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True 0 1 0 1", "1", "True"]
