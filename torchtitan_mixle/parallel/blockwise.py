"""Causal attention in pieces: chunks of queries against chunks of keys, merged by their log-sum-exp.

A sequence is cut into chunks of equal length, numbered in order. A query chunk sees every earlier chunk of keys whole,
its own causally, and no later one; so every piece is a rectangle or a square that a flash kernel computes without a
mask, and nothing is computed that the mask would drop. With each piece's log-sum-exp the pieces add up to the exact
softmax over all keys (Milakov & Gimelshein 2018), and the backward pass of a piece, given the merged output and
log-sum-exp, is the exact share of the gradient (Dao et al. 2022; Liu et al. 2023).

Tensors of attention are (B, H, T, D): batch, heads, tokens, head size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Piece(NamedTuple):
    """Queries `rows` against keys `columns`; `causal` pieces are square, aligned on the diagonal."""

    rows: slice
    columns: slice
    causal: bool


def pieces(query_chunks: Sequence[int], key_chunks: Sequence[int], length: int) -> list[Piece]:
    """What of the causal mask lies between these chunks of `length` tokens, held one after the other in rising order.

    Neighbouring query chunks that see the same keys whole are one piece.
    """
    result: list[Piece] = []
    for i, chunk in enumerate(query_chunks):
        rows = slice(i * length, (i + 1) * length)
        earlier = slice(0, sum(key < chunk for key in key_chunks) * length)
        if earlier.stop:
            last = result[-1] if result else None
            if last and not last.causal and last.columns == earlier and last.rows.stop == rows.start:
                result[-1] = last._replace(rows=slice(last.rows.start, rows.stop))
            else:
                result.append(Piece(rows, earlier, causal=False))
        if chunk in key_chunks:
            at = key_chunks.index(chunk) * length
            result.append(Piece(rows, slice(at, at + length), causal=True))
    return result


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that partial results are added in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class PartialSoftmax:
    """Attention of queries over the keys seen so far."""

    def __init__(self, query: Tensor) -> None:
        dtype = sum_dtype(query.dtype)
        self.output = torch.zeros(query.shape, dtype=dtype, device=query.device)
        self.log_sum_exp = torch.full(query.shape[:-1], -torch.inf, dtype=dtype, device=query.device)

    def add(self, rows: slice, output: Tensor, log_sum_exp: Tensor) -> None:
        """Take in attention over further keys: output (B, H, rows, D) and log-sum-exp (B, H, rows) over them alone."""
        before = self.log_sum_exp[:, :, rows]
        after = torch.logaddexp(before, log_sum_exp)
        target = self.output[:, :, rows]
        target.mul_((before - after).exp().unsqueeze(-1))
        target.addcmul_(output.to(target.dtype), (log_sum_exp - after).exp().unsqueeze(-1))
        before.copy_(after)


def unpack(packed: Tensor) -> tuple[Tensor, ...]:
    """(B, T, H, n, D), as attention's tensors travel -> n views (B, H, T, D)."""
    return tuple(x.transpose(1, 2) for x in packed.unbind(dim=3))


def add_forward(
    partial: PartialSoftmax, q: Tensor, keys_values: Tensor, parts: Sequence[Piece], scale: float | None
) -> None:
    """Bring the attention of q (B, H, Tq, D) over keys and values (B, T, H, 2, D) into `partial`."""
    k, v = unpack(keys_values)
    for rows, columns, causal in parts:
        partial.add(rows, *attend(q[:, :, rows], k[:, :, columns], v[:, :, columns], causal, scale))


def add_backward(
    dq: Tensor,
    d_keys_values: Tensor,
    upstream: Tensor,
    q: Tensor,
    keys_values: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    parts: Sequence[Piece],
    scale: float | None,
) -> None:
    """Add what these keys contribute to dq (B, H, Tq, D) and d_keys_values (B, T, H, 2, D).

    `upstream` is the gradient of `output`; both and the log-sum-exp are those over all keys.
    """
    k, v = unpack(keys_values)
    dk, dv = unpack(d_keys_values)
    for rows, columns, causal in parts:
        shares = attend_backward(
            upstream[:, :, rows],
            q[:, :, rows],
            k[:, :, columns],
            v[:, :, columns],
            output[:, :, rows],
            log_sum_exp[:, :, rows],
            causal,
            scale,
        )
        for total, share in zip((dq[:, :, rows], dk[:, :, columns], dv[:, :, columns]), shares, strict=True):
            total += share


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Attention (B, H, Tq, D) and log-sum-exp (B, H, Tq) by the device's flash kernel."""
    if q.device.type == "cpu":
        output, log_sum_exp = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return output, log_sum_exp
    if q.dtype == torch.float32:  # flash kernels take 16 bits
        output, log_sum_exp, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
        return output, log_sum_exp[:, :, : q.shape[2]]  # its rows are padded to a multiple of 32
    output, log_sum_exp, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return output, log_sum_exp


def attend_backward(
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from the gradient `upstream` of the output."""
    if q.device.type == "cpu":
        result = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            upstream, q, k, v, output, log_sum_exp, 0.0, causal, scale=scale
        )
        return result[0], result[1], result[2]
    no_dropout = torch.zeros(2, dtype=torch.int64, device=q.device)  # the random state of a dropout of 0 is not read
    if q.dtype == torch.float32:
        padding = -q.shape[2] % 32
        padded = torch.nn.functional.pad(log_sum_exp, (0, padding), value=torch.inf)
        result = aten._scaled_dot_product_efficient_attention_backward(
            upstream,
            q,
            k,
            v,
            None,
            output,
            padded,
            no_dropout[0],
            no_dropout[1],
            0.0,
            (True, True, True, False),
            causal,
            scale=scale,
        )
        return result[0], result[1], result[2]
    n_queries, n_keys = q.shape[2], k.shape[2]
    result = aten._scaled_dot_product_flash_attention_backward(
        upstream,
        q,
        k,
        v,
        output,
        log_sum_exp.contiguous(),
        None,
        None,
        n_queries,
        n_keys,
        0.0,
        causal,
        no_dropout.view(torch.uint64),
        no_dropout.view(torch.uint64),
        scale=scale,
    )
    return result[0], result[1], result[2]
