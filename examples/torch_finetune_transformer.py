"""Fine-tunes a small transformer that was trained before: the language model learns to tell code from prose.

    python examples/torch_finetune_transformer.py                    # makes the weights first, in some seconds
    horovodrun -np 2 python examples/torch_finetune_transformer.py
    horovodrun -np 2 python examples/torch_finetune_transformer.py --pretrained weights.pt    # kept for the next time

The model is that of torch_language_model.py. Its head is replaced by one for two classes, with a higher learning rate
than the layers that know something already; the embeddings are frozen. Only rank 0 reads the file of weights. A model
of Hugging Face's `transformers` is fine-tuned likewise: `from_pretrained` on rank 0, `from_config` on the others.
"""

import argparse
import ast
import math
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch_language_model import LanguageModel, load_text, loss_of

import horovod.torch as hvd

WIDTH, LAYERS, LENGTH = 64, 2, 64


def pretrain(steps: int, chance: torch.Generator) -> dict[str, Any]:
    """The weights of a language model, made in this process alone. Elsewhere they come from a file or a hub."""
    text, _ = load_text()
    model = LanguageModel(WIDTH, LAYERS, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (16, 1), generator=chance)
        optimizer.zero_grad()
        loss_of(model, text[starts + torch.arange(LENGTH + 1)]).backward()
        optimizer.step()
    return model.state_dict()


class Classifier(nn.Module):
    """Logits of the classes: (batch, length) of bytes -> (batch, classes)."""

    def __init__(self, language_model: LanguageModel, classes: int) -> None:
        super().__init__()
        self.body = language_model
        self.body.head = nn.Identity()
        self.head = nn.Linear(WIDTH, classes)
        for table in (self.body.bytes, self.body.positions):
            table.requires_grad_(False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(text).mean(1))


def load_examples(chance: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces of the standard library: class 0 is code without docstrings and comments, class 1 is docstrings."""
    prose, _ = load_text()
    sources = [
        path.read_text(encoding="utf-8") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[f-j]*.py"))
    ]
    trees = [ast.parse(source) for source in sources]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    code = torch.tensor(list("\n".join(map(ast.unparse, trees)).encode()))
    parts = []
    for text in (code, prose):
        starts = torch.randint(len(text) - LENGTH, (1200, 1), generator=chance)
        parts.append(text[starts + torch.arange(LENGTH)])
    labels = torch.arange(2).repeat_interleave(1200)
    order = torch.randperm(2400, generator=chance)
    return torch.cat(parts)[order], labels[order]


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tuning with Horovod")
    parser.add_argument("--pretrained", type=Path, help="file of weights; made if it is not there. Default: no file")
    parser.add_argument("--pretrain-steps", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="pieces of text in a step of one process")
    parser.add_argument("--lr", type=float, default=1e-3, help="of the layers; the head has ten times as much")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()
    device = torch.device("cpu")
    if torch.cuda.is_available():  # a process that sees one GPU only, as with --pin-gpus, takes that one
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.set_num_threads(1)  # processes of one host share its cores
    chance = torch.Generator().manual_seed(args.seed)

    language_model = LanguageModel(WIDTH, LAYERS, LENGTH)
    if hvd.rank() == 0:
        if args.pretrained is not None and args.pretrained.exists():
            weights = torch.load(args.pretrained)
        else:
            weights = pretrain(args.pretrain_steps, torch.Generator().manual_seed(args.seed))
            if args.pretrained is not None:
                torch.save(weights, args.pretrained)
        language_model.load_state_dict(weights)
    torch.manual_seed(args.seed)  # of the head; making the weights has drawn numbers, too
    model = Classifier(language_model, classes=2).to(device)

    pieces, labels = load_examples(chance)  # the same on all ranks
    (train_x, test_x), (train_y, test_y) = pieces.split([1600, 800]), labels.split([1600, 800])
    body = [parameter for parameter in model.body.parameters() if parameter.requires_grad]
    rate = args.lr * math.sqrt(hvd.size())
    groups = [{"params": body, "lr": rate}, {"params": model.head.parameters(), "lr": 10 * rate}]
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(groups), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # the weights that rank 0 has read go to all ranks
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    def accuracy() -> float:
        with torch.no_grad():
            own = model(test_x[hvd.rank() :: hvd.size()].to(device)).argmax(1).cpu()
        right = (own == test_y[hvd.rank() :: hvd.size()]).sum()
        return hvd.allreduce(right, op=hvd.Sum, name="right").item() / len(test_y)

    before = accuracy()
    for _ in range(args.epochs):
        order = torch.randperm(len(train_x), generator=chance)[hvd.rank() :: hvd.size()]
        for batch in order.split(args.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(train_x[batch].to(device)), train_y[batch].to(device)).backward()
            optimizer.step()
    after = accuracy()
    if hvd.rank() == 0:
        print(f"test accuracy: {before:.3f} before, {after:.3f} after fine-tuning")


if __name__ == "__main__":
    main()
