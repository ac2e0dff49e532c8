"""Keras models that are trained on the rows of a DataFrame, with Keras 3 on any of its backends, or with tf_keras.

from horovod.spark.keras import KerasEstimator

estimator = KerasEstimator(num_proc=4, store=Store.create("hdfs:///work"), model=model, optimizer="sgd",
                           loss="mse", feature_cols=["features"], label_cols=["label"], epochs=10)
predictions = estimator.fit(train).transform(test)  # with a column label__output
"""

from horovod.spark.keras.estimator import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
