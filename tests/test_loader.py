"""The loader: one global order for any number of ranks, continued from one number."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchtitan.config.job_config import DataLoader as DataLoaderOptions

from torchtitan_mixle.data.loader import (
    GlobalBatches,
    GlobalOrderLoader,
    TrainingSamples,
    ValidationSamples,
    torch_loader,
)
from torchtitan_mixle.errors import ConfigError


class Counting:
    """A stream whose token i is i: a batch then says which tokens it holds."""

    name = "counting"
    tokenizer = "numbers"
    fingerprint = "counting"

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens = self.vocab_size = n_tokens

    def read(self, starts: Any, length: int) -> Any:
        assert (starts >= 0).all()
        assert (starts + length <= self.n_tokens).all()
        return starts[:, None] + np.arange(length)

    def locate(self, position: int) -> str:
        return f"shard-00000.bin, token {position}"

    def check_ids(self, vocab_size: int) -> None: ...


SEQ_LEN = 4
N = 23
SOURCE = Counting(N * SEQ_LEN + 3)  # 23 samples and a tail that no sample holds


def loader(rank: int = 0, dp: int = 1, batch: int = 2, *, seed: int = 0, workers: int = 0) -> GlobalOrderLoader:
    samples = TrainingSamples(SOURCE, seq_len=SEQ_LEN, vocab_size=SOURCE.vocab_size, seed=seed)
    options = DataLoaderOptions(num_workers=workers)
    return GlobalOrderLoader(samples, dp_rank=rank, dp_world_size=dp, local_batch_size=batch, options=options)


def take(loaders: list[GlobalOrderLoader], steps: int) -> list[int]:
    """First tokens of the samples of `steps` steps, ranks in order within a step."""
    iterators = [iter(x) for x in loaders]
    return [int(row[0]) for _ in range(steps) for it in iterators for row in next(it)[0]["input"]]


def test_batches_are_windows_with_the_next_token_as_label() -> None:
    inputs, labels = next(iter(loader(batch=5)))
    assert inputs["input"].shape == labels.shape == (5, SEQ_LEN)
    assert inputs["input"].dtype == labels.dtype == torch.int64
    assert torch.equal(inputs["input"] + 1, labels)
    assert (inputs["input"][:, 0] % SEQ_LEN == 0).all()


@pytest.mark.parametrize(("dp", "batch"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_the_order_does_not_depend_on_the_ranks(dp: int, batch: int) -> None:
    assert take([loader(r, dp, batch) for r in range(dp)], 12) == take([loader(batch=1)], 96)


def test_every_sample_once_an_epoch_and_epochs_differ() -> None:
    starts = take([loader(batch=1)], 3 * N)
    epochs = [starts[i * N : (i + 1) * N] for i in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == [i * SEQ_LEN for i in range(N)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert take([loader(batch=1, seed=1)], N) != epochs[0]


@pytest.mark.parametrize("dp_after", [1, 2, 4])
def test_resume_on_other_ranks_neither_repeats_nor_skips(dp_after: int) -> None:
    unbroken = take([loader(batch=4)], 10)
    before = [loader(r, 2, 2) for r in range(2)]
    first = take(before, 3)
    state = before[0].state_dict()
    assert state == before[1].state_dict(), "the state is the same on every rank"
    assert state["samples_consumed"] == 12
    after = [loader(r, dp_after, 4 // dp_after) for r in range(dp_after)]
    for one in after:
        one.load_state_dict(state)
    assert first + take(after, 7) == unbroken


def test_workers_read_ahead_but_the_state_does_not() -> None:
    one = loader(workers=2)
    iterator = iter(one)
    seen = [next(iterator)[0]["input"][:, 0].tolist() for _ in range(3)]
    assert one.state_dict()["samples_consumed"] == 6
    assert [start for batch in seen for start in batch] == take([loader()], 3)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    take([loader()], 2)
    assert torch.equal(before, torch.get_rng_state())


def test_other_data_or_window_is_no_place_to_continue_from() -> None:
    state = loader().state_dict()
    with pytest.raises(ConfigError, match=r"samples of another training data \(other, now counting\)"):
        loader().load_state_dict({**state, "data": "other"})
    with pytest.raises(ConfigError, match=r"another training\.seq_len \(8, now 4\).*exclude_from_loading"):
        loader().load_state_dict({**state, "seq_len": 8})


def test_the_checkpoints_seed_keeps_the_order() -> None:
    first = loader(seed=0)
    expected = take([loader(seed=0)], 6)
    taken = take([first], 2)
    second = loader(seed=9)
    second.load_state_dict(first.state_dict())
    assert taken + take([second], 4) == expected


def test_an_id_beyond_v_is_named_with_its_place() -> None:
    samples = TrainingSamples(SOURCE, seq_len=SEQ_LEN, vocab_size=50, seed=0)
    with pytest.raises(ConfigError, match=r"token id (5\d) in shard-00000\.bin, token \1 is not below .* V=50"):
        samples.__getitems__(list(range(N)))


def test_a_workers_error_is_one_line(tmp_path: Path) -> None:
    samples = TrainingSamples(SOURCE, seq_len=SEQ_LEN, vocab_size=50, seed=0)
    options = DataLoaderOptions(num_workers=1)
    one = GlobalOrderLoader(samples, dp_rank=0, dp_world_size=1, local_batch_size=N, options=options)
    with pytest.raises(ConfigError, match=r"^token id 5\d in .* is not below .* V=50; set \[mixle\] vocab_size=95$"):
        next(iter(one))


def validation_batches(dp: int, batch: int, n_tokens: int) -> list[list[Any]]:
    samples = ValidationSamples(Counting(n_tokens), seq_len=SEQ_LEN, vocab_size=n_tokens)
    return [
        list(
            torch_loader(
                samples,
                GlobalBatches(start=0, stop=samples.n, dp_rank=r, dp_world_size=dp, local_batch_size=batch),
                DataLoaderOptions(),
            )
        )
        for r in range(dp)
    ]


@pytest.mark.parametrize(("dp", "batch"), [(1, 1), (1, 5), (2, 3), (4, 4)])
@pytest.mark.parametrize("n_tokens", [2, 17, 18, 40])
def test_validation_scores_every_token_once_and_ranks_keep_step(dp: int, batch: int, n_tokens: int) -> None:
    ranks = validation_batches(dp, batch, n_tokens)
    assert len({len(batches) for batches in ranks}) == 1
    labels = torch.cat([y.flatten() for batches in ranks for _, y in batches])
    assert sorted(labels[labels != -100].tolist()) == list(range(1, n_tokens))
    for batches in ranks:
        for inputs, y in batches:
            assert torch.equal(inputs["input"][y != -100] + 1, y[y != -100])
