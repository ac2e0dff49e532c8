"""The training of keras_digits.py, elastic: it goes on without processes that are lost, and takes in those that come:

    horovodrun -np 2 --min-np 1 python examples/keras_elastic_digits.py

The lines marked "elastic" are what that needs in addition to data-parallel training.
"""

import argparse

import keras
import numpy as np
from keras_digits import make_model
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovod.keras as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with Keras and Horovod, elastic")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--batches-per-commit", type=int, default=5, help="steps that a lost process costs at most")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(args.seed)
    digits = load_digits()
    images = digits.images.astype(np.float32)[..., None] / 16
    train_x, test_x, train_y, test_y = train_test_split(
        images, digits.target, test_size=0.25, random_state=args.seed, stratify=digits.target
    )

    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])
    # elastic 1: what all ranks go back to, and what newcomers get. No callback broadcasts the weights: a process that
    # comes later would wait in it alone.
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    def follow_the_size() -> None:
        model.optimizer.learning_rate = args.lr * hvd.size()

    # elastic 2: called in each new world
    state.register_reset_callbacks([follow_the_size])

    def tell(epoch: int, logs: object = None) -> None:
        if hvd.rank() == 0:
            print(f"epoch {state.epoch} ends with processes: {hvd.size()}", flush=True)

    @hvd.elastic.run  # elastic 3: where processes were lost or have come, joins the next world and calls this again
    def train(state: hvd.elastic.KerasState) -> None:
        # Each process sees a different part of the data, all of them equally many batches.
        rows = len(train_x) // (args.batch_size * hvd.size()) * args.batch_size
        own_x, own_y = (part[hvd.rank() :: hvd.size()][:rows] for part in (train_x, train_y))
        callbacks = [
            hvd.elastic.UpdateBatchStateCallback(state),  # elastic 4: how far the epoch is, and the training
            hvd.elastic.UpdateEpochStateCallback(state),
            keras.callbacks.LambdaCallback(on_epoch_end=tell),
            # elastic 5: the last one; a lost process costs no more than the steps since the commit before
            hvd.elastic.CommitStateCallback(state, batches_per_commit=args.batches_per_commit),
        ]
        model.fit(
            own_x,
            own_y,
            batch_size=args.batch_size,
            initial_epoch=state.epoch,  # so that schedules of the learning rate go on, too
            epochs=args.epochs,
            callbacks=callbacks,
            verbose=0,
        )

    train(state)
    if hvd.rank() == 0:
        found = np.argmax(model.predict(test_x, verbose=0), axis=1)
        print(f"test accuracy: {np.mean(found == test_y):.3f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
