"""The digits of examples/torch_digits.py for test_compose.sh: says where it is, and which bits came out.

Each epoch also reduces a tensor with a name of its own, on which ranks agree by way of a coordinator: an epoch that
begins after the serving one was killed needs the other one.
"""

import hashlib
import json
import os
import sys
import time

import torch
import torch.nn.functional as F
from torch_digits import load_data, make_model

import horovod.torch as hvd

EPOCHS = int(os.environ.get("EPOCHS", "12"))
BATCH = 32


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    train, test = load_data(7)
    images, labels = train.tensors
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    longest_s = 0.0
    for epoch in range(EPOCHS):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))[hvd.rank() :: hvd.size()]
        for start in range(0, len(order) - BATCH + 1, BATCH):
            began = time.monotonic()
            chosen = order[start : start + BATCH]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            longest_s = max(longest_s, time.monotonic() - began)
        mean = float(hvd.allreduce(loss.detach(), name=f"loss.{epoch}"))
        tell("epoch", epoch=epoch, loss=mean)
    model.eval()
    with torch.no_grad():
        accuracy = float((model(test.tensors[0]).argmax(1) == test.tensors[1]).float().mean())
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()
    tell("done", accuracy=accuracy, sha256=digest, longest_step_s=round(longest_s, 3))
    hvd.shutdown()


def tell(event: str, **fields: object) -> None:
    """One line for whoever watches: rank 0's in the order in which things happen."""
    print(json.dumps({"event": event, "rank": hvd.rank(), **fields}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
