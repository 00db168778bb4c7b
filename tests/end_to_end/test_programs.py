"""Whole programs: Ctrl-C, signals, exits, forks; what they print, how they end, and what they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.slow

METHODS = ("forkserver", "spawn", "fork")
LATE = 5.0
"""Seconds for what shall take one at most, on a machine that others use, too."""


BUSY = """
import threading, time, agnoload

class Data:
    def __len__(self): return 4
    def __getitem__(self, index):
        print("busy", flush=True)
        time.sleep(60)

def loop():
    for batch in agnoload.DataLoader(Data(), 1, num_workers=2, multiprocessing_context={method!r}):
        pass

loop()  # the user's line
"""


@pytest.mark.parametrize("method", METHODS)
def test_c38_ctrl_c_is_one_interrupt_in_the_parent_at_the_users_line(method, program) -> None:
    one = program(BUSY.format(method=method))
    assert [one.line(), one.line()] == ["busy", "busy"]
    os.killpg(one.process.pid, signal.SIGINT)
    code, _, err = one.end()
    assert one.gone() < LATE
    assert code == -signal.SIGINT
    assert err.count("Traceback") == err.count("KeyboardInterrupt") == 1
    assert "loop()  # the user's line" in err


HOLDS = BUSY.replace("time.sleep(60)", "import ctypes; ctypes.PyDLL(None).sleep(600)")
"""The same, but its C code never lets go of the interpreter lock."""


@pytest.mark.parametrize(
    ("text", "name", "method"),
    [
        (BUSY, "SIGTERM", "forkserver"),
        (BUSY, "SIGHUP", "fork"),
        (HOLDS, "SIGINT", "forkserver"),
        *((HOLDS, "SIGKILL", method) for method in METHODS),
    ],
    ids=lambda value: value if len(value) < 12 else "holds the lock" if "ctypes" in value else "sleeps",
)
def test_c38_a_killed_parent_takes_everything_along(text, name, method, program) -> None:
    one = program(text.format(method=method))
    assert [one.line(), one.line()] == ["busy", "busy"]
    one.process.send_signal(getattr(signal, name))
    code, _, err = one.end()
    assert one.gone() < LATE
    assert code == -getattr(signal, name)
    assert (err == "") == (name != "SIGINT")


START = """
import contextlib, os, signal, agnoload
from agnoload.pools import crew

held = crew.interrupts_held

@contextlib.contextmanager
def interrupted():
    with held() as blocked:
        yield blocked
        os.killpg(0, signal.SIGINT)  # the new process has just been started

crew.interrupts_held = interrupted
for batch in agnoload.DataLoader(range(8), 1, num_workers=2, multiprocessing_context={method!r}):
    pass
"""


@pytest.mark.parametrize("method", METHODS)
def test_c38_ctrl_c_while_processes_start_is_the_parents_alone(method, program) -> None:
    one = program(START.format(method=method))
    code, _, err = one.end()
    assert one.gone() < LATE
    assert code == -signal.SIGINT
    assert err.count("Traceback") == err.count("KeyboardInterrupt") == 1


TWICE = """
import os, signal, threading, time, agnoload

class Data:
    def __len__(self): return 4
    def __getitem__(self, index):
        signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
        print("busy", flush=True)
        time.sleep(60)

for batch in agnoload.DataLoader(Data(), 1, num_workers=2):
    pass
"""


def test_c38_ctrl_c_a_second_time_kills_what_was_given_time(program) -> None:
    one = program(TWICE)
    assert [one.line(), one.line()] == ["busy", "busy"]
    os.killpg(one.process.pid, signal.SIGINT)
    assert one.line() == "asked"  # and since it did not end, it is waited for
    os.killpg(one.process.pid, signal.SIGINT)
    code, _, err = one.end()
    assert one.gone() < LATE
    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert "Exception ignored" not in err


# ---------------------------------------------------------------------------------------------- leftovers of others


KILLED = """
import os, signal, sys, agnoload

loader = agnoload.DataLoader(range(1000), 4, num_workers=2)
batches = iter(loader)
other = iter(agnoload.DataLoader(range(1000), 4, num_workers=2))
next(batches), next(other)
print(*batches._pool.pids().values(), *other._pool.pids().values(), flush=True)
{end}
"""


def test_c30_a_killed_run_leaves_nothing_and_the_next_one_works(program, tmp_path) -> None:
    before = set(os.listdir("/tmp"))
    runs = [program(KILLED.format(end="signal.pause()")) for _ in range(2)]  # side by side
    pids = [[int(pid) for pid in one.line().split()] for one in runs]
    assert all(len(set(found)) == 4 for found in pids)
    for one, found in zip(runs, pids, strict=True):
        for pid in (*found, one.process.pid):  # in the other order the workers may be gone already
            os.kill(pid, signal.SIGKILL)
        one.end()
        assert one.gone() < LATE
    assert [name for name in os.listdir("/tmp") if name not in before and "agnoload" in name] == []
    again = program(KILLED.format(end="print(sum(map(len, batches)))"))
    again.line()
    assert again.end() == (0, "996\n", "")


CHILD = """
import multiprocessing, os, signal, sys
import numpy as np
import agnoload

def child():
    pass

if __name__ == "__main__":
    loader = agnoload.DataLoader(np.arange(400), 4, num_workers=2)
    batches = iter(loader)
    kept = [next(batches) for _ in range(20)]
    for method in {methods}:
        process = multiprocessing.get_context(method).Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0
    kept += list(batches)
    assert np.concatenate(kept).tolist() == list(range(400))
    print("right", flush=True)
    {end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("pass", 0), ("sys.exit(3)", 3), ("raise KeyError", 1), ("os.kill(os.getpid(), signal.SIGTERM)", -15)],
)
def test_c31_a_child_of_the_users_that_ends_takes_nothing_along(end, code, program) -> None:
    one = program(CHILD.format(end=end, methods=("fork", "spawn", "forkserver") if end == "pass" else ("fork",)))
    assert one.line() == "right"
    found, _, err = one.end()
    assert found == code
    assert err.startswith("Traceback") if "raise" in end else err == ""
    assert "resource_tracker" not in err
    one.gone()


# ---------------------------------------------------------------------------------------------- no main guard


UNGUARDED = """
import os, sys
with open({log!r}, "a") as log:
    log.write("run\\n")

import numpy as np
import agnoload

class Data:
    def __len__(self): return 6
    def __getitem__(self, index): return helper(index)

def helper(index):
    return np.int64(index * FACTOR)

FACTOR = 2
for method in ("forkserver", "spawn", "fork"):
    print([batch.tolist() for batch in agnoload.DataLoader(Data(), 2, num_workers=2, multiprocessing_context=method)])
print(os.path.basename(globals().get("__file__") or "none"), getattr(__spec__, "name", None))
"""


@pytest.mark.parametrize("way", ["file", "stdin", "module", "command"])
def test_c36_a_program_without_main_guard_runs_once(way, tmp_path) -> None:
    log, path = tmp_path / "log", tmp_path / "program.py"
    text = UNGUARDED.format(log=str(log))
    path.write_text(text)
    last = {"file": "program.py None", "stdin": "<stdin> None", "module": "program.py program", "command": "none None"}
    flags = {"file": [path], "stdin": ["-"], "module": ["-m", "program"]}
    command = [sys.executable, *flags.get(way, ["-c", text])]
    options = {"input": text if way == "stdin" else None, "cwd": tmp_path, "timeout": 60}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["[[0, 2], [4, 6], [8, 10]]"] * 3 + [last[way]]
    assert log.read_text() == "run\n"


NOTEBOOK = """
import sys, types
cells = [
    "import agnoload",
    "class Data:\\n    def __len__(self): return 6\\n    def __getitem__(self, index): return scale(index)",
    "def scale(index): return index * FACTOR",
    "loaders = [agnoload.DataLoader(Data(), 2, num_workers=2, multiprocessing_context=method)"
    " for method in ('forkserver', 'spawn', 'fork')]",
    "FACTOR = 3",
    "for loader in loaders: print([batch.tolist() for batch in loader])",
    "FACTOR = 5",
    "for loader in loaders: print([batch.tolist() for batch in loader])",
]
main = sys.modules["__main__"] = types.ModuleType("__main__")  # as a kernel's: it has no file
for cell in cells:
    exec(compile(cell, "<cell>", "exec"), main.__dict__)
"""


def test_c36_what_is_defined_in_a_notebook_reaches_workers(program) -> None:
    lines = "[[0, 3], [6, 9], [12, 15]]\n" * 3 + "[[0, 5], [10, 15], [20, 25]]\n" * 3
    assert program(NOTEBOOK).end() == (0, lines, "")


def test_c37_jax_before_the_loader_gives_no_warning(program) -> None:
    pytest.importorskip("jax")
    text = """
import jax.numpy as jnp
print(int(jnp.arange(4).sum()))
import agnoload
loader = agnoload.DataLoader(range(8), 2, num_workers=2)
print([batch.tolist() for batch in loader])
"""
    code, out, err = program(text, "-W", "error").end()
    assert (code, out, err) == (0, "6\n[[0, 1], [2, 3], [4, 5], [6, 7]]\n", "")


def test_c37_an_idle_thread_gives_no_warning_either(program) -> None:
    text = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
import agnoload
for method in (None, "spawn"):
    loader = agnoload.DataLoader(range(8), 2, num_workers=2, multiprocessing_context=method)
    print([batch.tolist() for batch in loader])
"""
    code, out, err = program(text, "-W", "error").end()
    assert (code, out, err) == (0, "[[0, 1], [2, 3], [4, 5], [6, 7]]\n" * 2, "")


# ---------------------------------------------------------------------------------------------- exits


EXIT = """
import sys, time, threading
import agnoload

class Data:
    def __len__(self): return 40
    def __getitem__(self, index):
        if index >= 2 and {busy}:
            time.sleep(60)
        return index

loader = agnoload.DataLoader(Data(), 1, num_workers=2, persistent_workers=True)
batches = iter(loader)
next(batches)
def tell(): print(time.monotonic() - began)
import atexit
atexit.register(tell)
began = time.monotonic()
{end}
"""


@pytest.mark.parametrize(
    ("end", "busy", "flags"),
    [
        ("", False, ("-W", "error")),
        ("", True, ("-X", "dev", "-W", "error")),
        ("sys.exit(0)", True, ()),
        ("del batches", True, ()),
        ("loader.close()", True, ()),
    ],
)
def test_c40_the_end_of_a_program_ends_its_workers_quickly_and_silently(end, busy, flags, program) -> None:
    one = program(EXIT.format(busy=busy, end=end), *flags)
    code, out, err = one.end()
    assert (code, err) == (0, "")
    assert float(out) < LATE
    one.gone()


DAEMON = """
import os, threading, time, agnoload

class Data:
    def __len__(self): return 4
    def __getitem__(self, index):
        print("busy", flush=True)
        open("busy", "x").close()
        time.sleep(60)

def loop():
    for batch in agnoload.DataLoader(Data(), 1, num_workers=1, worker_type={kind!r}, persistent_workers=True):
        pass

threading.Thread(target=loop, daemon=True).start()
while not os.path.exists("busy"):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_daemon_thread_that_waits_for_a_batch_says_nothing_at_exit(kind, program) -> None:
    one = program(DAEMON.format(kind=kind))
    assert one.line() == "busy"
    code, _, err = one.end()
    assert (code, err) == (0, "")
    one.gone()


ATEXIT = """
import atexit, agnoload
loader = agnoload.DataLoader(range(8), 2, num_workers=2)
atexit.register(lambda: print([batch.tolist() for batch in loader]))
next(iter(loader))
"""


def test_a_loader_may_be_used_by_a_function_that_runs_at_exit(program) -> None:
    one = program(ATEXIT)
    assert one.end() == (0, "[[0, 1], [2, 3], [4, 5], [6, 7]]\n", "")
    one.gone()


# ---------------------------------------------------------------------------------------------- forks of the user's


FORKED = """
import os, sys, agnoload
from agnoload.errors import AgnoloadError

loader = agnoload.DataLoader(
    range(40), 4, num_workers=2, persistent_workers={persistent}, worker_type={kind!r},
    multiprocessing_context={method!r},
)
if {persistent}:
    list(loader)
batches = iter(loader)
first = next(batches).tolist()
sys.stdout.flush()
pid = os.fork()
if pid == 0:
    try:
        next(batches)
    except AgnoloadError as error:
        print("refused" if "fork of it" in str(error) else error, flush=True)
    print(len(list(loader)), len(list(loader)), flush=True)
    {child}
_, status = os.waitpid(pid, 0)
print("child", os.waitstatus_to_exitcode(status), flush=True)
print(first + [n for batch in batches for n in batch.tolist()] == list(range(40)), flush=True)
loader.close()
"""


@pytest.mark.parametrize(
    ("child", "method", "kind", "persistent"),
    [
        ("os._exit(0)", "forkserver", "process", False),
        ("sys.exit(0)", "forkserver", "process", True),
        ("sys.exit(0)", "spawn", "process", False),
        ("loader.close(); sys.exit(0)", "fork", "process", True),
        ("loader.close(); sys.exit(0)", None, "thread", True),
        ("os._exit(0)", None, "thread", False),
    ],
)
def test_a_forked_copy_of_the_program_leaves_the_parents_workers_alone(
    child, method, kind, persistent, program
) -> None:
    one = program(FORKED.format(persistent=persistent, method=method, kind=kind, child=child), "-W", "ignore")
    code, out, err = one.end()
    assert (code, err) == (0, "")
    assert out.splitlines() == ["refused", "10 10", "child 0", "True"]
    one.gone()


OUTLIVES = """
import os, signal, time, agnoload

loader = agnoload.DataLoader(range(4000), 4, num_workers=2)
batches = iter(loader)
next(batches)
pid = os.fork()
if pid == 0:
    signal.pause()
print(pid, *batches._pool.pids().values(), flush=True)
signal.pause()
"""


def test_a_forked_copy_that_outlives_the_program_does_not_keep_its_workers_alive(program) -> None:
    one = program(OUTLIVES)
    copy, *found = (int(pid) for pid in one.line().split())
    one.process.kill()
    one.process.wait()
    try:
        _, alive = psutil.wait_procs([psutil.Process(pid) for pid in found if psutil.pid_exists(pid)], timeout=LATE)
        assert alive == []
        others = {process.pid for process in one.alive()}
        psutil.wait_procs([psutil.Process(pid) for pid in others - {copy} if psutil.pid_exists(pid)], timeout=LATE)
        assert {process.pid for process in one.alive()} == {copy}  # the fork server is gone, too
    finally:
        os.kill(copy, signal.SIGKILL)
    one.gone()


NARROW = """
import fcntl, os, tempfile
import agnoload

def small():
    ends = pipe()
    fcntl.fcntl(ends[0], fcntl.F_SETPIPE_SZ, 4096)
    return ends

pipe, os.pipe = os.pipe, small
folder = tempfile.mkdtemp()
os.chdir(folder)
os.rmdir(folder)
for method in ("forkserver", "fork"):
    options = {"num_workers": 2, "prefetch_factor": 300, "multiprocessing_context": method}
    print(sum(len(batch) for batch in agnoload.DataLoader(range(2000), 1, **options)))
"""


def test_a_removed_directory_and_pipes_that_the_system_makes_small_harm_nothing(program) -> None:
    """A user with very many pipes open gets new ones of a single page."""
    assert program(NARROW).end() == (0, "2000\n2000\n", "")
