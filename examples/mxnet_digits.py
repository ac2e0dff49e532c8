"""Trains a small convolutional network on scikit-learn's 1,797 handwritten digits with MXNet's gluon:

python examples/mxnet_digits.py
horovodrun -np 2 python examples/mxnet_digits.py
"""

import argparse

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovod.mxnet as hvd


def make_model() -> gluon.nn.HybridSequential:
    model = gluon.nn.HybridSequential()
    with model.name_scope():
        for channels in (16, 32):
            model.add(gluon.nn.Conv2D(channels, kernel_size=3, padding=1, activation="relu"))
            model.add(gluon.nn.MaxPool2D(pool_size=2, strides=2))
        model.add(gluon.nn.Dense(10))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with MXNet and Horovod")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()  # Horovod 1: join the other processes
    mx.random.seed(args.seed)  # of the weights
    np.random.seed(args.seed + hvd.rank())  # of the order of the data

    digits = load_digits()
    images = digits.images.astype(np.float32)[:, None] / 16
    train_x, test_x, train_y, test_y = train_test_split(
        images, digits.target, test_size=0.25, random_state=args.seed, stratify=digits.target
    )
    # Horovod 2: each process takes its share of the data
    mine = slice(hvd.rank(), len(train_x) // hvd.size() * hvd.size(), hvd.size())
    dataset = gluon.data.ArrayDataset(train_x[mine], train_y[mine].astype(np.float32))
    loader = gluon.data.DataLoader(dataset, args.batch_size, shuffle=True, last_batch="discard")

    model = make_model()
    model.initialize(mx.init.Xavier())
    model.hybridize()
    # Horovod 3: start from the same weights. Those whose shape only the first batch tells follow then
    hvd.broadcast_parameters(model.collect_params(), root_rank=0)
    # Horovod 4: average the gradients. N processes make one batch that is N times as large, so they take larger steps
    options = {"learning_rate": args.lr * hvd.size(), "momentum": args.momentum}
    trainer = hvd.DistributedTrainer(model.collect_params(), "sgd", options)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

    for epoch in range(args.epochs):
        losses = []
        for data, labels in loader:
            with autograd.record():
                loss = loss_of(model(data), labels)
            loss.backward()
            trainer.step(args.batch_size)
            losses.append(loss.mean())
        average = hvd.allreduce(mx.nd.stack(*losses).mean().reshape((1,)))
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {average.asscalar():.4f}")

    if hvd.rank() == 0:
        found = model(mx.nd.array(test_x)).asnumpy().argmax(axis=1)
        print(f"accuracy {np.mean(found == test_y):.4f} with {hvd.size()} processes")
    hvd.shutdown()


if __name__ == "__main__":
    main()
