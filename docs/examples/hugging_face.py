"""A table of Hugging Face's `datasets`, mapped from the disk by every worker, a torch network, and either loader.

    python docs/examples/hugging_face.py FOLDER --loader agnoload    # or torch: the same loss

The table (178 wines of 13 measurements each, from scikit-learn) is written first where there is none.
"""

import argparse
from pathlib import Path

import datasets
import numpy as np
import torch
from sklearn.datasets import load_wine

import agnoload


def write_wines(folder: Path) -> None:
    numbers, labels = load_wine(return_X_y=True)
    numbers = (numbers - numbers.mean(0)) / numbers.std(0)
    datasets.Dataset.from_dict({"numbers": numbers.astype(np.float32), "label": labels}).save_to_disk(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tell wines apart that a table holds.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--loader", choices=["agnoload", "torch"], default="agnoload")
    options = parser.parse_args()
    datasets.disable_progress_bars()
    if not options.folder.exists():
        write_wines(options.folder)
    table = datasets.load_from_disk(options.folder)  # a sample is {"numbers": 13 numbers, "label": a number}
    order = np.random.default_rng(0).permutation(len(table)).tolist()
    how = {"batch_size": 32, "sampler": order, "num_workers": 2, "persistent_workers": True}
    if options.loader == "torch":
        loader = torch.utils.data.DataLoader(table.with_format("torch"), **how)
    else:  # with_format("torch") works as well; then the workers import torch, too
        loader = agnoload.DataLoader(table.with_format("numpy"), **how, backend="torch")

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(13, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(10):
        for batch in loader:
            loss = torch.nn.functional.cross_entropy(model(batch["numbers"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"loss: {loss.item():.6f}")


if __name__ == "__main__":
    main()
