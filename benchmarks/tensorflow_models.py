"""The models of benchmarks/models.py for TensorFlow: the same layers of the same sizes, with the same first weights.

Images are (batch, height, width, channels), as TensorFlow on a CPU wants them. Each layer takes its weights from a
parameter of the model for PyTorch, so a layer that had another size, or was left out, would not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from torch import nn

from benchmarks import models
from benchmarks.models import TrainingCase

Layer = Callable[[Any], Any]
_GROUPS, _HEADS = 8, 4


class Twin:
    """A model with the weights of one for PyTorch, which it is called like."""

    def __init__(self, case: TrainingCase) -> None:
        self.variables: list[tf.Variable] = []
        self._prefix = f"{case.operation}."  # in the names by which gradients meet: another model's have other shapes
        model = models.make_model(case)
        makers: dict[type, Callable[[Any], Layer]] = {
            models.ResNet: self._resnet,
            models.Transformer: self._transformer,
            nn.Sequential: self._sequence,
        }
        self._call = makers[type(model)](model)

    def __call__(self, inputs: Any) -> Any:
        return self._call(inputs)

    # -- layers ----------------------------------------------------------------------------------------------------
    def _variable(self, parameter: nn.Parameter, order: tuple[int, ...] | None = None) -> tf.Variable:
        """order: of the parameter's dimensions in the variable."""
        value = parameter.detach().numpy()
        value = value if order is None else value.transpose(order)
        made = tf.Variable(value, name=f"{self._prefix}{len(self.variables)}")
        self.variables.append(made)
        return made

    def _sequence(self, layers: nn.Sequential) -> Layer:
        made = [tf.nn.relu if isinstance(layer, nn.ReLU) else self._linear(layer) for layer in layers]

        def call(x: Any) -> Any:
            for layer in made:
                x = layer(x)
            return x

        return call

    def _linear(self, layer: nn.Linear) -> Layer:
        return self._affine(layer.weight, layer.bias)

    def _affine(self, weight: nn.Parameter, bias: nn.Parameter) -> Layer:
        kernel, offset = self._variable(weight, (1, 0)), self._variable(bias)

        def call(x: Any) -> Any:
            rows = tf.matmul(tf.reshape(x, [-1, kernel.shape[0]]), kernel) + offset  # one product, not one a sample
            return tf.reshape(rows, [*x.shape[:-1], kernel.shape[1]])

        return call

    def _convolution(self, layer: nn.Conv2d) -> Layer:
        kernel = self._variable(layer.weight, (2, 3, 1, 0))
        edge, stride = int(layer.padding[0]), layer.stride[0]
        # "SAME" would put all of the edge behind an image of even size that is taken in steps of two.
        padding = [[0, 0], [edge, edge], [edge, edge], [0, 0]]
        return lambda x: tf.nn.conv2d(x, kernel, stride, padding)

    def _group_norm(self, layer: nn.GroupNorm) -> Layer:
        scale, offset = self._variable(layer.weight), self._variable(layer.bias)

        def call(x: Any) -> Any:
            batch, height, width, channels = x.shape
            parts = tf.reshape(x, [batch, height, width, _GROUPS, channels // _GROUPS])
            mean, variance = tf.nn.moments(parts, [1, 2, 4], keepdims=True)
            normal = (parts - mean) * tf.math.rsqrt(variance + layer.eps)
            return tf.reshape(normal, x.shape) * scale + offset

        return call

    def _layer_norm(self, layer: nn.LayerNorm) -> Layer:
        scale, offset = self._variable(layer.weight), self._variable(layer.bias)

        def call(x: Any) -> Any:
            mean, variance = tf.nn.moments(x, [-1], keepdims=True)
            return (x - mean) * tf.math.rsqrt(variance + layer.eps) * scale + offset

        return call

    # -- models ----------------------------------------------------------------------------------------------------
    def _block(self, block: Any) -> Layer:
        first, second = self._convolution(block.first), self._convolution(block.second)
        before, after = (self._group_norm(norm) for norm in block.norms)
        shortcut = self._convolution(block.shortcut) if isinstance(block.shortcut, nn.Conv2d) else tf.identity

        def call(x: Any) -> Any:
            hidden = tf.nn.relu(before(first(x)))
            return tf.nn.relu(after(second(hidden)) + shortcut(x))

        return call

    def _resnet(self, model: models.ResNet) -> Layer:
        stem = self._convolution(model.stem)
        blocks = [self._block(block) for block in model.layers]
        head = self._linear(model.head)

        def call(x: Any) -> Any:
            x = stem(x)
            for block in blocks:
                x = block(x)
            return head(tf.reduce_mean(x, [1, 2]))

        return call

    def _attention(self, layer: nn.MultiheadAttention) -> Layer:
        into = self._affine(layer.in_proj_weight, layer.in_proj_bias)
        out = self._linear(layer.out_proj)

        def call(x: Any) -> Any:
            batch, length, width = x.shape
            parts = tf.reshape(into(x), [batch, length, 3, _HEADS, width // _HEADS])
            query, key, value = tf.unstack(tf.transpose(parts, [2, 0, 3, 1, 4]))
            scores = tf.matmul(query, key, transpose_b=True) * (width // _HEADS) ** -0.5
            later = 1.0 - tf.linalg.band_part(tf.ones([length, length]), -1, 0)
            mixed = tf.matmul(tf.nn.softmax(scores - 1e9 * later), value)
            return out(tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [batch, length, width]))

        return call

    def _encoder(self, layer: nn.TransformerEncoderLayer) -> Layer:
        attention = self._attention(layer.self_attn)
        wide, narrow = self._linear(layer.linear1), self._linear(layer.linear2)
        first, second = self._layer_norm(layer.norm1), self._layer_norm(layer.norm2)

        def call(x: Any) -> Any:
            x = x + attention(first(x))
            return x + narrow(tf.nn.relu(wide(second(x))))

        return call

    def _transformer(self, model: models.Transformer) -> Layer:
        of_bytes, of_positions = self._variable(model.bytes.weight), self._variable(model.positions.weight)
        layers = [self._encoder(layer) for layer in model.layers.layers]
        head = self._linear(model.head)

        def call(text: Any) -> Any:
            hidden = tf.gather(of_bytes, text) + of_positions[: text.shape[1]]
            for layer in layers:
                hidden = layer(hidden)
            return head(hidden)

        return call


def make_batch(case: TrainingCase, number: int, samples: int) -> tuple[tf.Tensor, tf.Tensor]:
    """That of benchmarks/models.py."""
    inputs, labels = models.make_batch(case, number, samples)
    if inputs.dim() == 4:
        inputs = inputs.permute(0, 2, 3, 1)
    return tf.constant(inputs.contiguous().numpy()), tf.constant(labels.numpy())


def loss_of(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
