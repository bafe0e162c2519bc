# No `from __future__ import annotations` here: TorchTitan merges these classes by their evaluated types.
"""The `[mixle]` section of the TOML, and the few TorchTitan defaults that this model changes.

A config file asks for it with `job.custom_config_module = "torchtitan_mixle.job_config"`.
"""

from dataclasses import dataclass, field


@dataclass
class Mixle:
    """What TorchTitan's own sections have no key for."""

    vocab_size: int | None = None
    """Rows of the tied token matrix; unset: the flavor's."""

    d_model: int | None = None
    """Width of the residual stream; unset: the flavor's."""

    n_layer: int | None = None
    """Blocks; unset: the flavor's."""

    n_head: int | None = None
    """Attention heads, which divide d_model; unset: the flavor's."""

    block: int | None = None
    """Rows of the position table, the longest sequence; unset: the flavor's."""

    mup_attention: bool = False
    """Scale attention scores by 1/head_dim instead of 1/sqrt(head_dim), as a mixle model under muP does."""

    mup_output_multiplier: float = 1.0
    """Factor on the logits of a freshly initialised model (a loaded checkpoint brings its own)."""

    context_parallel_method: str = "allgather"
    """How queries and keys come together: "allgather", "ring" or "ulysses"."""

    context_parallel_order: str | None = None
    """How ranks share the tokens of a sequence: "headtail" (a chunk from either end, so that all have the same work) or
    "contiguous"; unset: as parallelism.context_parallel_load_balancer says, which is "headtail"."""

    peak_tflops: float | None = None
    """Dense peak of one device in TFLOP/s, for MFU on a device that is not in the table, or to overrule the table."""


@dataclass
class Model:
    hf_assets_path: str = "."
    """Folder with a tokenizer.json, for Hugging Face data sets; other data sets bring their tokenizer."""


@dataclass
class Checkpoint:
    last_save_model_only: bool = False
    """Whether the last checkpoint holds the weights alone; such a run cannot be continued."""


@dataclass
class JobConfig:
    mixle: Mixle = field(default_factory=Mixle)
    """The mixle CausalLM"""
    model: Model = field(default_factory=Model)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
