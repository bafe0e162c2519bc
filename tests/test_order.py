"""The shuffle is a bijection, and looks like one drawn at random."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_mixle.data.order import Shuffle


@settings(max_examples=150, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_every_sample_once(n: int, seed: int, epoch: int) -> None:
    order = Shuffle(n, seed=seed, epoch=epoch)(np.arange(n))
    assert np.array_equal(np.sort(order), np.arange(n))


def test_a_part_is_the_part_of_the_whole() -> None:
    shuffle = Shuffle(1000, seed=3, epoch=1)
    whole = shuffle(np.arange(1000))
    assert np.array_equal(shuffle(np.array([999, 0, 17])), whole[[999, 0, 17]])


def test_seeds_and_epochs_differ() -> None:
    orders = [Shuffle(1000, seed=s, epoch=e)(np.arange(1000)) for s, e in [(0, 0), (0, 1), (1, 0)]]
    for i, a in enumerate(orders):
        for b in orders[i + 1 :]:
            assert (a == b).mean() < 0.02


def test_neighbours_are_torn_apart() -> None:
    n = 100_000
    order = Shuffle(n, seed=0, epoch=0)(np.arange(n))
    correlation = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 0.02
    # Of a random order, every tenth of the positions gets about a tenth of every tenth of the samples.
    table, _, _ = np.histogram2d(np.arange(n), order, bins=10)
    assert abs(table - n / 100).max() < 6 * np.sqrt(n / 100)


def test_billions_of_samples_cost_nothing() -> None:
    n = 10**12
    order = Shuffle(n, seed=0, epoch=0)(np.arange(n - 4096, n))
    assert len(np.unique(order)) == 4096
    assert (order < n).all()


def test_empty_is_refused() -> None:
    with pytest.raises(ValueError, match="n=0"):
        Shuffle(0, seed=0, epoch=0)
