"""Trains on a folder of TFRecord files with tf.data, each process on its own files:

    python examples/tensorflow2_tfrecords.py                     # writes files first
    horovodrun -np 2 python examples/tensorflow2_tfrecords.py
    horovodrun -np 8 python examples/tensorflow2_tfrecords.py --data "gs://bucket/train-*.tfrecord"

Files are shared out, so no process reads another one's. They hold different numbers of records: an epoch has as many
steps as the process with the fewest records can make.
"""

import argparse
import math
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovod.tensorflow as hvd

FEATURES = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}


def write_records(folder: Path, files: int, images: np.ndarray, labels: np.ndarray) -> None:
    for number in range(files):
        with tf.io.TFRecordWriter(str(folder / f"train-{number:03}.tfrecord")) as writer:
            for image, label in zip(images[number::files], labels[number::files], strict=True):
                values = {
                    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image.tobytes()])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=values)).SerializeToString())


def parsed(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    values = tf.io.parse_single_example(record, FEATURES)
    pixels = tf.reshape(tf.io.decode_raw(values["image"], tf.uint8), [8, 8, 1])
    return tf.cast(pixels, tf.float32) / 16, values["label"]


def make_dataset(pattern: str, batch_size: int, seed: int) -> tuple[tf.data.Dataset, int]:
    """Batches of this rank's records, without end, and how many of them each rank has in an epoch."""
    paths = sorted(tf.io.gfile.glob(pattern))
    if len(paths) < hvd.size():
        raise ValueError(f"{hvd.size()} processes need as many files; {pattern} matches {len(paths)}.")
    own = paths[hvd.rank() :: hvd.size()]
    records = int(tf.data.TFRecordDataset(own).reduce(np.int64(0), lambda count, _: count + 1))
    steps = int(hvd.allreduce(tf.constant(records // batch_size), op=hvd.Min, name="steps"))
    files = tf.data.Dataset.from_tensor_slices(own).shuffle(len(own), seed=seed)
    dataset = files.interleave(tf.data.TFRecordDataset, cycle_length=4, num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.shuffle(1000, seed=seed).repeat().map(parsed, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.batch(batch_size).prefetch(tf.data.AUTOTUNE), steps


def main() -> None:
    parser = argparse.ArgumentParser(description="TFRecord files with Horovod")
    parser.add_argument("--data", help='files of records, as "/data/*.tfrecord"; default: files that it writes')
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of one process")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:  # a process that sees one GPU only, as with --pin-gpus, takes that one
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    keras.utils.set_random_seed(args.seed)
    digits = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        digits.images.astype(np.uint8), digits.target, test_size=0.25, random_state=args.seed, stratify=digits.target
    )

    with tempfile.TemporaryDirectory() as folder:  # every process writes the same files for itself
        if args.data is None:
            write_records(Path(folder), max(5, hvd.size()), train_x, train_y)
        dataset, steps = make_dataset(args.data or f"{folder}/*.tfrecord", args.batch_size, args.seed)
        model = keras.Sequential(
            [
                keras.Input([8, 8, 1]),
                keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.Adam(args.lr * math.sqrt(hvd.size()))
        hvd.broadcast_variables(model.variables, root_rank=0)

        @tf.function
        def step(images: tf.Tensor, labels: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(images, training=True))
            tape = hvd.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        for images, labels in dataset.take(args.epochs * steps):
            step(images, labels)

    own = slice(hvd.rank(), None, hvd.size())
    right = np.argmax(model(test_x[own, ..., None].astype(np.float32) / 16), axis=1) == test_y[own]
    total = hvd.allreduce(tf.constant([right.sum(), right.size]), op=hvd.Sum, name="right and all")
    if hvd.rank() == 0:
        print(f"accuracy {total[0] / total[1]:.4f} after {steps} steps in each epoch with {hvd.size()} processes")
    hvd.shutdown()


if __name__ == "__main__":
    main()
