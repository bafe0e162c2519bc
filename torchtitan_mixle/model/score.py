"""The loss of a model over data, on one device."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_mixle.model.model import CausalLM


@torch.no_grad()
def mean_loss(model: CausalLM, batches: Iterable[tuple[dict[str, Tensor], Tensor]]) -> tuple[float, int]:
    """(mean cross-entropy in nats over the labels that are not -100, how many there are): a sum divided once."""
    device = model.tok.weight.device
    total, tokens = torch.zeros((), dtype=torch.float64, device=device), 0
    model.eval()
    for inputs, labels in batches:
        logits = model(inputs["input"].to(device)).float()  # (B, T, V)
        total += F.cross_entropy(logits.flatten(0, 1), labels.flatten().to(device), reduction="sum").double()
        tokens += int((labels != -100).sum())
    return float(total) / tokens, tokens
