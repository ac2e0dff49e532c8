"""Where a rank's batches come from. An estimator's data_module names the class."""

from __future__ import annotations

from horovod.base.errors import DataCode, coded
from horovod.spark.common.batches import Batches, Source


class DataModule:
    """Subclasses may return batches of their own."""

    def batches(self, source: Source, rank: int, size: int) -> Batches:
        """What rank `rank` of `size` trains or validates with."""
        return Batches(source, rank, size)


class PetastormDataModule(DataModule):
    """The default. The name is that of an earlier reader: horovod.data.parquet reads."""


class NVTabularDataModule(DataModule):
    """The name of a reader that needs NVTabular, which has no release for the Pythons and CUDA of today."""

    def __init__(self) -> None:
        sentence = "NVTabular is not supported: leave data_module out, the default reads the same files."
        raise NotImplementedError(coded(DataCode.MISSING_DATA_PACKAGE, sentence))
