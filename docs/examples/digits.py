"""Handwritten digits, read by a small network: one way of loading, three frameworks.

    python docs/examples/digits.py --backend numpy    # or torch, or jax

Two worker processes shuffle and shift the images; the network is 64 -> 256 -> 10 and learns by Adam.
"""

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from tqdm import tqdm

import agnoload

Predict = Callable[[Any], Any]
"""Images in, the class of each out; arrays of the chosen framework."""

RATE, DECAY1, DECAY2, TINY = 4e-3, 0.9, 0.999, 1e-8


class Digits(agnoload.Dataset):
    """Images of 8 x 8 pixels in [0, 1] as 64 float32 values, and their labels."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, shift: bool) -> None:
        self.images = images
        self.labels = labels
        self.shift = shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int32]:
        image = self.images[index]
        if self.shift:  # by up to one pixel each way; the same draw whichever worker loads this sample
            down, right = agnoload.sample_rng().integers(0, 3, size=2)
            image = np.pad(image, 1)[down : down + 8, right : right + 8]
        return image.reshape(64), self.labels[index]


def load(backend: str, seed: int) -> tuple[agnoload.DataLoader, agnoload.DataLoader]:
    """The loaders for training and for testing; all that follows depends on the framework, this does not."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8)
    labels = labels.astype(np.int32)  # JAX has no int64 by default
    order = np.random.default_rng(seed).permutation(len(labels))
    train, test = order[:1400], order[1400:]
    training = agnoload.DataLoader(
        Digits(images[train], labels[train], shift=True),
        batch_size=50,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        seed=seed,
        backend=backend,
    )
    testing = agnoload.DataLoader(Digits(images[test], labels[test], shift=False), batch_size=397, backend=backend)
    return training, testing


def initial_weights(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    sizes = [(64, 256), (256,), (256, 10), (10,)]
    return [(rng.normal(size=s) * (len(s) == 2) * np.sqrt(2 / s[0])).astype(np.float32) for s in sizes]


def train_numpy(epochs: Iterable[int], training: Iterable[Any], seed: int) -> Predict:
    weights = initial_weights(seed)
    first = [np.zeros_like(w) for w in weights]
    second = [np.zeros_like(w) for w in weights]
    step = 0
    for _ in epochs:
        for x, y in training:
            w1, b1, w2, b2 = weights
            hidden = np.maximum(x @ w1 + b1, 0)
            logits = hidden @ w2 + b2
            shares = np.exp(logits - logits.max(1, keepdims=True))
            slope = (shares / shares.sum(1, keepdims=True) - np.eye(10, dtype=np.float32)[y]) / len(y)
            back = (slope @ w2.T) * (hidden > 0)
            step += 1
            for i, gradient in enumerate([x.T @ back, back.sum(0), hidden.T @ slope, slope.sum(0)]):
                first[i] += (1 - DECAY1) * (gradient - first[i])
                second[i] += (1 - DECAY2) * (gradient**2 - second[i])
                scale = np.sqrt(second[i] / (1 - DECAY2**step)) + TINY
                weights[i] -= RATE * first[i] / (1 - DECAY1**step) / scale
    w1, b1, w2, b2 = weights
    return lambda x: (np.maximum(x @ w1 + b1, 0) @ w2 + b2).argmax(1)


def train_torch(epochs: Iterable[int], training: Iterable[Any], seed: int) -> Predict:
    import torch

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for _ in epochs:
        for x, y in training:
            loss = torch.nn.functional.cross_entropy(model(x), y.long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return lambda x: model(x).argmax(1)


def train_jax(epochs: Iterable[int], training: Iterable[Any], seed: int) -> Predict:
    import jax
    import jax.numpy as jnp

    def logits(weights, x):
        w1, b1, w2, b2 = weights
        return jax.nn.relu(x @ w1 + b1) @ w2 + b2

    def loss(weights, x, y):
        return -jnp.take_along_axis(jax.nn.log_softmax(logits(weights, x)), y[:, None], axis=1).mean()

    @jax.jit
    def update(weights, first, second, step, x, y):
        gradients = jax.grad(loss)(weights, x, y)
        first = [m + (1 - DECAY1) * (g - m) for m, g in zip(first, gradients, strict=True)]
        second = [v + (1 - DECAY2) * (g**2 - v) for v, g in zip(second, gradients, strict=True)]
        scales = [jnp.sqrt(v / (1 - DECAY2**step)) + TINY for v in second]
        steps = [RATE * m / (1 - DECAY1**step) / s for m, s in zip(first, scales, strict=True)]
        return [w - d for w, d in zip(weights, steps, strict=True)], first, second

    weights = [jnp.asarray(w) for w in initial_weights(seed)]
    first = second = [jnp.zeros_like(w) for w in weights]
    step = 0
    for _ in epochs:
        for x, y in training:
            step += 1
            weights, first, second = update(weights, first, second, float(step), x, y)
    return lambda x: logits(weights, x).argmax(1)


TRAIN = {"numpy": train_numpy, "torch": train_torch, "jax": train_jax}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on the digits of scikit-learn.")
    parser.add_argument("--backend", choices=TRAIN, default="numpy")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    training, testing = load(options.backend, options.seed)
    with training, testing:
        epochs = tqdm(range(options.epochs), desc=f"training with {options.backend}", unit="epoch")
        predict = TRAIN[options.backend](epochs, training, options.seed)
        right = [np.asarray(predict(x)) == np.asarray(y) for x, y in testing]
    print(f"accuracy: {np.concatenate(right).mean():.3f}")


if __name__ == "__main__":
    main()
