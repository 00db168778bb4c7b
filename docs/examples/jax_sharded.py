"""A JAX training loop over batches that are sharded over all devices.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python docs/examples/jax_sharded.py    # eight CPU devices
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import agnoload


class Circles(agnoload.Dataset):
    """Points of the plane; the label is 1 inside the unit circle."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        point = agnoload.sample_rng().uniform(-1.4, 1.4, size=2).astype(np.float32)
        return {"point": point, "label": np.float32(point @ point < 1)}


def predict(weights: dict[str, jax.Array], point: jax.Array) -> jax.Array:
    hidden = jnp.tanh(point @ weights["in"] + weights["bias"])
    return hidden @ weights["out"]


def loss(weights: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    logits = predict(weights, batch["point"])
    return jnp.mean(jnp.logaddexp(0, logits) - batch["label"] * logits)


@jax.jit
def update(weights, batch):
    gradients = jax.grad(loss)(weights, batch)
    return jax.tree.map(lambda w, g: w - 0.5 * g, weights, gradients)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn a circle on all devices.")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    mesh = Mesh(np.array(jax.devices()), ("data",))
    spread = NamedSharding(mesh, PartitionSpec("data"))  # a batch's rows over the devices
    rng = np.random.default_rng(0)
    weights = {"in": 3 * rng.normal(size=(2, 32)), "bias": rng.normal(size=32), "out": np.zeros(32)}
    everywhere = NamedSharding(mesh, PartitionSpec())
    weights = jax.device_put(jax.tree.map(np.float32, weights), everywhere)

    loader = agnoload.DataLoader(
        Circles(), 256, shuffle=True, drop_last=True, num_workers=2, seed=0, backend="jax", device=spread
    )
    with loader:
        for _ in range(options.epochs):
            for batch in loader:
                weights = update(weights, batch)
        right = [jnp.mean((predict(weights, b["point"]) > 0) == (b["label"] > 0)) for b in loader]
    print(f"{len(jax.devices())} devices, {len(batch['point'].addressable_shards)} shards a batch")
    print(f"accuracy: {np.mean(right):.3f}")


if __name__ == "__main__":
    main()
