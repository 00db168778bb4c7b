"""Is what agnoload puts on a GPU right, and how fast does it get there?

    python benchmarks/gpu_check.py [--json FILE] [--only torch,jax,cupy] [--workers N]

For one machine with an NVIDIA GPU; it ends within 5 minutes. Each part runs in a fresh process, and what it found, or
how it failed, is printed and written at once, so that the next one's trouble hides nothing. Per framework

- `right`: 10,000 batches, batch k filled with k, while other copies keep the copy engine busy and the consumer's stream
  is behind; not one value may differ. Memory must stay flat, and no worker may open the GPU.
- `fast`: bytes a second to the device for batches of 64 x (3, 224, 224) float32, against the ceiling of a page-locked
  copy and against torch's loader; the time of a step with loading over that of the step alone, at most 1.05.

Without a GPU it says so and ends with 0. `--dry-run` runs a few batches of each part on the CPU: it tests this script.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import agnoload

FRAMEWORKS = ("torch", "jax", "cupy")
DEVICES = {"torch": "cuda:0", "jax": "gpu:0", "cupy": "cuda:0"}
LIMIT = 285.0
"""Seconds for all parts together."""
PATIENCE = 100.0
"""Seconds for one part."""
IMAGES = (64, 3, 224, 224)
SMALL = (64, 3, 32, 32)


def gpus() -> list[str]:
    """The names of the GPUs that the driver shows; nothing is created on them."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, name = ctypes.c_int(0), ctypes.create_string_buffer(100)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    return [
        "unnamed" if driver.cuDeviceGetName(name, len(name), number) else name.value.decode()
        for number in range(count.value)
    ]


class Numbered(agnoload.Dataset):
    """Batch k holds k everywhere: 256 KiB of it, made anew each time."""

    def __init__(self, batches: int, rows: int = 32, columns: int = 2048) -> None:
        self.batches, self.rows, self.columns = batches, rows, columns

    def __len__(self) -> int:
        return self.batches * self.rows

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index]).data

    def __getitems__(self, indices: Any) -> Any:
        number = indices[0] // self.rows
        return agnoload.Batch({"x": np.full((len(indices), self.columns), number, np.int32)})


class JaxNumbered(Numbered):
    """The same from JAX arrays, as a careless dataset makes them."""

    def __getitems__(self, indices: Any) -> Any:
        import jax.numpy as jnp

        return [{"x": jnp.full(self.columns, index // self.rows, jnp.int32)} for index in indices]


class Images(agnoload.Dataset):
    """64 images in memory, again and again."""

    def __init__(self, batches: int, shape: tuple[int, ...]) -> None:
        self.batches = batches
        self.images = np.random.default_rng(0).random(shape, np.float32)

    def __len__(self) -> int:
        return self.batches * 64

    def __getitem__(self, index: int) -> Any:
        return self.images[index % 64]


class Torch:
    """What this script does with torch."""

    def __init__(self, dry: bool) -> None:
        import torch

        self.torch = torch
        self.dry = dry
        self.device: Any = "cpu" if dry else DEVICES["torch"]
        self.bad = torch.zeros((), dtype=torch.int64, device=self.device)
        self.weights = torch.eye(128 if dry else 2048, device=self.device)
        if not dry:
            self.load = torch.empty(1 << 28, dtype=torch.uint8).pin_memory()
            self.sink = torch.empty_like(self.load, device=self.device)
            self.side = torch.cuda.Stream()

    def compare(self, x: Any, number: int) -> None:
        self.bad += (x != number).sum()

    def mismatches(self) -> int:
        return int(self.bad.item())

    def slow_down(self) -> None:
        """Fill the copy engine for some 10 ms, and let the consumer's stream fall behind."""
        if not self.dry:
            with self.torch.cuda.stream(self.side):
                self.sink.copy_(self.load, non_blocking=True)
            self.torch.cuda._sleep(10_000_000)

    def step(self, x: Any, rounds: int) -> None:
        y = self.weights + x.reshape(-1)[0]
        for _ in range(rounds):
            y = y @ self.weights
        self.last = y

    def wait(self) -> None:
        if not self.dry:
            self.torch.cuda.synchronize()

    def device_bytes(self) -> int:
        return 0 if self.dry else int(self.torch.cuda.memory_reserved())

    def copier(self, array: Any) -> Callable[[], Any]:
        """A copy from page-locked memory, for the ceiling."""
        source = self.torch.from_numpy(array)
        if not self.dry:
            source = source.pin_memory()
        target = self.torch.empty_like(source, device=self.device)
        return lambda: target.copy_(source, non_blocking=True)


class Jax:
    """What this script does with JAX."""

    def __init__(self, dry: bool) -> None:
        import jax
        import jax.numpy as jnp

        self.jax, self.jnp = jax, jnp
        self.device: Any = "cpu:0" if dry else DEVICES["jax"]
        self.target = jax.local_devices(backend="cpu" if dry else "gpu")[0]
        self.bad = jax.device_put(np.int32(0), self.target)
        self.weights = jax.device_put(np.eye(128 if dry else 2048, dtype=np.float32), self.target)
        self.load = np.zeros(1 << 28, np.uint8)
        self.dry = dry
        self.differing = jax.jit(lambda bad, x, number: bad + (x != number).sum())
        self.matmul = jax.jit(self._matmul, static_argnums=2)
        self.last = self.weights

    def _matmul(self, x: Any, weights: Any, rounds: int) -> Any:
        start = weights + x.reshape(-1)[0]
        return self.jax.lax.fori_loop(0, rounds, lambda _, y: y @ weights, start)

    def compare(self, x: Any, number: int) -> None:
        self.bad = self.differing(self.bad, x, np.int32(number))

    def mismatches(self) -> int:
        return int(self.bad)

    def slow_down(self) -> None:
        if not self.dry:
            self.sink = self.jax.device_put(self.load, self.target)
            self.last = self.matmul(self.last, self.weights, 20)

    def step(self, x: Any, rounds: int) -> None:
        self.last = self.matmul(x, self.weights, rounds)

    def wait(self) -> None:
        self.jax.block_until_ready((self.last, self.bad))

    def device_bytes(self) -> int:
        return int((self.target.memory_stats() or {}).get("bytes_in_use", 0))

    def copier(self, array: Any) -> Callable[[], Any]:
        def copy() -> None:
            self.last = self.jax.device_put(array, self.target)

        return copy


class Cupy:
    """What this script does with CuPy; it has no CPU to try it on."""

    def __init__(self, dry: bool) -> None:
        import cupy
        import cupyx

        self.cupy = cupy
        self.device: Any = DEVICES["cupy"]
        self.bad = cupy.zeros((), cupy.int64)
        self.weights = cupy.eye(2048, dtype=cupy.float32)
        self.load = cupyx.zeros_pinned(1 << 28, np.uint8)
        self.sink = cupy.empty(self.load.shape, np.uint8)
        self.side = cupy.cuda.Stream(non_blocking=True)
        self.pinned = cupyx.empty_like_pinned

    def compare(self, x: Any, number: int) -> None:
        self.bad += (x != number).sum()

    def mismatches(self) -> int:
        return int(self.bad.get())

    def slow_down(self) -> None:
        self.sink.set(self.load, stream=self.side)
        self.step(self.bad, 20)

    def step(self, x: Any, rounds: int) -> None:
        y = self.weights + x.reshape(-1)[0]
        for _ in range(rounds):
            y = y @ self.weights
        self.last = y

    def wait(self) -> None:
        self.cupy.cuda.Device().synchronize()

    def device_bytes(self) -> int:
        return int(self.cupy.get_default_memory_pool().total_bytes())

    def copier(self, array: Any) -> Callable[[], Any]:
        source = self.pinned(array)
        source[...] = array
        target = self.cupy.empty(array.shape, array.dtype)
        return lambda: target.set(source, stream=self.cupy.cuda.get_current_stream())


MAKERS: dict[str, Callable[[bool], Any]] = {"torch": Torch, "jax": Jax, "cupy": Cupy}


def children() -> Iterator[int]:
    """The processes below this one, however deep."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    below = [os.getpid()]
    while below:
        for child in parents.get(below.pop(), []):
            below.append(child)
            yield child


def gpu_openers() -> list[int]:
    """Those of them that have opened a GPU."""
    openers = []
    for child in children():
        links = []
        with suppress(OSError):
            for link in Path(f"/proc/{child}/fd").iterdir():
                with suppress(OSError):
                    links.append(os.readlink(link))
        if any(link.startswith("/dev/nvidia") for link in links):
            openers.append(child)
    return openers


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def right(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Every batch of the framework holds what it should."""
    batches = 60 if arguments.dry_run else 10_000
    framework = MAKERS[name](arguments.dry_run)
    found: dict[str, Any] = {}

    def loader(dataset: Any, **options: Any) -> Any:
        options = {"num_workers": arguments.workers, "backend": name, "pin_memory": not arguments.dry_run} | options
        return agnoload.DataLoader(dataset, 32, **options)

    def count(batches: Any, each: Callable[[Any], Any]) -> None:
        for number, batch in enumerate(batches):
            if number % 50 == 0:
                framework.slow_down()
            framework.compare(each(batch["x"]), number)
            del batch
            if number == found["batches"] // 10:
                framework.wait()
                found["start"] = resident_bytes(), framework.device_bytes()
                found["openers"] = gpu_openers()
        framework.wait()
        end = resident_bytes(), framework.device_bytes()
        host, device = (now - then for now, then in zip(end, found.pop("start"), strict=True))
        found["host MiB gained"] = max(found.get("host MiB gained", 0), host >> 20)
        found["device MiB gained"] = max(found.get("device MiB gained", 0), device >> 20)

    found["batches"] = batches
    with loader(Numbered(batches), device=framework.device) as placed:
        count(placed, lambda x: x)
    if name == "torch":
        found |= torch_by_hand(framework, loader, count, batches)
    if name == "jax":
        sharding = jax_sharding(framework)
        found["batches"] = batches // 10
        with loader(Numbered(batches // 10), device=sharding) as sharded:
            count(sharded, lambda x: x)
        with loader(JaxNumbered(batches // 10), device=framework.device) as from_jax:
            count(from_jax, lambda x: x)
        found["batches"] = batches + 2 * (batches // 10)
    found["mismatches"] = framework.mismatches()
    found["passed"] = (
        found["mismatches"] == 0
        and not found["openers"]
        and found["host MiB gained"] < 256
        and found["device MiB gained"] < 256
        and all(found.get(flag, True) for flag in ("pinned", "no other device"))
    )
    return found


def torch_by_hand(framework: Any, loader: Any, count: Any, batches: int) -> dict[str, Any]:
    """Page-locked batches that the user copies and drops at once, on the default stream and on one of his own."""
    torch = framework.torch
    pinned = True

    def copied(x: Any) -> Any:
        nonlocal pinned
        pinned = pinned and (framework.dry or x.is_pinned())
        return x.to(framework.device, non_blocking=True)

    with loader(Numbered(batches)) as by_hand:
        count(by_hand, copied)
        if not framework.dry:
            with torch.cuda.stream(torch.cuda.Stream()):
                count(by_hand, copied)
    others = [] if framework.dry else [n for n in range(1, torch.cuda.device_count()) if has_context(torch, n)]
    return {"pinned": pinned, "no other device": not others, "batches": 2 * batches + (not framework.dry) * batches}


def has_context(torch: Any, number: int) -> bool:
    return bool(torch._C._cuda_hasPrimaryContext(number))


def jax_sharding(framework: Any) -> Any:
    mesh = framework.jax.sharding.Mesh(np.array([framework.target]), ("data",))
    return framework.jax.sharding.NamedSharding(mesh, framework.jax.sharding.PartitionSpec("data"))


def fast(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Bytes a second to the device, and what loading costs a step."""
    seconds = 0.3 if arguments.dry_run else 6.0
    framework = MAKERS[name](arguments.dry_run)
    dataset = Images(100_000, SMALL if arguments.dry_run else IMAGES)
    nbytes = dataset.images.nbytes
    copy_once = framework.copier(dataset.images)
    ceiling = nbytes * rate(seconds, framework, lambda: repeat(None), lambda _: copy_once())
    options = {"num_workers": arguments.workers, "backend": name, "device": framework.device}
    with agnoload.DataLoader(dataset, 64, pin_memory=not arguments.dry_run, **options) as loader:
        ours = nbytes * rate(seconds, framework, lambda: iter(loader), lambda batch: setattr(framework, "last", batch))
        rounds = rounds_for(max(2 * nbytes / ceiling, 1.5 * nbytes / ours), framework)
        alone = step_seconds(seconds, framework, repeat(next(iter(loader))), rounds)
        loaded = step_seconds(seconds, framework, iter(loader), rounds)
    found = {
        "ceiling GB/s": ceiling / 1e9,
        "agnoload GB/s": ours / 1e9,
        "of the ceiling": ours / ceiling,
        "step ms alone": alone * 1e3,
        "step ms loading": loaded * 1e3,
        "overlap": loaded / alone,
        "passed": arguments.dry_run or loaded <= 1.05 * alone,
    }
    if name == "torch":
        theirs = nbytes * torch_rate(seconds, framework, dataset, arguments.workers)
        found |= {"torch's loader GB/s": theirs / 1e9, "times torch's": ours / theirs}
    return found


def repeat(batch: Any) -> Iterator[Any]:
    while True:
        yield batch


def rate(seconds: float, framework: Any, start: Callable[[], Iterator[Any]], use: Callable[[Any], Any]) -> float:
    """Batches a second, after ten that do not count."""
    batches = start()
    for _ in range(10):
        use(next(batches))
    framework.wait()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(5):
            use(next(batches))
        count += 5
    framework.wait()
    return count / (time.perf_counter() - began)


def rounds_for(seconds: float, framework: Any) -> int:
    """How many products make a step that long."""
    x = framework.weights
    framework.step(x, 10)
    framework.wait()
    began = time.perf_counter()
    framework.step(x, 10)
    framework.wait()
    return max(1, round(10 * seconds / (time.perf_counter() - began)))


def step_seconds(seconds: float, framework: Any, batches: Iterator[Any], rounds: int) -> float:
    """The time of a step that never waits for the device between two."""
    for _ in range(5):
        framework.step(next(batches), rounds)
    framework.wait()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(5):
            framework.step(next(batches), rounds)
        framework.wait()
        count += 5
    return (time.perf_counter() - began) / count


def torch_rate(seconds: float, framework: Any, dataset: Any, workers: int) -> float:
    """torch's own loader on the same data, copied as its documentation says."""
    pin = not framework.dry
    theirs = framework.torch.utils.data.DataLoader(dataset, 64, num_workers=workers, pin_memory=pin)
    return rate(seconds, framework, lambda: iter(theirs), lambda batch: batch.to(framework.device, non_blocking=True))


PARTS: dict[str, Callable[[str, argparse.Namespace], dict[str, Any]]] = {"right": right, "fast": fast}


def run_part(part: str, name: str, arguments: argparse.Namespace, limit: float) -> dict[str, Any]:
    """One part in a fresh process; what went wrong there is its result."""
    if importlib.util.find_spec(name) is None:
        return {"skipped": f"{name} is not installed"}
    if name == "cupy" and arguments.dry_run:
        return {"skipped": "CuPy has no CPU"}
    if limit < 10:
        return {"passed": False, "error": f"no time is left of {LIMIT:.0f} s"}
    command = [sys.executable, __file__, "--part", f"{part}:{name}", "--workers", str(arguments.workers)]
    command += ["--dry-run"] if arguments.dry_run else []
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired as error:
        return {"passed": False, "error": f"not finished in {limit:.0f} s", "stderr": last_lines(error.stderr)}
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not found:
        error = f"exit status {done.returncode}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
        return {"passed": False, "error": error, "stderr": last_lines(done.stderr)}
    result: dict[str, Any] = json.loads(found[-1])
    return result


def last_lines(text: str | bytes | None) -> str:
    text = text.decode(errors="replace") if isinstance(text, bytes) else text or ""
    return "\n".join(text.splitlines()[-20:])


def in_this_process(part: str, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a part finds, or why this framework cannot use the GPU here."""
    try:
        agnoload.get_backend(name).check(None if arguments.dry_run else DEVICES[name])
    except agnoload.BackendUnavailable as error:
        return {"skipped": str(error)}
    return PARTS[part](name, arguments)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("agnoload", "numpy", "torch", "jax", "jaxlib", "cupy-cuda12x", "cupy-cuda13x", "cupy"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def table(results: dict[str, dict[str, Any]]) -> str:
    """One line a fact."""
    lines = []
    for part, facts in results.items():
        lines.append(part)
        for key, value in facts.items():
            shown = value if not isinstance(value, float) else f"{value:.3f}"
            lines.append(f"    {key:<22}{str(shown).replace(chr(10), chr(10) + 26 * ' ')}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results there, too")
    parser.add_argument("--only", default=",".join(FRAMEWORKS), help="frameworks, with commas between")
    parser.add_argument("--workers", type=int, default=max(1, min(8, len(os.sched_getaffinity(0)) - 1)))
    parser.add_argument("--dry-run", action="store_true", help="a few batches on the CPU")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        part, _, name = arguments.part.partition(":")
        print(json.dumps(in_this_process(part, name, arguments)))
        return 0
    names = gpus()
    if not arguments.dry_run and not names:
        print("no NVIDIA GPU on this machine: nothing was checked")
        return 0
    began = time.perf_counter()
    machine = {"date": time.strftime("%Y-%m-%d"), "gpus": names, "system": platform.platform(), "versions": versions()}
    command = " ".join(["python", *sys.argv])
    print(f"{machine}\n{command}", flush=True)
    results: dict[str, dict[str, Any]] = {}
    for part in PARTS:  # whether it is right comes first, for each of them
        for name in arguments.only.split(","):
            left = LIMIT - (time.perf_counter() - began)
            key = f"{name}: {part}"
            results[key] = run_part(part, name, arguments, min(PATIENCE, left))
            print(table({key: results[key]}), flush=True)
            if arguments.json:
                document = {"machine": machine, "command": command, "results": results}
                arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    print(f"\n{table(results)}\n{time.perf_counter() - began:.0f} s")
    return 0 if all(facts.get("passed", True) for facts in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
