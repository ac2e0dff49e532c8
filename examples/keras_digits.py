"""Trains a small convolutional network on scikit-learn's 1,797 handwritten digits with model.fit and all callbacks:

    python examples/keras_digits.py
    horovodrun -np 2 python examples/keras_digits.py
    KERAS_BACKEND=torch horovodrun -np 2 python examples/keras_digits.py

It saves the best model, loads it again with an optimizer that is distributed, and trains for another epoch.
"""

import argparse
import tempfile
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovod.keras as hvd


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
    parser = argparse.ArgumentParser(description="Digits with Keras and Horovod")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()  # Horovod 1: join the other processes
    keras.utils.set_random_seed(args.seed)

    digits = load_digits()
    images = digits.images.astype(np.float32)[..., None] / 16
    train_x, test_x, train_y, test_y = train_test_split(
        images, digits.target, test_size=0.25, random_state=args.seed, stratify=digits.target
    )
    # Horovod 2: each process sees a different part of the data, all of them equally many batches
    rows = len(train_x) // (args.batch_size * hvd.size()) * args.batch_size
    own_x, own_y = (part[hvd.rank() :: hvd.size()][:rows] for part in (train_x, train_y))

    model = make_model()
    # Horovod 3: N processes make one batch that is N times as large, so they take larger steps
    lr = args.lr * hvd.size()
    # Horovod 4: average the gradients
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(lr, momentum=0.9))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])

    with tempfile.TemporaryDirectory() as folder:
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # Horovod 5: start from the same weights
            hvd.callbacks.MetricAverageCallback(),  # before the callbacks that read metrics
            hvd.callbacks.LearningRateWarmupCallback(lr, warmup_epochs=2, verbose=1),
            hvd.callbacks.LearningRateScheduleCallback(lr, lambda epoch: 0.3, start_epoch=args.epochs - 2),
        ]
        path = Path(folder, "digits.keras")
        if hvd.rank() == 0:  # Horovod 6: one process writes
            best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
            best.filepath = str(path)
            callbacks.append(best)
        verbose = 2 if hvd.rank() == 0 else 0
        model.fit(own_x, own_y, batch_size=args.batch_size, epochs=args.epochs, callbacks=callbacks, verbose=verbose)

        # The file is what Keras writes without Horovod, too. Rank 0 has it; the others get its values from there.
        if hvd.rank() == 0:
            model = hvd.load_model(path)
    again = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(own_x, own_y, batch_size=args.batch_size, epochs=1, callbacks=again, verbose=0)
    if hvd.rank() == 0:
        found = np.argmax(model.predict(test_x, verbose=0), axis=1)
        print(f"accuracy {np.mean(found == test_y):.4f} with {hvd.size()} processes")
    hvd.shutdown()


if __name__ == "__main__":
    main()
