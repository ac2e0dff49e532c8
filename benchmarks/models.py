"""What is trained: three models that differ in how much they compute for each byte of gradient, and their data.

No layer keeps statistics over a batch (GroupNorm and not BatchNorm), so that training by N ranks equals training by one
on the joined batch, which is how it is checked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.cases import Case

MODELS = ("mlp", "resnet", "transformer")
_BATCH = {"mlp": 64, "resnet": 16, "transformer": 8}
# One process also takes the joined batch of all ranks, in float32: 8 of these fit into 16 GB.
_LARGE_BATCH = {"mlp": 1024, "resnet": 128, "transformer": 32}
_CLASSES, _VOCABULARY, _LENGTH = 10, 256, 64
_MOST_STEPS = 500


@dataclass(frozen=True)
class TrainingCase(Case):
    """A step of data-parallel training. `operation` is the model, `ranks` those that train together."""

    tiny: bool = False  # to see that everything works
    large: bool = False  # for GPUs

    @property
    def elements(self) -> list[int]:
        """Of each gradient."""
        with torch.device("meta"):
            return [parameter.numel() for parameter in make_model(self).parameters()]

    @property
    def result_elements(self) -> int:
        return sum(self.elements)

    @property
    def batch(self) -> int:
        """Samples in a step of one rank."""
        return 2 if self.tiny else (_LARGE_BATCH if self.large else _BATCH)[self.operation]

    @property
    def label(self) -> str:
        return f"{self.result_elements / 1e6:.2f} M"

    def most_calls(self) -> int:
        return _MOST_STEPS


def make_model(case: TrainingCase) -> nn.Module:
    """With the same weights for the same case, on every rank and in every library."""
    torch.manual_seed(0)
    if case.operation == "mlp":
        width = 16 if case.tiny else 8192 if case.large else 1024
        layers = [nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, _CLASSES)]
        return nn.Sequential(*layers)
    if case.operation == "resnet":
        return ResNet(8, blocks=1) if case.tiny else ResNet(64, blocks=4) if case.large else ResNet(32, blocks=2)
    return Transformer(16, 1) if case.tiny else Transformer(768, 6) if case.large else Transformer(128, 4)


def make_batch(case: TrainingCase, number: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels, the same for the same arguments."""
    chance = torch.Generator().manual_seed(number)
    if case.operation == "transformer":
        text = torch.randint(_VOCABULARY, (samples, _LENGTH + 1), generator=chance)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()
    shape = (samples, 784) if case.operation == "mlp" else (samples, 3, 32, 32)
    return torch.randn(shape, generator=chance), torch.randint(_CLASSES, (samples,), generator=chance)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


class _Block(nn.Module):
    """Two convolutions around which the input is added (He et al., https://arxiv.org/abs/1512.03385)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(8, outputs) for _ in range(2))
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(hidden)) + self.shortcut(x))


class ResNet(nn.Module):
    """For images of 32 x 32: three stages, each half as large and twice as wide as the one before."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        layers, inputs = [], width
        for stage in range(3):
            for block in range(blocks):
                outputs = width << stage
                layers.append(_Block(inputs, outputs, 2 if stage and not block else 1))
                inputs = outputs
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


class ResNet18(nn.Module):
    """ResNet-18 of the same paper, for images of 224 x 224 and 1000 classes, with GroupNorm; `width` is 64 there."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
        widths = [width << stage for stage in range(4)]
        inputs = [width, *widths[:-1]]
        stages = [
            block
            for stage, (before, after) in enumerate(zip(inputs, widths, strict=True))
            for block in (_Block(before, after, 2 if stage else 1), _Block(after, after, 1))
        ]
        self.layers = nn.Sequential(*stem, *stages)
        self.head = nn.Linear(widths[-1], 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean((2, 3)))


class Transformer(nn.Module):
    """A language model over bytes: (batch, length) -> (batch, length, 256)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(_VOCABULARY, width)
        self.positions = nn.Embedding(_LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, _VOCABULARY)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[1]
        mask = torch.full((length, length), float("-inf"), device=text.device).triu(1)
        hidden = self.bytes(text) + self.positions.weight[:length]
        return self.head(self.layers(hidden, mask=mask, is_causal=True))
