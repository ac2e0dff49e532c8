"""LightningModules that are trained on the rows of a DataFrame, those of lightning and of pytorch_lightning.

from horovod.spark.lightning import TorchEstimator

estimator = TorchEstimator(num_proc=4, store=Store.create("hdfs:///work"), model=LitModel(), feature_cols=["features"],
                           label_cols=["label"], epochs=10)
predictions = estimator.fit(train).transform(test)  # with a column label__output
"""

from horovod.spark.lightning.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
