"""JAX through the loader: one CPU device here, and in fresh interpreters eight of them and two processes."""

from __future__ import annotations

import os
import socket
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

import agnoload
from agnoload import AgnoloadWarning, DataLoader

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def jax() -> Any:
    return pytest.importorskip("jax")


class Wide(agnoload.Dataset):
    """A number that only 64 bits hold."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return {"wide": 2**40 + 7, "x": np.float32(index), "framework": "jax" in sys.modules}


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"device": "cpu:0"}])
def test_what_narrows_is_said_once_a_loader_by_the_loader_alone(jax: Any, options: dict[str, Any]) -> None:
    for _ in range(2):
        with DataLoader(Wide(), 2, backend="jax", **options) as loader:
            with pytest.warns(AgnoloadWarning, match=r"int64.*int32") as caught:
                first = [batch for _ in range(2) for batch in loader]
            assert len(caught) == 1
            assert "worker" not in str(caught[0].message)
        assert all(batch["wide"].dtype == np.int32 and batch["wide"].tolist() == [7, 7] for batch in first)
        if "num_workers" in options:
            assert not any(leaf for batch in first for leaf in batch["framework"].tolist())
    with pytest.raises(AgnoloadWarning, match="int64") as error:
        next(iter(DataLoader(Wide(), 2, backend="jax")))
    assert error.value.__notes__ == ["at the leaf wide", "while batch 0 of epoch 0 was handed to the backend"]


class Jaxen(agnoload.Dataset):
    """Makes its samples with JAX, and keeps some of its arrays."""

    def __init__(self) -> None:
        import jax.numpy as jnp

        self.table = jnp.arange(80, dtype=jnp.float32).reshape(20, 4)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        import jax
        import jax.numpy as jnp

        here = jax.devices()[0].platform, os.environ.get("JAX_PLATFORMS", ""), agnoload.get_worker_info() is not None
        leaves = {"row": self.table[index] * 2, "half": jnp.full(3, index, jnp.bfloat16), "count": jnp.int32(index)}
        return leaves | {"here": here}


def test_a_dataset_that_uses_jax_gives_the_same_in_workers_and_takes_no_device_there(jax: Any) -> None:
    dataset = Jaxen()
    alone = list(DataLoader(dataset, 5, backend="jax"))
    with DataLoader(dataset, 5, backend="jax", num_workers=1) as loader:
        batches = list(loader)
    for number, (one, other) in enumerate(zip(alone, batches, strict=True)):
        for name, dtype in {"row": "float32", "half": "bfloat16", "count": "int32"}.items():
            assert isinstance(other[name], jax.Array)
            assert other[name].dtype.name == dtype
            assert (one[name] == other[name]).all()
        assert other["count"].tolist() == [*range(5 * number, 5 * number + 5)]
        platforms, asked, in_worker = other["here"]
        assert platforms == asked == ["cpu"] * 5
        assert in_worker.all()
    for batch in DataLoader(dataset, 5, backend="numpy"):
        assert type(batch["row"]) is np.ndarray
        assert batch["half"].dtype.name == "bfloat16"


class Importing(agnoload.Dataset):
    """Imports JAX and asks it for nothing; the batch says whether somebody made JAX take its devices."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        import jax  # noqa: F401
        from jax._src.xla_bridge import backends_are_initialized

        return {"x": np.full(3, index, np.float32), "taken": backends_are_initialized()}


def test_a_worker_whose_dataset_imports_jax_does_not_make_it_take_devices(jax: Any) -> None:
    with DataLoader(Importing(), 2, backend="jax", num_workers=1) as loader:
        batches = list(loader)
    assert [batch["taken"].tolist() for batch in batches] == [[False, False]] * 2
    assert [batch["x"][:, 0].tolist() for batch in batches] == [[0, 1], [2, 3]]


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Scene:
    points: Point
    weight: Any
    name: str = "scene"


class Scenes(agnoload.Dataset):
    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> Scene:
        return Scene(Point(np.full((16, 16), index, np.float32), np.int32(index)), np.float32(0.5), f"scene {index}")


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "device": "cpu:0"}])
def test_a_step_takes_batches_of_the_samples_own_types_and_may_donate_them(jax: Any, options: dict[str, Any]) -> None:
    if not hasattr(Scene, "registered"):
        jax.tree_util.register_dataclass(Scene, data_fields=["points", "weight"], meta_fields=["name"])
        Scene.registered = True  # type: ignore[attr-defined]
    loss = jax.jit(jax.value_and_grad(lambda w, points, weight: (w * points.x).sum() + weight.sum() + points.y.sum()))
    step = jax.jit(lambda state, x: (state + x.sum(), x * 2), donate_argnums=(0, 1))
    state, kept = jax.numpy.zeros(()), []
    with DataLoader(Scenes(), 4, backend="jax", **options) as loader:
        for number, batch in enumerate(loader):
            assert type(batch) is Scene
            assert type(batch.points) is Point
            assert batch.name == [f"scene {n}" for n in range(4 * number, 4 * number + 4)]
            assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch))
            value, slope = loss(2.0, batch.points, batch.weight)
            total = sum(range(4 * number, 4 * number + 4))
            assert (float(value), float(slope)) == (513 * total + 2, 256 * total)
            state, twice = step(state, batch.points.x)
            kept.append((batch.points.y, twice))
    assert float(state) == 256 * sum(range(120))
    for number, (own, twice) in enumerate(kept):
        rows = np.arange(4 * number, 4 * number + 4)
        assert own.tolist() == rows.tolist()
        assert (np.asarray(twice) == 2 * rows[:, None, None]).all()


def test_jax_is_given_two_batches_ahead_and_a_batch_that_fits_is_silent(
    jax: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agnoload_jax import JaxBackend

    from agnoload.pools.inline import InlinePool

    class Spy(JaxBackend):
        ahead = 0

        def place(self, batch: Any, device: Any) -> Callable[[], Any]:
            self.ahead += 1
            finish = super().place(batch, device)

            def counted() -> Any:
                self.ahead -= 1
                return finish()

            return counted

    monkeypatch.setattr(InlinePool, "ready", lambda self: bool(self._requests))
    spy, seen = Spy(), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in DataLoader(Scenes(), 15, backend=spy, device="cpu:0"):
            assert isinstance(batch.points.x, jax.Array)
            seen.append(spy.ahead)
    assert seen == [2, 2, 2, 2, 2, 2, 1, 0]


EIGHT = """
    import gc
    import jax, jax.numpy as jnp, numpy as np, agnoload
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from agnoload.testing.backends import _Slots, check_backend
    assert jax.device_count() == 8
    total = jnp.ones(1) + 1  # JAX is in use before any worker starts

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    spread, everywhere, square = (NamedSharding(mesh, P(*axes)) for axes in (["data"], [], ["data", "model"]))
    check_backend("jax")
    check_backend("jax", "cpu:5")
    check_backend("jax", everywhere)

    # The slot is kept while any shard of the batch lives, and a step that donates its batch writes into no other field.
    slots = _Slots()
    backend = agnoload.get_backend("jax")
    device = backend.check(square)
    step = jax.jit(lambda state, x: (state + x, x - 1), donate_argnums=(0, 1))
    state = jax.device_put(jnp.zeros((8, 8)), square)
    for n in range(1, 11):
        batch = slots.lend(n)
        state, less = step(state, backend.place({"x": batch["x"]}, device)()["x"])
        assert (batch["y"] == n).all() and (np.asarray(less) == n - 1).all()
    assert (np.asarray(state) == 55).all()
    due = [(n, backend.place({"x": slots.lend(n)["x"]}, device)) for n in range(40)]
    del batch
    gc.collect()
    kept = [(n, finish()["x"]) for n, finish in due]
    for n, x in kept:
        assert x.sharding == square and (np.asarray(x) == n).all()
        assert [shard.data.shape for shard in x.addressable_shards] == [(2, 4)] * 8
    del due, x, less
    kept.clear(); gc.collect(); jax.block_until_ready(jnp.zeros(1) + 1); gc.collect()
    assert slots.held() == [], slots.held()

    class Rows(agnoload.Dataset):
        def __len__(self): return 72
        def __getitem__(self, i):
            return {"x": np.full((4, 6), i, np.float32), "y": np.int32(i), "name": f"row {i}"}

    weights = jax.device_put(jnp.ones((6, 8)), NamedSharding(mesh, P(None, "model")))
    step = jax.jit(lambda w, x: (x @ w).sum(), donate_argnums=1)
    for sharding in (spread, everywhere, jax.devices()[3], "cpu:5"):
        with agnoload.DataLoader(Rows(), 16, num_workers=1, drop_last=True, backend="jax", device=sharding) as loader:
            batches = list(loader)
        assert len(batches) == 4
        for n, batch in enumerate(batches):
            assert batch["y"].tolist() == list(range(16 * n, 16 * n + 16)), batch["y"]
            assert (np.asarray(batch["x"])[:, 0, 0] == np.arange(16 * n, 16 * n + 16)).all()
            assert batch["name"][3] == f"row {16 * n + 3}"
            if isinstance(sharding, NamedSharding):
                assert batch["x"].sharding == batch["y"].sharding == sharding
                want = 6 * 8 * 4 * sum(range(16 * n, 16 * n + 16))
                assert float(step(weights, batch["x"])) == want
            else:
                assert batch["x"].devices() == {sharding if sharding != "cpu:5" else jax.devices()[5]}

    # What does not divide fails in its turn, and says what to do.
    options = {"num_workers": 1, "collate_fn": np.float32, "backend": "jax", "device": spread}
    with agnoload.DataLoader(range(70), 32, **options) as loader:
        came = iter(loader)
        assert [next(came).shape for _ in range(2)] == [(32,), (32,)]
        try:
            next(came)
        except ValueError as error:
            assert any("(6,)" in note and "drop_last=True" in note for note in error.__notes__), error.__notes__
            assert error.__notes__[-1] == "while batch 2 of epoch 0 was handed to the backend", error.__notes__
        else:
            raise SystemExit("six rows went to four devices")

    # Without a device batches are not committed, and go with weights that lie on all of them.
    for batch in agnoload.DataLoader(Rows(), 16, drop_last=True, backend="jax"):
        assert float(step(weights, batch["x"])) == 6 * 8 * 4 * sum(batch["y"].tolist())
    print("ok")
"""


@pytest.mark.filterwarnings("default")
def test_batches_over_eight_devices_from_workers_that_start_after_jax(start: Any, ended: Any, jax: Any) -> None:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    assert ended(start(EIGHT, **flags, PYTHONWARNINGS="error")) == ["ok\n"]


HOST = """
    import sys
    import jax, numpy as np, agnoload
    from agnoload.backend import registry
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    rank, address = int(sys.argv[1]), sys.argv[2]
    backend = agnoload.get_backend("jax")
    assert backend.world() is None
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    assert backend.world() == registry.rank_and_world(agnoload.get_backend("numpy")) == (rank, 2)
    elsewhere = next(d for d in jax.devices() if d.process_index != rank)
    try:
        backend.check(elsewhere)
    except agnoload.OptionError as error:
        assert "must belong to this process" in str(error)
    else:
        raise SystemExit("another process's device was taken")

    class Rows(agnoload.Dataset):
        def __len__(self): return 70
        def __getitem__(self, i):
            info = agnoload.get_worker_info()
            draw = agnoload.sample_rng().integers(1 << 30, dtype=np.int32)
            return {"y": np.int32(i), "draw": draw, "rank": np.int32(info.rank), "world": np.int32(info.world_size),
                    "name": f"{info.rank}"}

    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
    sampler = agnoload.DistributedSampler(Rows(), tail="drop")
    loader = agnoload.DataLoader(Rows(), 8, sampler=sampler, num_workers=1, drop_last=True, seed=7, backend="jax",
                                 device=everywhere)
    assert (sampler.rank, sampler.num_replicas) == (rank, 2)
    total = jax.jit(lambda y: y.sum())
    with loader:
        for epoch in range(2):
            for batch in loader:
                y = batch["y"]
                assert y.shape == (16,) and not y.is_fully_addressable and y.sharding == everywhere
                mine = [(int(i), int(d)) for i, d in zip(*(
                    np.concatenate([s.data for s in batch[k].addressable_shards]) for k in ("y", "draw")))]
                assert {int(r) for s in batch["rank"].addressable_shards for r in s.data} == {rank}
                assert {int(w) for s in batch["world"].addressable_shards for w in s.data} == {2}
                assert batch["name"] == [f"{rank}"] * 8
                print("share", epoch, int(total(y)), mine, flush=True)  # other lines are the network's
    jax.distributed.shutdown()
"""


class Drawn(agnoload.Dataset):
    def __len__(self) -> int:
        return 70

    def __getitem__(self, index: int) -> Any:
        return index, agnoload.sample_rng().integers(1 << 30, dtype=np.int32)


def test_two_processes_load_their_shares_of_global_arrays(start: Any, ended: Any, jax: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    outputs = ended(*[start(HOST, str(rank), address, **flags, PYTHONWARNINGS="error") for rank in range(2)])
    shares = [[line.split(maxsplit=3)[1:] for line in out.splitlines() if line.startswith("share")] for out in outputs]
    assert [len(share) for share in shares] == [8, 8]
    alone = iter(DataLoader(Drawn(), 16, shuffle=True, seed=7, drop_last=True).steps(8))
    for number, (one, other) in enumerate(zip(*shares, strict=True)):
        indices, draws = (leaf.tolist() for leaf in next(alone))
        pairs = list(zip(indices, draws, strict=True))
        assert one == [str(number // 4), str(sum(indices)), repr(pairs[0::2])]  # as one process would, draws too
        assert other == [str(number // 4), str(sum(indices)), repr(pairs[1::2])]
