"""Trains a small convolutional network on scikit-learn's 1,797 handwritten digits in a loop of its own:

    python examples/tensorflow2_digits.py
    horovodrun -np 2 python examples/tensorflow2_digits.py

The lines marked "Horovod" are all that data-parallel training adds to a script for one process.
"""

import argparse
import time

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovod.tensorflow as hvd


def make_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Dropout(0.25),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with TensorFlow and Horovod")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()  # Horovod 1: join the other processes
    # Horovod 2: each process has a GPU of its own; with `horovodrun --pin-gpus` it sees no other
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    keras.utils.set_random_seed(args.seed)

    digits = load_digits()
    images = digits.images.astype(np.float32)[..., None] / 16
    train_x, test_x, train_y, test_y = train_test_split(
        images, digits.target, test_size=0.25, random_state=args.seed, stratify=digits.target
    )
    # Horovod 3: each process sees a different part of the data, all of them equally many batches
    steps = len(train_x) // (args.batch_size * hvd.size())
    train = tf.data.Dataset.from_tensor_slices((train_x, train_y)).shard(hvd.size(), hvd.rank())
    train = train.shuffle(len(train_x), seed=args.seed).batch(args.batch_size, drop_remainder=True).take(steps)

    model = make_model()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Horovod 4: N processes make one batch that is N times as large, so they take larger steps
    optimizer = keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9)
    hvd.broadcast_variables(model.variables, root_rank=0)  # Horovod 5: start from the same weights

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape)  # Horovod 6: average the gradients
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    start = time.perf_counter()
    for epoch in range(args.epochs):
        losses = [step(x, y) for x, y in train]
        loss = hvd.allreduce(tf.reduce_mean(losses))  # Horovod 7: averages over the processes, for people
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {float(loss):.4f}")
    if hvd.rank() == 0:
        found = np.argmax(model(test_x, training=False), axis=1)
        seconds = time.perf_counter() - start
        print(f"accuracy {np.mean(found == test_y):.4f} after {seconds:.1f} s with {hvd.size()} processes")
    hvd.shutdown()


if __name__ == "__main__":
    main()
