"""Text from a model, token by token, with the keys and values of earlier tokens kept."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.model.model import CausalAttention, CausalLM, causal_attention


class KeyValueCache:
    """One block's attention over the tokens that it has been given so far; takes the place of `causal_attention`."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.filled = 0
        self._kept: Tensor | None = None  # (2, B, H, block, D): keys and values

    def attend(self, qkv: Tensor, scale: float | None) -> Tensor:
        """New tokens' qkv (B, T, H, 3, D) -> (B, T, H, D); T is 1, or these are the first tokens."""
        first = self.filled == 0
        if not first and qkv.shape[1] != 1:
            raise ValueError(f"{qkv.shape[1]} new tokens at once; after the first call there is one at a time")
        if self._kept is None:
            batch, _, heads, _, head_dim = qkv.shape
            self._kept = qkv.new_empty(2, batch, heads, self.block, head_dim)
        end = self.filled + qkv.shape[1]
        self._kept[:, :, :, self.filled : end] = qkv[:, :, :, 1:].permute(3, 0, 2, 1, 4)
        self.filled = end
        if first:
            return causal_attention(qkv, scale)
        k, v = self._kept[:, :, :, :end]
        q = qkv[:, :, :, 0].transpose(1, 2)  # (B, H, 1, D): the last token sees all
        return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


@contextmanager
def _cached(model: CausalLM) -> Iterator[list[KeyValueCache]]:
    """The model with a cache in each block, and without afterwards."""
    attentions = [module for module in model.modules() if isinstance(module, CausalAttention)]
    caches = [KeyValueCache(model.model_args.block) for _ in attentions]
    plain = [attention.attend for attention in attentions]
    for attention, cache in zip(attentions, caches, strict=True):
        attention.attend = cache.attend
    try:
        yield caches
    finally:
        for attention, attend in zip(attentions, plain, strict=True):
            attention.attend = attend


@torch.no_grad()
def generate(
    model: CausalLM,
    prompt: list[int],
    n: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    n_ids: int | None = None,
    cache: bool = True,
) -> Iterator[int]:
    """Up to `n` ids that follow `prompt` (at least one id), each drawn from softmax(logits / temperature).

    A temperature of 0 takes the likeliest id. `top_k` draws among the likeliest k alone, `n_ids` among ids below it.
    Raises ConfigError if the logits are not finite.
    The model sees the last `block` ids, as mixle's `LM.generate` does: up to that length a token costs one position
    with the cache, beyond it the positions of all of them shift, and each token costs a whole pass with or without.
    """
    generator = torch.Generator().manual_seed(seed)
    block, device = model.model_args.block, model.tok.weight.device
    ids = list(prompt)
    model.eval()
    caching: AbstractContextManager[list[KeyValueCache]] = _cached(model) if cache else nullcontext([])
    with caching as caches:
        for _ in range(n):
            if len(ids) > block:
                for kept in caches:
                    kept.filled = 0
            done = caches[0].filled if caches else 0
            window = torch.tensor([ids[-block:][done:]], device=device)  # (1, T)
            positions = torch.arange(done, done + window.shape[1], device=device)
            logits = model(window, positions)[0, -1, :n_ids].float().cpu()  # (V,)
            if not logits.isfinite().all():
                raise ConfigError(
                    f"the model's logits for token {len(ids)} hold NaN or infinite numbers: its weights do, or they "
                    f"are too large for the dtype; use an earlier step, or --dtype float32"
                )
            ids.append(_draw(logits, temperature, top_k, generator))
            yield ids[-1]


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    likeliest = torch.arange(len(logits))
    if top_k is not None and top_k < len(logits):
        logits, likeliest = logits.topk(top_k)
    shares = torch.softmax(logits / temperature, dim=0)
    return int(likeliest[torch.multinomial(shares, 1, generator=generator)])
