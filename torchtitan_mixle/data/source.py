"""What the loader needs of a token stream, whether it lies in memory or in files."""

from typing import Protocol

import numpy as np
import numpy.typing as npt


class TokenSource(Protocol):
    """One long stream of token ids, documents laid end to end, each closed by an end-of-document id."""

    name: str
    """How messages call it: "python_stdlib" or the folder's path."""
    vocab_size: int
    """Ids lie in [0, vocab_size)."""
    tokenizer: str
    """Hash of the tokenizer.json that the ids are of, or "bytes"."""
    n_tokens: int
    fingerprint: str
    """Changes whenever the token stream does; saved with a run's position in the data."""

    def read(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """Tokens [start, start + length) for each start: (n,) -> (n, length). Every window lies inside the stream."""
        ...

    def locate(self, position: int) -> str:
        """Where a token of the stream lies, for messages: "shard-00003.bin, token 17"."""
        ...

    def check_ids(self, vocab_size: int) -> None:
        """Raise ConfigError if the stream holds, or its index declares, an id >= vocab_size."""
        ...
