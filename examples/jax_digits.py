"""Trains a small convolutional network on scikit-learn's 1,797 handwritten digits with JAX, Optax and nothing else:

python examples/jax_digits.py
horovodrun -np 2 python examples/jax_digits.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovod.jax as hvd


def make_params(key: jax.Array) -> dict[str, jax.Array]:
    first, second, last = jax.random.split(key, 3)
    scaled = jax.nn.initializers.he_normal()
    return {
        "conv1": scaled(first, (3, 3, 1, 16)),
        "conv2": scaled(second, (3, 3, 16, 32)),
        "dense": scaled(last, (2 * 2 * 32, 10)),
        "bias": jnp.zeros(10),
    }


def logits_of(params: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    for name in ("conv1", "conv2"):
        images = jax.lax.conv_general_dilated(
            images, params[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        images = jax.lax.reduce_window(jax.nn.relu(images), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    return images.reshape(len(images), -1) @ params["dense"] + params["bias"]


def loss_of(params: dict[str, jax.Array], images: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, images), labels).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with JAX and Horovod")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()  # Horovod 1: join the other processes

    digits = load_digits()
    images = digits.images.astype(np.float32)[..., None] / 16
    train_x, test_x, train_y, test_y = train_test_split(
        images, digits.target, test_size=0.25, random_state=args.seed, stratify=digits.target
    )

    # Horovod 2: start from the same weights
    params = hvd.broadcast_parameters(make_params(jax.random.key(args.seed)), root_rank=0)
    # Horovod 3: average the gradients. N processes make one batch that is N times as large, so they take larger steps
    optimizer = hvd.DistributedOptimizer(optax.sgd(args.lr * hvd.size(), momentum=0.9))
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, images, labels):
        loss, gradients = jax.value_and_grad(loss_of)(params, images, labels)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, hvd.allreduce(loss)

    order = np.random.default_rng(args.seed)
    together = args.batch_size * hvd.size()
    for epoch in range(args.epochs):
        shuffled = order.permutation(len(train_x))
        for start in range(0, len(shuffled) - together + 1, together):
            # Horovod 4: each process takes its share of the batch
            mine = shuffled[start : start + together][hvd.rank() :: hvd.size()]
            params, opt_state, loss = step(params, opt_state, train_x[mine], train_y[mine])
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}")

    if hvd.rank() == 0:
        found = np.argmax(logits_of(params, test_x), axis=1)
        print(f"accuracy {np.mean(found == test_y):.4f} with {hvd.size()} processes")
    hvd.shutdown()


if __name__ == "__main__":
    main()
