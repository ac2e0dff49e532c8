"""Trains word vectors on sentences that it makes up: an embedding, whose gradients have a few rows of many.

    python examples/tensorflow2_text.py
    horovodrun -np 2 python examples/tensorflow2_text.py

Each process reads other sentences. The rows of a step that some process has seen are gathered (tf.IndexedSlices), not
the whole table; with --dense all of it is reduced.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

WORDS, LENGTH = 5000, 12


def sentences(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Half of them take most words from the first tenth of the vocabulary: these are to be found."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, count)
    likely = random.integers(0, WORDS // 10, (count, LENGTH))
    any_word = random.integers(0, WORDS, (count, LENGTH))
    is_likely = random.random((count, LENGTH)) < 0.6 * labels[:, None]
    return np.where(is_likely, likely, any_word).astype(np.int32), labels.astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description="Text with TensorFlow and Horovod")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64, help="sentences in a step of one process")
    parser.add_argument("--dense", action="store_true", help="reduce the whole table")
    args = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input([LENGTH], dtype="int32"),
            keras.layers.Embedding(WORDS, 16),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.02), sparse_as_dense=args.dense)
    hvd.broadcast_variables(model.variables, root_rank=0)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y[:, None], model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for number in range(args.steps):
        loss = step(*sentences(args.batch_size, seed=number * hvd.size() + hvd.rank()))
    average = float(hvd.allreduce(loss))
    if hvd.rank() == 0:
        x, y = sentences(1000, seed=10**6)
        found = model(x, training=False)[:, 0].numpy() > 0
        print(f"accuracy {np.mean(found == y):.4f}, loss {average:.4f} with {hvd.size()} processes")
    hvd.shutdown()


if __name__ == "__main__":
    main()
