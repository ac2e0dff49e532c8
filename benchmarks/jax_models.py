"""The models of benchmarks/models.py for JAX: the same layers of the same sizes, with the same first weights.

Images are (batch, height, width, channels), as XLA on a CPU wants them. Each layer takes its weights from a parameter
of the model for PyTorch, so a layer that had another size, or was left out, would not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from torch import nn

from benchmarks import models
from benchmarks.models import TrainingCase

Layer = Callable[[Any, Any], Any]  # of all parameters, and what goes in
_GROUPS, _HEADS = 8, 4


class Twin:
    """A function of its parameters and inputs, with the first weights of a model for PyTorch."""

    def __init__(self, case: TrainingCase) -> None:
        self.params: list[jax.Array] = []
        model = models.make_model(case)
        makers: dict[type, Callable[[Any], Layer]] = {
            models.ResNet: self._resnet,
            models.Transformer: self._transformer,
            nn.Sequential: self._sequence,
        }
        self._call = makers[type(model)](model)

    def __call__(self, params: Any, inputs: Any) -> Any:
        return self._call(params, inputs)

    # -- layers ----------------------------------------------------------------------------------------------------
    def _parameter(self, parameter: nn.Parameter, order: tuple[int, ...] | None = None) -> int:
        """Its place in `params`. order: of the parameter's dimensions in the array."""
        value = parameter.detach().numpy()
        self.params.append(jnp.array(value if order is None else value.transpose(order)))
        return len(self.params) - 1

    def _sequence(self, layers: nn.Sequential) -> Layer:
        made = [None if isinstance(layer, nn.ReLU) else self._linear(layer) for layer in layers]

        def call(params: Any, x: Any) -> Any:
            for layer in made:
                x = jax.nn.relu(x) if layer is None else layer(params, x)
            return x

        return call

    def _linear(self, layer: nn.Linear) -> Layer:
        return self._affine(layer.weight, layer.bias)

    def _affine(self, weight: nn.Parameter, bias: nn.Parameter) -> Layer:
        kernel, offset = self._parameter(weight, (1, 0)), self._parameter(bias)
        return lambda params, x: x @ params[kernel] + params[offset]

    def _convolution(self, layer: nn.Conv2d) -> Layer:
        kernel = self._parameter(layer.weight, (2, 3, 1, 0))
        edge, stride = int(layer.padding[0]), layer.stride
        padding = ((edge, edge), (edge, edge))
        names = ("NHWC", "HWIO", "NHWC")
        return lambda params, x: jax.lax.conv_general_dilated(
            x, params[kernel], stride, padding, dimension_numbers=names
        )

    def _group_norm(self, layer: nn.GroupNorm) -> Layer:
        scale, offset = self._parameter(layer.weight), self._parameter(layer.bias)

        def call(params: Any, x: Any) -> Any:
            batch, height, width, channels = x.shape
            parts = x.reshape(batch, height, width, _GROUPS, channels // _GROUPS)
            normal = _normal(parts, (1, 2, 4), layer.eps)
            return normal.reshape(x.shape) * params[scale] + params[offset]

        return call

    def _layer_norm(self, layer: nn.LayerNorm) -> Layer:
        scale, offset = self._parameter(layer.weight), self._parameter(layer.bias)
        return lambda params, x: _normal(x, (-1,), layer.eps) * params[scale] + params[offset]

    # -- models ----------------------------------------------------------------------------------------------------
    def _block(self, block: Any) -> Layer:
        first, second = self._convolution(block.first), self._convolution(block.second)
        before, after = (self._group_norm(norm) for norm in block.norms)
        shortcut = self._convolution(block.shortcut) if isinstance(block.shortcut, nn.Conv2d) else _unchanged

        def call(params: Any, x: Any) -> Any:
            hidden = jax.nn.relu(before(params, first(params, x)))
            return jax.nn.relu(after(params, second(params, hidden)) + shortcut(params, x))

        return call

    def _resnet(self, model: models.ResNet) -> Layer:
        stem = self._convolution(model.stem)
        blocks = [self._block(block) for block in model.layers]
        head = self._linear(model.head)

        def call(params: Any, x: Any) -> Any:
            x = stem(params, x)
            for block in blocks:
                x = block(params, x)
            return head(params, x.mean((1, 2)))

        return call

    def _attention(self, layer: nn.MultiheadAttention) -> Layer:
        into = self._affine(layer.in_proj_weight, layer.in_proj_bias)
        out = self._linear(layer.out_proj)

        def call(params: Any, x: Any) -> Any:
            batch, length, width = x.shape
            parts = into(params, x).reshape(batch, length, 3, _HEADS, width // _HEADS)
            query, key, value = parts.transpose(2, 0, 3, 1, 4)
            scores = query @ key.swapaxes(-1, -2) * (width // _HEADS) ** -0.5
            known = jnp.tril(jnp.ones((length, length), bool))
            mixed = jax.nn.softmax(jnp.where(known, scores, -1e9)) @ value
            return out(params, mixed.transpose(0, 2, 1, 3).reshape(batch, length, width))

        return call

    def _encoder(self, layer: nn.TransformerEncoderLayer) -> Layer:
        attention = self._attention(layer.self_attn)
        wide, narrow = self._linear(layer.linear1), self._linear(layer.linear2)
        first, second = self._layer_norm(layer.norm1), self._layer_norm(layer.norm2)

        def call(params: Any, x: Any) -> Any:
            x = x + attention(params, first(params, x))
            return x + narrow(params, jax.nn.relu(wide(params, second(params, x))))

        return call

    def _transformer(self, model: models.Transformer) -> Layer:
        of_bytes, of_positions = self._parameter(model.bytes.weight), self._parameter(model.positions.weight)
        layers = [self._encoder(layer) for layer in model.layers.layers]
        head = self._linear(model.head)

        def call(params: Any, text: Any) -> Any:
            hidden = params[of_bytes][text] + params[of_positions][: text.shape[1]]
            for layer in layers:
                hidden = layer(params, hidden)
            return head(params, hidden)

        return call


def _unchanged(params: Any, x: Any) -> Any:
    return x


def _normal(x: Any, axes: tuple[int, ...], epsilon: float) -> Any:
    """With mean 0 and variance 1 over these dimensions."""
    return (x - x.mean(axes, keepdims=True)) * jax.lax.rsqrt(x.var(axes, keepdims=True) + epsilon)


def make_batch(case: TrainingCase, number: int, samples: int) -> tuple[Any, Any]:
    """That of benchmarks/models.py, in arrays of NumPy."""
    inputs, labels = models.make_batch(case, number, samples)
    if inputs.dim() == 4:
        inputs = inputs.permute(0, 2, 3, 1)
    return inputs.contiguous().numpy(), labels.numpy()


def loss_of(logits: Any, labels: Any) -> Any:
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
