"""Trains on a folder of images that has one subfolder for each class, with augmentation:

    python examples/torch_image_folder.py                            # draws images of three shapes first
    horovodrun -np 2 python examples/torch_image_folder.py
    horovodrun -np 8 python examples/torch_image_folder.py --data /datasets/flowers --epochs 30

The folder is as torchvision's ImageFolder expects it: train/CLASS/*.png and test/CLASS/*.png, or .jpg.
"""

import argparse
import math
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd

SIZE = 32
CORNERS = {"triangle": 3, "square": 4, "disc": 40}


class ImageFolder(Dataset):
    """(3, 32, 32) float32 and the number of its class, from the files of a folder."""

    def __init__(self, folder: Path, augment: bool) -> None:
        self.augment = augment
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files = [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in sorted((folder / name).iterdir())
            if path.suffix in (".png", ".jpg")
        ]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[place]
        with Image.open(path) as file:
            pixels = np.array(file.convert("RGB").resize((SIZE, SIZE)), dtype=np.float32) / 255
        image = torch.from_numpy(pixels).permute(2, 0, 1)
        return (self._augmented(image) if self.augment else image), label

    @staticmethod
    def _augmented(image: torch.Tensor) -> torch.Tensor:
        """A random crop of the image with a border around it, mirrored half of the time, darker or brighter."""
        padded = F.pad(image, (4, 4, 4, 4), mode="replicate")
        down, right = torch.randint(9, (2,)).tolist()
        crop = padded[:, down : down + SIZE, right : right + SIZE]
        crop = crop.flip(2) if torch.rand(()) < 0.5 else crop
        return (crop * (0.8 + 0.4 * torch.rand(()))).clamp(0, 1)


def draw_images(folder: Path, for_each_class: int, chance: random.Random) -> None:
    for name, corners in CORNERS.items():
        (folder / name).mkdir(parents=True)
        for number in range(for_each_class):
            dark, bright = (tuple(chance.randrange(*span) for _ in "rgb") for span in ((0, 100), (150, 256)))
            image = Image.new("RGB", (SIZE, SIZE), dark)
            circle = (chance.randrange(13, 20), chance.randrange(13, 20), chance.randrange(8, 12))
            ImageDraw.Draw(image).regular_polygon(circle, corners, chance.randrange(-15, 16), fill=bright)
            image.save(folder / name / f"{number}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description="A folder of images with Horovod")
    parser.add_argument("--data", type=Path, help="folder with train/ and test/; default: one that it draws")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of one process")
    parser.add_argument("--workers", type=int, default=1, help="processes that read images for each rank")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()
    device = torch.device("cpu")
    if torch.cuda.is_available():  # a process that sees one GPU only, as with --pin-gpus, takes that one
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.set_num_threads(1)  # processes of one host share its cores
    with tempfile.TemporaryDirectory() as own:
        # Every host has its own files: its first process draws them, and tells the others where.
        folders = hvd.allgather_object(own, name="folders")
        data = args.data or Path(folders[hvd.rank() - hvd.local_rank()])
        if args.data is None and hvd.local_rank() == 0:
            chance = random.Random(args.seed)  # the same files on every host
            draw_images(data / "train", 120, chance)
            draw_images(data / "test", 30, chance)
        hvd.barrier()
        train, test = ImageFolder(data / "train", augment=True), ImageFolder(data / "test", augment=False)
        accuracy = learn(train, test, args, device)
        hvd.barrier()  # the files stay until all have read them
    if hvd.rank() == 0:
        print(f"test accuracy: {accuracy:.3f} on {len(test)} images of {len(test.classes)} classes")


def learn(train: ImageFolder, test: ImageFolder, args: argparse.Namespace, device: torch.device) -> float:
    torch.manual_seed(args.seed + hvd.rank())  # no two ranks augment alike; the broadcast makes weights equal
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(
        train, args.batch_size, sampler=sampler, num_workers=args.workers, persistent_workers=args.workers > 0
    )
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, len(train.classes))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr * math.sqrt(hvd.size()))
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # another order, and another part of the files for each rank
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # the statistics of batch normalization of one rank
    model.eval()
    # Ranks may have different numbers of test images, so the sum is of counts. DistributedSampler would repeat images.
    share = torch.utils.data.Subset(test, range(hvd.rank(), len(test), hvd.size()))
    counts = torch.zeros(2)
    with torch.no_grad():
        for images, labels in DataLoader(share, batch_size=64):
            right = (model(images.to(device)).argmax(1).cpu() == labels).sum()
            counts += torch.tensor([right, len(labels)])
    right, total = hvd.allreduce(counts, op=hvd.Sum, name="right and all").tolist()
    return right / total


if __name__ == "__main__":
    main()
