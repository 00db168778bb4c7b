"""`torch.utils.data.get_worker_info()` in workers that are not torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data._utils import worker

_look: Callable[[], Any] | None = None


def install(look: Callable[[], Any]) -> None:
    """Have torch's function give, in a worker of ours, what `look()` says; anywhere else what it always gives."""
    global _look
    if _look is None:
        # Its code, not its name: programs import the function itself, often before this.
        worker.get_worker_info.__code__ = _get_worker_info.__code__
    _look = look


def _get_worker_info() -> Any:  # it runs in torch's module: `_worker_info` is torch's own
    from agnoload_torch.workers import info_of_ours

    return _worker_info or info_of_ours()  # type: ignore[name-defined]  # noqa: F821


def info_of_ours() -> Any:
    """What torch would say in this worker; its seed is another one for each worker and epoch, as torch's is."""
    info = None if _look is None else _look()
    if info is None:
        return None
    seed = (info.seed + info.epoch * info.num_workers + info.id) % 2**63
    return worker.WorkerInfo(id=info.id, num_workers=info.num_workers, seed=seed, dataset=info.dataset)
