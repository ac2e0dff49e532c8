"""A torch.nn.Module with optimizer and losses as a LightningModule, under the module name of earlier releases."""

from horovod.spark.lightning.module import lightning_module

__all__ = ["lightning_module"]
