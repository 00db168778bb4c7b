"""No two keys share a stream of random numbers, and equal keys give equal numbers in any interpreter."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload.global_rng import GlobalRng
from agnoload.seeding import Purpose, Rewinder, SampleContext, generator

SEEDS = (0, 1, 2, 2**32, 2**63 - 1, 2**100)
EPOCHS = (0, 1, 2, 2**31, 2**32, 2**63 - 1)
RANKS = (0, 1, 2, 255)


def test_no_two_samples_and_no_two_requests_share_their_first_128_bits():
    context, process = SampleContext(Rewinder()), GlobalRng()
    samples, numpy, python, count = set(), set(), set(), 0
    restore = process.save()
    try:
        for key in product(SEEDS, EPOCHS, RANKS, [*range(20), 2**16, 2**31, 2**32, 2**48, 2**63 - 1]):
            seed, epoch, rank, position = key
            context.at(seed, epoch, position, 1, rank)
            for context.purpose in (Purpose.SAMPLE, Purpose.COLLATE):
                samples.add(context.rng().bytes(16))
            context.rewinder.rewind(seed, epoch, Purpose.GLOBALS, position, rank)
            process.seed(context.rewinder.philox)
            numpy.add(np.random.bytes(16))
            python.add(random.randbytes(16))
            count += 1
    finally:
        restore()
    assert count > 3_000
    assert len(samples) == 2 * count
    assert len(numpy | python | samples) == 4 * count


WORDS = st.integers(0, (1 << 63) - 1)
KEYS = st.tuples(st.integers(0, 1 << 128), WORDS, st.sampled_from(Purpose), WORDS, st.integers(0, (1 << 16) - 1))


@settings(max_examples=50)
@given(KEYS, KEYS)
def test_keys_give_equal_numbers_where_they_are_equal_and_only_there(one, other):
    assert generator(*one).bytes(16) == generator(*one).bytes(16)
    rewinder = Rewinder()
    for changed in (other, *(one[:n] + other[n : n + 1] + one[n + 1 :] for n in range(5))):
        equal = rewinder.rewind(*changed).bytes(16) == rewinder.rewind(*one).bytes(16)
        assert equal == (changed == one)


def test_neighbouring_streams_are_not_shifts_of_each_other():
    """A counter that ran from one key into the next would repeat the numbers of the next one."""
    context = SampleContext(Rewinder())
    seen = set()
    for position in range(50):
        context.at(7, 0, position, 1, 0)
        words = context.rng().integers(1 << 63, size=2_000).tolist()
        assert not seen & set(words)
        seen.update(words)


def test_neighbouring_draws_are_independent():
    """Of the first numbers of neighbouring samples, each bit is 1 half of the time, alone and against its neighbour."""
    context = SampleContext(Rewinder())
    words = np.empty(8_000, np.uint64)
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
for number, each in enumerate(options):
    with agnoload.DataLoader(Draws(), seed=11, num_workers=0 if number else WORKERS, **each) as loader:
        found += [batch.tobytes().hex() for _ in range(2) for batch in loader]
        found.append(json.dumps(loader.state_dict()))
print(json.dumps(found))
"""


@pytest.mark.slow
def test_two_fresh_interpreters_agree():
    outputs = []
    for hash_seed, workers in (("1", 0), ("2", 2)):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", SCRIPT.replace("WORKERS", str(workers))]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
        outputs.append(ran.stdout)
    assert outputs[0] == outputs[1]
