"""Ragged fields through the loader, and each framework's own form of them."""

from __future__ import annotations

import doctest
import importlib
import logging
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agnoload
from agnoload import DataLoader, Packed, Padded, ragged_collate

LENGTHS = [3, 1, 0, 5, 2, 7, 4, 1, 6, 2, 0, 9]


class Graphs(agnoload.Dataset):
    """Sequences of unequal length, and edges between their rows."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Any:
        n = LENGTHS[index]
        rows = np.full((n, 2), index + 1, np.float32)
        edges = np.array([np.arange(n), np.arange(n)[::-1]], np.int32)
        return {"x": rows, "edges": edges, "label": np.int32(index)}


def batches(backend: str, form: Any, multiple_of: int = 1, **options: Any) -> list[Any]:
    collate = ragged_collate(form, ["x", "edges"], {"edges": "x"}, axis={"edges": 1}, multiple_of=multiple_of)
    with DataLoader(Graphs(), 4, collate_fn=collate, backend=backend, **options) as loader:
        return list(loader)


@pytest.fixture(autouse=True)
def no_advice_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It logs, once a process, which of its own functions its own code had better call."""
    monkeypatch.setattr(logging.getLogger("torch.fx._symbolic_trace"), "disabled", True)


@pytest.mark.slow
def test_a_packed_field_is_a_nested_tensor_of_torchs_without_the_padding() -> None:
    torch = pytest.importorskip("torch")
    from agnoload_torch.ragged import segment_ids, to_nested

    found = zip(
        batches("torch", "packed", num_workers=1),
        batches("torch", "packed", 8),
        batches("numpy", "packed"),
        strict=True,
    )
    for batch, padded, plain in found:
        field = batch["x"]
        assert type(field) is Packed
        nested = to_nested(field)
        assert nested.values().data_ptr() == field.values.data_ptr()
        assert nested.offsets().tolist() == plain["x"].offsets.tolist()
        starts = pairwise(plain["x"].offsets.tolist())
        for item, (start, stop) in zip(nested.unbind(), starts, strict=True):
            assert item.tolist() == plain["x"].values[start:stop].tolist()
        assert (nested * 2).values().tolist() == (plain["x"].values * 2).tolist()
        assert segment_ids(field).tolist() == plain["x"].item_of_value().tolist()
        assert segment_ids(batch["edges"], axis=1).tolist() == plain["edges"].item_of_value(axis=1).tolist()
        assert batch["edges"].values.tolist() == plain["edges"].values.tolist()

        assert padded["x"].values.shape[0] % 8 == 0
        assert to_nested(padded["x"]).values().tolist() == plain["x"].values.tolist()
        sums = torch.zeros(5, 2).index_add_(0, segment_ids(padded["x"]), padded["x"].values)
        assert sums[:4].tolist() == torch.stack([item.sum(0) for item in nested.unbind()]).tolist()


def forms_agree(name: str, lengths: list[int], side: Any, multiple_of: int) -> None:
    """A framework's masks and segment ids are those of NumPy."""
    items = [np.arange(n) for n in lengths]
    padded = ragged_collate("padded", side=side, multiple_of=multiple_of)(items)
    packed = ragged_collate("packed", multiple_of=multiple_of)(items)
    forms = importlib.import_module(f"agnoload_{name}.ragged")
    convert = agnoload.get_backend(name).convert
    ours = Padded(*(convert(leaf.astype(np.int32)) for leaf in padded))
    assert forms.mask(ours, side).tolist() == padded.mask(side).tolist()
    rows = Packed(*(convert(leaf.astype(np.int32)) for leaf in packed))
    assert forms.segment_ids(rows).tolist() == packed.item_of_value().tolist()


@settings(max_examples=20)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.sampled_from(["left", "right"]), st.integers(1, 4))
def test_masks_and_segment_ids_of_torch_are_those_of_numpy(lengths: list[int], side: Any, multiple_of: int) -> None:
    pytest.importorskip("torch")
    forms_agree("torch", lengths, side, multiple_of)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
def test_masks_and_segment_ids_of_jax_are_those_of_numpy(side: Any) -> None:
    pytest.importorskip("jax")  # it compiles for each shape, which is too slow for a property
    forms_agree("jax", LENGTHS, side, 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:JAX's 64-bit types are off")
@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "device": "cpu:0"}])
def test_jit_compiles_a_packed_step_once_and_sums_by_segment(options: dict[str, Any]) -> None:
    jax = pytest.importorskip("jax")
    from agnoload_jax.ragged import mask, segment_ids

    @jax.jit  # type: ignore[untyped-decorator]
    def sums(batch: Any) -> Any:
        ids = segment_ids(batch["x"])
        ends = jax.numpy.take(batch["x"].values, batch["edges"].values[1], axis=0)
        along = jax.ops.segment_sum(ends, segment_ids(batch["edges"], axis=1), num_segments=4)
        return jax.ops.segment_sum(batch["x"].values, ids, num_segments=4), along

    for batch, plain in zip(batches("jax", "packed", 32, **options), batches("numpy", "packed"), strict=True):
        assert isinstance(batch["x"].values, jax.Array)
        assert batch["x"].values.shape == (32, 2)
        starts = list(pairwise(plain["x"].offsets.tolist()))
        wanted = [plain["x"].values[start:stop].sum(0).tolist() for start, stop in starts]
        rows, along = sums({"x": batch["x"], "edges": batch["edges"]})
        assert rows.tolist() == along.tolist() == wanted
    assert sums._cache_size() == 1

    @jax.jit  # type: ignore[untyped-decorator]
    def kept(field: Any) -> Any:
        return (field.values * mask(field)[..., None]).sum(1), field.lengths

    for batch, plain in zip(batches("jax", "padded", 16, **options), batches("numpy", "padded"), strict=True):
        total, lengths = kept(batch["x"])
        assert lengths.tolist() == plain["x"].lengths.tolist()
        assert total.tolist() == ((plain["label"] + 1) * plain["x"].lengths)[:, None].repeat(2, 1).tolist()
    assert kept._cache_size() == 1


def test_cupys_forms_are_those_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = list(zip(batches("numpy", "packed"), batches("numpy", "padded"), strict=True))
    # Its functions are NumPy's, name by name. No batch is made from here on: agnoload would keep a backend for it.
    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.delitem(sys.modules, "agnoload_cupy.ragged", raising=False)
    forms = importlib.import_module("agnoload_cupy.ragged")
    try:
        for packed, padded in pairs:
            for field, axis in (("x", 0), ("edges", 1)):
                ids = packed[field].item_of_value(axis)
                assert forms.segment_ids(packed[field], axis).tolist() == ids.tolist()
                for side in ("right", "left"):
                    mask = padded[field].mask(side, axis)
                    assert forms.mask(padded[field], side, axis).tolist() == mask.tolist()
    finally:
        del sys.modules["agnoload_cupy.ragged"]


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_the_examples_in_their_docstrings_run(name: str) -> None:
    pytest.importorskip(name)
    failed, tried = doctest.testmod(importlib.import_module(f"agnoload_{name}.ragged"))
    assert (failed, tried > 0) == (0, True)
