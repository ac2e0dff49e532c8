"""Gradient accumulation, mixed precision and gradient clipping together, on one process or on many:

    python examples/torch_accumulation_amp.py
    horovodrun -np 2 python examples/torch_accumulation_amp.py

The model and the data are those of torch_digits.py. A step has several backward passes, whose gradients add up on each
process and travel once (backward_passes_per_step). The forward passes compute in bfloat16 (autocast), the loss is
multiplied by a large factor, so that small gradients do not vanish (GradScaler, for CPUs since PyTorch 2.3), and the
averaged gradient must not be longer than a limit (clipping). For the last two `synchronize` comes before `step`:
processes that looked at their own gradients would each come to a decision of its own.
"""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torch_digits import load_data, make_model
from tqdm import tqdm

import horovod.torch as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description="Gradient accumulation and mixed precision with Horovod")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=8, help="images in a backward pass of one process")
    parser.add_argument("--passes", type=int, default=4, help="backward passes in a step (default: %(default)s)")
    parser.add_argument("--max-norm", type=float, default=1.0, help="of the gradient of a step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()  # Horovod 1: join the other processes
    torch.set_num_threads(1)  # Horovod 2: processes of one host share its cores (on GPUs: torch.cuda.set_device)
    torch.manual_seed(args.seed)

    train, test = load_data(args.seed)
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    model = make_model()
    # Horovod 3: N processes make one batch that is N times as large, so they take larger steps
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    # Horovod 4: average the gradients, each time after so many backward passes
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=args.passes
    )
    # Horovod 5: start from the same weights and optimizer state
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    # bfloat16 has the range of float32 and could do without; float16 could not.
    scaler = torch.amp.GradScaler("cpu")

    passes = steps = clipped = 0
    for epoch in tqdm(range(args.epochs), unit="epoch", disable=hvd.rank() != 0):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            with torch.amp.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss / args.passes).backward()  # the passes' gradients are summed up, so this makes their mean
            passes += 1
            if passes % args.passes:
                continue
            optimizer.synchronize()  # from here on all processes see the same gradients ...
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
            with optimizer.skip_synchronize():  # ... which must not be averaged again
                scaler.step(optimizer)  # skips the step where gradients have overflowed, on all processes alike
            scaler.update()
            optimizer.zero_grad()
            steps += 1
            clipped += int(norm > args.max_norm)

    model.eval()
    images, labels = test.tensors
    with torch.no_grad(), torch.amp.autocast("cpu", dtype=torch.bfloat16):
        correct = (model(images).argmax(1) == labels).double().mean()
    accuracy = hvd.allreduce(correct, name="accuracy")
    if hvd.rank() == 0:
        print(f"test accuracy: {accuracy.item():.3f} after {steps} steps, {clipped} of them with a clipped gradient")


if __name__ == "__main__":
    main()
