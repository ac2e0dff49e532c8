"""`horovod.spark`: training on the executors of Spark."""
