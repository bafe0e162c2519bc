"""What a run reports: the console line, TensorBoard, and metrics.jsonl in the dump folder."""

import logging
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils

from torchtitan_mixle.data.loader import GlobalOrderLoader
from torchtitan_mixle.metrics.counting import flops_per_token
from torchtitan_mixle.metrics.hardware import peak_flops
from torchtitan_mixle.metrics.jsonl import StepLog
from torchtitan_mixle.model.args import CausalLMArgs
from torchtitan_mixle.upstream_log import hide_untrue_lines

logger = logging.getLogger(__name__)


def build_metrics_processor(
    job_config: JobConfig, parallel_dims: ParallelDims, model_args: CausalLMArgs, tag: str | None = None
) -> "CausalLMMetrics":
    """TorchTitan's `build_metrics_processor_fn`."""
    hide_untrue_lines()
    return CausalLMMetrics(job_config, parallel_dims, model_args, tag)


class CausalLMMetrics(MetricsProcessor):
    """TorchTitan's processor with true throughput and utilisation: no peak is assumed for a device that is unknown."""

    def __init__(
        self, job_config: JobConfig, parallel_dims: ParallelDims, model_args: CausalLMArgs, tag: str | None = None
    ) -> None:
        super().__init__(job_config, parallel_dims, tag)
        self.flops = flops_per_token(model_args, job_config.training.seq_len)
        self.peak = self._device_peak(job_config.mixle.peak_tflops)
        self.loader: GlobalOrderLoader | None = None
        """The loader, if it counts for the whole run."""
        self._tokens_before: int | None = None
        self.has_loss = True
        """Whether this rank's loss is one: in a pipeline only the last stage's is."""
        folder = Path(job_config.job.dump_folder)
        is_writer = dist.get_rank() == 0
        self.train_log = StepLog(folder / "metrics.jsonl") if is_writer else None
        self.validation_log = StepLog(folder / "validation.jsonl") if is_writer else None

    def _device_peak(self, override_tflops: float | None) -> float | None:
        name = self.device_memory_monitor.device_name
        peak = override_tflops * 1e12 if override_tflops is not None else peak_flops(name)
        if peak is None:
            logger.info("MFU is not reported: no peak rate is known for %r; [mixle] peak_tflops gives one", name)
        else:
            logger.info("MFU is against %.1f TFLOP/s for %s", peak / 1e12, name)
        return peak

    def should_log(self, step: int) -> bool:
        """TorchTitan asks on every rank at every step: the first time tells where this start of the run begins."""
        for log in (self.train_log, self.validation_log):
            if log is not None:
                log.start_at(step)
        return bool(super().should_log(step))

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Report a step; `grad_norm` is the norm before clipping. Rates are over the time since the last report."""
        extra = dict(extra_metrics or {})
        extra["n_tokens_seen"] = self._tokens_seen(int(extra.get("n_tokens_seen", 0)))
        global_avg_loss, global_max_loss = self._from_last_stage(global_avg_loss, global_max_loss)
        seconds = time.perf_counter() - self.time_last_log
        rates = self._rates(seconds)
        memory = self.device_memory_monitor.get_peak_stats()
        loading_pct = 100 * sum(self.data_loading_times) / seconds
        self.logger.log(
            {
                "loss_metrics/global_avg_loss": global_avg_loss,
                "loss_metrics/global_max_loss": global_max_loss,
                "grad_norm": grad_norm,
                "throughput(tps)": rates["tokens_per_second_per_device"],
                "time_metrics/data_loading(%)": loading_pct,
                "memory/max_active(GiB)": memory.max_active_gib,
                "memory/max_reserved(GiB)": memory.max_reserved_gib,
                "tflops": rates["tflops_per_device"],
                **({"mfu(%)": rates["mfu_pct"]} if "mfu_pct" in rates else {}),
                **extra,
            },
            step,
        )
        if self.train_log is not None:
            self.train_log.append(
                {
                    "step": step,
                    "loss": global_avg_loss,
                    "max_loss": global_max_loss,
                    "grad_norm": grad_norm,
                    "lr": extra.get("lr"),
                    "tokens_seen": extra["n_tokens_seen"],
                    **rates,
                    "data_loading_pct": loading_pct,
                    "memory_gib": memory.max_reserved_gib,
                }
            )
        self._print_step(step, global_avg_loss, grad_norm, rates, memory.max_reserved_gib)
        self._restart_interval()

    def _from_last_stage(self, *losses: float) -> list[float]:
        """The losses of the pipeline's last stage, on every stage."""
        mesh = self.parallel_dims.get_optional_mesh("pp")
        if mesh is None:
            return list(losses)
        values = torch.tensor(losses, dtype=torch.float64, device=utils.device_type)
        if not self.has_loss:
            values.zero_()
        dist.all_reduce(values, group=mesh.get_group())
        return values.tolist()

    def _tokens_seen(self, counted_by_trainer: int) -> int:
        """Tokens of the whole run.

        TorchTitan counts per rank, wrong once a run goes on with other ranks; the loader counts for all, but from zero
        where its state was left out of a resume. Then what the trainer knew of before is added.
        """
        if self.loader is None:
            return counted_by_trainer
        tokens = self.loader.tokens_seen()
        if self._tokens_before is None:
            self._tokens_before = 0 if self.loader.resumed else counted_by_trainer // self.parallel_dims.cp - tokens
        return self._tokens_before + tokens

    def _rates(self, seconds: float) -> dict[str, float]:
        dims = self.parallel_dims
        global_rate = self.ntokens_since_last_log * dims.dp_replicate * dims.dp_shard / seconds
        per_device = global_rate / dims.world_size
        rates = {
            "tokens_per_second": global_rate,
            "tokens_per_second_per_device": per_device,
            "tflops_per_device": self.flops.total * per_device / 1e12,
        }
        if self.peak is not None:
            rates["mfu_pct"] = 100 * self.flops.total * per_device / self.peak
            rates["mfu_causal_pct"] = 100 * self.flops.causal_total * per_device / self.peak
        return rates

    def _print_step(self, step: int, loss: float, grad_norm: float, rates: dict[str, float], memory_gib: float) -> None:
        color = self.color
        mfu = f"  {color.magenta}mfu: {rates['mfu_pct']:.2f}%" if "mfu_pct" in rates else ""
        logger.info(
            f"{color.red}step: {step:2}  {color.green}loss: {loss:8.5f}  {color.orange}grad_norm: {grad_norm:7.4f}  "
            f"{color.turquoise}memory: {memory_gib:5.2f}GiB  "
            f"{color.blue}tokens/s: {rates['tokens_per_second']:,.0f}  "
            f"{color.cyan}tflops: {rates['tflops_per_device']:,.2f}{mfu}{color.reset}"
        )

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        """Report the token-weighted validation loss."""
        perplexity = math.exp(min(loss, 700.0))
        self.logger.log({"validation_metrics/loss": loss, **(extra_metrics or {})}, step)
        if self.validation_log is not None:
            self.validation_log.append({"step": step, "loss": loss, "perplexity": perplexity, **(extra_metrics or {})})
        color = self.color
        logger.info(
            f"{color.yellow}validate step: {step:2}  {color.green}loss: {loss:8.5f}  "
            f"{color.turquoise}perplexity: {perplexity:,.3f}{color.reset}"
        )

    def leave_out(self, seconds: float) -> None:
        """Do not count the last `seconds` as time that training took."""
        self.time_last_log += seconds

    def _restart_interval(self) -> None:
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.time_last_log = time.perf_counter()
        self.device_memory_monitor.reset_peak_stats()
