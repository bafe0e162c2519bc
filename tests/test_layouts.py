"""Every data-parallel layout is the one-process run: same start, same ids, same loss, norm and gradients."""

from typing import Any

import pytest
import torch

from tests.jobs import TINY, steps_with_gradients
from tests.ranks import RankPool

REPLICATE = "parallelism.data_parallel_replicate_degree"
SHARD = "parallelism.data_parallel_shard_degree"
LAYOUTS = {
    "fsdp2": (2, {SHARD: 2}),
    "fsdp4": (4, {SHARD: 4, "training.local_batch_size": 1}),
    "hsdp2x2": (4, {REPLICATE: 2, SHARD: 2}),
    "ddp2": (2, {REPLICATE: 2}),
    "ddp4": (4, {REPLICATE: 4, "training.local_batch_size": 1}),
    "fsdp2, no reshard": (2, {SHARD: 2, "parallelism.fsdp_reshard_after_forward": "never"}),
    "fsdp2, full recomputation": (2, {SHARD: 2, "activation_checkpoint.mode": "full"}),
}


@pytest.fixture(scope="module")
def one_process(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    dump = {"job.dump_folder": str(tmp_path_factory.mktemp("one"))}
    return ranks.run(steps_with_gradients, 1, TINY | dump)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_process(layout: str, one_process: dict[str, Any], ranks: RankPool, tmp_path: Any) -> None:
    world_size, overrides = LAYOUTS[layout]
    results = ranks.run(steps_with_gradients, world_size, TINY | overrides | {"job.dump_folder": str(tmp_path)})
    reference = one_process
    for result in results:
        for name, value in reference["initial"].items():
            assert torch.equal(result["initial"][name], value), f"initial {name}"
        assert result["gradients"].keys() == reference["gradients"].keys()
        for name, gradient in reference["gradients"].items():
            error = (result["gradients"][name] - gradient).norm() / gradient.norm()
            assert error < 1e-4, f"gradient of {name}: {error:.1e}"
        assert result["loss"][0] == pytest.approx(reference["loss"][0], rel=1e-5)
        assert result["grad_norm"][0] == pytest.approx(reference["grad_norm"][0], rel=1e-5)
        assert result["loss"] == pytest.approx(reference["loss"], abs=1e-4)
        assert torch.equal(result["final"]["tok.weight"], result["final"]["head.weight"])
        assert result["optimizer_parameters"] == reference["optimizer_parameters"]
    seen = sorted(sample for result in results for sample in result["batches"])
    assert seen == sorted(reference["batches"]), "the ranks together did not see the one-process batches"


def test_the_reference_starts_at_ln_v(one_process: dict[str, Any]) -> None:
    assert one_process["loss"][0] == pytest.approx(torch.tensor(257.0).log().item(), abs=0.2)
    assert one_process["optimizer_parameters"] == 891_776
