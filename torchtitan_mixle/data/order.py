"""The order of samples: a shuffle of any length in constant memory."""

from typing import cast

import numpy as np
import numpy.typing as npt

_ROUNDS = 6


class Shuffle:
    """A pseudo-random bijection of [0, n): position in the epoch -> sample.

    A Feistel network over the smallest even number of bits that holds n, applied again to every result that falls
    outside [0, n) ("cycle walking", Black and Rogaway 2002): a permutation without a table, so that a data set of
    billions of samples costs nothing to shuffle and any part of the order can be computed alone.
    """

    def __init__(self, n: int, *, seed: int, epoch: int) -> None:
        if n < 1:
            raise ValueError(f"n={n}: nothing to shuffle")
        self.n = n
        self._half_bits = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half_bits)) - 1)
        self._keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Samples (k,) at `positions` (k,), each in [0, n)."""
        x = self._permute(positions.astype(np.uint64))
        while (outside := x >= self.n).any():
            x[outside] = self._permute(x[outside])
        return x.astype(np.int64)

    def _permute(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = x >> self._half_bits, x & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        return cast("npt.NDArray[np.uint64]", (left << self._half_bits) | right)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele et al. 2014): every input bit reaches every output bit. Wraps modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
