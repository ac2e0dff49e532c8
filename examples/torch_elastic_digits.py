"""The training of torch_digits.py, elastic: it goes on without processes that are lost, and takes in those that come:

    horovodrun -np 2 --min-np 1 python examples/torch_elastic_digits.py

The lines marked "elastic" are what that needs in addition to data-parallel training.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torch_digits import load_data, make_model

import horovod.torch as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with Horovod, elastic")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--batches-per-commit", type=int, default=5, help="steps that a lost process costs at most")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train_set, test_set = load_data(args.seed)
    model = make_model()
    # No broadcast of the weights here: a process that comes later would wait in it alone. run() sends the state.
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    # elastic 1: knows what of the epoch is done, and deals out the rest to the ranks that there are
    sampler = hvd.elastic.ElasticSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    # elastic 2: what all ranks go back to, and what newcomers get
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)

    def follow_the_size() -> None:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size()

    # elastic 3: called in each new world
    state.register_reset_callbacks([follow_the_size])

    @hvd.elastic.run  # elastic 4: where processes were lost or have come, joins the next world and calls this again
    def train(state: hvd.elastic.TorchState) -> None:
        while state.epoch < args.epochs:
            for images, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()
                sampler.record_batch(state.batch, len(images))
                state.batch += 1
                if state.batch % args.batches_per_commit == 0:
                    state.commit()  # elastic 5: a lost process costs no more than the steps since then
            state.epoch += 1
            if hvd.rank() == 0:
                print(f"epoch {state.epoch} ends with processes: {hvd.size()}", flush=True)
            sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
    accuracy = hvd.allreduce(_accuracy(model, *test_set.tensors), name="accuracy")
    if hvd.rank() == 0:
        print(f"test accuracy: {accuracy.item():.3f}")


def _accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return (model(images).argmax(1) == labels).double().mean()


if __name__ == "__main__":
    main()
