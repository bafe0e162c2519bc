"""TensorBoard events of a run in one folder, each step once, across any number of starts."""

from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torchtitan.components.metrics import BaseLogger


class TensorBoard(BaseLogger):
    """Scalars in `folder`.

    `start_at` tells where this start of the run resumed: readers then drop what an earlier start, cut off after its
    last checkpoint, had written of that step and later ones. (TorchTitan makes a folder a start instead.)
    """

    def __init__(self, folder: Path, tag: str | None = None) -> None:
        self._folder = folder
        self._tag = tag
        self._writer: SummaryWriter | None = None

    def start_at(self, step: int) -> None:
        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder), max_queue=1000, purge_step=step)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.start_at(step)
        assert self._writer is not None
        for name, value in metrics.items():
            self._writer.add_scalar(name if self._tag is None else f"{self._tag}/{name}", value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
