"""model.fit with callbacks on a folder of files, which are read while it trains:

    python examples/keras_files.py                                # writes files first
    horovodrun -np 2 python examples/keras_files.py
    KERAS_BACKEND=jax horovodrun -np 2 python examples/keras_files.py --data /datasets/digits

A file is a .npz of images and labels. The callbacks average what fit measures over all ranks, warm the learning rate
up, lower it when the loss of validation stays, stop early on all ranks in the same epoch, and save the best model.
"""

import argparse
import tempfile
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

import horovod.keras as hvd


def write_files(folder: Path, chance: np.random.Generator) -> None:
    """Files of 50 images; every fourth is for validation."""
    digits = load_digits()
    order = chance.permutation(len(digits.target))
    for number, part in enumerate(np.split(order, range(50, len(order), 50))):
        kind = "validation" if number % 4 == 3 else "train"
        (folder / kind).mkdir(exist_ok=True)
        images, labels = digits.images[part, ..., None].astype(np.float32) / 16, digits.target[part]
        np.savez(folder / kind / f"{number:03}.npz", images=images, labels=labels)


class Files(keras.utils.PyDataset):
    """Every rank's share of the files, in another order in each epoch; one file is one batch.

    All ranks have equally many batches: the files that are too many rest, other ones in each epoch.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(workers=2, use_multiprocessing=False)  # two threads read ahead
        self.paths = sorted(folder.glob("*.npz"))
        if len(self.paths) < hvd.size():
            raise ValueError(f"{hvd.size()} processes need as many files; {folder} has {len(self.paths)}.")
        self.seed, self.epoch = seed, -1
        self.on_epoch_begin()

    def on_epoch_begin(self) -> None:
        self.epoch += 1
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.paths))  # the same on all ranks
        self.own = order[hvd.rank() :: hvd.size()][: len(self)]

    def __len__(self) -> int:
        return len(self.paths) // hvd.size()

    def __getitem__(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        with np.load(self.paths[self.own[place]]) as file:
            return file["images"], file["labels"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Keras, files and callbacks with Horovod")
    parser.add_argument("--data", type=Path, help="folder with train/ and validation/; default: made by the script")
    parser.add_argument("--epochs", type=int, default=20, help="at most")
    parser.add_argument("--patience", type=int, default=4, help="epochs without a better model before it stops")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of one process")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(args.seed)
    with tempfile.TemporaryDirectory() as own:
        data = args.data or Path(own)
        if args.data is None:
            write_files(data, np.random.default_rng(args.seed))  # the same on all ranks
        train, validation = Files(data / "train", args.seed), Files(data / "validation", args.seed)
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
        rate = args.lr * hvd.size()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(rate))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss=loss, metrics=["accuracy"])
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            # It comes before all that read metrics: those then see the same numbers, and decide alike, on every rank.
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2),
            keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.3, patience=2),
            keras.callbacks.EarlyStopping(monitor="val_loss", patience=args.patience, restore_best_weights=True),
        ]
        best = data / "best.keras"
        if hvd.rank() == 0:  # one process writes
            callbacks.append(keras.callbacks.ModelCheckpoint(best, monitor="val_loss", save_best_only=True))
        history = model.fit(train, validation_data=validation, epochs=args.epochs, callbacks=callbacks, verbose=0)

        if hvd.rank() == 0:
            files = [dict(np.load(path)) for path in validation.paths]
            images, labels = (np.concatenate([file[name] for file in files]) for name in ("images", "labels"))
            right = keras.models.load_model(best, compile=False).predict(images, verbose=0).argmax(1) == labels
            epochs = len(history.history["loss"])
            print(f"accuracy {right.mean():.4f} of the best of {epochs} epochs with {hvd.size()} processes")
    hvd.shutdown()


if __name__ == "__main__":
    main()
