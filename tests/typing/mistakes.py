"""What type checkers must not let pass: every line that says so. Read by mypy and pyright, never run."""

import agnoload
from agnoload import DataLoader


class Numbers(agnoload.Dataset[int]): ...


def of_texts(samples: list[str]) -> int:
    return len(samples)


def half(sample: int) -> float:
    return sample / 2


DataLoader(Numbers(), 2, collate_fn=of_texts)  # wrong
DataLoader(Numbers(), 2, collate_fn=half)  # wrong
DataLoader(Numbers(), 2, num_workers="two")  # wrong
DataLoader(Numbers(), 2, worker_type="fibre")  # wrong
DataLoader(Numbers(), 2, on_error="ignore")  # wrong
DataLoader(Numbers(), 2, prefetch=2)  # wrong
DataLoader(3, 2)  # wrong
DataLoader(Numbers(), 2).steps("3")  # wrong
DataLoader(Numbers(), 2).stats().batches = 3  # wrong
for batch in DataLoader(Numbers(), 2):
    batch.no_such_thing()  # wrong
