"""What a framework has under another name, and why it has not what others have."""

from __future__ import annotations

# Public, and not in __all__.
MORE = {"TensorFlow": ["SyncBatchNormalization"], "PyTorch": ["mpi_ops.is_homogeneous"]}
INSTEAD: dict[str, dict[str, tuple[str, ...]]] = {}
AS_THE_BACKEND = {("Compression", "Keras")}
REASONS: dict[str, dict[str, str]] = {}
