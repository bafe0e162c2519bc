"""Batches of a token stream in one global order, for any number of data-parallel ranks."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config.job_config import DataLoader as DataLoaderOptions

from torchtitan_mixle.data.order import Shuffle
from torchtitan_mixle.data.source import TokenSource
from torchtitan_mixle.errors import ConfigError

logger = logging.getLogger(__name__)

Batch = tuple[dict[str, Tensor], Tensor]
"""({"input": ids (B, T)}, labels (B, T)), int64."""


def samples_per_epoch(source: TokenSource, seq_len: int) -> int:
    """Windows of seq_len inputs, each with the next token as label; a shorter tail is left out."""
    return max(0, (source.n_tokens - 1) // seq_len)


class TrainingSamples(Dataset[Batch]):
    """Global sample number -> tokens. Numbers run on through the epochs, each of which has its own shuffle."""

    def __init__(self, source: TokenSource, *, seq_len: int, vocab_size: int, seed: int) -> None:
        self.source = source
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.seed = seed
        self.n = samples_per_epoch(source, seq_len)

    def sample_ids(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Which window of the stream each global sample number (k,) stands for: (k,)."""
        epochs, positions = np.divmod(numbers, self.n)
        ids = np.empty_like(numbers)
        for epoch in np.unique(epochs):  # one, or two where a batch crosses the end of an epoch
            here = epochs == epoch
            ids[here] = Shuffle(self.n, seed=self.seed, epoch=int(epoch))(positions[here])
        return ids

    def __getitems__(self, numbers: list[int]) -> Batch:
        starts = self.sample_ids(np.asarray(numbers, dtype=np.int64)) * self.seq_len
        windows = self.source.read(starts, self.seq_len + 1)
        check_window_ids(windows, starts, self.source, self.vocab_size)
        inputs, labels = np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])
        return {"input": torch.from_numpy(inputs)}, torch.from_numpy(labels)


class ValidationSamples(Dataset[Batch]):
    """Every token after the first of a stream as a label exactly once, in the stream's order.

    The last window is filled up, and windows past the end are made, with ignored labels: every rank then does the same
    number of steps, and the token-weighted mean does not notice.
    """

    def __init__(self, source: TokenSource, *, seq_len: int, vocab_size: int) -> None:
        self.source = source
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.n = max(0, -(-(source.n_tokens - 1) // seq_len))

    def __getitems__(self, numbers: list[int]) -> Batch:
        inputs = torch.zeros(len(numbers), self.seq_len, dtype=torch.int64)
        labels = torch.full_like(inputs, IGNORE_INDEX)
        for row, number in enumerate(numbers):
            start = number * self.seq_len
            length = min(self.seq_len + 1, self.source.n_tokens - start)
            if length < 2:
                continue
            starts = np.array([start])
            window = self.source.read(starts, length)
            check_window_ids(window, starts, self.source, self.vocab_size)
            tokens = torch.from_numpy(window[0])
            inputs[row, : length - 1], labels[row, : length - 1] = tokens[:-1], tokens[1:]
        return {"input": inputs}, labels


def check_window_ids(
    windows: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], source: TokenSource, vocab_size: int
) -> None:
    """Raise ConfigError for an id that the token table does not have: the last guard, after the start-up check."""
    if windows.max() < vocab_size:
        return
    row, column = np.argwhere(windows >= vocab_size)[0]
    token = int(windows[row, column])
    if token < source.vocab_size:
        remedy = f"set [mixle] vocab_size={source.vocab_size}"
    else:
        remedy = f"nor below the data's own {source.vocab_size}: index and shard disagree, prepare the data again"
    raise ConfigError(
        f"token id {token} in {source.locate(int(starts[row] + column))} is not below the model's vocabulary size "
        f"V={vocab_size}; {remedy}"
    )


class GlobalBatches(Sampler[list[int]]):
    """This rank's share of every global batch from sample number `start` on: rank r takes the r-th local batch."""

    def __init__(
        self, *, start: int, stop: int | None, dp_rank: int, dp_world_size: int, local_batch_size: int
    ) -> None:
        self.start, self.stop = start, stop
        self.offset = dp_rank * local_batch_size
        self.stride = dp_world_size * local_batch_size
        self.local_batch_size = local_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        at = self.start
        while self.stop is None or at < self.stop:
            first = at + self.offset
            yield list(range(first, first + self.local_batch_size))
            at += self.stride


def torch_loader(samples: Dataset[Batch], batches: GlobalBatches, options: DataLoaderOptions) -> DataLoader[Batch]:
    """PyTorch's loader over whole batches, with TorchTitan's options."""
    workers = options.num_workers
    return DataLoader(
        samples,
        batch_sampler=batches,
        collate_fn=_as_is,
        num_workers=workers,
        persistent_workers=options.persistent_workers and workers > 0,
        prefetch_factor=options.prefetch_factor if workers > 0 else None,
        pin_memory=options.pin_memory and torch.accelerator.is_available(),
        generator=torch.Generator(),  # it draws a seed, and must not draw it from the run's generator
    )


def _plain_errors(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Pass batches on; a worker's ConfigError arrives with a traceback in its message, and leaves without."""
    try:
        yield from batches
    except ConfigError as error:
        raise ConfigError(str(error).strip().rpartition("ConfigError: ")[2]) from None


def _as_is(batch: Any) -> Any:
    """TrainingSamples and ValidationSamples make whole batches: nothing is left to collate."""
    return batch


class GlobalOrderLoader(BaseDataLoader):
    """TorchTitan's training loader. Its state is the number of samples that all ranks together have consumed.

    The state also says of which data: a position means nothing in another stream or with another window length.
    """

    def __init__(
        self,
        samples: TrainingSamples,
        *,
        dp_rank: int,
        dp_world_size: int,
        local_batch_size: int,
        options: DataLoaderOptions,
    ) -> None:
        self.samples = samples
        self.dp_rank = dp_rank
        self.dp_world_size = dp_world_size
        self.local_batch_size = local_batch_size
        self.options = options
        self.samples_consumed = 0
        self.resumed = False

    def __iter__(self) -> Iterator[Batch]:
        batches = GlobalBatches(
            start=self.samples_consumed,
            stop=None,
            dp_rank=self.dp_rank,
            dp_world_size=self.dp_world_size,
            local_batch_size=self.local_batch_size,
        )
        for batch in _plain_errors(torch_loader(self.samples, batches, self.options)):
            # Counted when handed out, whatever the workers have read ahead.
            self.samples_consumed += batches.stride
            yield batch

    def tokens_seen(self) -> int:
        """Tokens that all ranks together have trained on, over all starts that continued in this data."""
        return self.samples_consumed * self.samples.seq_len

    def state_dict(self) -> dict[str, Any]:
        return {
            "samples_consumed": self.samples_consumed,
            "seed": self.samples.seed,
            "seq_len": self.samples.seq_len,
            "data": self.samples.source.fingerprint,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the samples of a checkpoint; ConfigError if they were samples of something else."""
        if not state_dict:
            return
        here = self.state_dict()
        for key, what in (("data", "training data"), ("seq_len", "training.seq_len")):
            if state_dict[key] != here[key]:
                raise ConfigError(
                    f"the checkpoint stopped after {state_dict['samples_consumed']} samples of another {what} "
                    f"({state_dict[key]}, now {here[key]}), so there is no place in the data to continue from; use the "
                    f'same, or start the data from its beginning with checkpoint.exclude_from_loading = ["dataloader"]'
                )
        if state_dict["seed"] != self.samples.seed:
            logger.warning(
                "The data order keeps the checkpoint's seed %s (debug.seed is %s): a new one would repeat samples",
                state_dict["seed"],
                self.samples.seed,
            )
            self.samples.seed = state_dict["seed"]
        self.samples_consumed = state_dict["samples_consumed"]
        self.resumed = True
