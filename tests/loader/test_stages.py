"""What a user changes on the dataset between epochs reaches the workers, also those that are kept."""

from __future__ import annotations

import pytest

import agnoload


class Staged:
    def __init__(self) -> None:
        self.stage = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = agnoload.get_worker_info()
        return self.stage, -1 if info is None else info.epoch


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_c09_workers_see_the_dataset_as_it_is_when_the_epoch_begins(persistent: bool, method: str) -> None:
    dataset = Staged()
    options = {"num_workers": 2, "persistent_workers": persistent, "multiprocessing_context": method}
    with agnoload.DataLoader(dataset, 2, **options) as loader:
        for epoch in range(3):
            dataset.stage = epoch
            for stages, epochs in loader:
                assert stages.tolist() == [epoch, epoch]
                assert epochs.tolist() == [epoch, epoch]


def test_c09_kept_workers_stay_while_nothing_has_changed() -> None:
    class Pids(Staged):
        def __getitem__(self, index: int) -> tuple[int, int]:
            import os

            return os.getpid(), self.stage

    with agnoload.DataLoader(Pids(), 2, num_workers=2, persistent_workers=True) as loader:
        epochs = [{int(pid) for pids, _ in loader for pid in pids} for _ in range(3)]
        loader.dataset.stage = 5
        changed = {int(pid) for pids, _ in loader for pid in pids}
    assert len(set.union(*epochs)) <= 2
    assert not changed & set.union(*epochs)
