"""Word vectors with sparse gradients, on one process or on many:

    python examples/torch_sparse_embeddings.py
    horovodrun -np 2 python examples/torch_sparse_embeddings.py
    horovodrun -np 2 python examples/torch_sparse_embeddings.py --sparse-as-dense

Skip-gram with negative sampling (Mikolov et al., "Distributed Representations of Words and Phrases and their
Compositionality", NeurIPS 2013) on the docstrings of the standard library: the vector of a word is to be near those of
the words around it, and far from those of random words.

A step touches a few rows of the tables, and nn.Embedding(sparse=True) makes gradients of only these. Horovod gathers
the rows of all processes (a sparse allreduce), so what travels grows with the number of processes but not with the
vocabulary. With sparse_as_dense=True it reduces the whole table, which is better where most rows are touched, or where
processes are many. Both lead to the same vectors.
"""

import argparse
import re
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn
from torch_language_model import load_text
from tqdm import tqdm

import horovod.torch as hvd

WINDOW = 3  # words on each side


class SkipGram(nn.Module):
    """How well words go together: (batch,) centers and (batch, n) others -> (batch, n) logits."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.centers = nn.Embedding(words, width, sparse=True)
        self.others = nn.Embedding(words, width, sparse=True)
        nn.init.normal_(self.centers.weight, std=width**-0.5)
        nn.init.zeros_(self.others.weight)

    def forward(self, centers: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bw,bnw->bn", self.centers(centers), self.others(others))


def load_pairs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs of neighbouring words to train on and to test on, both (n, 2), and how often each word occurs, (words,)."""
    training, test = (re.findall("[a-z]+", bytes(text.tolist()).decode().lower()) for text in load_text())
    counts = Counter(training)
    number = {word: index for index, word in enumerate(sorted(counts))}

    def pairs(words: list[str]) -> torch.Tensor:
        text = torch.tensor([number[word] for word in words if word in number])
        ahead = [torch.stack([text[:-distance], text[distance:]], 1) for distance in range(1, WINDOW + 1)]
        return torch.cat([*ahead, *(pair.flip(1) for pair in ahead)])

    return pairs(training), pairs(test), torch.tensor([float(counts[word]) for word in number])


def main() -> None:
    parser = argparse.ArgumentParser(description="Sparse gradients with Horovod")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=256, help="pairs in a step of one process")
    parser.add_argument("--negatives", type=int, default=5, help="random words for each pair (default: %(default)s)")
    parser.add_argument("--width", type=int, default=32, help="of the vectors (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of one process")
    parser.add_argument("--sparse-as-dense", action="store_true", help="reduce whole tables")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()  # Horovod 1: join the other processes
    torch.set_num_threads(1)  # Horovod 2: processes of one host share its cores (on GPUs: torch.cuda.set_device)
    torch.manual_seed(args.seed)

    training, test, counts = load_pairs()
    chance = torch.Generator().manual_seed(args.seed + hvd.rank())  # each process trains on pairs of its own
    noise = counts**0.75  # the paper's distribution of the random words

    model = SkipGram(len(counts), args.width)
    # Horovod 3: N processes make one batch that is N times as large; Adam's steps grow with the root of that
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=args.lr * hvd.size() ** 0.5)
    # Horovod 4: average the gradients, their touched rows or all
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), sparse_as_dense=args.sparse_as_dense
    )
    # Horovod 5: start from the same weights and optimizer state
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for _ in tqdm(range(args.steps), unit="step", disable=hvd.rank() != 0):
        centers, neighbours = training[torch.randint(len(training), (args.batch_size,), generator=chance)].unbind(1)
        strangers = torch.multinomial(noise, args.batch_size * args.negatives, replacement=True, generator=chance)
        others = torch.cat([neighbours[:, None], strangers.view(args.batch_size, -1)], 1)
        wanted = torch.zeros(others.shape)
        wanted[:, 0] = 1
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(centers, others), wanted, reduction="sum") / args.batch_size
        loss.backward()
        optimizer.step()

    # Which of two words is the neighbour, and which a random one? Guessing is right in half of the cases.
    centers, neighbours = test[hvd.rank() :: hvd.size()].unbind(1)
    strangers = torch.multinomial(noise, len(centers), replacement=True, generator=chance)
    with torch.no_grad():
        real, random = model(centers, torch.stack([neighbours, strangers], 1)).unbind(1)
    accuracy = hvd.allreduce((real > random).double().mean(), name="accuracy")
    if hvd.rank() == 0:
        touched = len(model.centers.weight.grad.coalesce().indices()[0])
        print(f"neighbours found: {accuracy.item():.3f}; the last step touched {touched} of {len(counts)} words")


if __name__ == "__main__":
    main()
