"""A generative adversarial network: two models, two optimizers, and each step of one goes through the other.

    python examples/torch_gan.py
    horovodrun -np 2 python examples/torch_gan.py

The data are points in the plane around eight centres on a circle, a common test for a generator that forgets a part
of the data (https://arxiv.org/abs/1611.02163). Each model has its own DistributedOptimizer.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

import horovod.torch as hvd

NOISE, CENTRES, SPREAD = 8, 8, 0.1


def centres() -> torch.Tensor:
    angles = torch.arange(CENTRES) * (2 * math.pi / CENTRES)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def real_points(count: int) -> torch.Tensor:
    return centres()[torch.randint(CENTRES, (count,))] + SPREAD * torch.randn(count, 2)


def make_model(inputs: int, outputs: int) -> nn.Module:
    hidden = [nn.Linear(inputs, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(128, outputs))


def distributed(model: nn.Module, name: str, lr: float) -> torch.optim.Optimizer:
    """Both models have parameters of equal names. The prefix tells them apart in messages."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.5, 0.99))
    named = [(f"{name}.{parameter}", value) for parameter, value in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description="A GAN with Horovod")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=128, help="points in a step of one process")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()
    device = torch.device("cpu")
    if torch.cuda.is_available():  # a process that sees one GPU only, as with --pin-gpus, takes that one
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.set_num_threads(1)  # processes of one host share its cores
    torch.manual_seed(args.seed + hvd.rank())  # each rank has its own noise and points

    generator, critic = make_model(NOISE, 2).to(device), make_model(2, 1).to(device)
    generator_steps, critic_steps = distributed(generator, "generator", args.lr), distributed(critic, "critic", args.lr)

    def noise(count: int) -> torch.Tensor:
        return torch.randn(count, NOISE).to(device)

    for _ in range(args.steps):
        # The critic: real points above made ones. detach() keeps the generator's gradients out of this step.
        real, made = real_points(args.batch_size).to(device), generator(noise(args.batch_size)).detach()
        critic_steps.zero_grad()
        F.softplus(critic(made) - critic(real)).mean().backward()
        critic_steps.step()

        # The generator. The gradients pass through the critic, whose weights must not change: without
        # requires_grad_(False) its unused gradients would be averaged over the ranks as well.
        critic.requires_grad_(False)
        real, made = real_points(args.batch_size).to(device), generator(noise(args.batch_size))
        generator_steps.zero_grad()
        F.softplus(critic(real) - critic(made)).mean().backward()
        generator_steps.step()
        critic.requires_grad_(True)

    with torch.no_grad():
        distances = torch.cdist(generator(noise(1000)).cpu(), centres())
    nearest, where = distances.min(1)
    near = nearest < 4 * SPREAD
    found = torch.stack([(near & (where == centre)).sum() for centre in range(CENTRES)])
    found = hvd.allreduce(found, op=hvd.Sum, name="found")  # points of all ranks around each centre
    if hvd.rank() == 0:
        share = found.sum().item() / (1000 * hvd.size())
        covered = int((found > 10 * hvd.size()).sum())
        print(f"{share:.3f} of the points are near a centre; centres found: {covered} of {CENTRES}")


if __name__ == "__main__":
    main()
