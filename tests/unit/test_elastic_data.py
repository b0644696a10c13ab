"""The cursor, the shares, the hash and the ledger."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sunfleck.core.events import DatasetDescribed, SamplesCommitted
from sunfleck.executor.elastic import data


def test_a_permutation_depends_on_seed_and_epoch_alone() -> None:
    first = data.permutation(3, 5, 1000)
    assert (first == data.permutation(3, 5, 1000)).all()
    assert not (first == data.permutation(3, 6, 1000)).all()
    assert not (first == data.permutation(4, 5, 1000)).all()
    assert sorted(first.tolist()) == list(range(1000))
    assert data.permutation(3, 5, 10, shuffle=False).tolist() == list(range(10))


def test_the_order_of_an_epoch_never_changes_between_versions() -> None:
    # A resumed job must find the order it began with.
    assert data.permutation(0, 0, 8).tolist() == [5, 0, 6, 1, 7, 2, 4, 3]


@given(start=st.integers(0, 10_000), width=st.integers(0, 500), world=st.integers(1, 70))
def test_shares_cover_a_step_once_and_differ_by_at_most_one(start: int, width: int, world: int) -> None:
    shares = [data.share(start, start + width, rank, world) for rank in range(world)]
    assert shares[0][0] == start
    assert shares[-1][1] == start + width
    assert all(a[1] == b[0] for a, b in itertools.pairwise(shares))
    sizes = [high - low for low, high in shares]
    assert max(sizes) - min(sizes) <= 1


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 3"):
        data.share(0, 10, 3, 3)


@given(n=st.integers(1, 300), seed=st.integers(0, 2**32), world=st.integers(1, 9), batch=st.integers(1, 64))
def test_hashes_of_all_shares_add_up_to_the_epochs(n: int, seed: int, world: int, batch: int) -> None:
    order = data.permutation(seed, 1, n)
    total = 0
    for start in range(0, n, batch):
        parts = [0.0, 0.0, 0.0]
        for rank in range(world):
            low, high = data.share(start, min(n, start + batch), rank, world)
            for i, part in enumerate(data.split_hash(data.index_hash(order[low:high]))):
                parts[i] += part
        total = (total + data.join_hash((parts[0], parts[1], parts[2]))) % data.HASH_MODULUS
    assert total == data.epoch_hash(n)


@given(n=st.integers(2, 200), i=st.integers(0, 10_000), j=st.integers(0, 10_000))
def test_a_repeated_or_lost_sample_changes_the_hash(n: int, i: int, j: int) -> None:
    indices = np.arange(n)
    i, j = i % n, j % n
    if i != j:
        indices[i] = j
        assert data.index_hash(indices) != data.epoch_hash(n)
    assert data.index_hash(np.arange(n - 1)) != data.epoch_hash(n)


# -- ledger ------------------------------------------------------------------------------------------------------------

N, BATCH = 23, 5
DESCRIBED = DatasetDescribed(job="j", n_samples=N, epoch_hash=data.epoch_hash(N), batch=BATCH)
STEPS = [(e, c, min(N, c + BATCH)) for e in range(3) for c in range(0, N, BATCH)]


def entry(round_number: int, first: int, last: int) -> SamplesCommitted:
    """Steps [first, last), all of one epoch, as a correct run commits them."""
    epoch, low, _ = STEPS[first]
    assert STEPS[last - 1][0] == epoch
    high = STEPS[last - 1][2]
    return SamplesCommitted(
        job="j",
        round=round_number,
        epoch=epoch,
        step_from=first,
        step_to=last,
        cursor_from=low,
        cursor_to=high,
        n_samples=high - low,
        index_hash=data.index_hash(data.permutation(9, epoch, N)[low:high]),
    )


def test_a_clean_ledger_is_proved() -> None:
    verdict = data.verify([entry(0, 0, 3), entry(0, 3, 5), entry(1, 5, 10), entry(1, 10, 12)], DESCRIBED)
    assert (verdict.lost, verdict.repeated) == (0, 0)
    assert verdict.n_epochs_proved == 2
    assert verdict.n_samples == 2 * N + 2 * BATCH


def test_entries_said_again_count_once_in_any_pieces_and_order() -> None:
    spans = [entry(0, 0, 5), entry(0, 3, 5), entry(0, 0, 3), entry(0, 0, 5), entry(1, 5, 10)]
    for order in (spans, spans[::-1]):
        lost, repeated = data.verify(order, DESCRIBED)
        assert (lost, repeated) == (0, 0)


def test_a_later_round_voids_what_it_trains_anew() -> None:
    verdict = data.verify([entry(0, 0, 4), entry(1, 2, 5), entry(1, 5, 10)], DESCRIBED)
    assert (verdict.lost, verdict.repeated) == (0, 0)
    assert verdict.n_epochs_proved == 1  # the first epoch's entry had to be cut: its hash says nothing
    assert verdict.n_samples == 2 * N


def test_steps_nobody_trained_are_lost() -> None:
    verdict = data.verify([entry(0, 0, 2), entry(1, 3, 5), entry(1, 5, 10)], DESCRIBED)
    assert (verdict.lost, verdict.repeated) == (BATCH, 0)
    assert "epoch 0" in verdict.problems[0]


def test_a_round_that_begins_at_the_wrong_position_repeats_samples() -> None:
    wrong = entry(1, 3, 5)
    wrong = msgspec.structs.replace(wrong, cursor_from=10, n_samples=13)
    verdict = data.verify([entry(0, 0, 3), wrong, entry(1, 5, 10)], DESCRIBED)
    assert verdict.repeated == BATCH


def test_other_samples_than_the_datasets_are_found_by_the_hash() -> None:
    wrong = entry(0, 0, 5)
    wrong = msgspec.structs.replace(wrong, index_hash=1)
    verdict = data.verify([wrong, entry(0, 5, 10)], DESCRIBED)
    assert verdict.lost == 1
    assert "hash" in verdict.problems[0]


@given(st.data())
def test_any_correct_history_is_clean_and_any_hole_is_found(draw: st.DataObject) -> None:
    """A history: rounds begin at or before where the one before stopped, entries cut at random, some said twice."""
    spans: list[SamplesCommitted] = []
    step, number = 0, 0
    while step < len(STEPS):
        stop = draw.draw(st.integers(step + 1, len(STEPS)))
        at = step
        while at < stop:
            epoch_end = (at // 5 + 1) * 5
            to = draw.draw(st.integers(at + 1, min(stop, epoch_end)))
            spans += [entry(number, at, to)] * draw.draw(st.integers(1, 2))
            at = to
        number += 1
        step = stop if stop == len(STEPS) else draw.draw(st.integers(0, stop))
        if number > 12:
            break
    reached = max((s.step_to for s in spans if s.round == number - 1), default=0)
    verdict = data.verify(draw.draw(st.permutations(spans)), DESCRIBED)
    assert (verdict.lost, verdict.repeated) == (0, 0), verdict
    last = [s for s in spans if s.round == number - 1]
    hole = draw.draw(st.sampled_from(last))
    if hole.step_to < reached and hole.step_from > 0 and all(s is hole or s.step_from != hole.step_from for s in last):
        rest = [s for s in spans if s != hole]
        first = min(s.step_from for s in rest if s.round == number - 1) if len(last) > 1 else 0
        if first < hole.step_from:
            assert data.verify(rest, DESCRIBED).lost == hole.n_samples
