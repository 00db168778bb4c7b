"""What a user changes on the dataset between epochs reaches the workers, also those that are kept."""

from __future__ import annotations

import os

import numpy as np
import pytest

import agnoload


class Staged:
    def __init__(self) -> None:
        self.stage = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        info = agnoload.get_worker_info()
        return self.stage, -1 if info is None else info.epoch, os.getpid()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_workers_see_the_dataset_as_it_is_when_the_epoch_begins_and_stay_while_it_is_the_same(method: str) -> None:
    """C9."""
    for persistent in (False, True):
        dataset = Staged()
        options = {"num_workers": 2, "persistent_workers": persistent, "multiprocessing_context": method}
        with agnoload.DataLoader(dataset, 2, **options) as loader:
            workers = []
            for stage in (0, 0, 1, 2):
                dataset.stage = stage
                epoch = loader.epoch
                stages, epochs, pids = (np.concatenate(column).tolist() for column in zip(*loader, strict=True))
                assert (set(stages), set(epochs)) == ({stage}, {epoch})
                workers.append(set(pids))
        assert os.getpid() not in set.union(*workers)
        assert len(workers[0] | workers[1]) <= 2 if persistent else not workers[0] & workers[1]
        assert not workers[1] & workers[2]
