"""PyTorch models that are trained on the rows of a DataFrame.

from horovod.spark.torch import TorchEstimator

estimator = TorchEstimator(num_proc=4, store=Store.create("hdfs:///work"), model=model, optimizer=optimizer,
                           loss=F.mse_loss, feature_cols=["features"], label_cols=["label"], epochs=10)
predictions = estimator.fit(train).transform(test)  # with a column label__output
"""

from horovod.spark.torch.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
