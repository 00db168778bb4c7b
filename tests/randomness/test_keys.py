"""No two keys share a stream of random numbers, and equal keys give equal numbers in any interpreter."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from itertools import product

import numpy as np
import pytest

from agnoload.global_rng import GlobalRng
from agnoload.seeding import Purpose, Rewinder, SampleContext, generator

SEEDS = (0, 1, 2, 2**32, 2**63 - 1, 2**100)
EPOCHS = (0, 1, 2, 2**31, 2**32, 2**63 - 1)
RANKS = (0, 1, 2, 255)


def contexts(positions):
    context = SampleContext(Rewinder())
    for seed, epoch, rank, position in product(SEEDS, EPOCHS, RANKS, positions):
        context.at(seed, epoch, position, 1, rank)
        yield context


@pytest.mark.slow
def test_a_hundred_thousand_samples_share_no_first_128_bits():
    positions = [*range(690), 2**16, 2**31, 2**32, 2**48, 2**63 - 1]
    seen = set()
    count = 0
    for context in contexts(positions):
        for purpose in (Purpose.SAMPLE, Purpose.COLLATE) if context.first < 5 else (Purpose.SAMPLE,):
            context.purpose = purpose
            seen.add(context.rng().bytes(16))
            count += 1
    assert len(seen) == count > 100_000


def test_no_two_requests_give_the_global_generators_the_same_first_128_bits():
    process = GlobalRng()
    restore = process.save()
    numpy, python, count = set(), set(), 0
    try:
        for context in contexts([*range(20), 2**32, 2**63 - 1]):
            key = context.seed, context.epoch, Purpose.GLOBALS, context.first, context.rank
            context.rewinder.rewind(*key)
            process.seed(context.rewinder.philox)
            numpy.add(np.random.bytes(16))
            python.add(random.randbytes(16))
            count += 1
    finally:
        restore()
    assert len(numpy) == len(python) == len(numpy | python) / 2 == count > 3_000


def test_neighbouring_streams_are_not_shifts_of_each_other():
    """A counter that ran from one key into the next would repeat the numbers of the next one."""
    context = SampleContext(Rewinder())
    seen = set()
    for position in range(50):
        context.at(7, 0, position, 1, 0)
        words = context.rng().integers(1 << 63, size=2_000).tolist()
        assert not seen & set(words)
        seen.update(words)


def test_purposes_do_not_share_a_stream():
    found = {generator(5, 1, purpose, 2, 3).bytes(16) for purpose in Purpose}
    assert len(found) == len(Purpose)


def test_neighbouring_draws_are_independent():
    """Of the first numbers of neighbouring samples, each bit is 1 half of the time, alone and against its neighbour."""
    context = SampleContext(Rewinder())
    words = np.empty(20_000, np.uint64)
    for position in range(len(words)):
        context.at(3, 0, position, 1, 0)
        words[position] = int.from_bytes(context.rng().bytes(8), "little")
    bits = np.unpackbits(words.view(np.uint8)).reshape(len(words), 64)
    spread = 5 * 0.5 / np.sqrt(len(words))
    assert (abs(bits.mean(0) - 0.5) < spread).all()
    assert (abs((bits[1:] ^ bits[:-1]).mean(0) - 0.5) < spread).all()


SCRIPT = """
import json, random
import numpy as np
import agnoload

class Draws(agnoload.Dataset):
    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.by_name = {name: random.Random(1) for name in ("one", "two")}
    def __len__(self):
        return 40
    def __getitem__(self, index):
        own = [rng.getrandbits(53) for rng in self.by_name.values()]
        sources = agnoload.sample_rng(), np.random, random, self.rng
        return np.array([index, *(source.random() for source in sources), *own])

labels = ["b", "a", "c", "a"] * 10
options = [
    dict(batch_size=4, shuffle=True),
    dict(batch_size=4, sampler=agnoload.DistributedSampler(range(40), 2, 1)),
    dict(batch_sampler=agnoload.BalancedBatchSampler(labels, 6)),
    dict(batch_sampler=agnoload.ClassUniformBatchSampler(labels, 2, 2)),
    dict(batch_sampler=agnoload.BucketBatchSampler(range(1, 41), max_tokens=80)),
]
found = []
for each in options:
    with agnoload.DataLoader(Draws(), seed=11, num_workers=WORKERS, **each) as loader:
        found += [batch.tobytes().hex() for _ in range(2) for batch in loader]
        found.append(json.dumps(loader.state_dict()))
print(json.dumps(found))
"""


def test_two_fresh_interpreters_agree():
    outputs = []
    for hash_seed, workers in (("1", 0), ("2", 2)):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        script = SCRIPT.replace("WORKERS", str(workers))
        ran = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        outputs.append(ran.stdout)
    assert outputs[0] == outputs[1]
