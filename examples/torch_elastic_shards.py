"""Elastic training on a folder of shards: processes come and go, and each sample of an epoch counts once.

    python examples/torch_elastic_shards.py                              # makes shards first
    horovodrun -np 2 --min-np 1 python examples/torch_elastic_shards.py --data /shared/shards

A shard is a .npz file of images and labels, as a preprocessing job writes them; all hosts see the same folder. Ranks
share out samples, not files, so that any number of ranks has work until the end of an epoch. A sample counts when the
step that used it is committed: a step that a lost process takes with it is forgotten, with its samples, and done again.
Where the ranks do not divide the samples that are left, the last ones are used twice.
"""

import argparse
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torch_digits import load_data, make_model

import horovod.torch as hvd


def write_shards(folder: Path, size: int, seed: int) -> None:
    images, labels = load_data(seed)[0].tensors
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    for number in range(len(labels) // size):
        part = slice(number * size, (number + 1) * size)
        np.savez(unfinished / f"{number:05}.npz", images=images[part].numpy(), labels=labels[part].numpy())
    try:
        unfinished.rename(folder)  # nobody sees half of it
    except OSError:  # another rank was faster, with the same files
        shutil.rmtree(unfinished)


class Shards(Dataset):
    """(sample's number, image, label) of all shards of a folder; a few of them are in memory at a time."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.npz"))
        if not self.paths:
            raise FileNotFoundError(f"There are no shards in {folder}: expected files such as {folder}/00000.npz.")
        sizes = [len(np.load(path)["labels"]) for path in self.paths]
        self.ends = np.cumsum(sizes)
        self._read = lru_cache(maxsize=16)(lambda number: dict(np.load(self.paths[number])))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, sample: int) -> tuple[int, torch.Tensor, int]:
        number = int(np.searchsorted(self.ends, sample, side="right"))
        shard = self._read(number)
        place = sample - (int(self.ends[number - 1]) if number else 0)
        return sample, torch.from_numpy(shard["images"][place]), int(shard["labels"][place])


def main() -> None:
    parser = argparse.ArgumentParser(description="A folder of shards with Horovod, elastic")
    parser.add_argument("--data", type=Path, help="folder that all hosts see; made if it is not there. Default: none")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="samples in a step of one process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--batches-per-commit", type=int, default=3, help="steps that a lost process costs at most")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    own = tempfile.TemporaryDirectory()
    folder = args.data or Path(own.name, "shards")
    if not folder.exists():
        write_shards(folder, size=96, seed=args.seed)
    samples = Shards(folder)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(samples, seed=args.seed)
    loader = DataLoader(samples, batch_size=args.batch_size, sampler=sampler)
    # What all ranks go back to when one is lost. `used` says how often each sample of this epoch was trained on.
    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0, used=torch.zeros(len(samples), dtype=int)
    )

    def follow_the_size() -> None:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size()

    state.register_reset_callbacks([follow_the_size])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.epoch < args.epochs:
            for numbers, images, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()
                sampler.record_batch(state.batch, len(images))
                state.used = state.used + torch.bincount(hvd.allgather(numbers), minlength=len(samples))
                state.batch += 1
                if state.batch % args.batches_per_commit == 0:
                    state.commit()
            state.epoch += 1
            if hvd.rank() == 0:
                counts = torch.bincount(state.used).tolist()  # samples that were never used, used once, used twice ...
                print(f"epoch {state.epoch}: uses of a sample {counts}, processes {hvd.size()}", flush=True)
            sampler.set_epoch(state.epoch)
            state.used = torch.zeros_like(state.used)
            state.commit()

    train(state)
    model.eval()
    images, labels = load_data(args.seed)[1].tensors
    with torch.no_grad():
        correct = (model(images).argmax(1) == labels).double().mean()
    accuracy = hvd.allreduce(correct, name="accuracy")
    if hvd.rank() == 0:
        print(f"test accuracy: {accuracy.item():.3f} with {len(samples.paths)} shards")


if __name__ == "__main__":
    main()
