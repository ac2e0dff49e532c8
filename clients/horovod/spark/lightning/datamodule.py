"""The data modules by the names that programs import."""

from horovod.spark.common.batches import DataModule, NVTabularDataModule, PetastormDataModule

__all__ = ["DataModule", "NVTabularDataModule", "PetastormDataModule"]
