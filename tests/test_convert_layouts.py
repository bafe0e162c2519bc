"""Runs of several layouts between mixle and GPT-2: what they load, what they train on from, what they leave."""

import json
import shlex
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mixle.models.language_model import LM
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2LMHeadModel

from tests.jobs import DEBUG_CONFIG, TINY, build_trainer, job_config, metrics_of, read_lines, whole_state
from tests.ranks import RankPool
from torchtitan_mixle.checkpoint.adapter import GPT2Adapter
from torchtitan_mixle.checkpoint.load import load_model, open_checkpoint
from torchtitan_mixle.checkpoint.preflight import check_start
from torchtitan_mixle.checkpoint.record import ModelRecord
from torchtitan_mixle.cli.main import main
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.flavors import FLAVORS
from torchtitan_mixle.model.args import CausalLMArgs, args_of
from torchtitan_mixle.model.model import CausalLM
from torchtitan_mixle.model.weights import from_mixle

SHARD, REPLICATE = "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree"
TENSOR, PIPELINE = "parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree"
CONTEXT, SCHEDULE = "parallelism.context_parallel_degree", "parallelism.pipeline_parallel_schedule"
STAGES = {PIPELINE: 2, "training.local_batch_size": 4, "training.global_batch_size": 8}
V_SHAPED = {
    SCHEDULE: "ZBVZeroBubble",
    "training.local_batch_size": 8,
    "parallelism.pipeline_parallel_first_stage_less_layers": 0,
    "parallelism.pipeline_parallel_last_stage_less_layers": 0,
}
DEBUG = FLAVORS["debugmodel"]
MULTIPLIER = 0.37

# Layout -> (ranks, degrees, what it starts from: an import, or safetensors under GPT-2's new or old names).
LAYOUTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "1": (1, {}, "imported"),
    "tp2": (2, {TENSOR: 2}, "imported"),
    "pp2": (2, STAGES, "imported"),
    "cp2": (2, {CONTEXT: 2}, "gpt2"),
    "fsdp2xtp2": (4, {SHARD: 2, TENSOR: 2}, "gpt2"),
    "hsdp2x2": (4, {SHARD: 2, REPLICATE: 2}, "old gpt2"),
    "pp2xfsdp2": (4, STAGES | {SHARD: 2}, "imported"),
    "tp2xpp2": (4, STAGES | {TENSOR: 2}, "imported"),
    "pp2, V-shaped": (2, STAGES | V_SHAPED, "gpt2"),
}
FROM_GPT2 = {name for name, (*_, start) in LAYOUTS.items() if "gpt2" in start}


VALIDATED = ("1", "fsdp2xtp2", "pp2")
AS_TRAINED = {"validation.seq_len": TINY["training.seq_len"], "validation.local_batch_size": 4}
"""A pipeline validates with the shapes that it trains with."""
IN_SEVERAL_FILES = {"pp2xfsdp2", "tp2xpp2"}


def run(overrides: dict[str, Any], file_bytes: int) -> dict[str, Any]:
    """Load, save that as step 0, take a step on noted samples, validate, save the weights for transformers."""
    trainer = build_trainer(overrides)
    adapter = trainer.checkpointer.sd_adapter
    adapter.fqn_to_index_mapping = GPT2Adapter(trainer.model_args, None, file_bytes=file_bytes).fqn_to_index_mapping
    assert trainer.checkpointer.load()
    loaded = whole_state(trainer)
    trainer.checkpointer.save(0)  # a multiple of the interval: in DCP's form, with all states
    samples: list[Tensor] = []

    def watch() -> Any:
        for inputs, labels in trainer.dataloader:
            samples.append(torch.cat([inputs["input"], labels[:, -1:]], dim=1))
            yield inputs, labels

    trainer.step += 1
    trainer.train_step(trainer.batch_generator(watch()))
    if overrides["validation.enable"]:
        trainer.validator.validate(trainer.model_parts, 1)
    trained = whole_state(trainer)
    trainer.checkpointer.interval = 1
    trainer.checkpointer.save(1)
    trainer.step = 2
    trainer.checkpointer.save(2, last_step=True)
    trainer.close()
    loss = metrics_of(overrides)[-1]["loss"]
    return {"loaded": loaded, "trained": trained, "samples": samples, "dp": trainer.dataloader.dp_rank, "loss": loss}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[LM, Path]:
    """A mixle model of the debug size, and a folder with it in every form that a run can start from."""
    folder = tmp_path_factory.mktemp("start")
    torch.manual_seed(0)
    lm = LM(DEBUG.vocab_size, d_model=DEBUG.d_model, n_layer=DEBUG.n_layer, n_head=DEBUG.n_head, block=DEBUG.block)
    with torch.no_grad():
        for parameter in lm.module.parameters():
            parameter.mul_(0.05) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
        lm.module.mup_output_multiplier.fill_(MULTIPLIER)
    lm.save(str(folder / "lm.pt"))
    command("import", folder / "lm.pt", "--out", folder / "imported")
    command("export", folder / "imported", "--to", "gpt2", "--out", folder / "gpt2")
    old = shutil.copytree(folder / "gpt2", folder / "old gpt2")
    tensors = load_file(old / "model.safetensors")
    tensors = {key.removeprefix("transformer."): value for key, value in tensors.items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 512, 512).tril()}, old / "model.safetensors")
    return lm, folder


@pytest.fixture(scope="module")
def validation_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("validation")
    (folder / "text.txt").write_text("".join(f"line {i} of what is said\n" for i in range(300)))
    command("prepare", folder / "text.txt", "--out", folder / "data", "--bytes")
    return folder / "data"


@pytest.fixture(scope="module")
def runs(
    start: tuple[LM, Path], validation_data: Path, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, list[dict[str, Any]]]]:
    """Layout -> (dump folder, what each rank returned)."""
    results = {}
    for name, (world_size, degrees, source) in LAYOUTS.items():
        folder = tmp_path_factory.mktemp("run")
        job = TINY | {
            "training.steps": 2,
            "checkpoint.enable": True,
            "checkpoint.interval": 10,
            "checkpoint.initial_load_path": str(start[1] / source),
            "checkpoint.initial_load_in_hf": name in FROM_GPT2,
            "checkpoint.last_save_in_hf": True,
            "checkpoint.last_save_model_only": True,
            "mixle.mup_output_multiplier": MULTIPLIER,
            "validation.enable": name in VALIDATED,
            "validation.dataset": "tokens",
            "validation.dataset_path": str(validation_data),
            "validation.seq_len": 48,
            "validation.steps": -1,
            "job.dump_folder": str(folder),
        }
        if PIPELINE in degrees:
            degrees = degrees | AS_TRAINED
        results[name] = (
            folder,
            ranks.run(run, world_size, job | degrees, 10**6 if name in IN_SEVERAL_FILES else 10**9),
        )
    return results


def command(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


def together(results: list[dict[str, Any]], moment: str) -> dict[str, Tensor]:
    """The whole state, of which pipeline stages hold parts."""
    return {name: value for result in results for name, value in result[moment].items()}


def our_logits(state: dict[str, Tensor], tokens: Tensor) -> Tensor:
    model = CausalLM(CausalLMArgs())
    model.load_state_dict(state)
    with torch.no_grad():
        return model(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_goes_on_from_a_mixle_model(name: str, runs: dict[str, Any], start: tuple[LM, Path]) -> None:
    """Every weight as imported, and at the first step the loss that mixle has on the same samples."""
    _, results = runs[name]
    lm = start[0]
    expected = from_mixle(lm.module.state_dict(), DEBUG.n_head)
    loaded = together(results, "loaded")
    assert loaded.keys() == expected.keys()
    for key, value in expected.items():
        if name in FROM_GPT2 and key in ("ln.weight", "ln.bias"):  # the factor went into these, and out of them again
            torch.testing.assert_close(loaded[key], value, atol=1e-7, rtol=1e-6)
        else:
            assert torch.equal(loaded[key], value), key
    assert results[0]["loss"] == pytest.approx(loss_in_mixle(lm, results), rel=1e-5)


def loss_in_mixle(lm: LM, results: list[dict[str, Any]]) -> float:
    """What mixle's module makes of the samples of a step."""
    by_rank = {result["dp"]: torch.cat(result["samples"]) for result in results}
    samples = torch.cat(list(by_rank.values()))
    assert samples.shape == (8, 33)
    with torch.no_grad():
        logits = lm.module(samples[:, :-1], return_all_logits=True)
    return F.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten()).item()


@pytest.mark.slow
def test_a_mixle_model_of_no_flavors_size_is_trained(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the flags that the import prints."""
    from torchtitan.config import ConfigManager

    lm = LM(257, d_model=48, n_layer=3, n_head=6, block=40)
    with torch.no_grad():
        lm.module.mup_output_multiplier.fill_(MULTIPLIER)
    lm.save(str(tmp_path / "lm.pt"))
    command("import", tmp_path / "lm.pt", "--out", tmp_path / "a start")
    words = shlex.split(capsys.readouterr().out.partition("start a run with ")[2])
    args = args_of(ConfigManager().parse_args(["--job.config_file", str(DEBUG_CONFIG), *words]))
    assert (args.vocab_size, args.d_model, args.n_layer, args.n_head, args.block) == (257, 48, 3, 6, 40)

    flags = dict(zip(words[:-1:2], words[1:-1:2], strict=True))
    job = TINY | {key.removeprefix("--"): int(value) if value.isdecimal() else value for key, value in flags.items()}
    job |= {TENSOR: 2, "job.dump_folder": str(tmp_path / "run"), "training.local_batch_size": 8}
    job |= {"checkpoint.enable": True, "checkpoint.interval": 10}
    results = ranks.run(run, 2, job, 10**9)
    for key, value in from_mixle(lm.module.state_dict(), 6).items():
        assert torch.equal(results[0]["loaded"][key], value), key
    assert results[0]["loss"] == pytest.approx(loss_in_mixle(lm, results), rel=1e-5)


@pytest.mark.parametrize("mup_attention", [True, False])
def test_flags_make_the_model_of_any_config(mup_attention: bool, tmp_path: Path) -> None:
    from torchtitan.config import ConfigManager

    config = tmp_path / "other.toml"
    keys = f"[mixle]\nvocab_size = 300\nn_head = 2\nmup_attention = {str(not mup_attention).lower()}\n"
    config.write_text(DEBUG_CONFIG.read_text() + keys)
    record = ModelRecord.of(replace(FLAVORS["124M"], n_head=6), mup_attention=mup_attention)
    args = args_of(ConfigManager().parse_args(["--job.config_file", str(config), *record.flags()]))
    assert ModelRecord.of(args, mup_attention=args.mup_attention) == record


@pytest.mark.slow
def test_same_weights_export_to_the_same_bytes(runs: dict[str, Any], tmp_path: Path) -> None:
    for i, (name, (folder, _)) in enumerate(runs.items()):
        if name in FROM_GPT2:
            continue  # their final norm went through a multiplication and a division
        step = folder / "checkpoint" / "step-0"
        command("export", step, "--to", "mixle", "--out", tmp_path / f"{i}.pt")
        command("export", step, "--to", "gpt2", "--out", tmp_path / f"{i}")
    files = [file.read_bytes() for file in sorted(tmp_path.glob("*.pt"))]
    folders = [{f.name: f.read_bytes() for f in path.iterdir()} for path in sorted(tmp_path.iterdir()) if path.is_dir()]
    assert len(files) == len(folders) == 5
    assert all(file == files[0] for file in files)
    assert all(content == folders[0] for content in folders)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_trained_weights_reach_mixle_and_transformers(name: str, runs: dict[str, Any], tmp_path: Path) -> None:
    """Exported, and saved by the run itself in Hugging Face's form: the same logits as the run's weights give."""
    folder, results = runs[name]
    state = together(results, "trained")
    tokens = torch.randint(DEBUG.vocab_size, (2, 40), generator=torch.Generator().manual_seed(5))
    expected = our_logits(state, tokens)
    step = folder / "checkpoint" / "step-1"
    command("export", step, "--to", "mixle", "--out", tmp_path / "lm.pt")
    command("export", step, "--to", "gpt2", "--out", tmp_path / "gpt2")
    with torch.no_grad():
        theirs = LM.load(str(tmp_path / "lm.pt")).module(tokens, return_all_logits=True)
        torch.testing.assert_close(theirs, expected, atol=1e-5, rtol=1e-5)
        for place in (tmp_path / "gpt2", folder / "checkpoint" / "step-2"):
            model = GPT2LMHeadModel.from_pretrained(place).eval()
            torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=1e-5)
    exported = load_file(tmp_path / "gpt2" / "model.safetensors")
    files = sorted((folder / "checkpoint" / "step-2").glob("*.safetensors"))
    assert (len(files) > 1) == (name in IN_SEVERAL_FILES)
    saved = {key: value for file in files for key, value in load_file(file).items()}
    assert saved.keys() == exported.keys()
    for key, value in exported.items():
        assert torch.equal(saved[key], value), key


@pytest.mark.slow
@pytest.mark.parametrize("name", VALIDATED)
def test_score_is_the_trainers_validation_loss(
    name: str, runs: dict[str, Any], validation_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = runs[name]
    (expected,) = read_lines(folder / "validation.jsonl")
    score = partial(command, "score", folder / "checkpoint" / "step-1", "--json")
    for more in ((), ("--batch-size", "3"), ("--dataset-path", validation_data, "--seq-len", 48))[
        : None if name == "1" else 1
    ]:
        capsys.readouterr()
        score(*more)
        result = json.loads(capsys.readouterr().out)
        assert result["tokens"] == expected["tokens"]
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.slow
def test_the_tools_find_what_the_run_was(runs: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Size, heads and tokenizer come from the record that the run left in its dump folder."""
    for name in ("cp2", "tp2xpp2"):
        folder, results = runs[name]
        step = folder / "checkpoint" / "step-1"
        weights, record = open_checkpoint(step)
        assert record.n_head == DEBUG.n_head
        model = load_model(weights, record, device="cpu", dtype="float32")
        for key, value in together(results, "trained").items():
            assert torch.equal(model.state_dict()[key], value), key
        command("generate", step, "--prompt", "def ", "--n", "20")
        assert capsys.readouterr().out.startswith("def ")


def check(overrides: dict[str, Any]) -> str:
    """What the start-up says of the weights that a job would start from."""
    job = job_config(TINY | {"checkpoint.enable": True} | overrides)
    try:
        return f"started from {check_start(job, args_of(job))[1]}"
    except ConfigError as error:
        return str(error)


def test_weights_of_another_model_are_refused(start: tuple[LM, Path], tmp_path: Path) -> None:
    """On every rank alike, from the files alone; a run that has checkpoints of its own is let alone."""
    folder = {"job.dump_folder": str(tmp_path), "checkpoint.initial_load_path": str(start[1] / "gpt2")}
    in_hf = folder | {"checkpoint.initial_load_in_hf": True}
    ours = folder | {"checkpoint.initial_load_path": str(start[1] / "imported")}
    assert check(in_hf) == check(ours) == "started from gelu"
    vocabulary = {"mixle.vocab_size": 300}
    assert "has vocab_size=257, and the model of this config vocab_size=300; set [mixle] vocab_size=257" in check(
        in_hf | vocabulary
    )
    said = check(ours | vocabulary)
    assert "is of a model with vocab_size=257 (" in said
    assert "and this model has vocab_size=300; start with --mixle.vocab_size 257 --mixle.d_model 128 " in said
    assert "is of a model with mup_attention=False" in check(ours | {"mixle.mup_attention": True})
    assert "holds safetensors, not a checkpoint" in check(folder)
    step = tmp_path / "checkpoint" / "step-7"
    step.mkdir(parents=True)
    assert check(ours) == "started from gelu"  # a first save that was broken off is set aside
    assert (tmp_path / "broken-checkpoint" / "broken-7").is_dir() and not step.exists()
    step.mkdir(parents=True)
    (step / "model.safetensors.index.json").write_text("{}")
    assert "step-7 holds Hugging Face files (checkpoint.last_save_in_hf), from which a run cannot go on" in check(
        {"job.dump_folder": str(tmp_path)}
    )
