"""Two heads on one trunk, each head trained by half of the processes; on one process or on many:

    python examples/torch_process_sets.py
    horovodrun -np 2 python examples/torch_process_sets.py
    horovodrun -np 4 python examples/torch_process_sets.py

One head tells which of the ten digits an image shows, the other whether it is odd. A process holds the trunk and one of
the heads (model parallelism). Gradients of the trunk are averaged over all processes, those of a head over those that
hold it, which are a process set: a group that runs collectives among itself while others run theirs. A process that is
alone holds both heads.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torch_digits import load_data
from tqdm import tqdm

import horovod.torch as hvd

TASKS = {"digit": 10, "odd": 2}  # classes


def labels_of(task: str, digits: torch.Tensor) -> torch.Tensor:
    return digits if task == "digit" else digits % 2


def make_teams() -> dict[str, hvd.ProcessSet]:
    """The processes that hold the head of each task. All processes call it, and all add the same sets."""
    if hvd.size() == 1:
        return dict.fromkeys(TASKS, hvd.global_process_set)
    return {task: hvd.add_process_set(range(first, hvd.size(), 2)) for first, task in enumerate(TASKS)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Process sets with Horovod")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init(process_sets="dynamic")  # Horovod 1: join the other processes; sets are added later
    torch.set_num_threads(1)  # Horovod 2: processes of one host share its cores (on GPUs: torch.cuda.set_device)
    torch.manual_seed(args.seed)

    train, test = load_data(args.seed)
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    teams = {task: team for task, team in make_teams().items() if team.included()}  # of this process: one, or both
    trunk = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU()
    )
    heads = nn.ModuleDict({task: nn.Linear(64, TASKS[task]) for task in teams})

    # Horovod 3: N processes make one batch that is N times as large, so they take larger steps
    optimizer = torch.optim.SGD(trunk.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    # Horovod 4: average the gradients, of the trunk over all processes ...
    optimizers = [hvd.DistributedOptimizer(optimizer, named_parameters=trunk.named_parameters(prefix="trunk"))]
    # Horovod 5: start from the same weights and optimizer state
    hvd.broadcast_parameters(trunk.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizers[0], root_rank=0)
    for task, team in teams.items():
        head = heads[task]
        optimizer = torch.optim.SGD(head.parameters(), lr=args.lr * team.size(), momentum=0.9)
        # ... and of the head over its team, which also starts from the same weights
        optimizers.append(hvd.DistributedOptimizer(optimizer, head.named_parameters(prefix=task), process_set=team))
        for name, parameter in head.named_parameters(prefix=task):
            hvd.broadcast_(parameter.data, root_rank=team.ranks[0], name=name, process_set=team)

    for epoch in tqdm(range(args.epochs), unit="epoch", disable=hvd.rank() != 0):
        sampler.set_epoch(epoch)
        for images, digits in loader:
            for optimizer in optimizers:
                optimizer.zero_grad()
            features = trunk(images)
            losses = [F.cross_entropy(heads[task](features), labels_of(task, digits)) for task in teams]
            (sum(losses) / len(losses)).backward()
            for optimizer in optimizers:
                optimizer.step()

    images, digits = test.tensors
    with torch.no_grad():
        features = trunk(images)
        found = {
            task: (heads[task](features).argmax(1) == labels_of(task, digits)).double().mean().item() for task in teams
        }
    accuracies = {
        task: accuracy for part in hvd.allgather_object(found, name="found") for task, accuracy in part.items()
    }
    if hvd.rank() == 0:
        print("test accuracy: " + ", ".join(f"{task} {accuracies[task]:.3f}" for task in TASKS))


if __name__ == "__main__":
    main()
