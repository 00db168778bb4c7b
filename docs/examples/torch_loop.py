"""A torch training loop whose data comes from agnoload: stop it when you like, it goes on where it stood.

python docs/examples/torch_loop.py CHECKPOINT [--steps 200]
"""

import argparse
from pathlib import Path

import numpy as np
import torch

import agnoload


class Waves(agnoload.Dataset):
    """Noisy sines of one of eight frequencies, which the network learns to tell apart."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> dict[str, np.ndarray | int]:
        rng = agnoload.sample_rng()
        label = index % 8
        wave = np.sin((np.arange(128) + rng.integers(128)) * (label + 1) / 10) + rng.normal(scale=0.5, size=128)
        return {"wave": wave.astype(np.float32), "label": label}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on made-up waves, with a checkpoint of model and data.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=200, help="how many more to take")
    parser.add_argument("--device", help='for example "cuda"; without it, the CPU')
    options = parser.parse_args()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(options.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = agnoload.DataLoader(
        Waves(),
        batch_size=64,
        shuffle=True,
        num_workers=2,
        seed=0,
        backend="torch",
        device=options.device,
        pin_memory=options.device is not None,
    )
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["data"])

    with loader:
        for batch in loader.steps(options.steps):  # across epochs, without a gap
            loss = torch.nn.functional.cross_entropy(model(batch["wave"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": loader.state_dict()}
        torch.save(saved, options.checkpoint)
    print(f"epoch {saved['data']['epoch']}, loss: {loss.item():.6f}")


if __name__ == "__main__":
    main()
