"""The loss: the largest one over data-parallel ranks, and no float32 copy of the logits where it is compiled."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import ParallelDims

from tests.jobs import job_config
from tests.ranks import RankPool
from torchtitan_mixle.metrics.losses import NotedLoss, max_loss, worst_of_ranks
from torchtitan_mixle.parallel.pipeline import ExactSchedule
from torchtitan_mixle.spec import Run


def test_passes_add_up_and_validation_is_left_out() -> None:
    loss_fn = NotedLoss(lambda pred, labels: F.cross_entropy(pred, labels, reduction="sum", ignore_index=IGNORE_INDEX))
    pred, labels = torch.randn(6, 5, requires_grad=True), torch.tensor([0, 1, IGNORE_INDEX, 2, 3, IGNORE_INDEX])
    whole = loss_fn(pred, labels)
    loss_sum, count = loss_fn.take(pred.device).tolist()
    assert (loss_sum, count) == (pytest.approx(whole.item()), 4)
    with torch.no_grad():
        loss_fn(pred, labels)
    for rows in (slice(0, 3), slice(3, 6)):
        loss_fn(pred[rows], labels[rows]).backward()
    assert loss_fn.take(pred.device).tolist() == [pytest.approx(whole.item()), 4]
    assert loss_fn.take(pred.device).tolist() == [0, 0]
    loss_fn(pred, labels)
    loss_fn.forget()
    assert loss_fn.take(pred.device).tolist() == [0, 0]


def test_a_pipelines_passes_are_noted_not_what_its_stages_try_out() -> None:
    class Schedule:
        def step(self, *args: Any, target: Any = None, losses: Any = None) -> str:
            loss_fn.loss_fn(torch.ones(1), torch.zeros(1))  # to learn the shapes
            if losses is not None:
                losses += [torch.tensor(3.0), torch.tensor(4.0)]
            return "result"

    loss_fn = NotedLoss(lambda pred, labels: pred.sum())
    tie: Any = None
    schedule = ExactSchedule(
        Schedule(), [], tie, passes_a_step=9, copies_of_labels=1, device=torch.device("cpu"), note=loss_fn.note
    )
    assert schedule.step(target=torch.tensor([[0, 1], [IGNORE_INDEX, 2]]), losses=[]) == "result"
    schedule.step(target=None, losses=None)  # a rank without the last stage
    assert loss_fn.take(torch.device("cpu")).tolist() == [7, 3]


def largest(dp: int, cp: int, noted: list[tuple[float, float]], average: float) -> tuple[float, list[float]]:
    import torch.distributed as dist

    dims = ParallelDims(dp_replicate=1, dp_shard=dp, cp=cp, tp=1, pp=1, ep=1, etp=1, world_size=dp * cp)
    rank = dist.get_rank()
    loss, measures = worst_of_ranks(torch.tensor(noted[rank], dtype=torch.float64), [rank, -rank, 7.5], dims)
    return max_loss(loss, average), measures


CASES: dict[str, tuple[int, int, list[tuple[float, float]], float]] = {
    # Ranks that share a sequence follow each other: (dp 0, cp 0), (dp 0, cp 1), (dp 1, cp 0), (dp 1, cp 1).
    "shares of a sequence": (2, 2, [(10, 4), (2, 2), (9, 3), (6, 3)], 15 / 6),
    "a share without labels": (2, 2, [(0, 0), (12, 4), (3, 3), (4, 4)], 3.0),
    "shares alone": (1, 2, [(10, 4), (2, 2)], 2.0),
    "a rank without labels": (2, 1, [(6, 4), (0, 0)], 1.5),
    "no rank with labels": (2, 1, [(0, 0), (0, 0)], math.nan),
    "below the average": (2, 1, [(6, 4), (6, 4)], 1.5 + 1e-9),
    "infinite": (2, 1, [(math.inf, 4), (6, 4)], math.inf),
}


@pytest.mark.parametrize("case", CASES)
def test_largest_loss(case: str, ranks: RankPool) -> None:
    dp, cp, noted, average = CASES[case]
    means = [
        sum(loss for loss, _ in share) / labels
        for share in (noted[i : i + cp] for i in range(0, dp * cp, cp))
        if (labels := sum(count for _, count in share))
    ]
    expected = max([average, *means]) if math.isfinite(average) else average
    for result, measures in ranks.run(largest, dp * cp, dp, cp, noted, average):
        assert measures == [dp * cp - 1, 0, 7.5]
        assert result == pytest.approx(expected, nan_ok=True)
        assert not result < average


@pytest.mark.slow
def test_compiled_loss_makes_no_float32_copy() -> None:
    """TorchTitan's loss is in float32; compiled, the logits are converted where they are read."""
    from torch._inductor.utils import run_and_get_code

    config = job_config({"compile.enable": True, "compile.components": ["loss"]})
    loss_fn = Run().build_loss_fn(config)
    rows, vocabulary = 256, 1024
    logits = torch.randn(2, rows // 2, vocabulary, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocabulary, (2, rows // 2))
    saved: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        def keep(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = loss_fn(logits, labels)
        loss.backward()
        return loss.detach()

    loss, code = run_and_get_code(step)
    expected = F.cross_entropy(logits.detach().flatten(0, 1).float(), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)
    assert code
    assert saved
    assert not [t for t in saved if t.dtype == torch.float32 and t.numel() >= logits.numel()]
    made = [line for text in code for line in text.splitlines() if "empty_strided" in line and "float32" in line]
    assert not [line for line in made if str(vocabulary) in line], made


def test_the_loss_is_compiled_inside_what_notes_it() -> None:
    config: Any = job_config({"compile.enable": True, "compile.components": ["loss"], "compile.backend": "eager"})
    loss_fn = Run().build_loss_fn(config)
    assert isinstance(loss_fn, NotedLoss)
    assert hasattr(loss_fn.loss_fn, "_torchdynamo_orig_callable")
