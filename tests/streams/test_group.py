"""The first samples of a stream, and several samples as one: `take`, `batch` and `pack`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload import ChainDataset, DataLoader, OptionError, StateError

SIZES = st.lists(st.integers(0, 6), min_size=1, max_size=5)
LANES = st.integers(1, 3)
WORKERS = st.integers(0, 2)


def flat(batches):
    return [value for batch in batches for value in batch]


def lanes_of(sizes, lanes):
    """The values of a `Sized` stream, lane by lane; one lane where `lanes` is 0."""
    starts = [sum(sizes[:shard]) for shard in range(len(sizes))]
    shards = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    return [flat(shards[lane :: lanes or 1]) for lane in range(min(lanes, len(sizes)) or 1)]


def in_pieces(values, size):
    return [values[start : start + size] for start in range(0, len(values), size)]


@settings(max_examples=12)
@given(sizes=SIZES, lanes=LANES, n=st.integers(0, 20), workers=WORKERS)
def test_take_gives_the_first_samples_of_a_plain_for(kit, deliver, sizes, lanes, n, workers):
    for stream in (kit.Sized(sizes, lanes), kit.Count(sum(sizes)).map(kit.negative).shuffle(1)):
        wanted = list(stream)[:n]
        assert list(stream.take(n)) == flat(deliver(stream.take(n), 3, workers)) == wanted
    assert len(kit.Sized(sizes).take(n)) == min(n, sum(sizes))


@settings(max_examples=15)
@given(sizes=SIZES, lanes=st.integers(0, 3), n=st.integers(1, 4), workers=WORKERS)
def test_batch_cuts_each_lane_by_itself(kit, deliver, sizes, lanes, n, workers):
    stream = (kit.Sized(sizes, lanes) if lanes else kit.Count(sum(sizes), sum(sizes))).map(kit.negative)
    wanted = [[-1 - value for value in piece] for lane in lanes_of(sizes, lanes) for piece in in_pieces(lane, n)]
    batched = stream.batch(n)
    assert list(batched) == wanted
    assert len(batched) == len(wanted)
    assert sorted(deliver(batched, None, workers)) == sorted(wanted)
    taken = batched.take(2)
    assert deliver(taken, None, workers) == wanted[:2]


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    lanes=st.integers(0, 2),
    n=st.integers(1, 5),
    key=st.sampled_from([None, "x"]),
    kind=st.sampled_from([list, lambda ids: np.array(ids, np.int32)]),
    workers=WORKERS,
)
def test_pack_lays_sequences_one_after_the_other_and_numbers_their_pieces(
    kit, deliver, lengths, lanes, n, key, kind, workers
):
    """Against the plainest way there is: all tokens of a lane in one line, cut."""

    def sequence(number):
        ids = kind(range(10 * number, 10 * number + lengths[number]))
        return ids if key is None else {key: ids, "other": 1}

    stream = kit.Sized([1] * len(lengths), lanes) if lanes else kit.Count(len(lengths))
    rows = stream.map(sequence).pack(n, key=key, value=-1)
    wanted = []
    for lane in lanes_of([1] * len(lengths), lanes):
        for pairs in in_pieces([(10 * number + k, number) for number in lane for k in range(lengths[number])], n):
            numbers = [number for _, number in pairs]
            segments = [1 + sorted(set(numbers)).index(number) for number in numbers]
            positions = [numbers[:place].count(number) for place, number in enumerate(numbers)]
            padding = [0] * (n - len(pairs))
            tokens = [token for token, _ in pairs] + [-1] * len(padding)
            wanted.append({"tokens": tokens, "segment_ids": segments + padding, "positions": positions + padding})
    found = [{name: array.tolist() for name, array in row.items()} for row in rows]
    assert found == wanted
    assert {str(row["tokens"].dtype) for row in rows} <= {"int64" if kind is list else "int32"}
    delivered = [{name: array.tolist() for name, array in row.items()} for row in flat(deliver(rows, 1, workers))]
    assert sorted(delivered, key=repr) == sorted(wanted, key=repr)


def test_what_is_no_sequence_of_token_ids_is_rejected(kit):
    with pytest.raises(OptionError, match=r"token ids.*key=.*got list \(shape \(1,\), dtype float64\)"):
        list(ChainDataset([iter([[0.5]])]).pack(4))
    with pytest.raises(TypeError, match="no length"):
        len(kit.Count(3, 3).pack(4))
    for sizeless in (kit.Count(3), kit.Sized([1, 2]).filter(bool)):
        with pytest.raises(TypeError, match="length is not known"):
            len(sizeless.batch(2))
        with pytest.raises(TypeError, match="length is not known"):
            len(sizeless.take(2))


def test_a_broken_state_of_packed_rows_is_rejected(kit, deliver):
    stream = kit.Resumable(9).map(lambda value: [value]).pack(2)
    for place, value, words in (
        (1, 0, "a bool in a state, got 0"),
        (2, "?", "integers in base64"),
        (3, "float64", "integers in base64"),
    ):
        loader = DataLoader(stream, 1, seed=7, collate_fn=list)
        next(iter(loader))
        state = loader.state_dict()
        state["stream"]["lanes"][0][2][place] = value
        with pytest.raises(StateError, match=words):
            deliver(stream, 1, state=state)
