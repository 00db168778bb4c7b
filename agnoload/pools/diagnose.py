"""Why a worker died, and what a loader waits for: the texts, and where their facts come from."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from agnoload.errors import AgnoloadError, WorkerDied, warn
from agnoload.messages import Request, describe_request, plain_indices
from agnoload.pools.launcher import UNKNOWN, Process
from agnoload.pools.status import DUMP_SIGNAL, Stage, WorkerStatusBoard
from agnoload.system import ROOT, control_groups

SILENCE = 60.0
"""Seconds without a batch after which one warning says what the workers are doing."""

DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/accel")
"""How the names begin under which accelerators are opened."""


def check_process(owner: int) -> None:
    """An iterator with workers is of no use in a forked copy of the process that made it."""
    if os.getpid() != owner:
        raise AgnoloadError(
            f"this iterator belongs to process {owner}, and this is a fork of it: make a new one here with iter(loader)"
        )


# ---------------------------------------------------------------------------------------------- deaths


def death_report(
    worker: int, process: Process, board: WorkerStatusBoard, request: Request | None, deaths: int, kills: int
) -> WorkerDied:
    """The error for a worker that has ended. `request`: what it was loading, and `deaths` how many workers died over
    it; `kills`: out-of-memory kills since the pool was made."""
    code = process.exitcode()
    if code is None or code == UNKNOWN:
        code, how = None, "ended (a signal handler or a thread of yours collected its exit code)"
    elif code >= 0:
        how = f"ended with exit code {code}"
    else:
        names = {number.value: number.name for number in signal.Signals}  # most real-time signals have none
        how = f"was killed by {names.get(-code, f'signal {-code}')}"
    doing = f"while it loaded {describe_request(request)}" if request is not None else "while it was idle"
    if request is None and board.stage(worker) <= Stage.STARTING:
        doing = "before its first batch: while it read the dataset or in worker_init_fn"
    text = f"{worker_name(worker, process)} {how} {doing}"
    if process.rss:
        text += f"; it had up to {process.rss / 2**20:,.0f} MiB of memory"
    if kills:
        text += f"; the control group counted {kills} out-of-memory kill{'s' * (kills > 1)}: use fewer workers"
    if deaths > 1:
        text += "; two workers in a row died over this batch, so it is not loaded again"
    batch, indices = (request.batch, plain_indices(request.indices)) if request is not None else (None, None)
    error = WorkerDied(text, worker, process.pid, code, batch, indices, kills, process.rss or None)
    if stack := board.stack(worker):
        error.add_note(f"the worker's Python stack when it died:\n{stack}")
    return error


def corruption_report(worker: int, process: Process | None) -> WorkerDied:
    """The error for a ticket that no worker's loop has written."""
    who = "a worker" if process is None else worker_name(worker, process)
    return WorkerDied(
        f"{who} sent a corrupted reply (slot out of range); user code in the worker probably overwrote shared memory "
        "or a file descriptor",
        None if process is None else worker,
        None if process is None else process.pid,
    )


def worker_name(worker: int, process: Process) -> str:
    return f"worker {worker} (pid {process.pid})"


def oom_kills(root: Path = ROOT) -> int:
    """How many processes of this control group the kernel has killed for memory so far; 0 where it does not say."""
    for folder in control_groups(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError):
                for line in (folder / name).read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
    return 0


# ---------------------------------------------------------------------------------------------- long waits


def what_holds_up(
    number: int, requests: Mapping[int, Request], board: WorkerStatusBoard, processes: Mapping[int, Process]
) -> str:
    """What a request under way waits for, with the stack of its worker."""
    what = describe_request(requests[number])
    claimed = [(board.claimed(worker), worker) for worker in processes]
    claims = {n: worker for n, worker in claimed if n is not None and n in requests}  # the others were answered
    busy = claims.get(number)
    if busy is None:
        starting = [worker for worker in processes if board.stage(worker) <= Stage.STARTING]
        if starting:
            busy, what = starting[0], "its start (reading the dataset, worker_init_fn)"
        elif claims:
            other, busy = next(iter(claims.items()))
            what = f"{describe_request(requests[other])}, asked for earlier, while {what} waits for a free worker"
        else:
            return f"{what} waits for a free worker"
    if board.stage(busy) == Stage.LAUNCHED:  # it does not handle our signal yet: that would end it
        return f"worker {busy} is busy with {what}: its process has not started yet"
    before, stack = board.stack(busy), "  (it did not answer)"
    processes[busy].kill(DUMP_SIGNAL)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        time.sleep(0.01)
        if board.stack(busy) != before:
            time.sleep(0.01)  # the fault handler writes line by line: let it end
            stack = board.stack(busy)[len(before) :].strip()
            break
    return f"{worker_name(busy, processes[busy])} is busy with {what}; its stack:\n{stack}"


# ---------------------------------------------------------------------------------------------- forks


def warn_about_fork() -> None:
    """Threads that may hold locks, and devices, do not survive a fork."""
    others = threading.active_count() - 1
    if others > 0:
        warn(
            f"multiprocessing_context='fork' copies this process of {others + 1} threads; a thread that is not "
            "copied may hold a lock, which nobody will release in the copy: a worker can hang for ever. Use the "
            "default (forkserver)"
        )
    opened = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                opened.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    if devices := sorted(name for name in opened if name.startswith(DEVICES)):
        warn(
            f"multiprocessing_context='fork' copies this process, which has opened {', '.join(devices)}: a driver does "
            "not work in a copy, so a sample that uses the device fails or hangs. Use the default (forkserver)"
        )
