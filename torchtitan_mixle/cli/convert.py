"""`torchtitan-mixle import` and `export`: models from and to other programs' files."""

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import track as rich_track

from torchtitan_mixle.cli.options import NOTHING_SAID, AboutModel, Flag


def import_(
    source: Annotated[Path, tyro.conf.Positional],
    /,
    out: Path,
    n_head: int | None = None,
    mup_attention: Flag = False,
    config: Path | None = None,
    overwrite: Flag = False,
) -> None:
    """Make a checkpoint of a mixle or GPT-2 model, for any layout to start from.

    Start a run from it with checkpoint.initial_load_path = OUT. Nothing in SOURCE is run as code, and memory holds the
    model once.

    Args:
        source: A file of mixle's LM.save, a mixle CausalLM's state dict (torch.save or .safetensors), or a folder of
            Hugging Face's transformers with the config.json and the safetensors of a GPT-2.
        out: Folder to make.
        n_head: Heads of a bare state dict, which does not say.
        mup_attention: The model scales its scores by 1/head_dim, as under muP; a mixle file does not say.
        config: TOML file of the job that will start from it: refuse a model of another size.
        overwrite: Replace OUT if it is an imported checkpoint, once the new one is whole.
    """
    from torchtitan_mixle.checkpoint.convert import import_model, is_imported
    from torchtitan_mixle.checkpoint.gpt2 import warn_of_activation
    from torchtitan_mixle.checkpoint.output import check_target
    from torchtitan_mixle.checkpoint.record import record_of_config
    from torchtitan_mixle.checkpoint.sources import open_source

    check_target(out, overwrite=overwrite, is_ours=is_imported)
    model = open_source(source, n_head=n_head, mup_attention=mup_attention)
    if config is not None:
        wanted = record_of_config(config)
        wanted.require_same(model.record, what=str(source))
        wanted.require_same_use(model.record)
    if warning := warn_of_activation(model.record.activation):
        _warn(warning)
    import_model(model, out, overwrite=overwrite, track=_track)
    flags = shlex.join(["--checkpoint.initial_load_path", str(out), *model.record.flags()])
    print(f"{out}: {model.record.describe()}, from {model.kind}; start a run with {flags}")


def export(
    checkpoint: Annotated[Path, tyro.conf.Positional],
    /,
    out: Path,
    to: Literal["mixle", "gpt2"],
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    overwrite: Flag = False,
    about: AboutModel = NOTHING_SAID,
) -> None:
    """Write a checkpoint's weights for mixle or for transformers. The bytes do not depend on the run's layout.

    Args:
        checkpoint: The step-N folder of a run, or an imported checkpoint.
        out: File (mixle) or folder (gpt2) to make.
        to: "mixle": a file that mixle.models.language_model.LM.load opens; "gpt2": a folder that transformers opens
            as a GPT2LMHeadModel with the activation "gelu".
        about: What the weights do not say.
        dtype: Of the written weights; unset: as they are in the checkpoint.
        overwrite: Replace OUT if it is an export, once the new one is whole.
    """
    import zipfile

    from torchtitan_mixle.checkpoint.convert import export_gpt2, export_mixle, is_gpt2_export
    from torchtitan_mixle.checkpoint.gpt2 import EXACT_GELU
    from torchtitan_mixle.checkpoint.load import DTYPES, open_checkpoint
    from torchtitan_mixle.checkpoint.output import check_target
    from torchtitan_mixle.checkpoint.texts import run_tokenizer

    check_target(out, overwrite=overwrite, is_ours=zipfile.is_zipfile if to == "mixle" else is_gpt2_export)
    weights, record = open_checkpoint(checkpoint, **vars(about))
    target = None if dtype is None else DTYPES[dtype]
    if record.activation not in EXACT_GELU:
        _warn(f"this model began as one with {record.activation}; what is written computes exact GELU, as training did")
    if to == "mixle":
        if record.mup_attention:
            _warn(
                "mixle's LM.load does not restore muP attention: set block.attn.mup_attention = True for every block "
                "of the loaded lm.module"
            )
        export_mixle(weights, record, out, dtype=target, overwrite=overwrite, track=_track)
    else:
        tokenizer, eos_id = run_tokenizer(record)
        export_gpt2(
            weights,
            record,
            out,
            dtype=target,
            overwrite=overwrite,
            track=_track,
            tokenizer=tokenizer,
            eos_id=eos_id,
        )
    print(f"{out}: {record.describe()}")


def _track(names: Iterable[str], what: str) -> Iterable[str]:
    return rich_track(list(names), description=what, console=Console(stderr=True))


def _warn(text: str) -> None:
    print(f"torchtitan-mixle: warning: {text}", file=sys.stderr)
