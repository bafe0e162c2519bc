"""From tokens and seconds to what a run reports: throughput and utilisation."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from torchtitan_mixle.metrics.bubble import reruns_by_stage
from torchtitan_mixle.metrics.counting import FlopsPerToken, flops_per_token, recomputed_flops_per_token
from torchtitan_mixle.metrics.hardware import peak_flops
from torchtitan_mixle.model.args import CausalLMArgs
from torchtitan_mixle.planning.check import compiles_model
from torchtitan_mixle.planning.order import Action, rank_of_stage
from torchtitan_mixle.planning.stages import job_schedule, stage_modules

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rates:
    """What turns counts into rates: the model's FLOPs, the device's peak, the layout."""

    flops: FlopsPerToken
    recomputed: float | None
    """FLOPs per token that are run again for the backward pass; None where that is not known."""
    peak: float | None
    """FLOP/s of one device; None where that is not known."""
    dims: ParallelDims

    def over(self, tokens: int, steps: int, seconds: float) -> dict[str, float]:
        """Rates of `steps` steps in which each data-parallel rank trained on `tokens` tokens, of whole sequences."""
        dims = self.dims
        global_rate = tokens * dims.dp_replicate * dims.dp_shard / seconds
        per_device = global_rate / dims.world_size
        rates = {
            "step_seconds": seconds / steps,
            "tokens_per_second": global_rate,
            "tokens_per_second_per_device": per_device,
            "tflops_per_device": self.flops.total * per_device / 1e12,
        }
        if self.peak is not None:
            rates["mfu_pct"] = 100 * self.flops.total * per_device / self.peak
            rates["mfu_causal_pct"] = 100 * self.flops.causal_total * per_device / self.peak
            if self.recomputed is not None:
                rates["hfu_pct"] = 100 * (self.flops.total + self.recomputed) * per_device / self.peak
        return rates


def job_rates(job_config: JobConfig, dims: ParallelDims, args: CausalLMArgs, device_name: str) -> Rates:
    """Of a job on devices of that name; says in the log what utilisation is measured against."""
    seq_len = job_config.training.seq_len
    peak = device_peak(job_config, device_name)
    recomputed = recomputed_by(job_config, args)
    if peak is not None and recomputed is None:
        logger.info(
            "HFU is not reported: under activation_checkpoint.mode=%r the compiler alone decides what runs again",
            job_config.activation_checkpoint.mode,
        )
    return Rates(flops_per_token(args, seq_len), recomputed, peak, dims)


def recomputed_by(job_config: Any, args: CausalLMArgs) -> int | None:
    """FLOPs per token that are run again if every checkpointed block is run again once; None where nobody can say."""
    options, parallelism = job_config.activation_checkpoint, job_config.parallelism
    compiled = compiles_model(job_config)
    # With tensor parallelism a whole compiled block is run again, see `parallelize`.
    into_the_graph = compiled and parallelism.tensor_parallel_degree == 1
    return recomputed_flops_per_token(
        args,
        job_config.training.seq_len,
        mode=options.mode,
        option=str(options.selective_ac_option),
        without_last_product=into_the_graph or (options.early_stop and not compiled),
        blocks_by_rank=_blocks_by_rank(job_config, args),
    )


def _blocks_by_rank(job_config: Any, args: CausalLMArgs) -> list[int]:
    return [sum(stages.values()) for stages in _stages_by_rank(job_config, args)]


def _stages_by_rank(job_config: Any, args: CausalLMArgs) -> list[dict[int, int]]:
    """For each pipeline rank, the number of blocks of its stages, in order."""
    pp = job_config.parallelism.pipeline_parallel_degree
    if pp == 1:
        return [{0: args.n_layer}]
    v_shaped = job_schedule(job_config.parallelism).v_shaped
    ranks: list[dict[int, int]] = [{} for _ in range(pp)]
    for number, stage in enumerate(stage_modules(args.n_layer, job_config.parallelism)):
        rank = rank_of_stage(number, pp, v_shaped=v_shaped)
        ranks[rank][number] = sum(name.startswith("blocks.") for name in stage)
    return ranks


def recomputed_in_pipeline(job_config: Any, args: CausalLMArgs, orders: Sequence[Sequence[Action]]) -> float | None:
    """As `recomputed_by`, with each stage's blocks run again as often as the ranks' actions, `orders`, say."""
    once = recomputed_by(job_config, args)
    if not once:
        return once
    options, reruns = job_config.activation_checkpoint, reruns_by_stage(orders)
    every = 1 if options.mode == "full" else int(options.selective_ac_option)
    blocks, runs = 0, 0.0
    for stages in _stages_by_rank(job_config, args):
        seen = 0  # TorchTitan counts over all the blocks of a rank
        for stage, number in stages.items():
            again = (seen + number) // every - seen // every
            seen += number
            blocks += again
            runs += again * reruns[stage]
    return once * runs / blocks


def share_of_forward(recomputed: float | None, flops: FlopsPerToken) -> float:
    """Of the blocks' forward pass, the share that is run again; 0 where that is not known."""
    return (recomputed or 0) / ((flops.blocks + flops.attention) / 3)


def computes_in_float8(job_config: Any) -> bool:
    """Whether linear layers run on float8 units, rather than imitate them."""
    return "float8" in job_config.model.converters and not job_config.quantize.linear.float8.emulate


def device_peak(job_config: Any, name: str) -> float | None:
    """The peak that the job's utilisation is measured against, in FLOP/s; None, and a line that says so, if unknown."""
    float8 = computes_in_float8(job_config)
    dtype = "float8" if float8 else "bfloat16"
    if (given := job_config.mixle.peak_tflops) is not None:
        logger.info("MFU is against the %.1f TFLOP/s of [mixle] peak_tflops, for %s", given, name)
        return float(given) * 1e12
    peak = peak_flops(name, float8=float8)
    if peak is None:
        logger.info(
            "MFU is not reported: no peak rate is known for %r in %s; [mixle] peak_tflops gives one", name, dtype
        )
    else:
        logger.info("MFU is against %.1f TFLOP/s, the dense %s peak of %s", peak / 1e12, dtype, name)
    return peak
