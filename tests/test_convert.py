"""Models from and to mixle and transformers, through the commands, against the real packages."""

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mixle.models.language_model import LM
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from torchtitan_mixle.checkpoint import convert
from torchtitan_mixle.checkpoint.load import load_model, open_checkpoint
from torchtitan_mixle.checkpoint.record import FILE
from torchtitan_mixle.cli.main import main
from torchtitan_mixle.model.model import CausalLM

Capture = pytest.CaptureFixture[str]

SHAPE = {"d_model": 48, "n_layer": 3, "n_head": 6, "block": 40}
VOCAB = 67  # nothing divides it
TOKENS = torch.randint(VOCAB, (3, 33), generator=torch.Generator().manual_seed(1))


def command(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


def refusal(capsys: Capture, *words: object) -> str:
    """The one line that a refused command ends in."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("torchtitan-mixle: ")]
    assert len(lines) == 1, lines
    return lines[0]


def spread(module: torch.nn.Module) -> None:
    """Weights under which every one of them shows in the logits."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3)


def our_model(checkpoint: Path) -> CausalLM:
    return load_model(*open_checkpoint(checkpoint), device="cpu", dtype="float32")


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        if isinstance(model, LM):
            return model.module(TOKENS, return_all_logits=True)
        return model.eval()(TOKENS).logits if isinstance(model, GPT2LMHeadModel) else model(TOKENS)


def assert_same_state(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


@pytest.fixture(scope="module")
def mixle(tmp_path_factory: pytest.TempPathFactory) -> tuple[LM, Path, Path]:
    """(the model, its LM.save file, the checkpoint imported from that)."""
    folder = tmp_path_factory.mktemp("mixle")
    lm = LM(VOCAB, **SHAPE)
    spread(lm.module)
    lm.module.mup_output_multiplier.fill_(0.37)
    lm.save(str(folder / "lm.pt"))
    command("import", folder / "lm.pt", "--out", folder / "imported")
    return lm, folder / "lm.pt", folder / "imported"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[GPT2LMHeadModel, Path, Path]:
    """(the model, the folder that save_pretrained made, the checkpoint imported from that)."""
    folder = tmp_path_factory.mktemp("gpt2")
    model = GPT2LMHeadModel(gpt2_config("gelu"))
    spread(model)
    model.save_pretrained(folder / "saved")
    command("import", folder / "saved", "--out", folder / "imported")
    return model, folder / "saved", folder / "imported"


def gpt2_config(activation: str, **others: Any) -> GPT2Config:
    sizes = {"n_embd": SHAPE["d_model"], "n_layer": SHAPE["n_layer"], "n_head": SHAPE["n_head"]}
    ends = {"bos_token_id": None, "eos_token_id": None}
    return GPT2Config(
        vocab_size=VOCAB, n_positions=SHAPE["block"], activation_function=activation, **sizes, **ends, **others
    )


def test_mixle_to_ours_to_mixle(mixle: tuple[LM, Path, Path], tmp_path: Path) -> None:
    lm, _, imported = mixle
    torch.testing.assert_close(logits_of(our_model(imported)), logits_of(lm), atol=1e-5, rtol=1e-5)
    command("export", imported, "--to", "mixle", "--out", tmp_path / "back.pt")
    assert_same_state(LM.load(str(tmp_path / "back.pt")).module.state_dict(), lm.module.state_dict())
    command("export", imported, "--to", "mixle", "--out", tmp_path / "elsewhere" / "other.pt")
    assert (tmp_path / "back.pt").read_bytes() == (tmp_path / "elsewhere" / "other.pt").read_bytes()


@pytest.mark.parametrize("kind", ["torch", "safetensors", "torch before 1.6"])
def test_state_dict(kind: str, mixle: tuple[LM, Path, Path], tmp_path: Path, capsys: Capture) -> None:
    state = mixle[0].module.state_dict()
    file = tmp_path / ("state.safetensors" if kind == "safetensors" else "state.pt")
    if kind == "safetensors":
        save_file({name: value.clone() for name, value in state.items()}, file)
    else:
        torch.save(state, file, _use_new_zipfile_serialization=kind == "torch")
    assert "give --n-head" in refusal(capsys, "import", file, "--out", tmp_path / "out")
    assert "does not divide d_model=48" in refusal(capsys, "import", file, "--out", tmp_path / "out", "--n-head", 5)
    command("import", file, "--out", tmp_path / "out", "--n-head", SHAPE["n_head"])
    assert_same_state(our_model(tmp_path / "out").state_dict(), our_model(mixle[2]).state_dict())


def test_mup_attention_is_carried(mixle: tuple[LM, Path, Path], tmp_path: Path, capsys: Capture) -> None:
    """mixle's file has no place for the flag: ours is beside the weights, and comes back."""
    lm, file, _ = mixle
    command("import", file, "--out", tmp_path / "imported", "--mup-attention")
    command("export", tmp_path / "imported", "--to", "mixle", "--out", tmp_path / "back.pt")
    assert "set block.attn.mup_attention = True" in capsys.readouterr().err
    command("import", tmp_path / "back.pt", "--out", tmp_path / "again")
    command("export", tmp_path / "again", "--to", "gpt2", "--out", tmp_path / "gpt2")
    loaded = LM.load(str(tmp_path / "back.pt"))
    assert_same_state(loaded.module.state_dict(), lm.module.state_dict())
    for block in loaded.module.blocks:
        block.attn.mup_attention = True
    expected = logits_of(loaded)
    assert (expected - logits_of(lm)).abs().max() > 1e-3
    for model in (our_model(tmp_path / "again"), GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2")):
        torch.testing.assert_close(logits_of(model), expected, atol=1e-5, rtol=1e-5)


def test_mixle_to_gpt2(mixle: tuple[LM, Path, Path], tmp_path: Path) -> None:
    """The factor on the logits has no place in GPT-2 but the final norm."""
    command("export", mixle[2], "--to", "gpt2", "--out", tmp_path / "gpt2")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2")
    torch.testing.assert_close(logits_of(model), logits_of(mixle[0]), atol=1e-5, rtol=1e-5)


def test_gpt2_to_ours_and_back(gpt2: tuple[GPT2LMHeadModel, Path, Path], tmp_path: Path) -> None:
    model, saved, imported = gpt2
    torch.testing.assert_close(logits_of(our_model(imported)), logits_of(model), atol=1e-5, rtol=1e-5)
    command("export", imported, "--to", "gpt2", "--out", tmp_path / "back")
    assert_same_state(GPT2LMHeadModel.from_pretrained(tmp_path / "back").state_dict(), model.state_dict())
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (saved, tmp_path / "back"))
    assert_same_state(ours, theirs)
    assert all(value.numel() for value in ours.values())


def test_dtype(gpt2: tuple[GPT2LMHeadModel, Path, Path], tmp_path: Path) -> None:
    command("export", gpt2[2], "--to", "gpt2", "--out", tmp_path / "half", "--dtype", "bfloat16")
    for name, value in load_file(tmp_path / "half" / "model.safetensors").items():
        assert torch.equal(value, gpt2[0].state_dict()[name].bfloat16()), name
    command("import", tmp_path / "half", "--out", tmp_path / "imported")
    assert our_model(tmp_path / "imported").tok.weight.dtype == torch.float32


def test_several_files(
    gpt2: tuple[GPT2LMHeadModel, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "FILE_BYTES", 100_000)
    command("export", gpt2[2], "--to", "gpt2", "--out", tmp_path / "many")
    assert len(list((tmp_path / "many").glob("model-0000?-of-0000?.safetensors"))) > 2
    assert_same_state(GPT2LMHeadModel.from_pretrained(tmp_path / "many").state_dict(), gpt2[0].state_dict())
    command("import", tmp_path / "many", "--out", tmp_path / "imported")
    assert_same_state(our_model(tmp_path / "imported").state_dict(), our_model(gpt2[2]).state_dict())


def test_names_of_the_first_release(gpt2: tuple[GPT2LMHeadModel, Path, Path], tmp_path: Path) -> None:
    """The files that OpenAI's weights are shared in: no "transformer.", and masks beside the weights."""
    folder = shutil.copytree(gpt2[1], tmp_path / "old")
    tensors = {n.removeprefix("transformer."): t for n, t in load_file(folder / "model.safetensors").items()}
    for i in range(SHAPE["n_layer"]):
        tensors[f"h.{i}.attn.bias"] = torch.ones(1, 1, 40, 40).tril()
        tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    command("import", folder, "--out", tmp_path / "imported")
    assert_same_state(our_model(tmp_path / "imported").state_dict(), our_model(gpt2[2]).state_dict())


def test_tanh_gelu_is_recorded_and_warned_about(tmp_path: Path, capsys: Capture) -> None:
    model = GPT2LMHeadModel(gpt2_config("gelu_new"))
    model.save_pretrained(tmp_path / "saved")
    command("import", tmp_path / "saved", "--out", tmp_path / "imported")
    assert "trained with gelu_new" in capsys.readouterr().err
    assert json.loads((tmp_path / "imported" / FILE).read_text())["activation"] == "gelu_new"
    command("export", tmp_path / "imported", "--to", "gpt2", "--out", tmp_path / "gpt2")
    assert "began as one with gelu_new" in capsys.readouterr().err
    assert json.loads((tmp_path / "gpt2" / "config.json").read_text())["activation_function"] == "gelu"


# What is wrong with a mixle file -> (what makes it so, given the payload, what the line says).
MIXLE_MISTAKES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing head": (lambda p: p["state_dict"].pop("head.weight"), "lacks head.weight"),
    "missing block": (
        lambda p: [p["state_dict"].pop(n) for n in list(p["state_dict"]) if n.startswith("blocks.1.")],
        "lacks blocks.1.ln1.weight, blocks.1.ln1.bias, blocks.1.ln2.weight and 9 more",
    ),
    "extra": (lambda p: p["state_dict"].update({"blocks.0.attn.rope": torch.ones(2)}), "has blocks.0.attn.rope, which"),
    "wrong shape": (
        lambda p: p["state_dict"].update({"blocks.0.mlp.2.weight": torch.ones(48, 96)}),
        "has blocks.0.mlp.2.weight (48, 96) instead of (48, 192)",
    ),
    "another vocabulary": (lambda p: p.update(vocab=68), "has tok.weight (67, 48) instead of (68, 48)"),
    "untied": (
        lambda p: p["state_dict"].update({"head.weight": torch.ones(67, 48)}),
        "tok.weight and head.weight differ",
    ),
    "whole numbers": (
        lambda p: p["state_dict"].update({"ln.bias": torch.ones(48, dtype=torch.int64)}),
        "ln.bias has the dtype torch.int64",
    ),
    "no heads": (lambda p: p.pop("n_head"), "n_head = None, but a file of mixle's LM.save has a whole number there"),
    "not tensors": (lambda p: p.update(state_dict=3), "its state_dict is not one of tensors"),
}


@pytest.mark.parametrize("name", MIXLE_MISTAKES)
def test_wrong_mixle_file(name: str, mixle: tuple[LM, Path, Path], tmp_path: Path, capsys: Capture) -> None:
    spoil, words = MIXLE_MISTAKES[name]
    payload = mixle[0].to_dict()
    spoil(payload)
    torch.save(payload, tmp_path / "lm.pt")
    assert words in refusal(capsys, "import", tmp_path / "lm.pt", "--out", tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["lm.pt"]


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def change_config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def change_tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


GPT2_MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda f: cut(f / "model.safetensors"), "model.safetensors is not a whole safetensors file"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no *.safetensors file"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    "another model": (change_config(model_type="llama"), "of the type 'llama'; only 'gpt2'"),
    "another vocabulary": (change_config(vocab_size=66), "transformer.wte.weight (67, 48) instead of (66, 48)"),
    "another activation": (change_config(activation_function="relu"), "activation_function = 'relu'"),
    "another norm": (change_config(layer_norm_epsilon=1e-6), "layer_norm_epsilon = 1e-06, but this model"),
    "another MLP": (change_config(n_inner=96), "n_inner = 96"),
    "untied config": (change_config(tie_word_embeddings=False), "tie_word_embeddings = False"),
    "heads": (change_config(n_head=5), "n_head = 5 does not divide n_embd = 48"),
    "untied head": (
        change_tensors(lambda t: t.update({"lm_head.weight": torch.ones(67, 48)})),
        "lm_head.weight is not transformer.wte.weight",
    ),
    "missing": (change_tensors(lambda t: t.pop("transformer.h.2.attn.c_attn.bias")), "lacks h.2.attn.c_attn.bias"),
    "extra": (
        change_tensors(lambda t: t.update({"transformer.h.0.x.weight": torch.ones(2)})),
        "has h.0.x.weight, which",
    ),
    "lost shard": (
        lambda f: (f / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"transformer.wte.weight": "model-00002-of-00002.safetensors"}})
        ),
        "lacks model-00002-of-00002.safetensors, which its model.safetensors.index.json names",
    ),
}


@pytest.mark.parametrize("name", GPT2_MISTAKES)
def test_wrong_gpt2_folder(
    name: str, gpt2: tuple[GPT2LMHeadModel, Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    spoil, words = GPT2_MISTAKES[name]
    folder = shutil.copytree(gpt2[1], tmp_path / "gpt2")
    spoil(folder)
    said = refusal(capsys, "import", folder, "--out", tmp_path / "out")
    assert words.replace("transformer.wte.weight (", "wte.weight (") in said
    assert [file.name for file in tmp_path.iterdir()] == ["gpt2"]


class Evil:
    """A pickle of this makes a file when it is opened with code allowed."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def test_nothing_in_a_file_is_run(mixle: tuple[LM, Path, Path], tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "was here"
    torch.save({"state_dict": Evil(target)}, tmp_path / "evil.pt")
    assert "without running code" in refusal(capsys, "import", tmp_path / "evil.pt", "--out", tmp_path / "out")
    folder = shutil.copytree(mixle[2], tmp_path / "step-1")
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(target)))
    said = refusal(capsys, "export", folder, "--to", "mixle", "--out", tmp_path / "out.pt")
    assert "which no checkpoint needs" in said
    assert not target.exists()


CHECKPOINT_MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (lambda f: cut(f / "__0_0.distcp"), "the checkpoint is damaged"),
    "file lost": (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "not finished": (lambda f: (f / ".metadata").unlink(), "has no .metadata, so it is not a (finished) checkpoint"),
    "metadata damaged": (lambda f: cut(f / ".metadata"), ".metadata cannot be read"),
    "bytes changed": (lambda f: overwrite_middle(f / "__0_0.distcp"), "cannot be read from"),
    "no record": (lambda f: (f / FILE).unlink(), "give --config with the run's TOML, or --n-head"),
    "foreign record": (lambda f: (f / FILE).write_text("[]"), "is not a record of this release"),
    "another record": (
        lambda f: (f / FILE).write_text((f / FILE).read_text().replace('"vocab_size": 67', '"vocab_size": 70')),
        "has tok.weight (67, 48) instead of (70, 48), head.weight (67, 48) instead of (70, 48)",
    ),
    "wrong record": (
        lambda f: (f / FILE).write_text((f / FILE).read_text().replace('"n_head": 6', '"n_head": "6"')),
        "n_head = '6' must be of type int",
    ),
}


def overwrite_middle(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[2000:-2000] = bytes(len(content) - 4000)
    file.write_bytes(content)


@pytest.mark.parametrize("name", CHECKPOINT_MISTAKES)
def test_damaged_checkpoint(name: str, mixle: tuple[LM, Path, Path], tmp_path: Path, capsys: Capture) -> None:
    spoil, words = CHECKPOINT_MISTAKES[name]
    folder = shutil.copytree(mixle[2], tmp_path / "step-1")
    spoil(folder)
    for words_of_command in (("mixle", "out.pt"), ("gpt2", "out")):
        to, out = words_of_command
        assert words in refusal(capsys, "export", folder, "--to", to, "--out", tmp_path / out)
    if name != "bytes changed":  # the tokenizer is refused before these are read
        assert words in refusal(capsys, "generate", folder, "--prompt", "x", "--tokenizer", "bytes")
    assert [file.name for file in tmp_path.iterdir()] == ["step-1"]


def test_untied_checkpoint_is_refused(mixle: tuple[LM, Path, Path], tmp_path: Path, capsys: Capture) -> None:
    import torch.distributed.checkpoint as dcp

    weights, record = open_checkpoint(mixle[2])
    state = {name: weights.read(name) for name in weights.shapes}
    state["head.weight"][3, 4] += 1
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=tmp_path / "step-3", no_dist=True)
    said = refusal(capsys, "export", tmp_path / "step-3", "--to", "mixle", "--out", tmp_path / "o", "--n-head", 6)
    assert "tok.weight and head.weight differ" in said
    assert not (tmp_path / "o").exists()
    assert record.n_head == 6


def respoiled(imported: Path, folder: Path, value: float) -> Path:
    """The imported checkpoint with one weight of another value, with its record."""
    import torch.distributed.checkpoint as dcp

    weights, record = open_checkpoint(imported)
    state = {name: weights.read(name) for name in weights.shapes}
    state["blocks.1.mlp.0.weight" if "blocks.1.mlp.0.weight" in state else "ln.weight"].view(-1)[5] = value
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    record.write(folder)
    return folder


@pytest.mark.parametrize(("to", "out"), [("mixle", "out.pt"), ("gpt2", "out")])
def test_weights_beyond_the_dtype_are_not_written(
    to: str, out: str, mixle: tuple[LM, Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    large = respoiled(mixle[2], tmp_path / "large", -1e6)
    words = ("export", large, "--to", to, "--out", tmp_path / out)
    said = refusal(capsys, *words, "--dtype", "float16")
    assert "has a weight of magnitude 1e+06, beyond the 65504 of float16; nothing is written" in said
    assert [file.name for file in tmp_path.iterdir()] == ["large"]
    command(*words, "--dtype", "bfloat16")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(
    value: float, mixle: tuple[LM, Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    step = respoiled(mixle[2], tmp_path / "step", value)
    for to, out in (("mixle", "out.pt"), ("gpt2", "out")):
        assert "holds NaN or infinite numbers" in refusal(capsys, "export", step, "--to", to, "--out", tmp_path / out)
    state = dict(mixle[0].module.state_dict())
    state["ln.bias"] = torch.full_like(state["ln.bias"], value)
    torch.save(state, tmp_path / "state.pt")
    said = refusal(capsys, "import", tmp_path / "state.pt", "--out", tmp_path / "in", "--n-head", 6)
    assert "ln.bias holds NaN or infinite numbers" in said
    assert sorted(file.name for file in tmp_path.iterdir()) == ["state.pt", "step"]


def test_options_that_contradict_the_record(mixle: tuple[LM, Path, Path], tmp_path: Path, capsys: Capture) -> None:
    """A wrong number of heads fits the weights as well."""
    imported = mixle[2]
    export = ("export", imported, "--to", "mixle", "--out", tmp_path / "out.pt")
    assert "says n_head=6; leave it out" in refusal(capsys, *export, "--n-head", 3)
    assert "says mup_attention=false; leave it out" in refusal(capsys, *export, "--mup-attention")
    config = tmp_path / "job.toml"
    config.write_text('[model]\nflavor = "debugmodel"\n[mixle]\nmup_attention = true\n')
    assert f"{config} says n_head=" in refusal(capsys, *export, "--config", config)
    assert not (tmp_path / "out.pt").exists()
    command(*export, "--n-head", 6)


def test_existing_output(mixle: tuple[LM, Path, Path], tmp_path: Path, capsys: Capture) -> None:
    """Without --overwrite nothing is touched; with it only what the command itself makes, and that whole."""
    _, file, imported = mixle
    made = {"import": tmp_path / "imported", "mixle": tmp_path / "lm.pt", "gpt2": tmp_path / "gpt2"}
    words = {
        "import": ("import", file, "--out", made["import"]),
        "mixle": ("export", imported, "--to", "mixle", "--out", made["mixle"]),
        "gpt2": ("export", imported, "--to", "gpt2", "--out", made["gpt2"]),
    }
    for kind, out in made.items():
        command(*words[kind])
        before = {path: path.read_bytes() for path in ([out] if out.is_file() else out.iterdir())}
        assert "exists; give --overwrite" in refusal(capsys, *words[kind])
        command(*words[kind], "--overwrite")
        assert {path: path.read_bytes() for path in ([out] if out.is_file() else out.iterdir())} == before or (
            kind == "import"  # DCP writes the time of the save
        )
    (made["import"] / "notes.txt").write_text("mine")
    (made["gpt2"] / "notes.txt").write_text("mine")
    made["mixle"].write_text("mine")
    for kind in made:
        assert "is nothing that this command writes" in refusal(capsys, *words[kind], "--overwrite")
    assert (made["import"] / "notes.txt").exists()
    assert made["mixle"].read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt2", "imported", "lm.pt"]


@pytest.mark.parametrize("to", ["mixle", "gpt2"])
def test_a_bad_write_is_noticed(
    to: str, mixle: tuple[LM, Path, Path], tmp_path: Path, capsys: Capture, monkeypatch: Any
) -> None:
    """A file that reads back as something else leaves nothing behind."""
    save, save_gpt2 = torch.save, convert.save_file

    def worse(payload: dict[str, Any], stream: Any) -> None:
        state = payload["state_dict"] | {"ln.bias": payload["state_dict"]["ln.bias"] + 1}
        save(payload | {"state_dict": state}, stream)

    def worse_gpt2(tensors: dict[str, Tensor], file: Path, **others: Any) -> None:
        save_gpt2({name: value.clone().fill_(0.5) for name, value in tensors.items()}, file, **others)

    monkeypatch.setattr(torch, "save", worse)
    monkeypatch.setattr(convert, "save_file", worse_gpt2)
    said = refusal(capsys, "export", mixle[2], "--to", to, "--out", tmp_path / "out")
    assert "is not what was written" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["import", "mixle", "gpt2"])
def test_disk_full(kind: str, mixle: tuple[LM, Path, Path], tmp_path: Path, capsys: Capture) -> None:
    """A file that may not grow as far as it must: one line, nothing left, and what was there still is."""
    _, file, imported = mixle
    words = ("import", file) if kind == "import" else ("export", imported, "--to", kind)
    command(*words, "--out", tmp_path / "out")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        said = refusal(capsys, *words, "--out", tmp_path / "out", "--overwrite")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert f"cannot write {tmp_path / 'out'}" in said
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


MEASURE = """
import ctypes, sys, threading
from pathlib import Path
from torchtitan_mixle.cli.main import main

status = Path("/proc/self/status")

def anonymous():
    line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

def peak(*words):
    ctypes.CDLL(None).malloc_trim(0)  # what the command before has freed is not this one's
    seen, ended = [anonymous()], threading.Event()
    def watch():
        while not ended.wait(0.002):
            seen.append(anonymous())
    watcher = threading.Thread(target=watch)
    watcher.start()
    assert main(list(words)) == 0
    ended.set()
    watcher.join()
    return max(seen) - seen[0]

for name in ("small", "large"):
    print(
        peak("import", f"{name}.pt", "--out", f"{name}-imported"),
        peak("export", f"{name}-imported", "--to", "mixle", "--out", f"{name}-out.pt"),
        peak("export", f"{name}-imported", "--to", "gpt2", "--out", f"{name}-gpt2"),
        peak("import", f"{name}-gpt2", "--out", f"{name}-again"),
    )
"""


@pytest.mark.slow
def test_memory_holds_the_model_once(tmp_path: Path) -> None:
    """Peak memory of each command, without mapped files, which the system can drop; a small model loads the code."""
    LM(10, d_model=8, n_layer=1, n_head=1, block=8).save(str(tmp_path / "small.pt"))
    large = LM(4000, d_model=512, n_layer=20, n_head=8, block=128)
    size = sum(p.numel() * 4 for p in large.module.parameters())
    assert size > 250e6
    large.save(str(tmp_path / "large.pt"))
    words = [sys.executable, "-c", MEASURE]
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    _, peaks = ([int(n) for n in line.split()] for line in run.stdout.splitlines() if line[0].isdigit())
    copies = [peak / size for peak in peaks]
    print("copies in memory:", copies)
    assert max(copies) < 1.3, copies  # one, and what the reading and writing of single tensors leaves in the heap
    assert min(copies[1:]) > 0.9, copies  # the measurement measures: these do hold the model (the first maps its file)


def test_no_room(mixle: tuple[LM, Path, Path], capsys: Capture) -> None:
    assert "cannot write" in refusal(capsys, "export", mixle[2], "--to", "mixle", "--out", "/proc/no/such.pt")


def test_import_for_a_config(mixle: tuple[LM, Path, Path], tmp_path: Path, capsys: Capture) -> None:
    config = Path(__file__).parents[1] / "train_configs" / "mixle_debug.toml"
    said = refusal(capsys, "import", mixle[1], "--out", tmp_path / "out", "--config", config)
    assert "has vocab_size=67, and the model of" in said
    assert "set [mixle] vocab_size=67" in said
    assert not list(tmp_path.iterdir())


def test_the_wrong_folder_is_named(mixle: tuple[LM, Path, Path], tmp_path: Path, capsys: Capture) -> None:
    for step in (5, 20, 100):
        shutil.copytree(mixle[2], tmp_path / "outputs" / "checkpoint" / f"step-{step}")
    for place in ("outputs", "outputs/checkpoint"):
        said = refusal(capsys, "generate", tmp_path / place, "--prompt", "x")
        assert f"did you mean {tmp_path}/outputs/checkpoint/step-100?" in said
    said = refusal(capsys, "generate", tmp_path / "nowhere", "--prompt", "x")
    assert "does not exist" in said


def test_generate_command(mixle: tuple[LM, Path, Path], tmp_path: Path, capsys: Capture) -> None:
    said = refusal(capsys, "generate", mixle[2], "--prompt", "x", "--tokenizer", "bytes")
    assert "the tokenizer has 257 ids and the model has V=67" in said
    assert "give --tokenizer" in refusal(capsys, "generate", mixle[2], "--prompt", "x")
    for flag, value in {"--temperature": -1, "--top-k": 0, "--n": 0, "--seed": -1}.items():
        assert flag in refusal(capsys, "generate", mixle[2], "--prompt", "x", flag, value)
    lm = LM(300, **SHAPE)  # more ids than bytes: none of them may come out
    spread(lm.module)
    lm.save(str(tmp_path / "lm.pt"))
    command("import", tmp_path / "lm.pt", "--out", tmp_path / "imported")
    texts = []
    for more in ([], ["--no-cache"], ["--seed", 1], ["--prompt", ""]):
        capsys.readouterr()
        command("generate", tmp_path / "imported", "--prompt", "ab", "--tokenizer", "bytes", "--n", 50, *more)
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("ab")
    assert texts[0] == texts[1] != texts[2]
