"""The TrainSpec: which of our parts, and which of TorchTitan's, make a training run."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import OptimizersContainer, build_optimizers
from torchtitan.components.tokenizer import BaseTokenizer, build_hf_tokenizer
from torchtitan.config import JobConfig
from torchtitan.config import Optimizer as OptimizerConfig
from torchtitan.distributed import ParallelDims
from torchtitan.hf_datasets.text_datasets import build_text_dataloader
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec, register_train_spec

from torchtitan_mixle.checkpoint.adapter import GPT2Adapter
from torchtitan_mixle.checkpoint.preflight import check_start
from torchtitan_mixle.checkpoint.record import record_of_job
from torchtitan_mixle.data.datasets import is_token_source, open_source
from torchtitan_mixle.data.loader import GlobalOrderLoader, TrainingSamples
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.leaving import settle_at_exit
from torchtitan_mixle.metrics.losses import NotedLoss
from torchtitan_mixle.metrics.processor import CausalLMMetrics, build_metrics_processor
from torchtitan_mixle.model.args import CausalLMArgs, FlavorArgs, args_of
from torchtitan_mixle.model.model import CausalLM
from torchtitan_mixle.parallel.parallelize import parallelize
from torchtitan_mixle.parallel.pipeline import Pipeline, build_pipeline
from torchtitan_mixle.preflight import check_started_job
from torchtitan_mixle.validate import build_validator

NAME = "mixle"


def build_tokenizer(job_config: JobConfig) -> BaseTokenizer | None:
    """The tokenizer of a Hugging Face text data set; token streams need none.

    TorchTitan's first call with the job's config, so the place for the start-up check.
    """
    settle_at_exit()
    check_started_job(job_config)
    datasets = [job_config.training.dataset]
    if job_config.validation.enable:
        datasets.append(job_config.validation.dataset)
    if all(is_token_source(dataset) for dataset in datasets):
        return None
    return _hf_tokenizer(job_config)


def _hf_tokenizer(job_config: JobConfig) -> BaseTokenizer:
    path = job_config.model.hf_assets_path
    try:
        tokenizer: BaseTokenizer = build_hf_tokenizer(job_config)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"model.hf_assets_path={path!r}: no tokenizer can be read there ({error}); "
            f"the data set {job_config.training.dataset!r} needs a folder with a tokenizer.json"
        ) from error
    args = args_of(job_config)
    size = tokenizer.get_vocab_size()
    if size > args.vocab_size:
        raise ConfigError(
            f"the tokenizer at model.hf_assets_path={path!r} has {size} tokens, more than the model's vocabulary size "
            f"V={args.vocab_size}; set [mixle] vocab_size={size}"
        )
    return tokenizer


class Run:
    """Builds the parts of a run that must know each other, which TorchTitan does not introduce.

    The loader alone knows how many samples the whole run has consumed (TorchTitan's own count is kept per rank, and is
    wrong once a run goes on with another number of ranks). The pipeline knows the tied matrix, which the optimizer must
    leave to one owner, which ranks have a loss to report, and how long the schedule waits. The loss function knows what
    each data-parallel rank's loss was. The adapter learns what it will load.
    """

    def __init__(self) -> None:
        self.job_config: JobConfig | None = None
        self.loader: BaseDataLoader | None = None
        self.metrics: CausalLMMetrics | None = None
        self.pipeline: Pipeline | None = None

    def build_dataloader(
        self, dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer | None, job_config: JobConfig
    ) -> BaseDataLoader:
        """Batches of this data-parallel rank."""
        self.job_config = job_config
        training = job_config.training
        if is_token_source(training.dataset):
            self.loader = _token_loader(dp_world_size, dp_rank, job_config)
        else:
            self.loader = build_text_dataloader(
                dp_world_size=dp_world_size, dp_rank=dp_rank, tokenizer=tokenizer, job_config=job_config
            )
        return self.loader

    def build_metrics_processor(
        self, job_config: JobConfig, parallel_dims: ParallelDims, model_args: CausalLMArgs, tag: str | None = None
    ) -> CausalLMMetrics:
        self.metrics = build_metrics_processor(job_config, parallel_dims, model_args, tag)
        self.pipeline = None
        if isinstance(self.loader, GlobalOrderLoader):
            self.metrics.loader = self.loader
        return self.metrics

    def build_loss_fn(self, job_config: JobConfig, **kwargs: Any) -> NotedLoss:
        """TorchTitan's loss, compiled if the job asks for that, which also notes what it was on this rank."""
        loss_fn = NotedLoss(build_cross_entropy_loss(job_config, **kwargs))
        if self.metrics is not None:
            self.metrics.losses = loss_fn
        return loss_fn

    def pipelining_fn(
        self,
        model: CausalLM,
        parallel_dims: ParallelDims,
        job_config: JobConfig,
        device: torch.device,
        model_args: CausalLMArgs,
        parallelize_fn: Callable[..., CausalLM],
        loss_fn: NotedLoss,
    ) -> tuple[Any, list[CausalLM], bool, bool]:
        # The stages are given the bare function, since torch calls it on data that is none too.
        pipeline = build_pipeline(
            model, parallel_dims, job_config, device, parallelize_fn, loss_fn.loss_fn, note=loss_fn.note
        )
        self.pipeline = pipeline
        if self.metrics is not None:
            self.metrics.has_loss = pipeline.has_last_stage
            training, parallelism = job_config.training, job_config.parallelism
            microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
            self.metrics.see_schedule(pipeline.schedule.schedule, microbatches)
        return pipeline.schedule, pipeline.parts, pipeline.has_first_stage, pipeline.has_last_stage

    def build_optimizers(
        self, model_parts: list[CausalLM], optimizer: OptimizerConfig, parallel_dims: ParallelDims
    ) -> OptimizersContainer:
        if self.pipeline is None:
            return build_optimizers(model_parts, optimizer, parallel_dims)
        tied = self.pipeline.tied
        mirror = tied.mirror
        # The optimizer takes what requires a gradient when it is built: not the mirror.
        if mirror is not None:
            mirror.requires_grad_(False)
        optimizers = build_optimizers(model_parts, optimizer, parallel_dims)
        if mirror is not None:
            mirror.requires_grad_(True)
        optimizers.register_step_post_hook(lambda *_: tied.copy_owner())
        return optimizers

    def build_adapter(self, model_args: CausalLMArgs, hf_assets_path: str | None) -> GPT2Adapter:
        """TorchTitan's `state_dict_adapter`; leaves the model's record in the dump folder, for export and the like."""
        job_config = self.job_config
        if job_config is None:
            return GPT2Adapter(model_args, hf_assets_path)
        source, activation = check_start(job_config, model_args)
        if job_config.checkpoint.enable and dist.get_rank() == 0:
            dump_folder = Path(job_config.job.dump_folder)
            replace(record_of_job(job_config, model_args, self._tokenizer()), activation=activation).write(dump_folder)
        return GPT2Adapter(model_args, hf_assets_path, source=source, save_folder=partial(_last_step, job_config))

    def _tokenizer(self) -> str | None:
        """Hash of the tokenizer behind a token stream."""
        loader = self.loader
        return loader.samples.source.tokenizer if isinstance(loader, GlobalOrderLoader) else None


def _last_step(job_config: JobConfig) -> Path:
    """The folder of the last checkpoint, the one that can be in Hugging Face's form."""
    return Path(job_config.job.dump_folder) / job_config.checkpoint.folder / f"step-{job_config.training.steps}"


def _token_loader(dp_world_size: int, dp_rank: int, job_config: JobConfig) -> GlobalOrderLoader:
    training = job_config.training
    args = args_of(job_config)
    samples = TrainingSamples(
        open_source(training.dataset, training.dataset_path, "train"),
        seq_len=training.seq_len,
        vocab_size=args.vocab_size,
        seed=args.seed,
    )
    return GlobalOrderLoader(
        samples,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        local_batch_size=training.local_batch_size,
        options=training.dataloader,
    )


def train_spec() -> TrainSpec:
    """The spec that is registered as `model.name = "mixle"`."""
    run = Run()
    return TrainSpec(
        model_cls=CausalLM,
        model_args=FlavorArgs(),
        parallelize_fn=parallelize,
        pipelining_fn=run.pipelining_fn,
        build_optimizers_fn=run.build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=run.build_dataloader,
        build_tokenizer_fn=build_tokenizer,
        build_loss_fn=run.build_loss_fn,
        build_validator_fn=build_validator,
        build_metrics_processor_fn=run.build_metrics_processor,
        state_dict_adapter=run.build_adapter,
    )


def register() -> None:
    """Make the model known to TorchTitan as `model.name = "mixle"`; a second call changes nothing."""
    try:
        get_train_spec(NAME)
    except ValueError:
        register_train_spec(NAME, train_spec())
