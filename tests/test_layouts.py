"""Every layout is the one-process run: same start, same ids, same loss, same norm, same gradients."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.jobs import BRIEF, TINY, hide_three_in_ten, steps_with_gradients
from tests.ranks import RankPool

REPLICATE = "parallelism.data_parallel_replicate_degree"
SHARD = "parallelism.data_parallel_shard_degree"
TENSOR = "parallelism.tensor_parallel_degree"
LAYOUTS = {
    "fsdp2": {SHARD: 2},
    "fsdp4": {SHARD: 4},
    "ddp2": {REPLICATE: 2, SHARD: 1},
    "ddp4": {REPLICATE: 4, SHARD: 1},
    "hsdp2x2": {REPLICATE: 2, SHARD: 2},
    "tp2": {TENSOR: 2},
    "tp4": {TENSOR: 4},
    "fsdp2xtp2": {SHARD: 2, TENSOR: 2},
    "ddp2xtp2": {REPLICATE: 2, SHARD: 1, TENSOR: 2},
    "hsdp2xtp2": {REPLICATE: 2, SHARD: 2, TENSOR: 2},
    # 257 rows over 2 and then 4: the ranks' shares are uneven twice.
    "fsdp4xtp2": {SHARD: 4, TENSOR: 2},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "accumulation 2": {},
    "full recomputation": {"activation_checkpoint.mode": "full"},
    "recomputation by op": {
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "op",
    },
    "loss parallel off": {"parallelism.disable_loss_parallel": True},
    "parameters stay gathered": {"parallelism.fsdp_reshard_after_forward": "never"},
}


def sizes(layout: dict[str, int], *, accumulation: int = 1) -> tuple[int, dict[str, Any]]:
    """(ranks, overrides) of a layout with TINY's global batch."""
    dp = layout.get(REPLICATE, 1) * layout.get(SHARD, 1)
    local = TINY["training.global_batch_size"] // dp // accumulation
    return dp * layout.get(TENSOR, 1), TINY | layout | {"training.local_batch_size": local}


def compare(results: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    """The bars of every layout."""
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
        assert result["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-3)
        assert torch.equal(result["final"]["tok.weight"], result["final"]["head.weight"])
        assert result["optimizer_parameters"] == reference["optimizer_parameters"]
    # Ranks that share the model see the same samples; each data-parallel rank counts once.
    by_dp_rank = {result["dp_rank"]: result["batches"] for result in results}
    seen = sorted(sample for samples in by_dp_rank.values() for sample in samples)
    assert seen == sorted(reference["batches"]), "the ranks together did not see the one-process batches"


@pytest.fixture(scope="module")
def one_process(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    _, job = sizes({})
    return ranks.run(steps_with_gradients, 1, job | {"job.dump_folder": str(tmp_path_factory.mktemp("one"))})[0]


@pytest.fixture(scope="module")
def brief_process(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    _, job = sizes({})
    job |= BRIEF | {"job.dump_folder": str(tmp_path_factory.mktemp("brief"))}
    return ranks.run(steps_with_gradients, 1, job)[0]


def test_the_reference_starts_at_ln_v(one_process: dict[str, Any]) -> None:
    assert one_process["loss"][0] == pytest.approx(torch.tensor(257.0).log().item(), abs=0.2)
    assert one_process["optimizer_parameters"] == 891_776


QUICK = ("fsdp2", "hsdp2x2", "tp2", "fsdp2xtp2")


@pytest.mark.parametrize("layout", [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in LAYOUTS])
def test_layout(layout: str, one_process: dict[str, Any], ranks: RankPool, tmp_path: Path) -> None:
    world_size, job = sizes(LAYOUTS[layout])
    results = ranks.run(steps_with_gradients, world_size, job | {"job.dump_folder": str(tmp_path)})
    compare(results, one_process)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", ["fsdp4", "hsdp2x2", "tp4", "ddp2xtp2", "fsdp2xtp2"])
def test_variant(layout: str, variant: str, brief_process: dict[str, Any], ranks: RankPool, tmp_path: Path) -> None:
    if variant == "loss parallel off" and TENSOR not in LAYOUTS[layout]:
        pytest.skip("there is no loss parallelism without tensor parallelism")
    if variant == "parameters stay gathered" and SHARD not in LAYOUTS[layout]:
        pytest.skip("nothing is gathered without FSDP")
    world_size, job = sizes(LAYOUTS[layout], accumulation=2)
    job |= BRIEF | VARIANTS[variant] | {"job.dump_folder": str(tmp_path)}
    compare(ranks.run(steps_with_gradients, world_size, job), brief_process)


def odd_shape(overrides: dict[str, Any]) -> dict[str, Any]:
    """A run of a model whose sizes divide by little, with labels left out."""
    from torchtitan_mixle.flavors import FLAVORS, Flavor

    FLAVORS["odd"] = Flavor(vocab_size=63, d_model=48, n_layer=3, n_head=6, block=31)
    try:
        return steps_with_gradients(overrides | {"model.flavor": "odd", "training.seq_len": 30}, hide_three_in_ten)
    finally:
        del FLAVORS["odd"]


@pytest.fixture(scope="module")
def odd_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens below 63."""
    from torchtitan_mixle.data.index import TokenFormat
    from torchtitan_mixle.data.writer import StoreWriter

    folder = tmp_path_factory.mktemp("odd") / "data"
    with StoreWriter(folder) as store:
        split = store.split(tokens=TokenFormat(vocab_size=63, eod_id=62, kind="bytes", hash="bytes"))
        split.write(np.random.default_rng(0).integers(0, 62, 5000))
        split.end_document()
    return folder


ODD_LAYOUTS = {
    "fsdp4": {SHARD: 4},
    "tp2": {TENSOR: 2},
    "tp3": {TENSOR: 3},
    "tp6": {TENSOR: 6},
    "fsdp2xtp3": {SHARD: 2, TENSOR: 3},
    "fsdp4xtp2": {SHARD: 4, TENSOR: 2},
    "hsdp2xtp2": {REPLICATE: 2, SHARD: 2, TENSOR: 2},
}


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=[] if x in ("tp3", "fsdp2xtp3") else pytest.mark.slow) for x in ODD_LAYOUTS]
)
def test_odd_sizes(layout: str, odd_data: Path, ranks: RankPool, tmp_path: Path) -> None:
    data = {"training.dataset": "tokens", "training.dataset_path": str(odd_data)}
    _, job = sizes({})
    one = ranks.run(odd_shape, 1, job | data | {"job.dump_folder": str(tmp_path / "one")})[0]
    world_size, job = sizes(ODD_LAYOUTS[layout])
    compare(ranks.run(odd_shape, world_size, job | data | {"job.dump_folder": str(tmp_path / "many")}), one)
