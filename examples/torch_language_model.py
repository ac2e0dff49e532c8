"""A small transformer learns to write like Python's standard library documents itself, on one process or on many:

    python examples/torch_language_model.py
    horovodrun -np 2 python examples/torch_language_model.py

The text is the docstrings of the standard library that runs the script, so nothing is downloaded; the model predicts
byte after byte. It prints the perplexity of text it has not trained on, before and after: how many bytes it hesitates
between, on average, so 256 would be a model that knows nothing.
"""

import argparse
import ast
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import horovod.torch as hvd

BYTES = 256


def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on, and bytes to test on: every tenth docstring."""
    documents = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-e]*.py")):  # a part of it is enough
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                documents.append(ast.get_docstring(node) or "")
    documents = [document + "\n\n" for document in documents if len(document) > 40]

    def joined(parts: list[str]) -> torch.Tensor:
        return torch.frombuffer(bytearray("".join(parts).encode()), dtype=torch.uint8).long()

    return joined([text for number, text in enumerate(documents) if number % 10]), joined(documents[::10])


class LanguageModel(nn.Module):
    """Logits of the next byte at every position: (batch, length) of bytes -> (batch, length, 256)."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 16, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, BYTES)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[1]
        hidden = self.bytes(text) + self.positions.weight[:length]
        return self.head(self.layers(hidden, mask=self.mask[:length, :length], is_causal=True))


def loss_of(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of predicting each byte of the windows from those before it."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def perplexity(model: nn.Module, text: torch.Tensor, length: int, windows: int = 256) -> float:
    """Of `windows` pieces of the text, divided among the processes; the same number on all of them."""
    model.eval()
    share = windows // hvd.size()
    pieces = text.unfold(0, length + 1, length)[hvd.rank() * share : (hvd.rank() + 1) * share]
    loss = hvd.allreduce(loss_of(model, pieces), name="loss")  # the mean over the processes
    model.train()
    return math.exp(loss.item())


def main() -> None:
    parser = argparse.ArgumentParser(description="A language model with Horovod")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16, help="windows of text in a step of one process")
    parser.add_argument("--length", type=int, default=64, help="bytes in a window (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="of the model, a multiple of 16 (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of one process")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()  # Horovod 1: join the other processes
    torch.set_num_threads(1)  # Horovod 2: processes of one host share its cores (on GPUs: torch.cuda.set_device)
    torch.manual_seed(args.seed)

    training, test = load_text()
    chance = torch.Generator().manual_seed(args.seed + hvd.rank())  # each process trains on windows of its own

    model = LanguageModel(args.width, args.layers, args.length)
    # Horovod 3: N processes make one batch that is N times as large; Adam's steps grow with the root of that
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr * math.sqrt(hvd.size()))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr * math.sqrt(hvd.size()), args.steps)
    # Horovod 4: average the gradients
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # Horovod 5: start from the same weights and optimizer state
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    before = perplexity(model, test, args.length)
    for _ in tqdm(range(args.steps), unit="step", disable=hvd.rank() != 0):
        starts = torch.randint(len(training) - args.length, (args.batch_size, 1), generator=chance)
        windows = training[starts + torch.arange(args.length + 1)]
        optimizer.zero_grad()
        loss_of(model, windows).backward()
        optimizer.step()
        schedule.step()
    after = perplexity(model, test, args.length)
    if hvd.rank() == 0:
        print(f"test perplexity: {before:.1f} before, {after:.1f} after training on {len(training)} bytes")


if __name__ == "__main__":
    main()
