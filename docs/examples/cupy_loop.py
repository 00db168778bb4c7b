"""A training loop in CuPy: batches lie on the GPU when their turn comes, and the products run there.

python docs/examples/cupy_loop.py [--steps 300]    # without CuPy or a GPU it says what is missing
"""

import argparse
from typing import Any

import numpy as np

import agnoload


class Waves(agnoload.Dataset):
    """Spectra of noisy sines of one of eight frequencies, which the network learns to tell apart."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        rng = agnoload.sample_rng()
        label = index % 8
        wave = np.sin((np.arange(128) + rng.integers(128)) * (label + 1) / 10) + rng.normal(scale=0.5, size=128)
        return {"spectrum": np.abs(np.fft.rfft(wave)).astype(np.float32), "label": np.int32(label)}


def probabilities(cupy: Any, weights: Any, spectrum: Any) -> Any:
    scores = spectrum @ weights
    powers = cupy.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tell waves apart on a GPU.")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()

    try:
        loader = agnoload.DataLoader(
            Waves(), 64, shuffle=True, num_workers=2, seed=0, backend="cupy", device="cuda:0", pin_memory=True
        )
    except agnoload.BackendUnavailable as error:
        print(error)
        return

    import cupy

    with loader, cupy.cuda.Device(0):
        weights = cupy.zeros((65, 8), cupy.float32)
        right = cupy.zeros((), cupy.int64)  # counted on the GPU: the loop never waits for it
        seen = 0
        for step, batch in enumerate(loader.steps(options.steps)):  # across epochs, without a gap
            guess = probabilities(cupy, weights, batch["spectrum"])
            if step >= options.steps // 2:
                right += (guess.argmax(axis=1) == batch["label"]).sum()
                seen += len(guess)
            wrong = guess - cupy.eye(8, dtype=cupy.float32)[batch["label"]]
            weights -= 0.002 / len(guess) * (batch["spectrum"].T @ wrong)
    print(f"accuracy: {int(right) / seen:.3f}")


if __name__ == "__main__":
    main()
