"""The same work set up with each loader. Imports stay inside: a process loads the one it measures.

Each is set up as its documentation has it for such data. What a loader is not made for it is not asked: `LookupError`.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from benchmarks.floor import collate_into
from benchmarks.workloads import NEEDS, Stream, in_memory

LOADERS = {
    "agnoload": "agnoload",
    "torch": "torch",
    "grain": "grain",
    "spdl": "spdl.dataloader",
    "jax-dataloader": "jax_dataloader",
    "floor": "numpy",
}
"""What can be measured, and the module that it needs."""
RIVALS = ("grain", "spdl", "jax-dataloader")


def reason_against(loader: str) -> str | None:
    """Why a loader cannot be measured here."""
    if loader not in LOADERS:
        return f"there is no loader {loader}; there are {', '.join(LOADERS)}"
    top = LOADERS[loader].partition(".")[0]
    return None if importlib.util.find_spec(top) else f"{loader} is not installed"


def lacking(workload: str) -> str | None:
    """Why a workload cannot be measured here, whatever the loader."""
    needed = NEEDS.get(workload.partition("-")[0], "numpy")
    return None if importlib.util.find_spec(needed) else f"{needed} is not installed"


def of_stream(loader: str, stream: Stream, **options: Any) -> Any:
    """A loader over a stream's dataset, in order, with the loader's own defaults."""
    if stream.collate_fn is not None:
        options["collate_fn"] = stream.collate_fn
    if loader == "agnoload":
        import agnoload

        return agnoload.DataLoader(stream.dataset(), stream.batch_size, num_workers=stream.workers, **options)
    if loader == "torch":
        import torch.utils.data

        return torch.utils.data.DataLoader(stream.dataset(), stream.batch_size, num_workers=stream.workers, **options)
    if loader == "grain" and not options and stream.collate_fn is None:
        return _grain(stream)
    if loader == "spdl" and not options and stream.collate_fn is None:
        return _spdl(stream)
    raise LookupError(f"no {loader} for this workload")


def _grain(stream: Stream) -> Any:
    """Worker processes that read with no threads of their own: what it advises for samples that wait for nothing."""
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # its worker processes want that of a program that is not started by absl
    dataset = grain.MapDataset.source(stream.dataset()).batch(stream.batch_size)
    alone = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    options = grain.MultiprocessingOptions(num_workers=stream.workers)
    return dataset.to_iter_dataset(alone).mp_prefetch(options)


def _spdl(stream: Stream) -> Any:
    """Worker threads, for which it is made; a batch is one task, which costs it less than a task for each sample."""
    import spdl.dataloader

    dataset = stream.dataset()

    def load(first: int) -> Any:
        return collate_into(None, [dataset[i] for i in range(first, min(first + stream.batch_size, len(dataset)))])

    firsts = range(0, len(dataset), stream.batch_size)
    return spdl.dataloader.DataLoader(firsts, preprocessor=load, num_threads=stream.workers, output_order="input")


def of_arrays(loader: str, batch_size: int, **options: Any) -> Any:
    """A loader over two arrays in memory, shuffled, without workers."""
    images, labels = in_memory()
    if loader == "agnoload":
        import agnoload

        return agnoload.DataLoader(agnoload.ArrayDataset(images, labels), batch_size, shuffle=True, **options)
    if loader == "torch":
        import torch
        import torch.utils.data as data

        rows = data.TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))
        return data.DataLoader(rows, batch_size, shuffle=True, **options)
    if loader == "grain":
        import grain

        indices = grain.MapDataset.range(len(labels)).shuffle(seed=0).batch(batch_size)
        return indices.map(
            lambda chosen: (images[chosen], labels[chosen])
        )  # it reads ahead in threads, as is best here
    if loader == "jax-dataloader":
        import jax_dataloader

        rows = jax_dataloader.ArrayDataset(images, labels)
        return jax_dataloader.DataLoader(rows, "jax", batch_size=batch_size, shuffle=True)
    raise LookupError(f"no {loader} for this workload")
