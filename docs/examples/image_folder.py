"""A folder of images, a class in each of its folders, augmented with Pillow, and either loader.

python docs/examples/image_folder.py FOLDER --loader agnoload    # or torch: the same loss with --plain
"""

import argparse
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import agnoload


class ImageFolder:
    """`FOLDER/CLASS/*`, in any format that Pillow reads, as ((3, 32, 32) float32 in [0, 1], number of the class)."""

    def __init__(self, folder: Path, augment: bool) -> None:
        self.augment = augment
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files = [(p, k) for k, name in enumerate(self.classes) for p in sorted((folder / name).iterdir())]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        path, label = self.files[index]
        with Image.open(path) as file:
            image = file.convert("RGB").resize((32, 32))
        if self.augment:
            if random.random() < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            image = image.rotate(random.uniform(-10, 10))
        return np.asarray(image, np.float32).transpose(2, 0, 1) / 255, label


def main() -> None:
    parser = argparse.ArgumentParser(description="Tell the classes of a folder of images apart.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--loader", choices=["agnoload", "torch"], default="agnoload")
    parser.add_argument("--plain", action="store_true", help="no augmentation")
    options = parser.parse_args()
    dataset = ImageFolder(options.folder, augment=not options.plain)
    if not len(dataset):
        parser.error(f"{options.folder} must have a folder of images for each class")
    order = np.random.default_rng(0).permutation(len(dataset)).tolist()
    if options.loader == "torch":
        loader = torch.utils.data.DataLoader(dataset, batch_size=16, sampler=order, num_workers=2)
    else:
        loader = agnoload.DataLoader(dataset, batch_size=16, sampler=order, num_workers=2, backend="torch")

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 5, stride=2),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(128, len(dataset.classes)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(5):
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"loss: {loss.item():.6f}")


if __name__ == "__main__":
    main()
