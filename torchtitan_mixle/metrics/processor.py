"""What a run reports: the console line, TensorBoard, and metrics.jsonl, validation.jsonl and run.json beside it."""

import dataclasses
import logging
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torchtitan.components.metrics import BaseLogger, LoggerContainer, MetricsProcessor
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils

from torchtitan_mixle.data.loader import GlobalOrderLoader
from torchtitan_mixle.metrics.bubble import actions_of, bubble_share, one_stage_bubble
from torchtitan_mixle.metrics.counting import count_parameters
from torchtitan_mixle.metrics.jsonl import StepLog
from torchtitan_mixle.metrics.losses import NotedLoss, max_loss, worst_of_ranks
from torchtitan_mixle.metrics.rates import job_rates, recomputed_in_pipeline, share_of_forward
from torchtitan_mixle.metrics.run_record import RunRecord
from torchtitan_mixle.metrics.summary import Summary
from torchtitan_mixle.metrics.tensorboard import TensorBoard
from torchtitan_mixle.model.args import CausalLMArgs
from torchtitan_mixle.stop import StopOnSignal, end_on_signal
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

    logger: BaseLogger

    def __init__(
        self, job_config: JobConfig, parallel_dims: ParallelDims, model_args: CausalLMArgs, tag: str | None = None
    ) -> None:
        super().__init__(_without_tensorboard(job_config), parallel_dims, tag)
        self.job_config = job_config
        device_name = self.device_memory_monitor.device_name
        self.model_args = model_args
        self.rates = job_rates(job_config, parallel_dims, model_args, device_name)
        self.bubble: float | None = None
        """Share of its time that a pipeline rank waits, by the schedule; None without a pipeline."""
        self.loader: GlobalOrderLoader | None = None
        """The loader, if it counts for the whole run."""
        self._tokens_before: int | None = None
        self.has_loss = True
        """Whether this rank's loss is one: in a pipeline only the last stage's is."""
        self.losses: NotedLoss | None = None
        """The loss function, if it notes what this rank's losses were."""
        self.stop = StopOnSignal(job_config) if _saves(job_config) else None
        if self.stop is None and dist.is_torchelastic_launched():
            end_on_signal()
        self.summary = Summary()
        self._first_step: int | None = None
        """Of this start of the run."""
        self._step_before = 0
        """The last step that is not part of the interval since the last report."""
        self._doubted = False
        self._open_logs(tag)
        if self.record is not None:
            self.record.write(device=self._device())
        self._record_model()

    def _open_logs(self, tag: str | None) -> None:
        options = self.job_config.metrics
        folder = Path(self.job_config.job.dump_folder)
        is_writer = dist.get_rank() == 0
        self.train_log = StepLog(folder / "metrics.jsonl") if is_writer else None
        self.validation_log = StepLog(folder / "validation.jsonl") if is_writer else None
        self.record = RunRecord(folder / "run.json", self.job_config, self.parallel_dims) if is_writer else None
        self.tensorboard: TensorBoard | None = None
        if options.enable_tensorboard and (is_writer or options.save_for_all_ranks):
            events = folder / options.save_tb_folder
            if options.save_for_all_ranks:
                events /= f"rank_{dist.get_rank()}"
            self.tensorboard = TensorBoard(events, tag)
            self.logger = _both(self.logger, self.tensorboard)

    def _device(self) -> dict[str, Any]:
        monitor, peak = self.device_memory_monitor, self.rates.peak
        return {
            "name": monitor.device_name,
            "memory_gib": monitor.device_capacity_gib,
            "peak_tflops": None if peak is None else peak / 1e12,
        }

    def _record_model(self) -> None:
        if self.record is not None:
            self.record.write(model=_model(self.model_args, self.rates.flops, self.rates.recomputed))

    def see_schedule(self, schedule: Any, microbatches: int) -> None:
        """Derive the bubble, and what is run again, from what the ranks of one of torch's schedules do, in order."""
        if isinstance(schedule, PipelineScheduleSingle):  # torch 2.13's table of 1F1B names microbatches that are not
            self.bubble = one_stage_bubble(self.parallel_dims.pp, microbatches)
        else:
            orders = actions_of(schedule)
            self.bubble = bubble_share(orders, share_of_forward(self.rates.recomputed, self.rates.flops))
            recomputed = recomputed_in_pipeline(self.job_config, self.model_args, orders)
            self.rates = dataclasses.replace(self.rates, recomputed=recomputed)
            self._record_model()

    def should_log(self, step: int) -> bool:
        """TorchTitan asks on every rank at every step: the first time tells where this start of the run begins."""
        logs = bool(super().should_log(step))
        if self._first_step is None:
            self._begin_at(step, reported=logs)
        if not logs and self.losses is not None:
            self.losses.forget()
        if self.stop is not None:
            self.stop.at_step_end(step)
        return logs

    def _begin_at(self, step: int, *, reported: bool) -> None:
        for log in (self.train_log, self.validation_log, self.tensorboard):
            if log is not None:
                log.start_at(step)
        if self.record is not None:
            self.record.write(first_step=step)
        self._first_step, self._step_before = step, step - 1
        if not reported:  # its time, much of it compiling, must not be part of the first report
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            self._restart_interval(step)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Report a step; `grad_norm` is the norm before clipping. Rates are over the time since the last report.

        Memory and the share of data loading are those of the rank where they are largest.
        """
        seconds = time.perf_counter() - self.time_last_log
        extra = dict(extra_metrics or {})
        extra["n_tokens_seen"] = self._tokens_seen(int(extra.get("n_tokens_seen", 0)))
        steps = max(1, step - self._step_before)
        rates = self.rates.over(self.ntokens_since_last_log, steps, seconds)
        own = self._measures(seconds)
        loss = self._from_last_stage(global_avg_loss)
        worst_loss, worst = self._worst(own, global_max_loss)
        rates["data_loading_pct"] = worst["data_loading_pct"]
        if self.bubble is not None:
            rates["bubble_pct"] = 100 * self.bubble
        record = {
            "step": step,
            "loss": loss,
            "max_loss": max_loss(worst_loss, loss),
            "grad_norm": grad_norm,
            "lr": extra.get("lr"),
            "tokens_seen": extra["n_tokens_seen"],
            "time": round(time.time(), 3),
            "steps": steps,
            **rates,
            "memory_gib": worst["memory_gib"],
            "memory_active_gib": worst["memory_active_gib"],
        }
        if step == self._first_step:
            record["first_step"] = True  # of this start: it compiles and warms up
        else:
            self.summary.add(rates, steps)
        if self.train_log is not None:
            self.train_log.append(record)
        of_this_rank = own if self.job_config.metrics.save_for_all_ranks else {}
        self.logger.log(_by_tag(record | of_this_rank, extra), step)
        self._print_step(record)
        self._doubt(rates.get("mfu_pct", 0.0))
        self._restart_interval(step)
        self.device_memory_monitor.reset_peak_stats()

    def _measures(self, seconds: float) -> dict[str, float]:
        """What this rank can say of itself alone, over the `seconds` since the last report."""
        memory = self.device_memory_monitor.get_peak_stats()
        return {
            "data_loading_pct": 100 * sum(self.data_loading_times) / seconds,
            "memory_gib": memory.max_reserved_gib,
            "memory_active_gib": memory.max_active_gib,
        }

    def _worst(self, own: dict[str, float], trainers_max_loss: float) -> tuple[float, dict[str, float]]:
        """The largest loss, and the largest of each measure, over all ranks."""
        device = torch.device(utils.device_type)
        if self.losses is None:  # as if it were the loss of one label
            noted = torch.tensor([trainers_max_loss, float(self.has_loss)], dtype=torch.float64, device=device)
        else:
            noted = self.losses.take(device)
        loss, measures = worst_of_ranks(noted, list(own.values()), self.parallel_dims)
        return loss, dict(zip(own, measures, strict=True))

    def _from_last_stage(self, loss: float) -> float:
        """The loss of the pipeline's last stage, on every stage."""
        mesh = self.parallel_dims.get_optional_mesh("pp")
        if mesh is None:
            return loss
        value = torch.tensor(loss if self.has_loss else 0.0, dtype=torch.float64, device=utils.device_type)
        dist.all_reduce(value, group=mesh.get_group())
        return value.item()

    def _tokens_seen(self, counted_by_trainer: int) -> int:
        """Tokens of the whole run.

        TorchTitan counts per rank, wrong once a run goes on with other ranks, and once for each rank that shares a
        sequence. The loader counts for all, but from zero where its state was left out of a resume. Then what the
        trainer knew of before is added.
        """
        counted_by_trainer //= self.parallel_dims.cp
        if self.loader is None:
            return counted_by_trainer
        tokens = self.loader.tokens_seen()
        if self._tokens_before is None:
            self._tokens_before = 0 if self.loader.resumed else counted_by_trainer - tokens
        return self._tokens_before + tokens

    def _print_step(self, record: dict[str, Any]) -> None:
        color = self.color
        shares = {"mfu_pct": "mfu", "mfu_causal_pct": "causal", "hfu_pct": "hfu", "bubble_pct": "bubble"}
        utilisation = "".join(f"  {name}: {record[key]:.2f}%" for key, name in shares.items() if key in record)
        logger.info(
            f"{color.red}step: {record['step']:2}  {color.green}loss: {record['loss']:8.5f}  "
            f"max: {record['max_loss']:8.5f}  {color.orange}grad_norm: {record['grad_norm']:7.4f}  "
            f"{color.turquoise}memory: {record['memory_gib']:5.2f}GiB  "
            f"{color.blue}tokens/s: {record['tokens_per_second']:,.0f} "
            f"({record['tokens_per_second_per_device']:,.0f} a device)  {record['step_seconds']:.3f}s/step  "
            f"data: {record['data_loading_pct']:.1f}%  "
            f"{color.cyan}tflops: {record['tflops_per_device']:,.2f}{color.magenta}{utilisation}{color.reset}"
        )

    def _doubt(self, mfu_pct: float) -> None:
        """No device is faster than its peak: say so once if this one seems to be."""
        if mfu_pct > 100 and not self._doubted:
            self._doubted = True
            logger.warning(
                "MFU of %.0f%% cannot be: the peak of %s must be higher; [mixle] peak_tflops gives it",
                mfu_pct,
                self.device_memory_monitor.device_name,
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

    def close(self) -> None:
        """Say what the run came to; TorchTitan calls this after the last step, and after a failure."""
        failed = sys.exc_info()[0] is not None
        stopped_by = None if self.stop is None else self.stop.stopped_by
        if self.stop is not None:
            self.stop.restore_config()
        line = self.summary.line()
        if line is not None:
            logger.info(line)
        if self.record is not None:
            summary = {} if line is None else {"summary": {"steps": self.summary.steps, **self.summary.spreads()}}
            ended = "failed" if failed else "complete" if stopped_by is None else "stopped"
            self.record.write(ended=ended, **summary)
        super().close()
        if self.stop is not None and stopped_by is not None and not failed:
            self.stop.leave()

    def _restart_interval(self, step: int) -> None:
        self._step_before = step
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.time_last_log = time.perf_counter()


def _without_tensorboard(job_config: JobConfig) -> JobConfig:
    """TorchTitan's writer makes a new folder a start, and in a pipeline writes from the last stage's rank."""
    return dataclasses.replace(job_config, metrics=dataclasses.replace(job_config.metrics, enable_tensorboard=False))


def _saves(job_config: JobConfig) -> bool:
    """Whether the run leaves anything to go on from; if not, a signal may as well end it at once."""
    checkpoint = job_config.checkpoint
    return checkpoint.enable and not checkpoint.load_only and not checkpoint.create_seed_checkpoint


def _both(first: BaseLogger, second: BaseLogger) -> LoggerContainer:
    both = LoggerContainer()
    both.add_logger(first)
    both.add_logger(second)
    return both


def _model(args: CausalLMArgs, flops: Any, recomputed: float | None) -> dict[str, Any]:
    counted = dataclasses.asdict(flops) | {"total": flops.total, "causal_total": flops.causal_total}
    return {
        "parameters": count_parameters(args),
        "flops_per_token": counted | {"recomputed": recomputed},
        "args": dataclasses.asdict(args),
    }


_TAGS = {
    "loss": "loss_metrics/global_avg_loss",
    "max_loss": "loss_metrics/global_max_loss",
    "grad_norm": "grad_norm",
    "tokens_per_second": "throughput/all_devices(tps)",
    "tokens_per_second_per_device": "throughput(tps)",
    "step_seconds": "time_metrics/end_to_end(s)",
    "data_loading_pct": "time_metrics/data_loading(%)",
    "bubble_pct": "time_metrics/bubble(%)",
    "memory_active_gib": "memory/max_active(GiB)",
    "memory_gib": "memory/max_reserved(GiB)",
    "tflops_per_device": "tflops",
    "mfu_pct": "mfu(%)",
    "mfu_causal_pct": "mfu_causal(%)",
    "hfu_pct": "hfu(%)",
}


def _by_tag(record: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """A report under TorchTitan's names, where it has one."""
    return {tag: record[key] for key, tag in _TAGS.items() if key in record} | extra
