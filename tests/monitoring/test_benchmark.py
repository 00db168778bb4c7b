"""`loader.benchmark()`: two numbers and a word of advice, and nothing else changes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import agnoload
from agnoload import Benchmark


class Waiting(agnoload.Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        time.sleep(0.002)
        return index


def test_it_prints_two_numbers_and_advice(capsys: pytest.CaptureFixture[str]) -> None:
    with agnoload.DataLoader(Waiting(), 5, num_workers=2) as loader:
        print(found := loader.benchmark(seconds=0.5))  # once: the loader itself prints nothing
    lines = capsys.readouterr().out.splitlines()
    assert lines == str(found).splitlines()
    assert lines[0].startswith(f"the loader alone: {found.loader:,.1f} batches/s")
    assert lines[1].startswith(f"one batch again and again: {found.ceiling:,.1f} batches/s")
    assert "need not wait" in lines[2]
    assert "waited for data" in lines[2]
    assert 0 < found.loader < found.ceiling
    assert found.batch_size == 5
    assert found.first_batch > 0


def test_where_loading_takes_little_it_says_so() -> None:
    text = str(Benchmark(loader=800.0, ceiling=1000.0, first_batch=0.25, batch_size=32.0, verdict="none"))
    assert text == (
        "the loader alone: 800.0 batches/s, 25,600 samples/s, the first batch after 0.25 s\n"
        "one batch again and again: 1,000.0 batches/s, the most that it can give\n"
        "loading takes little: the rest is a batch's way to the user, and larger batches make it cheaper"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1, "worker_type": "thread", "batch_size": None},
        {"num_workers": 1, "persistent_workers": True},
        {"shuffle": True, "generator": np.random.default_rng(3)},
    ],
    ids=["a thread, single samples", "a kept process", "a generator"],
)
def test_the_loader_is_afterwards_what_it_was(options: dict[str, Any]) -> None:
    options = {"batch_size": 4, **options}
    generator = options.get("generator", np.random.default_rng(0))
    with agnoload.DataLoader(range(20), **options) as loader:
        running = iter(loader)
        first = next(running)
        state, stats, pools = loader.state_dict(), loader.stats(), loader._keeper.kept._pools[:]
        drawn = generator.bit_generator.state
        loader.benchmark(0.05)
        assert loader.state_dict() == state
        assert loader.stats() == stats
        assert loader._keeper.kept._pools == pools
        assert generator.bit_generator.state == drawn
        rest = list(running)
    assert len(rest) == len(loader) - 1
    assert sorted(np.ravel([*np.ravel(first), *np.concatenate([np.ravel(b) for b in rest])]).tolist()) == [*range(20)]


class Rotated:
    """Somebody's sampler: each epoch starts one index later."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter([(index + self.epoch) % 20 for index in range(20)])

    def __len__(self) -> int:
        return 20


def test_epochs_of_the_measurement_are_neither_begun_nor_set_on_a_sampler() -> None:
    sampler, twin = agnoload.RandomSampler(range(20), seed=3), agnoload.RandomSampler(range(20), seed=3)
    sampler.set_epoch(5)
    twin.set_epoch(5)
    loader = agnoload.DataLoader(range(20), 4, sampler=sampler)
    loader.benchmark(0.05)
    assert np.concatenate(list(loader)).tolist() == list(twin)
    loader = agnoload.DataLoader(range(20), 20, sampler=Rotated())
    assert next(iter(loader))[0] == 0
    loader.benchmark(0.05)
    assert next(iter(loader))[0] == 1


def test_a_stream_can_be_measured_and_the_ceiling_includes_what_the_backend_does() -> None:
    class Count(agnoload.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(20))

    class Slow(agnoload.Backend):
        name = "slow"
        converted = 0

        def convert(self, leaf: Any) -> Any:
            type(self).converted += 1
            return leaf

    loader = agnoload.DataLoader(Count(), 4, backend=Slow())
    found = loader.benchmark(0.05)
    assert min(found.loader, found.ceiling) > 0
    alone = sum(1 for _ in loader)
    assert Slow.converted > 2 * alone


def test_nothing_cannot_be_measured() -> None:
    with pytest.raises(agnoload.OptionError, match="at least one batch"):
        agnoload.DataLoader([]).benchmark(0.05)
