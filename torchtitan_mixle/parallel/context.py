"""Context parallelism: every rank holds some tokens of each sequence, and attention brings queries and keys together.

Three methods, equal in result, that differ in what travels:

- `allgather`: every rank gets all keys and values, in one collective a block; backward is one reduce-scatter.
- `ring`: keys and values move from rank to rank while the ones before are computed with (Liu et al. 2023), so that no
  rank ever holds more than two shares of them; backward is a second ring, which carries their gradients home.
- `ulysses`: an all-to-all gives every rank whole sequences of some heads, and a second one gives the outputs back
  (Jacobs et al. 2023).

Here tokens lie as in the model: qkv is (B, t, H, 3, D), the output (B, t, H, D), with the t = T/cp tokens and H heads
of this rank.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_mixle.parallel.blockwise import (
    PartialSoftmax,
    Piece,
    add_backward,
    add_forward,
    attend,
    attend_backward,
    pieces,
    sum_dtype,
    unpack,
)
from torchtitan_mixle.planning.sequence import chunks_of_rank

# The names of torch 2.13, and those before it.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Attended(NamedTuple):
    """What a forward pass gives: the output, and what the backward pass wants to see again."""

    output: Tensor
    """(B, t, H, D)."""
    log_sum_exp: Tensor
    """Of the rows that this rank computed."""
    kept: Tensor
    """What travelled here, if the backward pass needs it: shape by method."""


@dataclass(frozen=True)
class ContextParallel(ABC):
    """This rank's part in context-parallel attention; the methods say what travels."""

    group: dist.ProcessGroup
    order: str
    """How tokens are dealt out: "contiguous", or "headtail" (rank r has chunks r and 2 cp - 1 - r)."""

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    def chunks(self, rank: int) -> list[int]:
        """Numbers of the sequence's chunks that a rank holds, rising."""
        return chunks_of_rank(self.order, rank, self.size)

    def in_sequence(self, shares: Tensor) -> Tensor:
        """Ranks' shares (cp, B, t, ...) -> whole sequences (B, T, ...)."""
        size, batch, length, *rest = shares.shape
        each = len(self.chunks(0))
        chunks = shares.view(size, batch, each, length // each, *rest).transpose(1, 2).flatten(0, 1)
        holders = [chunk for rank in range(size) for chunk in self.chunks(rank)]
        order = sorted(range(len(holders)), key=holders.__getitem__)
        return torch.cat([chunks[i] for i in order], dim=1)

    def in_shares(self, sequences: Tensor) -> Tensor:
        """Whole sequences (B, T, ...) -> ranks' shares (cp, B, t, ...)."""
        chunks = sequences.chunk(self.size * len(self.chunks(0)), dim=1)
        return torch.stack([torch.cat([chunks[i] for i in self.chunks(r)], dim=1) for r in range(self.size)])

    def pieces(self, keys_of: int | None, length: int) -> list[Piece]:
        """What this rank's `length` queries see of the keys of a rank, or of all keys in sequence (None)."""
        mine = self.chunks(self.rank)
        keys = list(range(self.size * len(mine))) if keys_of is None else self.chunks(keys_of)
        return pieces(mine, keys, length // len(mine))

    @abstractmethod
    def forward(self, qkv: Tensor, scale: float | None) -> Attended: ...

    @abstractmethod
    def backward(self, upstream: Tensor, qkv: Tensor | None, attended: Attended, scale: float | None) -> Tensor:
        """Gradient of qkv, from that of the output; qkv is there if the method needs it."""

    needs_qkv = True
    """Whether the backward pass reads qkv."""

    @abstractmethod
    def kept_shape(self, qkv: torch.Size) -> list[int]: ...

    def log_sum_exp_shape(self, qkv: torch.Size) -> list[int]:
        batch, length, heads, _, _ = qkv
        return [batch, heads, length]

    @abstractmethod
    def pairs(self, length: int) -> int:
        """Query-key pairs, over all heads alike, that a rank with `length` tokens computes; a square on the diagonal
        counts whole, as torch counts a causal kernel."""


def heads_first(x: Tensor) -> Tensor:
    """(B, T, H, D) <-> (B, H, T, D)."""
    return x.transpose(1, 2)


class AllGather(ContextParallel):
    """All keys and values on every rank."""

    def kept_shape(self, qkv: torch.Size) -> list[int]:
        batch, length, heads, _, size = qkv
        return [batch, length * self.size, heads, 2, size]

    def pairs(self, length: int) -> int:
        return _count(self.pieces(None, length))

    def forward(self, qkv: Tensor, scale: float | None) -> Attended:
        own = qkv[:, :, :, 1:].contiguous()
        gathered = own.new_empty(self.size, *own.shape)
        _all_gather(gathered.flatten(0, 1), own, group=self.group)
        keys_values = self.in_sequence(gathered)
        q = heads_first(qkv[:, :, :, 0])
        partial = PartialSoftmax(q)
        add_forward(partial, q, keys_values, self.pieces(None, qkv.shape[1]), scale)
        return Attended(_output(partial, qkv), partial.log_sum_exp, keys_values)

    def backward(self, upstream: Tensor, qkv: Tensor | None, attended: Attended, scale: float | None) -> Tensor:
        assert qkv is not None
        q = heads_first(qkv[:, :, :, 0])
        dq = torch.zeros(q.shape, dtype=sum_dtype(q.dtype), device=q.device)
        d_keys_values = torch.zeros(attended.kept.shape, dtype=dq.dtype, device=q.device)
        add_backward(
            dq,
            d_keys_values,
            heads_first(upstream),
            q,
            attended.kept,
            heads_first(attended.output),
            attended.log_sum_exp,
            self.pieces(None, qkv.shape[1]),
            scale,
        )
        shares = self.in_shares(d_keys_values)
        own = torch.empty_like(shares[0])
        _reduce_scatter(own, shares.flatten(0, 1), group=self.group)
        return _d_qkv(heads_first(dq), own, qkv)


class Ring(ContextParallel):
    """Keys and values from rank to rank."""

    def kept_shape(self, qkv: torch.Size) -> list[int]:
        return [0]

    def pairs(self, length: int) -> int:
        return sum(_count(self.pieces(source, length)) for source in range(self.size))

    def forward(self, qkv: Tensor, scale: float | None) -> Attended:
        q = heads_first(qkv[:, :, :, 0])
        keys_values = qkv[:, :, :, 1:].contiguous()
        partial = PartialSoftmax(q)
        for hop in range(self.size):
            following = _Hop(keys_values, self) if hop < self.size - 1 else None
            add_forward(partial, q, keys_values, self.pieces(self._source(hop), qkv.shape[1]), scale)
            if following:
                keys_values = following.arrived()
        return Attended(_output(partial, qkv), partial.log_sum_exp, qkv.new_empty(0))

    def backward(self, upstream: Tensor, qkv: Tensor | None, attended: Attended, scale: float | None) -> Tensor:
        assert qkv is not None
        q = heads_first(qkv[:, :, :, 0])
        keys_values = qkv[:, :, :, 1:].contiguous()
        dq = torch.zeros(q.shape, dtype=sum_dtype(q.dtype), device=q.device)
        travelling: _Hop | None = None  # the gradients of the keys and values that arrive with the next hop
        for hop in range(self.size):
            following = _Hop(keys_values, self) if hop < self.size - 1 else None
            share = torch.zeros(keys_values.shape, dtype=dq.dtype, device=q.device)
            add_backward(
                dq,
                share,
                heads_first(upstream),
                q,
                keys_values,
                heads_first(attended.output),
                attended.log_sum_exp,
                self.pieces(self._source(hop), qkv.shape[1]),
                scale,
            )
            if travelling:
                share += travelling.arrived()
            travelling = _Hop(share, self)  # after the last hop they are one rank short of home
            if following:
                keys_values = following.arrived()
        assert travelling is not None
        return _d_qkv(heads_first(dq), travelling.arrived(), qkv)

    def _source(self, hop: int) -> int:
        """Whose keys and values are here after that many hops."""
        return (self.rank - hop) % self.size


class _Hop:
    """A tensor on its way to the next rank while the one before it sends its own."""

    def __init__(self, tensor: Tensor, ring: ContextParallel) -> None:
        self._sent = tensor  # must live until it has left
        self._received = torch.empty_like(tensor)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=ring.group, group_peer=(ring.rank + 1) % ring.size),
                dist.P2POp(dist.irecv, self._received, group=ring.group, group_peer=(ring.rank - 1) % ring.size),
            ]
        )

    def arrived(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


class Ulysses(ContextParallel):
    """Whole sequences of some heads on every rank."""

    needs_qkv = False

    def kept_shape(self, qkv: torch.Size) -> list[int]:
        """q, k, v and output of this rank's heads over whole sequences."""
        batch, length, heads, _, size = qkv
        return [batch, length * self.size, heads // self.size, 4, size]

    def log_sum_exp_shape(self, qkv: torch.Size) -> list[int]:
        batch, length, heads, _, _ = qkv
        return [batch, heads // self.size, length * self.size]

    def pairs(self, length: int) -> int:
        return length * length * self.size  # T x T for one head in cp of them

    def forward(self, qkv: Tensor, scale: float | None) -> Attended:
        kept = qkv.new_empty(self.kept_shape(qkv.shape))
        kept[:, :, :, :3] = self._to_heads(qkv)
        q, k, v, output = unpack(kept)
        result, log_sum_exp = attend(q, k, v, True, scale)
        output.copy_(result)
        return Attended(self._to_tokens(heads_first(output)), log_sum_exp.contiguous(), kept)

    def backward(self, upstream: Tensor, qkv: Tensor | None, attended: Attended, scale: float | None) -> Tensor:
        q, k, v, output = unpack(attended.kept)
        d_output = heads_first(self._to_heads(upstream))
        gradients = attend_backward(d_output, q, k, v, output, attended.log_sum_exp, True, scale)
        return self._to_tokens(torch.stack([heads_first(x) for x in gradients], dim=3))

    def _to_heads(self, x: Tensor) -> Tensor:
        """Some tokens of all heads (B, t, H, ...) -> all tokens of some heads (B, T, H/cp, ...)."""
        return self.in_sequence(self._exchange(torch.stack(x.chunk(self.size, dim=2))))

    def _to_tokens(self, x: Tensor) -> Tensor:
        """All tokens of some heads (B, T, H/cp, ...) -> some tokens of all heads (B, t, H, ...)."""
        return torch.cat(list(self._exchange(self.in_shares(x))), dim=2)

    def _exchange(self, for_ranks: Tensor) -> Tensor:
        """(cp, ...) by the rank that it goes to -> by the rank that it comes from."""
        from_ranks = torch.empty_like(for_ranks)
        dist.all_to_all_single(from_ranks, for_ranks, group=self.group)
        return from_ranks


METHODS: dict[str, type[ContextParallel]] = {"allgather": AllGather, "ring": Ring, "ulysses": Ulysses}


def _count(parts: list[Piece]) -> int:
    return sum((p.rows.stop - p.rows.start) * (p.columns.stop - p.columns.start) for p in parts)


def _output(partial: PartialSoftmax, qkv: Tensor) -> Tensor:
    return heads_first(partial.output).to(qkv.dtype).contiguous()


def _d_qkv(dq: Tensor, d_keys_values: Tensor, qkv: Tensor) -> Tensor:
    """Gradients (B, t, H, D) and (B, t, H, 2, D) as one of qkv."""
    return torch.cat([dq.unsqueeze(3), d_keys_values], dim=3).to(qkv.dtype)
