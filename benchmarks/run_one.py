"""One loader, one workload, one fresh process, one line of JSON: `python -m benchmarks.run_one LOADER WORKLOAD`.

A workload may carry changes: `small@batch_size=256,workers=4` or `fields@count=50`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import psutil

from benchmarks import floor, loaders
from benchmarks.measure import cpu_seconds, descriptors, family, private_mib, worker_mib
from benchmarks.workloads import FOLDERS, STREAMS, Rows, Stream, strings

Figures = dict[str, Any]


def timed(first_batch: Callable[[], tuple[Any, Iterator[Any]]], seconds: float) -> Figures:
    """Rate, latency and CPU time of an iterator that does not end: some batches unseen, then the clock."""
    begun = time.perf_counter()
    _, batches = first_batch()
    first = time.perf_counter() - begun
    unseen = time.perf_counter() + seconds / 5
    while time.perf_counter() < unseen:
        next(batches)
    waits = []
    cpu, begun = cpu_seconds(), time.perf_counter()
    before = begun
    while before < begun + seconds:
        next(batches)
        now = time.perf_counter()
        waits.append(now - before)
        before = now
    cpu = cpu_seconds() - cpu
    return {
        "rate": len(waits) / (before - begun),
        "batches": len(waits),
        "first_s": first,
        "p50_ms": 1000 * float(np.median(waits)),
        "p99_ms": 1000 * float(np.quantile(waits, 0.99)),
        "cpu_ms": 1000 * cpu / len(waits),
    }


def _begin(loader: Any) -> tuple[Any, Iterator[Any]]:
    batches = iter(loader)
    return next(batches), batches


def changed(name: str) -> tuple[str, dict[str, int]]:
    """A workload's name without its changes, and these."""
    base, _, changes = name.partition("@")
    return base, {key: int(value) for key, _, value in (c.partition("=") for c in changes.split(",") if c)}


def stream_of(name: str) -> Stream:
    base, changes = changed(name)
    outer = {key: changes.pop(key) for key in ("batch_size", "workers") if key in changes}
    stream = STREAMS[base]
    return replace(stream, dataset=partial(stream.dataset, **changes), **outer)


def stream_rate(loader: str, name: str, quick: bool) -> Figures:
    stream, seconds = stream_of(name), 1.0 if quick else 5.0
    if loader == "floor":
        return floor.rate(stream, seconds)
    return timed(lambda: _begin(loaders.of_stream(loader, stream)), seconds)


def array_rate(loader: str, name: str, quick: bool) -> Figures:
    source = floor.in_memory_epochs(256) if loader == "floor" else partial(iter, loaders.of_arrays(loader, 256))
    epochs = itertools.chain.from_iterable(source() for _ in itertools.count())
    return timed(lambda: (next(epochs), epochs), 1.0 if quick else 5.0)


def start(loader: str, name: str, quick: bool) -> Figures:
    """Seconds to the first batch of 20, and from the last one to the first of the next epoch.

    From making the loader on; `start-early` from `iter` on, of a loader that was made a second before.
    """
    stream = Stream(partial(Rows, length=640), 32)
    method = name.removeprefix("start-")
    early = method == "early"
    loaders.of_stream(loader, replace(stream, workers=0))  # the imports are not what is asked for
    begun = time.perf_counter()
    data = loaders.of_stream(loader, stream, multiprocessing_context="forkserver" if early else method)
    if early:
        time.sleep(1.0)
        begun = time.perf_counter()
    _, batches = _begin(data)
    first = time.perf_counter()
    for _ in batches:
        last = time.perf_counter()
    del batches
    _begin(data)
    return {"seconds": first - begun, "gap_s": time.perf_counter() - last}


def kept(loader: str, name: str, quick: bool) -> Figures:
    """Seconds to load 3,000 batches that all stay alive, and the descriptors that it takes."""
    count = 300 if quick else 3000
    stream = Stream(partial(Rows, length=32 * count), 32)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # or torch ends at 1,024
    if loader == "floor":
        return {"seconds": floor.kept(stream, count)}
    data = loaders.of_stream(loader, stream)
    before, begun = descriptors(), time.perf_counter()
    batches = list(data)
    return {"seconds": time.perf_counter() - begun, "batches": len(batches), "descriptors": descriptors() - before}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _sampler_module(loader: str) -> Any:
    if loader == "agnoload":
        import agnoload

        return agnoload
    if loader != "torch":
        raise LookupError(f"no {loader} for this workload")
    import torch.utils.data

    return torch.utils.data


def weighted(loader: str, name: str, quick: bool) -> Figures:
    """Seconds and memory to make 100,000 weighted draws out of 1e8 weights."""
    count, draws = (10**6 if quick else 10**8), 100_000
    weights = np.random.default_rng(0).random(count)
    module = None if loader == "floor" else _sampler_module(loader)
    peak, begun = _peak_mib(), time.perf_counter()
    if module is None:
        sums = np.cumsum(weights)
        drawn = sums.searchsorted(np.random.default_rng(0).random(draws) * sums[-1])
    else:
        try:
            drawn = list(module.WeightedRandomSampler(weights, draws))
        except (ValueError, RuntimeError) as error:
            return {"error": str(error).splitlines()[0]}
    figures = {"seconds": time.perf_counter() - begun, "batches": len(drawn)}
    return figures | {"bytes_a_weight": (_peak_mib() - peak) * 2**20 / count}


def _shuffles(loader: str) -> Callable[[int], Any]:
    """What gives the first index of a shuffle of so many."""
    if loader == "floor":
        return lambda count: np.random.default_rng(0).permutation(count)[0]
    if loader == "grain":
        import grain

        return lambda count: grain.MapDataset.range(count).shuffle(seed=0)[0]
    module = _sampler_module(loader)
    return lambda count: next(iter(module.RandomSampler(range(count))))


def shuffle(loader: str, name: str, quick: bool) -> Figures:
    """Seconds to the first index of a shuffle of 1e8, and memory beside what was there."""
    count = changed(name)[1].get("length", 10**6 if quick else 10**8)
    begin = _shuffles(loader)
    peak, begun = _peak_mib(), time.perf_counter()
    begin(count)
    return {"seconds": time.perf_counter() - begun, "extra_mib": _peak_mib() - peak}


def worker_memory(loader: str, name: str, quick: bool) -> Figures:
    """Private memory that the worst worker gains over a shuffled epoch of 1,000,000 strings."""
    texts: Any = strings(10**5 if quick else 10**6)
    if loader == "floor":
        raise LookupError("no floor for this workload")
    if loader == "agnoload":
        import agnoload

        texts = agnoload.PackedList(texts)
    stream = Stream(lambda: texts, 1000)
    begun = time.perf_counter()
    data = loaders.of_stream(loader, stream, shuffle=True)
    batches = iter(data)
    next(batches)
    before = {p: private_mib(p) for p in family()[1:]}
    for _ in itertools.islice(batches, len(data) - 2):
        pass  # the last batch stays inside, and with it the workers stay alive
    gains = [private_mib(p) - before[p] for p in family()[1:] if p in before and p.status() != psutil.STATUS_ZOMBIE]
    return {"mib": max(gains), "seconds": time.perf_counter() - begun}


VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "forkserver": {"multiprocessing_context": "forkserver"},
    "threads": {"worker_type": "thread"},
    "kept": {"persistent_workers": True},
}


def epochs(loader: str, name: str, quick: bool) -> Figures:
    """Seconds of the first epoch, from making the loader on, of a later one, and what a worker has for itself.

    What the user's process imports is imported before.
    """
    work, _, variant = name.partition("-")
    options = VARIANTS[variant]
    _check_epochs(loader, name, options)
    with FOLDERS[work](200 if quick else 2000) as dataset:
        stream = Stream(lambda: dataset, 10 if quick else 50)
        loaders.of_stream(loader, replace(stream, workers=0))
        seconds = []
        begun = time.perf_counter()
        data = loaders.of_stream(loader, stream, shuffle=True, **options)
        for _ in range(2 if quick else 5):
            for _ in data:
                pass
            now = time.perf_counter()
            seconds.append(now - begun)
            begun = now
        batches = iter(data)
        for _ in range(len(data) // 2):
            next(batches)
        mib = worker_mib()
        del batches
    figures = {"seconds": float(np.median(seconds[1:])), "first_epoch_s": seconds[0]}
    return figures if mib is None else figures | {"worker_mib": mib}


def _check_epochs(loader: str, name: str, options: dict[str, Any]) -> None:
    if loader not in ("agnoload", "torch") or (loader == "torch" and "worker_type" in options):
        raise LookupError(f"no {loader} for this workload")
    if reason := loaders.lacking(name):
        raise LookupError(reason)


AHEAD = {"first": 0.0, "early": 5.0}
"""Seconds between making the loader and iterating it, in which a program builds its model."""


def first_epoch(loader: str, name: str, quick: bool) -> Figures:
    """Seconds of the first epoch by forkserver: from making the loader on, or if it was made before, from `iter` on."""
    work, _, variant = name.partition("-")
    _check_epochs(loader, name, {})
    with FOLDERS[work](200 if quick else 2000) as dataset:
        stream = Stream(lambda: dataset, 10 if quick else 50)
        loaders.of_stream(loader, replace(stream, workers=0))
        begun = time.perf_counter()
        data = loaders.of_stream(loader, stream, shuffle=True, multiprocessing_context="forkserver")
        if AHEAD[variant]:
            time.sleep(AHEAD[variant])
            begun = time.perf_counter()
        _, batches = _begin(data)
        first = time.perf_counter() - begun
        for _ in batches:
            pass
        return {"seconds": time.perf_counter() - begun, "first_s": first}


QUESTIONS: dict[str, Callable[[str, str, bool], Figures]] = {
    "small": stream_rate,
    "fields": stream_rate,
    "big": stream_rate,
    "decode": stream_rate,
    "stacked": stream_rate,
    "inmem": array_rate,
    "start-forkserver": start,
    "start-early": start,
    "start-spawn": start,
    "kept": kept,
    "weighted": weighted,
    "shuffle": shuffle,
    "strings": worker_memory,
    "plain": epochs,
    **{f"{work}{variant and '-'}{variant}": epochs for work in ("imports", "torchvision") for variant in VARIANTS},
    **{f"{work}-{variant}": first_epoch for work in ("imports", "torchvision") for variant in AHEAD},
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_one", description=__doc__)
    parser.add_argument("loader")
    parser.add_argument("workload", help=f"one of {', '.join(QUESTIONS)}")
    parser.add_argument("--quick", action="store_true", help="short runs on small data, to see that it works")
    options = parser.parse_args()
    try:
        figures = QUESTIONS[changed(options.workload)[0]](options.loader, options.workload, options.quick)
    except LookupError as error:
        figures = {"error": str(error)}
    print(json.dumps({"loader": options.loader, "workload": options.workload, **figures}), flush=True)


if __name__ == "__main__":
    main()
