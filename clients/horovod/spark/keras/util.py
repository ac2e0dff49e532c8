"""Models and optimizers of Keras as bytes, under the module name that programs for earlier releases import."""

from horovod.spark.keras.files import SavedModel, SavedOptimizer, from_bytes, import_keras, keras_of, to_bytes

__all__ = ["SavedModel", "SavedOptimizer", "from_bytes", "import_keras", "keras_of", "to_bytes"]
