"""Locks of a whole process that its forks find free."""

from __future__ import annotations

import os
from typing import Any, TypeVar

LockT = TypeVar("LockT")


def free_in_forks(lock: LockT) -> LockT:
    """The lock itself; a forked child frees it. The thread that may hold it is not in the child to do so.

    For locks that live as long as the process: each stays registered.
    """
    renewed: Any = lock
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renewed._at_fork_reinit)  # what the locks of `logging` do
    return lock
