"""The same work set up with each loader. Imports stay inside: a process loads the one it measures."""

from __future__ import annotations

from typing import Any

from benchmarks.workloads import Stream, in_memory


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
    if loader == "grain" and stream.collate_fn is None:
        return _grain(stream)
    raise LookupError(f"no {loader} for this workload")


def _grain(stream: Stream) -> Any:
    import grain

    dataset = grain.MapDataset.source(stream.dataset()).batch(stream.batch_size).to_iter_dataset()
    return dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=stream.workers))


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
    raise LookupError(f"no {loader} for this workload")
