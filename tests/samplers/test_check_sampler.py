"""`check_sampler` finds what is wrong with a sampler, and says it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from agnoload.samplers import RandomSampler, Sampler, SeededSampler
from agnoload.samplers.order import Order, from_array, indivisible
from agnoload.testing import check_sampler


class Good(Sampler[int]):
    def __init__(self, items=(3, 1, 2)):
        self.items = list(items)

    def __iter__(self):
        return iter(self.items)

    def __len__(self):
        return len(self.items)


class TooLong(Good):
    def __len__(self):
        return 4


class Forgetful(Good):
    def set_epoch(self, epoch):
        self.items = [epoch]


class Standing(Good):
    """Only `set_epoch` moves it on."""

    def set_epoch(self, epoch):
        self.items = self.items[:1] * epoch + [3, 1, 2]


class Leaky(Good):
    """Goes on where the last loop was left."""

    def __iter__(self):
        while self.items:
            yield self.items.pop()
        self.items = [3, 1, 2]


class Unpicklable(Good):
    def __init__(self):
        super().__init__()
        self.function = lambda: None


class Counting(Good):
    numbers = itertools.count()

    def __init__(self):
        super().__init__([next(self.numbers)])


class Ordered(SeededSampler[int]):
    def __len__(self):
        return 12

    def order(self, seed, epoch):
        return from_array(np.random.default_rng((seed, epoch)).permutation(12))


class Moody(Ordered):
    """Its order changes each time it is asked for."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def order(self, seed, epoch):
        self.asked += 1
        return from_array(np.roll(super().order(seed, epoch).indices(0, 12), self.asked))


class WrongStep(Ordered):
    def order(self, seed, epoch):
        indices = super().order(seed, epoch).indices(0, 12)
        return Order(12, lambda start, stop, step: indices[start:stop])


class WrongRest(Ordered):
    class Order(Order):
        def after(self, position):
            return super().after(position + 1) if position else self

    def order(self, seed, epoch):
        return self.Order(12, super().order(seed, epoch).whole)


class WrongPosition(SeededSampler[list[int]]):
    yields_batches = True

    def __len__(self):
        return 4

    def batches(self, seed, epoch):
        def left(skip):
            batches = indivisible(4, lambda number: np.arange(3) + 3 * number, lambda number: 3 * number, skip)
            return replace(batches, position=lambda number: number + skip, after=lambda position: left(position // 3))

        return left(0)


def test_good_samplers_pass():
    check_sampler(Good)
    check_sampler(lambda: Good([[3, 1], [2]]))
    check_sampler(Ordered)
    check_sampler(lambda: RandomSampler(range(3)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (TooLong, "3 items came in epoch 0, and len is 4"),
        (lambda: Good([1, np.int64(2)]), r"must be of type int, item 1 of epoch 0 holds np.int64\(2\)"),
        (lambda: Good([[1], [True]]), "item 1 of epoch 0 holds True"),
        (Forgetful, r"set_epoch\(0\) must bring epoch 0 back"),
        (Standing, "it repeated epoch 0: move on"),
        (Leaky, "after a loop that was left early"),
        (Counting, "two fresh samplers must yield the same"),
        (Moody, "must"),
        (WrongStep, "2 ranks in turns must yield what one does"),
        (WrongRest, "what is left after 1 item must be the rest"),
        (WrongPosition, "item 1 must be at 3, not 1"),
    ],
)
def test_what_is_wrong_is_named(make, words):
    with pytest.raises(AssertionError, match=words):
        check_sampler(make)


def test_a_sampler_that_cannot_be_pickled_fails():
    with pytest.raises(Exception, match=r"(?i)pickle|local object"):
        check_sampler(Unpicklable)
