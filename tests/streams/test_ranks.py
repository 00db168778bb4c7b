"""Streams split over the processes that train together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload import DataLoader, Mixture, OptionError, StateError
from agnoload.streams import resolve_ranks

UNEVEN = ["keep", "stop", "repeat", "pad"]


def flat(batches):
    return [value for batch in batches for value in batch]


@settings(max_examples=20)
@given(
    kind=st.sampled_from(["samples", "shards", "drawn", "self-split", "shuffled", "shuffled shards"]),
    n=st.integers(0, 14),
    world=st.integers(1, 4),
    size=st.integers(1, 3),
    workers=st.integers(0, 2),
)
def test_each_sample_comes_on_exactly_one_rank(kit, deliver, kind, n, world, size, workers):
    make = {
        "samples": lambda: kit.Count(n),
        "shards": lambda: kit.Shards(n, 5, lanes=2),
        "drawn": lambda: kit.Drawn(n),
        "self-split": lambda: kit.SelfSplitting(n),
        "shuffled": lambda: kit.Count(n).shuffle(4),
        "shuffled shards": lambda: kit.Shards(n, 5).shuffle(3),
    }[kind]
    shares = [flat(deliver(make().split_by_rank(rank, world), size, workers)) for rank in range(world)]
    assert sorted(flat(shares)) == list(range(n))


@settings(max_examples=12)
@given(
    sizes=st.lists(st.integers(0, 5), max_size=6),
    world=st.integers(1, 4),
    sharded=st.booleans(),
    shuffled=st.booleans(),
    workers=st.sampled_from([0, 0, 0, 2]),
)
def test_uneven_ranks_stop_together_or_are_filled(kit, deliver, sizes, world, sharded, shuffled, workers):
    total, found = sum(sizes), {}
    for uneven in UNEVEN:
        # Each rank makes a stream of its own, as each process does.
        streams = [kit.Sized(sizes) if sharded else kit.Count(total, total) for _ in range(world)]
        streams = [stream.shuffle(3) if shuffled else stream for stream in streams]
        splits = [stream.split_by_rank(rank, world, uneven) for rank, stream in enumerate(streams)]
        found[uneven] = [flat(deliver(split, 2, workers)) for split in splits]
        for split, share in zip(splits, found[uneven], strict=True):
            assert len(DataLoader(split, 1, seed=7)) == len(share)
    keep, stop, repeat, pad = found.values()
    assert sorted(flat(keep)) == list(range(total))
    shortest, longest = min(map(len, keep)), max(map(len, keep))
    assert [len(share) for share in stop] == [shortest] * world
    assert all(set(share) <= set(own) for share, own in zip(stop, keep, strict=True))
    assert len(set(flat(stop))) == shortest * world
    assert [len(share) for share in repeat] == [longest] * world
    assert set(flat(repeat)) == set(range(total))
    assert [[value for value, _ in share] for share in pad] == repeat
    assert sorted(value for value, real in flat(pad) if real) == list(range(total))


@settings(max_examples=12)
@given(n=st.integers(0, 20), world=st.integers(1, 4), size=st.integers(1, 3), workers=st.integers(0, 2))
def test_ranks_draw_what_one_rank_draws(kit, deliver, n, world, size, workers):
    whole = flat(deliver(kit.Count(n).map(kit.with_own_draw), 4))
    for rank in range(world):
        stream = kit.Count(n).split_by_rank(rank, world).map(kit.with_own_draw)
        assert flat(deliver(stream, size, workers)) == whole[rank::world]


@settings(max_examples=12)
@given(before=st.sampled_from([1, 2, 4]), after=st.integers(1, 5), size=st.integers(1, 3), workers=st.integers(0, 2))
def test_another_number_of_ranks_resumes_at_the_same_place(kit, deliver, before, after, size, workers):
    def split(rank, world):
        return kit.Resumable(40).map(kit.with_own_draw).split_by_rank(rank, world)

    loader = DataLoader(split(0, before), 4 * size // before, seed=7, collate_fn=list)
    delivered = 4 * size  # on all ranks together
    next(iter(loader))
    state = loader.state_dict()
    whole = flat(deliver(split(0, 1), 4))
    if delivered % after:
        with pytest.raises(StateError, match="samples on each of"):
            deliver(split(0, after), 2, workers, state=state)
        return
    for rank in range(after):
        rest = flat(deliver(split(rank, after), 4 * size // after or 1, workers, state=state))
        assert rest == whole[delivered:][rank::after]


def test_ranks_without_a_seed_agree_on_what_they_split(kit, deliver):
    def make(name, rank, world=3):
        streams = {
            "samples": kit.Count(23).shuffle(5),
            "shards": kit.Shards(23, 7).shuffle(5),
            "mixture": Mixture([range(12), range(12, 23)], [2, 1], stop="last", shuffle=True),
        }
        return streams[name].split_by_rank(rank, world).map(lambda value: value)

    for name in ("samples", "shards"):
        shares = [flat(deliver(make(name, rank), 4, 2, seed=None)) for rank in range(3)]
        assert sorted(flat(shares)) == list(range(23))
        assert DataLoader(make(name, 0)).seed == 0
        assert DataLoader(make(name, 0), seed=7).seed == 7
    whole, *shares = [flat(deliver(make("mixture", r, w), 4, seed=None)) for r, w in ((0, 1), (0, 3), (1, 3), (2, 3))]
    assert set(whole) == set(range(23))
    assert [shares[place % 3][place // 3] for place in range(len(whole))] == whole
    assert len({DataLoader(kit.Count(5)).seed for _ in range(3)}) == 3


def test_a_shuffled_stream_whose_length_was_asked_for_before_runs_on_the_loaders_seed(kit, deliver):
    def make(ask):
        stream = kit.Sized([3, 2, 4]).shuffle(2).split_by_rank(0, 1, uneven="stop")
        if ask:
            len(stream), list(stream)
        return deliver(stream, 2, seed=1)

    assert make(ask=True) == make(ask=False)


def test_ranks_that_split_nothing_draw_nothing_in_common(kit, load, monkeypatch):
    seen = {"own": [], "numpy": [], "python": []}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        for batch in load(kit.Drawing(12), 4, seed=0, num_workers=2):
            for source in seen:
                seen[source] += batch[source]
    for found in seen.values():
        assert len(set(found)) == len(found) == 24


def test_samples_and_shards_are_dealt_out_in_turn(kit, load):
    assert [list(kit.Count(7).split_by_rank(rank, 3)) for rank in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]
    assert list(kit.Sized([1] * 5).split_by_rank(1, 2)) == [1, 3]
    shares = [list(kit.Count(2).split_by_rank(rank, 5, uneven="repeat")) for rank in range(5)]
    assert shares == [[0], [1], [0], [1], [0]], "repeats come from the start, as samplers do it"
    found = [load(kit.Count(5).split_by_rank(rank, 2, "pad"), 4) for rank in (0, 1)]
    assert found == [[([0, 2, 4], [True] * 3)], [([1, 3, 0], [True, True, False])]]


def test_each_epoch_has_other_shards_for_a_rank_and_a_loader_knows_how_many_batches(kit, deliver):
    def split(uneven):
        return kit.Sized([4, 1, 3, 0, 5]).shuffle(3).split_by_rank(0, 2, uneven=uneven)

    for uneven in UNEVEN:
        loader, found = DataLoader(split(uneven), 2, seed=5, collate_fn=list), []
        for epoch in range(3):
            length = len(loader)
            found.append(list(loader))
            assert len(found[-1]) == length
            assert found[-1] == deliver(split(uneven), 2, seed=5, epoch=epoch), (
                "as of a stream that nobody has read before"
            )
        assert found[0] != found[1] != found[2]


def test_the_stream_may_say_how_long_its_shards_are(kit):
    class Generators(kit.Sized):
        def shard(self, number):
            return iter(super().shard(number))

    class Saying(Generators):
        def shard_length(self, number):
            return self.sizes[number]

    assert [list(Saying([4, 1, 2]).split_by_rank(rank, 2, uneven="stop")) for rank in range(2)] == [[0], [4]]
    for stream in (
        Saying([4, 1, 2]).map(str),
        Saying([4, 1, 2]).shuffle(3),
        Saying([4]) + Saying([1, 2]),
        Saying([4, 1, 2]).batch(2),
    ):
        shares = [list(stream.split_by_rank(rank, 2, uneven="stop")) for rank in range(2)]
        assert len(shares[0]) == len(shares[1]) == len(stream.split_by_rank(0, 2, uneven="stop")) > 0
    with pytest.raises(OptionError, match=r"shard_length\(i\), or use uneven='keep'"):
        Generators([4, 1]).split_by_rank(0, 2, uneven="stop")


def test_rank_and_world_are_those_given_or_of_the_environment_or_of_the_backend(kit, load, monkeypatch):
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    inner, given_one = kit.Count(7).split_by_rank(), kit.Count(7).split_by_rank(0, 2)
    assert list(inner) == list(range(7))
    resolve_ranks(Mixture([inner.shuffle(3), given_one], [1, 1]), (1, 2))
    assert list(inner) == [1, 3, 5]
    assert given_one.rank == 0
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    stream = kit.Count(7).split_by_rank()
    assert (stream.rank, stream.world_size) == (1, 3)
    resolve_ranks(stream.map(abs), (0, 2))
    assert list(stream) == [1, 4]
    assert load(kit.Count(8).split_by_rank(), 2) == [[1, 4], [7]]
    assert load(kit.Count(4), 2) == [[0, 1], [2, 3]]  # never split in silence


def test_ranks_that_cannot_be_are_rejected(kit):
    for arguments, words in (
        ((2, 2), "rank 2 and world size 2"),
        ((-1, 2), "rank -1"),
        ((1,), "or neither"),
        ((0, 2, "drop"), "'keep', 'stop'"),
    ):
        with pytest.raises(OptionError, match=words):
            kit.Count(3).split_by_rank(*arguments)


def test_a_state_of_one_rank_is_rejected_on_another(kit, deliver):
    for stream in (kit.Sized([3, 4, 1, 6]), kit.Count(20)):
        split = [stream.split_by_rank(rank, 2).filter(lambda value: True) for rank in (0, 1)]
        loader = DataLoader(split[0], 2, seed=7)
        next(iter(loader))
        with pytest.raises(StateError, match=r"saved with \(0, 2\), got \(1, 2\)"):
            deliver(split[1], 2, state=loader.state_dict())
