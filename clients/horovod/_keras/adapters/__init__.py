"""Keras on each framework: what backends.py lists, by the operations of horovod.tensorflow, .torch and .jax.

tf_keras.py has the optimizers of Keras 2, which runs on TensorFlow only.
"""
