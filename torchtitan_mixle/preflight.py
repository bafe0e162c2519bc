"""What can be known to be wrong with a job before anything is built."""

from pathlib import Path

import torch
import torch.distributed as dist
from torchtitan.config import JobConfig
from torchtitan.hf_datasets.text_datasets import DATASETS as HF_DATASETS

from torchtitan_mixle.data.datasets import check_dataset_name, is_token_source, open_source
from torchtitan_mixle.data.loader import samples_per_epoch
from torchtitan_mixle.data.source import TokenSource
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.model.args import CausalLMArgs, args_of
from torchtitan_mixle.planning.check import RunPlan, check_plan, check_seq_len, run_plan
from torchtitan_mixle.planning.options import check_options
from torchtitan_mixle.planning.stages import check_pipeline
from torchtitan_mixle.planning.values import check_values


def check_started_job(job_config: JobConfig) -> None:
    """`check_job` of the job that this process is a rank of."""
    check_job(job_config, dist.get_world_size(), on_accelerator=torch.accelerator.is_available())


def check_job(job_config: JobConfig, world_size: int, *, on_accelerator: bool) -> None:
    """Raise ConfigError on every rank for a job that cannot run. Needs no communication: all ranks see the same."""
    if not hasattr(job_config, "mixle"):
        raise ConfigError(
            'the config does not know [mixle]; add job.custom_config_module="torchtitan_mixle.job_config" to it'
        )
    check_values(job_config)
    args = args_of(job_config)
    plan = run_plan(job_config, world_size)
    check_plan(args, plan)
    if plan.pipeline_parallel_degree > 1:
        check_pipeline(job_config, args, plan)
    check_options(job_config, args, plan, on_accelerator=on_accelerator)
    _check_training_data(job_config, args, plan)
    if job_config.checkpoint.create_seed_checkpoint and plan.world_size != 1:
        raise ConfigError(
            f"checkpoint.create_seed_checkpoint needs 1 process, not {plan.world_size}; start it with NGPU=1"
        )
    if job_config.validation.enable:
        _check_validation(job_config, args, plan)


def _check_training_data(job_config: JobConfig, args: CausalLMArgs, plan: RunPlan) -> None:
    training = job_config.training
    check_dataset_name(training.dataset, key="training.dataset")
    if not is_token_source(training.dataset):
        _check_hf_path(training.dataset, training.dataset_path, key="training.dataset_path")
        return
    source = open_source(training.dataset, training.dataset_path, "train")
    source.check_ids(args.vocab_size)
    available = samples_per_epoch(source, training.seq_len)
    if plan.samples_per_step > available:
        raise ConfigError(
            f"a step of {plan.samples_per_step} samples of training.seq_len={training.seq_len} tokens is more than the "
            f"{available} samples ({source.n_tokens} tokens) of {source.name}; lower training.global_batch_size, "
            f"training.local_batch_size or training.seq_len"
        )


def _check_validation(job_config: JobConfig, args: CausalLMArgs, plan: RunPlan) -> None:
    validation = job_config.validation
    check_dataset_name(validation.dataset, key="validation.dataset")
    check_seq_len(args, plan, validation.seq_len, key="validation.seq_len")
    if is_token_source(validation.dataset):
        source = open_source(validation.dataset, validation.dataset_path, "validation")
        source.check_ids(args.vocab_size)
        _check_same_tokenizer(job_config, source)
        return
    if is_token_source(job_config.training.dataset):
        raise ConfigError(
            f"validation.dataset={validation.dataset!r} is text, training.dataset={job_config.training.dataset!r} are "
            f"tokens, and their tokenizers need not agree; prepare the validation text with `torchtitan-mixle prepare`"
        )
    _check_hf_path(validation.dataset, validation.dataset_path, key="validation.dataset_path")
    if validation.steps == -1:
        raise ConfigError(
            f"validation.steps=-1 (all data) needs a data set of known length, which {validation.dataset!r} is not; "
            f"set validation.steps to a positive number"
        )


def _check_same_tokenizer(job_config: JobConfig, source: TokenSource) -> None:
    """A loss over tokens that the model was not trained on would be a number without meaning."""
    training, validation = job_config.training, job_config.validation
    if source.n_tokens < 2:
        raise ConfigError(f"{source.name} has {source.n_tokens} tokens, and validation needs 2: an input and its label")
    same = is_token_source(training.dataset) and (
        open_source(training.dataset, training.dataset_path, "train").tokenizer == source.tokenizer
    )
    if not same:
        raise ConfigError(
            f"validation.dataset={validation.dataset!r} ({source.name}) was not made with the tokenizer of "
            f"training.dataset={training.dataset!r}; prepare both with the same one (--validation-fraction makes both)"
        )


def _check_hf_path(dataset: str, path: str | None, *, key: str) -> None:
    default = HF_DATASETS[dataset].path
    if path is not None and not (Path(path).is_dir() and any(Path(path).iterdir())):
        raise ConfigError(
            f"{key}={path!r} is not a folder with files; it replaces {default!r} of the data set {dataset!r}"
        )
