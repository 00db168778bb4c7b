"""`check_resume` refuses what does not go on as if it had never stopped, and says where."""

from __future__ import annotations

import random

import numpy as np
import pytest

import agnoload
from agnoload import DataLoader
from agnoload.testing import check_resume

N = 12


class Calls(agnoload.Dataset):
    """Gives how often it was asked."""

    def __init__(self):
        self.calls = 0

    def __len__(self):
        return N

    def __getitem__(self, index):
        self.calls += 1
        return {"index": index, "calls": self.calls}


class Untold(agnoload.Dataset):
    """Draws from where no loader can set anything."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return index, random.SystemRandom().random()


class Forgets:
    """A sampler that counts its epochs itself, and forgets them when it stops."""

    def __init__(self):
        self.epoch = -1

    def __len__(self):
        return N

    def __iter__(self):
        self.epoch += 1
        order = list(range(N))
        random.Random(self.epoch).shuffle(order)
        return iter(order)


class Alters(Forgets):
    """A sampler whose order depends on how often it was made."""

    made = 0

    def __init__(self):
        super().__init__()
        Alters.made += 1
        self.epoch = Alters.made


class Stream(agnoload.IterableDataset):
    """A stream whose state is off by some samples."""

    def __init__(self, off):
        self.place, self.off = 0, off

    def __iter__(self):
        while self.place < N:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self):
        return {"place": max(0, self.place + self.off)}

    def load_state_dict(self, state):
        self.place = state["place"]


class SavingSampler(Stream):
    def __len__(self):
        return N


class Unplain(Stream):
    def state_dict(self):
        return {"place": self.place, "what": object()}


class Refuses(Stream):
    def load_state_dict(self, state):
        if state["place"]:
            raise KeyError("where")


class Prefetched(DataLoader):
    """Its state counts a batch more than was delivered."""

    def state_dict(self):
        state = super().state_dict()
        return state | {"position": state["position"] + 3} if 0 < state["position"] < 9 else state


class Reseeds(DataLoader):
    def load_state_dict(self, state):
        super().load_state_dict(state | {"seed": state["seed"] + 1})


class Tells(DataLoader):
    """Its state says within an epoch how many workers it has."""

    def state_dict(self):
        state = super().state_dict()
        return state | {"workers": self.num_workers if state["position"] else 0}

    def load_state_dict(self, state):
        super().load_state_dict({name: value for name, value in state.items() if name != "workers"})


one_for_all = DataLoader(range(N), 3, shuffle=True)

FAULTS = {
    "a dataset that counts its calls": (
        lambda: DataLoader(Calls(), 3),
        r"stop at batch 1 of 4, with 0 workers, what is left of the epoch: 'calls' of batch 0 must be .*\[4, 5, 6\], "
        r"but it is .*\[1, 2, 3\]",
    ),
    "the same, in workers": (
        lambda num_workers=0: DataLoader(Calls(), 3, num_workers=num_workers),
        r"with 2 workers instead of 0, the (first|next) epoch: 'calls' of batch [0-3]",  # by who was free
    ),
    "draws that follow from nothing": (
        lambda: DataLoader(Untold(), 3),
        r"stop at batch 0 of 4, .*: '\[1\]' of batch 0 must be .* float64",
    ),
    "a sampler that forgets its epoch": (
        lambda: DataLoader(range(N), 3, sampler=Forgets()),
        r"stop at batch 4 of 4, with 0 workers, the next epoch: the content of batch 0",
    ),
    "a sampler that is another one each time": (
        lambda: DataLoader(range(N), 3, sampler=Alters()),
        r"stop at batch 0 of 4, .*: the content of batch 0",
    ),
    "a sampler whose state is one too far": (
        lambda: DataLoader(range(N), 3, sampler=SavingSampler(1)),
        r"stop at batch 1 of 4, .*: the content of batch 0 must be .*\[3, 4, 5\], but it is .*\[4, 5, 6\]",
    ),
    "a stream whose state is one too far": (
        lambda: DataLoader(Stream(1), 3),
        r"stop at batch 1 of 4, .*: the content of batch 0 must be .*\[4, 5, 6\], but it is .*\[5, 6, 7\]",
    ),
    "a stream whose state is one too near": (
        lambda num_workers=0: DataLoader(Stream(-1), 3, num_workers=num_workers),
        r"stop at batch 1 of 4, with 2 workers, what is left of the epoch: 4 batches came, not 3",
    ),
    "a stream that refuses its own state": (
        lambda: DataLoader(Refuses(0), 3),
        r"stop at batch 1 of 4, with 0 workers: Refuses must take what .*KeyError: 'where'",
    ),
    "a state that is not JSON": (lambda: DataLoader(Unplain(0), 3), r"json\.dumps takes, but Object of type object"),
    "a state of what was prefetched": (
        lambda: Prefetched(range(N), 3, shuffle=True, seed=1),
        r"stop at batch 1 of 4, .*: 2 batches came, not 3|restored and taken again must be equal",
    ),
    "a state that is changed on the way": (
        lambda: Reseeds(range(N), 3, shuffle=True),
        r"restored and taken again must be equal: .* became",
    ),
    "a state that depends on the workers": (
        lambda num_workers=0: Tells(range(N), 3, num_workers=num_workers),
        r"the states after each batch must not depend on the workers",
    ),
    "one loader for all": (lambda: one_for_all, r"make_loader must make a fresh loader at each call"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_refused_in_words_that_lead_to_it(name):
    make, words = FAULTS[name]
    with pytest.raises(AssertionError, match=words):
        check_resume(make)


class Order:
    def __len__(self):
        return N

    def __iter__(self):
        return iter(np.random.permutation(N).tolist())


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda num_workers: DataLoader(Stream(0), 3, num_workers=num_workers),
        lambda: DataLoader(range(N), 3, sampler=SavingSampler(0)),
        lambda **options: DataLoader(range(N), 3, sampler=Order(), **options),
    ],
)
def test_without_the_fault_the_same_pass(make):
    check_resume(make)
