"""What tensor parallelism communicates, and the dtype it computes in."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs import TINY, build_trainer, metrics_of
from tests.ranks import RankPool

TENSOR = "parallelism.tensor_parallel_degree"
GATHER, SCATTER, REDUCE = "all_gather", "reduce_scatter", "all_reduce"
N_LAYER = 4


def count_collectives(overrides: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Collectives of one optimizer step by phase and kind."""
    from torch.distributed.tensor.debug import CommDebugMode
    from torchtitan.distributed.utils import clip_grad_norm_

    trainer = build_trainer(overrides)
    model = trainer.model_parts[0]
    tokens, labels = torch.randint(257, (2, 2, 32))
    counts = {}

    def counted(phase: str, action: Any) -> Any:
        with CommDebugMode() as mode:
            result = action()
        for key, n in mode.get_comm_counts().items():
            kind = next(k for k in (GATHER, SCATTER, REDUCE) if k.replace("_", "") in str(key).replace("_", ""))
            counts[phase] = counts.get(phase, {}) | {kind: counts.get(phase, {}).get(kind, 0) + n}
        return result

    with trainer.train_context():
        logits = counted("forward", lambda: model(tokens))
        loss = counted("loss", lambda: trainer.loss_fn(logits, labels))
        counted("backward", loss.backward)
    counted("clip", lambda: clip_grad_norm_(list(model.parameters()), 1.0, foreach=True))
    counted("optimizer", trainer.optimizers.step)
    trainer.close()
    return counts


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("loss_parallel", [True, False])
def test_collectives_are_those_of_the_closed_form(
    tp: int, loss_parallel: bool, ranks: RankPool, tmp_path: Path
) -> None:
    """Per block and direction two all-gathers and two reduce-scatters; one more each for embedding and head."""
    job = TINY | {TENSOR: tp, "training.global_batch_size": 2, "job.dump_folder": str(tmp_path)}
    counts = ranks.run(count_collectives, tp, job | {"parallelism.disable_loss_parallel": not loss_parallel})[0]
    pairs = 2 * N_LAYER + 1
    # Without loss parallelism the logits are gathered; with it the loss needs the maximum, the sum, the label's logit.
    assert counts["forward"] == {GATHER: pairs + (not loss_parallel), SCATTER: pairs}
    assert counts.get("loss", {}) == ({REDUCE: 3} if loss_parallel else {})
    # The norms' and positions' gradients are added up in one all-reduce, the norm of all gradients is another.
    assert counts["backward"] == {GATHER: pairs, SCATTER: pairs, REDUCE: 1}
    assert counts["clip"] == {REDUCE: 1}
    assert counts.get("optimizer", {}) == {}


def test_partial_gradients_are_added_up_once_a_step(ranks: RankPool, tmp_path: Path) -> None:
    job = TINY | {TENSOR: 2, "training.global_batch_size": 4, "job.dump_folder": str(tmp_path)}
    counts = ranks.run(count_collectives, 2, job)[0]
    assert REDUCE not in counts["backward"], "the first of two passes of a step leaves them as they are"


def dtypes(overrides: dict[str, Any]) -> dict[str, Any]:
    """Operand dtypes of a linear in the middle of the model, and the run's losses."""
    trainer = build_trainer(overrides)
    model = trainer.model_parts[0]
    seen: dict[str, Any] = {}

    def look(module: Any, inputs: Any, output: Any) -> None:
        seen["linear output"] = str(output.dtype)

    next(iter(model.blocks.values())).attn.wqkv.register_forward_hook(look)
    batches = trainer.batch_generator(trainer.dataloader)
    for _ in range(3):
        trainer.step += 1
        trainer.train_step(batches)
    seen["parameter"] = str(next(model.parameters()).dtype)
    trainer.close()
    seen["losses"] = [line["loss"] for line in metrics_of(overrides)]
    return seen


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, {}),
        (2, {"parallelism.data_parallel_shard_degree": 2}),
        (2, {"parallelism.data_parallel_replicate_degree": 2}),
        (2, {TENSOR: 2}),
        (4, {TENSOR: 2, "parallelism.data_parallel_replicate_degree": 2}),
        (4, {TENSOR: 2, "parallelism.data_parallel_shard_degree": 2}),
        (2, {"parallelism.pipeline_parallel_degree": 2}),
        (4, {"parallelism.pipeline_parallel_degree": 2, "parallelism.data_parallel_shard_degree": 2}),
        (4, {"parallelism.pipeline_parallel_degree": 2, TENSOR: 2}),
    ],
)
@pytest.mark.slow
def test_every_layout_computes_in_the_dtype_that_was_asked_for(
    world_size: int, layout: dict[str, int], ranks: RankPool, tmp_path: Path
) -> None:
    job = TINY | layout | {"training.mixed_precision_param": "bfloat16", "job.dump_folder": str(tmp_path)}
    reference = ranks.run(dtypes, 1, TINY | {"job.dump_folder": str(tmp_path / "fp32")})[0]
    assert reference["linear output"] == "torch.float32"
    for result in ranks.run(dtypes, world_size, job):
        assert result["linear output"] == "torch.bfloat16"
        assert result["parameter"] == "torch.float32"
        assert result["losses"] == pytest.approx(reference["losses"], abs=0.02)
        assert result["losses"] != reference["losses"]
