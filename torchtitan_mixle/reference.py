"""Tensor, pipeline and context parallelism as plain mathematics in one process: the oracle of the distributed code.

Every "rank" is an entry of a list and every collective a concatenation or a sum over it. No process group, no device
mesh: what a distributed run computes, written so that it can be read and compared at every position.

A model here is a mixle `CausalLM` or any object with its attributes: `tok`, `pos`, `blocks` (each with `ln1`, `attn`,
`ln2` and an `mlp` of Linear, activation, Linear), `ln`, `head` and, if the logits are scaled, `mup_output_multiplier`;
an attention has `qkv` (rows [all q | all k | all v]), `proj`, `h` (heads) and, if muP scales the scores,
`mup_attention`. Our own weights come in that layout out of `model.weights.to_mixle`.

Shards are slices of the live parameters: outputs are the model's, and a backward through them leaves the model's
gradients in the model's parameters. The qkv rows of a rank do not lie together in mixle's matrix, so those (alone) are
copied: shard again after an update of the parameters, and shard with gradients enabled if gradients are wanted.

Misuse raises ConfigError, a ValueError. Shapes: B batch, T sequence, d width, H heads of D = d / H numbers each,
V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.planning.check import check_heads, divisors, validate_tp_pp_cp_plan

__all__ = [
    "ColumnParallelLinear",
    "PPStage",
    "RowParallelLinear",
    "TPAttentionShard",
    "TPBlockShard",
    "TPCausalLMShard",
    "cp_attention_forward",
    "cp_forward_causal_lm",
    "cp_shard_sequence",
    "pipeline_forward",
    "pp_partition_causal_lm",
    "tp_attention_forward",
    "tp_forward_causal_lm",
    "tp_shard_attention",
    "tp_shard_causal_lm",
    "validate_tp_pp_cp_plan",
]


# ---- What the three kinds share


def _blocks(model: Any) -> list[Any]:
    """The model's blocks, in order."""
    if isinstance(model.blocks, nn.ModuleDict):
        raise _other_layout(model, "its blocks are a ModuleDict")
    return list(model.blocks)


def _head_dim(attn: Any) -> int:
    """D of an attention in mixle's layout."""
    if not hasattr(attn, "qkv"):
        raise _other_layout(attn, "it has no qkv with rows [all q | all k | all v]")
    head_dim, rest = divmod(attn.qkv.weight.shape[0], 3 * attn.h)
    if rest:
        raise _other_layout(attn, f"its {attn.qkv.weight.shape[0]} rows of qkv are not q, k and v of h={attn.h} heads")
    return head_dim


def _other_layout(module: nn.Module, why: str) -> ConfigError:
    return ConfigError(
        f"{type(module).__name__} is not in mixle's layout: {why}; "
        "load its weights into a mixle CausalLM with model.weights.to_mixle(state_dict, n_head)"
    )


def _embed(owner: Any, ids: Tensor, first_position: int = 0) -> Tensor:
    """Token plus position embeddings (B, T, d) of ids (B, T) that start at `first_position` of their sequence."""
    positions = torch.arange(first_position, first_position + ids.shape[1], device=ids.device)
    return owner.tok(ids) + owner.pos(positions)


def _logits(owner: Any, x: Tensor) -> Tensor:
    """(B, T, d) -> (B, T, V)."""
    return owner.head(owner.ln(x)) * getattr(owner, "mup_output_multiplier", 1.0)


def _token_ids(owner: Any, x: Tensor) -> Tensor:
    """`x` as int64 ids, once it is sure that the embeddings of `owner` hold them; mixle takes ids as floats, too."""
    vocab, longest = owner.tok.weight.shape[0], owner.pos.weight.shape[0]
    if x.ndim != 2 or 0 in x.shape:
        raise ConfigError(f"x has shape {tuple(x.shape)}: must be token ids (batch, sequence), neither of them 0")
    if x.shape[1] > longest:
        raise ConfigError(
            f"x has T={x.shape[1]} positions but the position table {longest} rows; use sequences of at most {longest}"
        )
    ids = x.long()
    if bool((ids != x).any()) or not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise ConfigError(
            f"x holds values from {x.min()} to {x.max()}: token ids must be whole numbers from 0 to {vocab - 1}"
        )
    return ids


def _split_heads(qkv: Tensor, n_head: int) -> tuple[Tensor, Tensor, Tensor]:
    """A projection (B, T, 3 * H * D) in mixle's order -> q, k and v, each (B, H, T, D)."""
    q, k, v = qkv.unflatten(-1, (3, n_head, -1)).permute(2, 0, 3, 1, 4)
    return q, k, v


def _attend(q: Tensor, k: Tensor, v: Tensor, *, mup_attention: bool, visible: Tensor | None = None) -> Tensor:
    """Heads (B, H, T, D) -> (B, T, H * D); a mask `visible` (T of q, T of k) takes the place of the causal one."""
    scale = 1.0 / q.shape[-1] if mup_attention else None  # None: the usual 1/sqrt(D)
    o = F.scaled_dot_product_attention(q, k, v, visible, is_causal=visible is None, scale=scale)
    return o.transpose(1, 2).flatten(2)


# ---- Tensor parallelism


@dataclass(eq=False)
class ColumnParallelLinear:
    """A Linear whose output features are shared between ranks.

    `weight[r]` (out_r, in) are contiguous rows of the dense weight in rank order, `bias[r]` (out_r,) the same rows of
    its bias, if it has one. Raises ConfigError for an empty list, or lists that do not fit one another.
    """

    weight: list[Tensor]
    bias: list[Tensor] | None

    def __post_init__(self) -> None:
        _check_shards_agree("in_features", [w.shape[1] for w in self.weight])
        rows = [w.shape[0] for w in self.weight]
        if self.bias is not None and [b.shape[0] for b in self.bias] != rows:
            raise ConfigError(
                f"bias has shards of {[b.shape[0] for b in self.bias]} numbers but weight has shards of {rows} rows; "
                "give every rank the bias of its own rows, or None for a Linear without bias"
            )

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out): every rank's output features, gathered in rank order."""
        return torch.cat(self._local_outputs(x), dim=-1)

    def _local_outputs(self, x: Tensor) -> list[Tensor]:
        """The outputs (..., out_r) that each rank has before (and often without) a gather."""
        _check_width(x, self.weight[0].shape[1])
        return [F.linear(x, w, self.bias[r] if self.bias else None) for r, w in enumerate(self.weight)]


@dataclass(eq=False)
class RowParallelLinear:
    """A Linear whose input features are shared between ranks.

    `weight[r]` (out, in_r) are contiguous columns of the dense weight in rank order. The ranks' outputs are summed, so
    the whole `bias` (out,) is one rank's (rank 0's). Raises ConfigError for an empty list or shards of different `out`.
    """

    weight: list[Tensor]
    bias: Tensor | None

    def __post_init__(self) -> None:
        out_features = _check_shards_agree("out_features", [w.shape[0] for w in self.weight])
        if self.bias is not None and self.bias.shape[0] != out_features:
            raise ConfigError(
                f"bias has {self.bias.shape[0]} numbers: must be one for each of out_features={out_features}"
            )

    def forward(self, x_shards: list[Tensor]) -> Tensor:
        """One (..., in_r) for each rank -> (..., out): the sum of the ranks' partial outputs."""
        widths, wanted = [x.shape[-1] for x in x_shards], [w.shape[1] for w in self.weight]
        if widths != wanted:
            raise ConfigError(
                f"x_shards have the widths {widths}: the ranks' weights take {wanted}; "
                f"pass {len(wanted)} shards, one for each rank, in rank order"
            )
        partial = [
            F.linear(x, w, self.bias if rank == 0 else None)
            for rank, (x, w) in enumerate(zip(x_shards, self.weight, strict=True))
        ]
        return torch.stack(partial).sum(dim=0)


@dataclass(eq=False)
class TPAttentionShard:
    """One rank's heads of an attention: H_r whole heads of D numbers.

    `qkv_weight` (3 * H_r * D, d) and `qkv_bias` (3 * H_r * D,) are those heads' rows of q, then of k, then of v;
    `proj_weight` (d, H_r * D) the columns that take their outputs. `proj_bias` (d,) is rank 0's, None elsewhere.
    """

    n_head_local: int
    qkv_weight: Tensor
    qkv_bias: Tensor | None
    proj_weight: Tensor
    proj_bias: Tensor | None
    mup_attention: bool = field(init=False, default=False)
    """Scores times 1/D, not 1/sqrt(D): what the whole attention's flag of this name says."""


@dataclass(eq=False)
class TPBlockShard:
    """One block, shared between ranks: the ranks' attention shards, and both Linears of the MLP."""

    attn: list[TPAttentionShard]
    mlp_fc1: ColumnParallelLinear
    mlp_fc2: RowParallelLinear


@dataclass(eq=False)
class TPCausalLMShard:
    """All blocks of a model, each shared between `tp_size` ranks."""

    blocks: list[TPBlockShard]
    tp_size: int


def tp_shard_attention(attn: Any, tp_size: int) -> list[TPAttentionShard]:
    """Give each of `tp_size` ranks an equal share of whole heads, in order.

    Raises ConfigError unless `tp_size` divides the heads of `attn`.
    """
    head_dim = _head_dim(attn)
    check_heads(attn.h, tp_size, key="tp_size")

    def heads_of_each(rows: Tensor) -> list[Tensor]:
        # A rank's rows are three separate runs (in q, in k, in v), which flatten() has to copy.
        per_head = rows.unflatten(0, (3, attn.h, head_dim))
        return [share.flatten(0, 2) for share in _shares(per_head, tp_size, dim=1)]

    qkv_weight = heads_of_each(attn.qkv.weight)
    qkv_bias = [None] * tp_size if attn.qkv.bias is None else heads_of_each(attn.qkv.bias)
    proj_weight = _shares(attn.proj.weight, tp_size, dim=1)
    proj_bias = [attn.proj.bias] + [None] * (tp_size - 1)
    shards = [
        TPAttentionShard(attn.h // tp_size, *rank)
        for rank in zip(qkv_weight, qkv_bias, proj_weight, proj_bias, strict=True)
    ]
    for shard in shards:
        shard.mup_attention = bool(getattr(attn, "mup_attention", False))
    return shards


def tp_attention_forward(x: Tensor, shards: list[TPAttentionShard]) -> Tensor:
    """The whole attention's output (B, T, d) for x (B, T, d), from its ranks' shards in rank order.

    Heads are independent, so a rank attends with its own alone; the only communication is the sum in the projection.
    Raises ConfigError if the shards are not all those of one attention of width d.
    """
    _check_attention_shards(x, shards)
    outputs = []
    for shard in shards:
        q, k, v = _split_heads(F.linear(x, shard.qkv_weight, shard.qkv_bias), shard.n_head_local)  # (B, H_r, T, D)
        outputs.append(_attend(q, k, v, mup_attention=shard.mup_attention))
    return RowParallelLinear([shard.proj_weight for shard in shards], shards[0].proj_bias).forward(outputs)


def tp_shard_causal_lm(model: Any, tp_size: int) -> TPCausalLMShard:
    """Share every block's attention (by heads) and MLP (by hidden units) between `tp_size` ranks.

    Embeddings, norms and head stay whole. Raises ConfigError unless `tp_size` divides both.
    """
    shards = []
    for block in _blocks(model):
        attn = tp_shard_attention(block.attn, tp_size)
        fc1, fc2 = block.mlp[0], block.mlp[2]
        hidden = fc1.weight.shape[0]
        if hidden % tp_size:
            raise ConfigError(f"tp_size={tp_size} must divide the {hidden} units of the MLP; use {_one_of(hidden)}")
        bias = None if fc1.bias is None else _shares(fc1.bias, tp_size)
        column = ColumnParallelLinear(_shares(fc1.weight, tp_size), bias)
        shards.append(TPBlockShard(attn, column, RowParallelLinear(_shares(fc2.weight, tp_size, dim=1), fc2.bias)))
    return TPCausalLMShard(shards, tp_size)


def tp_forward_causal_lm(model: Any, x: Tensor, tp_shard: TPCausalLMShard) -> Tensor:
    """Logits (B, T, V) at every position of ids x (B, T), attention and MLP computed by the ranks of `tp_shard`.

    Raises ConfigError if `tp_shard` is not of a model of this depth and width, or x does not fit the embeddings.
    """
    blocks = _blocks(model)
    ranks = {n for b in tp_shard.blocks for n in (len(b.attn), len(b.mlp_fc1.weight), len(b.mlp_fc2.weight))}
    if len(tp_shard.blocks) != len(blocks) or ranks - {tp_shard.tp_size}:
        raise ConfigError(
            f"tp_shard has {len(tp_shard.blocks)} blocks, shared between {sorted(ranks)} ranks: must be the model's "
            f"{len(blocks)} and tp_size={tp_shard.tp_size}; use tp_shard_causal_lm(model, {tp_shard.tp_size})"
        )
    h = _embed(model, _token_ids(model, x))  # (B, T, d)
    for block, shard in zip(blocks, tp_shard.blocks, strict=True):
        h = h + tp_attention_forward(block.ln1(h), shard.attn)
        # The activation works unit by unit, so each rank applies it to its own and nothing is gathered in between.
        hidden = [block.mlp[1](y) for y in shard.mlp_fc1._local_outputs(block.ln2(h))]  # each (B, T, 4d / tp)
        h = h + shard.mlp_fc2.forward(hidden)
    return _logits(model, h)


def _shares(tensor: Tensor, n: int, dim: int = 0) -> list[Tensor]:
    """Equal contiguous shares along `dim`, as views (chunk()'s may not be used once the whole was updated in place)."""
    size = tensor.shape[dim] // n
    return [tensor.narrow(dim, rank * size, size) for rank in range(n)]


def _one_of(n: int) -> str:
    return "one of " + ", ".join(map(str, divisors(n)))


def _check_width(x: Tensor, width: int) -> None:
    if x.shape[-1:] != (width,):
        raise ConfigError(f"x has shape {tuple(x.shape)}: its last dimension must be {width}, the width of the weights")


def _check_shards_agree(what: str, sizes: Sequence[int]) -> int:
    """The one value in `sizes`, a number for each rank."""
    if len(set(sizes)) != 1:
        raise ConfigError(
            f"weight has shards of {what}={list(sizes)}: must be one shard or more, all equal in it; "
            "pass the shards of one Linear"
        )
    return sizes[0]


def _check_attention_shards(x: Tensor, shards: list[TPAttentionShard]) -> None:
    """Raise ConfigError unless `shards` are the ranks, all of them and in order, of one attention over x (B, T, d)."""
    width, n_head = x.shape[-1] if x.ndim == 3 else 0, sum(shard.n_head_local for shard in shards)
    head_dim = width // max(n_head, 1)
    fits = n_head * head_dim == width > 0
    for rank, shard in enumerate(shards):
        rows = shard.n_head_local * head_dim
        fits &= shard.qkv_weight.shape == (3 * rows, width) and shard.proj_weight.shape == (width, rows)
        fits &= shard.mup_attention == shards[0].mup_attention and (rank == 0 or shard.proj_bias is None)
    if not fits:
        ranks = [
            (s.n_head_local, (*s.qkv_weight.shape,), (*s.proj_weight.shape,), s.proj_bias is not None, s.mup_attention)
            for s in shards
        ]
        raise ConfigError(
            f"x has shape {tuple(x.shape)} and the ranks (n_head_local, shapes of qkv_weight and proj_weight, has "
            f"proj_bias, mup_attention) {ranks}: must be (batch, sequence, width) and alike, of whole heads that make "
            "up the width, proj_bias on rank 0 alone; pass all shards of one tp_shard_attention(...) in rank order"
        )


# ---- Pipeline parallelism


class PPStage(nn.Module):
    """A contiguous run of blocks, after the embeddings (first stage) and before norm and head (last stage).

    The modules are the model's own. Raises ConfigError if `tok` comes without `pos`, or `ln` without `head`.
    """

    mup_output_multiplier: Tensor | None

    def __init__(
        self, blocks: list[nn.Module], *, tok: Any = None, pos: Any = None, ln: Any = None, head: Any = None
    ) -> None:
        super().__init__()
        for names, parts in (("tok and pos", (tok, pos)), ("ln and head", (ln, head))):
            if parts.count(None) == 1:
                raise ConfigError(f"{names} belong to the same stage; give it both, or neither")
        self.blocks = nn.ModuleList(blocks)
        self.tok, self.pos, self.ln, self.head = tok, pos, ln, head
        self.register_buffer("mup_output_multiplier", None if head is None else torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Ids (B, T) in the first stage and activations (B, T, d) elsewhere -> activations, or logits (B, T, V)."""
        if self.tok is not None:
            x = _embed(self, _token_ids(self, x))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else _logits(self, x)


def pp_partition_causal_lm(model: Any, pp_size: int) -> list[PPStage]:
    """Cut the blocks into `pp_size` contiguous stages; the first ones take one block more when they do not divide.

    Stages share the model's modules, the tied matrix included. Raises ConfigError unless every stage gets a block.
    """
    blocks = _blocks(model)
    if not 1 <= pp_size <= len(blocks):
        raise ConfigError(
            f"pp_size={pp_size}: every stage needs one of the {len(blocks)} blocks; use 1 to {len(blocks)}"
        )
    size, rest = divmod(len(blocks), pp_size)
    stages = []
    for rank in range(pp_size):
        first = rank * size + min(rank, rest)
        parts: dict[str, Any] = {}
        if rank == 0:
            parts |= {"tok": model.tok, "pos": model.pos}
        if rank == pp_size - 1:
            parts |= {"ln": model.ln, "head": model.head}
        stages.append(PPStage(blocks[first : first + size + (rank < rest)], **parts))
    stages[-1].mup_output_multiplier = torch.as_tensor(getattr(model, "mup_output_multiplier", 1.0))
    return stages


_END = object()  # comes after the last microbatch
_Modes = Callable[[], AbstractContextManager[None]]


def pipeline_forward(stages: list[PPStage], x: Tensor, n_microbatches: int) -> Tensor:
    """Run x (B, ...) through the stages as `n_microbatches` microbatches, all in flight at the same time.

    One thread for each stage, a queue between neighbours. Microbatches differ by one sample at most where B does not
    divide; the outputs come back as one tensor in the order of x, and gradients flow back through it. Threads compute
    under the caller's grad mode, inference mode and autocast. An exception in a stage is raised here as it is; no
    thread outlives the call. Raises ConfigError for no stages or `n_microbatches` outside 1..B.
    """
    if not stages:
        raise ConfigError("no stages; pass the list that pp_partition_causal_lm(model, pp_size) returns")
    batch = x.shape[0] if x.ndim else 0
    if not 1 <= n_microbatches <= batch:
        raise ConfigError(
            f"n_microbatches={n_microbatches}: every microbatch needs a sample of the batch of {batch} that x holds; "
            f"use {'a batch that is not empty' if batch == 0 else f'1 to {batch}'}"
        )
    # Without a limit on the queues no put ever waits, so a stage that gave up cannot leave its predecessor stuck.
    queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(len(stages) + 1)]
    stop, modes = Event(), _callers_modes(x.device.type)
    threads = [
        Thread(target=_run_stage, args=(stage, queues[i], queues[i + 1], modes, stop), name=f"pipeline stage {i}")
        for i, stage in enumerate(stages)
    ]
    for item in (*x.tensor_split(n_microbatches), _END):
        queues[0].put(item)
    try:
        for thread in threads:
            thread.start()
        outputs = []
        for _ in range(n_microbatches):
            if isinstance(item := queues[-1].get(), BaseException):
                raise item
            outputs.append(item)
        return torch.cat(outputs)
    finally:
        # Also on Ctrl-C. Every stage ends by telling the next one, so none is left waiting on its queue.
        stop.set()
        for thread in threads:
            if thread.ident is not None:  # it was started
                thread.join()


def _run_stage(stage: PPStage, inbox: SimpleQueue[Any], outbox: SimpleQueue[Any], modes: _Modes, stop: Event) -> None:
    """One stage's thread: its inputs in order until they end, one is the exception of a stage, or nobody waits."""
    try:
        with modes():
            while (item := inbox.get()) is not _END and not isinstance(item, BaseException) and not stop.is_set():
                outbox.put(stage(item))
    except BaseException as error:  # all of them: the caller is to see it, not this thread's excepthook
        item = error
    outbox.put(item)


def _callers_modes(device_type: str) -> _Modes:
    """This thread's torch modes, as a context for another thread: torch keeps them apart for each."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)

    @contextmanager
    def modes() -> Iterator[None]:
        # Grad mode after inference mode, which sets it, too.
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
            torch.autocast(device_type, dtype=dtype, enabled=autocast),
        ):
            yield

    return modes


# ---- Context parallelism


def cp_shard_sequence(x: Tensor, cp_size: int) -> list[Tensor]:
    """(B, T, ...) -> `cp_size` contiguous chunks (B, T / cp_size, ...), one for each rank, as views.

    Raises ConfigError unless `cp_size` divides T.
    """
    if x.ndim < 2 or x.shape[1] < 1:
        raise ConfigError(f"x has shape {tuple(x.shape)}: must be (batch, sequence, ...), the sequence not empty")
    if cp_size < 1 or x.shape[1] % cp_size:
        raise ConfigError(
            f"cp_size={cp_size} must divide the sequence, T={x.shape[1]}, since every rank holds a chunk of the same "
            f"length; use {_one_of(x.shape[1])}"
        )
    return _shares(x, cp_size, dim=1)


def cp_attention_forward(attn: Any, chunks: list[Tensor]) -> list[Tensor]:
    """Each rank's chunk (B, c, d) of the attention's input -> its chunk (B, c, d) of the output.

    Each rank projects its own chunk; one gather gives every rank all keys and values (B, H, T, D); each then attends
    with its own queries, the first of which stands at rank * c. Raises ConfigError unless all chunks are equally long.
    """
    _head_dim(attn)  # refuses what is not in mixle's layout
    shapes = [tuple(chunk.shape) for chunk in chunks]
    if len(set(shapes)) != 1 or len(shapes[0]) != 3:
        raise ConfigError(
            f"chunks have the shapes {shapes}: must be one chunk or more, all of one (batch, T / cp, width); "
            "cut the sequence with cp_shard_sequence(x, cp_size)"
        )
    _check_width(chunks[0], attn.qkv.weight.shape[1])
    queries, keys, values = zip(*(_split_heads(attn.qkv(chunk), attn.h) for chunk in chunks), strict=True)
    k, v = torch.cat(keys, dim=2), torch.cat(values, dim=2)  # the gather: (B, H, T, D)
    mup_attention = getattr(attn, "mup_attention", False)
    outputs = []
    for rank, q in enumerate(queries):
        length = q.shape[2]
        # Query i of this rank stands at rank * length + i and sees the keys up to there.
        visible = torch.ones(length, k.shape[2], dtype=torch.bool, device=q.device).tril(rank * length)
        outputs.append(attn.proj(_attend(q, k, v, mup_attention=mup_attention, visible=visible)))
    return outputs


def cp_forward_causal_lm(model: Any, x: Tensor, cp_size: int) -> Tensor:
    """Logits (B, T, V) at every position of ids x (B, T), the sequence shared between `cp_size` ranks.

    Only attention looks at other ranks' positions; all else runs on each chunk by itself. Raises ConfigError unless
    `cp_size` divides T and x fits the embeddings.
    """
    blocks = _blocks(model)
    chunks = cp_shard_sequence(_token_ids(model, x), cp_size)
    hidden = [_embed(model, ids, rank * ids.shape[1]) for rank, ids in enumerate(chunks)]  # each (B, T / cp, d)
    for block in blocks:
        attended = cp_attention_forward(block.attn, [block.ln1(h) for h in hidden])
        hidden = [h + a for h, a in zip(hidden, attended, strict=True)]
        hidden = [h + block.mlp(block.ln2(h)) for h in hidden]
    return torch.cat([_logits(model, h) for h in hidden], dim=1)
