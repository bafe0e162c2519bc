"""What a run starts from: its newest whole checkpoint, or given weights; anything else is one line on every rank."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import BRIEF, TINY, build_trainer, job_config, metrics_of
from tests.ranks import RankPool
from torchtitan_mixle.checkpoint.preflight import check_start
from torchtitan_mixle.checkpoint.record import FILE
from torchtitan_mixle.cli.main import main
from torchtitan_mixle.errors import ConfigError
from torchtitan_mixle.flavors import FLAVORS
from torchtitan_mixle.model.args import CausalLMArgs

JOB = TINY | BRIEF | {"checkpoint.enable": True, "checkpoint.interval": 1, "checkpoint.keep_latest_k": 0}


def go_on(overrides: dict[str, Any]) -> dict[str, Any]:
    """Start as TorchTitan does: load, train to training.steps and save each; or the ConfigError that it ends in."""
    try:
        trainer = build_trainer(overrides)
    except ConfigError as error:
        return {"error": str(error)}
    trainer.train()
    trainer.close()
    return {"error": "", "steps": [line["step"] for line in metrics_of(overrides)]}


def both(ranks: RankPool, folder: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """What both ranks of a two-rank job come to, which must be the same."""
    said = ranks.run(go_on, 2, JOB | {"job.dump_folder": str(folder)} | overrides)
    assert said[0] == said[1]
    assert "\n" not in said[0]["error"]
    return dict(said[0])


@pytest.fixture(scope="module")
def earlier(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump folder of a run with checkpoints of steps 1 to 3."""
    folder = tmp_path_factory.mktemp("earlier")
    assert both(ranks, folder, {}) == {"error": "", "steps": [1, 2, 3]}
    return folder


@pytest.fixture
def run(earlier: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(earlier, tmp_path / "run"))


@pytest.fixture(scope="module")
def imported(earlier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's weights, by way of a mixle file, as a checkpoint of weights alone."""
    folder = tmp_path_factory.mktemp("imported")
    step = earlier / "checkpoint" / "step-3"
    assert main(["export", str(step), "--to", "mixle", "--out", str(folder / "lm.pt")]) == 0
    assert main(["import", str(folder / "lm.pt"), "--out", str(folder / "weights")]) == 0
    return folder / "weights"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another scale of attention": (
        {"mixle.mup_attention": True},
        f"{FILE} says mup_attention=False, and this config makes mup_attention=True: the checkpoints there are of "
        f"another model; set it back, or use another job.dump_folder",
    ),
    "another flavor": ({"model.flavor": "debugmodel"}, "says n_layer=2, and this config makes n_layer=4"),
    "another vocabulary": ({"mixle.vocab_size": 300}, "says vocab_size=257, and this config makes vocab_size=300"),
    "another folder of checkpoints below the same record": (
        {"mixle.mup_attention": True, "checkpoint.folder": "other"},
        "says mup_attention=False, and this config makes mup_attention=True",
    ),
    "a step that is not there": ({"checkpoint.load_step": 7}, "the steps there are: 3, 2, 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_start_is_refused(name: str, run: Path, ranks: RankPool) -> None:
    """And the record, by which the checkpoints are read, stays as it was."""
    overrides, words = REFUSED[name]
    before = (run / FILE).read_bytes()
    assert words in both(ranks, run, overrides)["error"]
    assert (run / FILE).read_bytes() == before


def test_another_number_of_heads_is_refused(run: Path, ranks: RankPool) -> None:
    """Which the weights' shapes do not show."""
    record = json.loads((run / FILE).read_text())
    (run / FILE).write_text(json.dumps(record | {"n_head": 2}))
    assert "says n_head=2, and this config makes n_head=" in both(ranks, run, {})["error"]


def test_a_record_without_a_checkpoint_binds_nobody(run: Path, ranks: RankPool) -> None:
    shutil.rmtree(run / "checkpoint")
    assert both(ranks, run, {"mixle.mup_attention": True, "training.steps": 1})["error"] == ""
    assert json.loads((run / FILE).read_text())["mup_attention"] is True


def cut(step: Path) -> None:
    os.truncate(max(step.glob("*.distcp"), key=lambda file: file.stat().st_size), 10)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "no metadata": lambda step: (step / ".metadata").unlink(),
    "a cut shard": cut,
    "cut metadata": lambda step: os.truncate(step / ".metadata", 50),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(name: str, run: Path, ranks: RankPool) -> None:
    """The run goes on from the one before, and its next save of the same step is whole; the damaged one is kept."""
    DAMAGE[name](run / "checkpoint" / "step-3")
    (run / "metrics.jsonl").unlink()
    assert both(ranks, run, {"checkpoint.keep_latest_k": 2}) == {"error": "", "steps": [3]}
    assert (run / "checkpoint" / "broken-3").is_dir()
    assert (run / "checkpoint" / "step-2").is_dir(), "a damaged step counts among the latest k"
    (run / "metrics.jsonl").unlink()
    assert both(ranks, run, {"training.steps": 4}) == {"error": "", "steps": [4]}


def test_damage_everywhere_is_refused(run: Path, ranks: RankPool) -> None:
    for step in (run / "checkpoint").iterdir():
        cut(step)
    before = sorted((run / "checkpoint").rglob("*"))
    assert "is whole (" in both(ranks, run, {})["error"]
    assert "the checkpoint is damaged" in both(ranks, run, {"checkpoint.load_step": 2})["error"]
    assert sorted((run / "checkpoint").rglob("*")) == before


def test_a_run_killed_in_its_first_save_starts_anew(run: Path, imported: Path, ranks: RankPool) -> None:
    """Nothing of that save could be read; a start from given weights needs the whole folder out of the way."""
    folder = run / "checkpoint"
    for step in folder.iterdir():
        (step / ".metadata").unlink()
    (folder / "step-3").rename(folder / "step-4")  # a step that the new start does not reach
    assert both(ranks, run, {"training.steps": 1}) == {"error": "", "steps": [1]}
    names = {path.name for path in folder.iterdir()}
    assert names == {"broken-1", "broken-2", "broken-4", "step-1"}
    assert list((folder / "broken-4").glob("*.distcp"))
    superseded = (run / "metrics.superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in superseded] == [1, 2, 3]
    (folder / "step-1" / ".metadata").unlink()
    given = {"checkpoint.initial_load_path": str(imported), "training.steps": 1}
    assert both(ranks, run, given)["error"] == ""
    assert (run / "broken-checkpoint" / "broken-1.1").is_dir()
    assert (folder / "step-1" / ".metadata").is_file()


def test_weights_alone_are_no_run_to_go_on_with(earlier: Path, imported: Path, ranks: RankPool, tmp_path: Path) -> None:
    given = {"checkpoint.initial_load_path": str(imported), "checkpoint.interval": 2, "training.steps": 1}
    said = both(ranks, tmp_path / "a", given | {"checkpoint.initial_load_model_only": False})["error"]
    assert "weights holds no optimizer, so a run cannot go on from it" in said
    assert "set checkpoint.initial_load_model_only=true" in said
    assert both(ranks, tmp_path / "b", given | {"checkpoint.last_save_model_only": True})["error"] == ""
    said = both(ranks, tmp_path / "b", {"training.steps": 2})["error"]
    assert "step-1 holds no optimizer, so a run cannot go on from it; start a new run with another job.dump" in said
    whole = {"checkpoint.initial_load_path": str(earlier / "checkpoint" / "step-2")}
    begun = both(ranks, tmp_path / "c", whole | {"checkpoint.initial_load_model_only": False})
    assert begun == {"error": "", "steps": [3]}


def test_data_of_another_kind_has_no_place_to_go_on_from(run: Path) -> None:
    text = {"training.dataset": "c4_test", "job.dump_folder": str(run)}
    job = job_config(JOB | text)
    shallow = replace(FLAVORS["debugmodel"], n_layer=2)
    args = CausalLMArgs(**vars(shallow))
    with pytest.raises(ConfigError, match=r"does not say where training.dataset='c4_test' was left"):
        check_start(job, args)
    job.checkpoint.exclude_from_loading = ["dataloader"]
    assert check_start(job, args) == (None, "gelu")
    assert job.checkpoint.load_step == 3


def test_an_initial_load_that_would_be_ignored_is_refused(imported: Path, ranks: RankPool, tmp_path: Path) -> None:
    """Checkpoints switched off, or a folder of checkpoints without one."""
    given = {"checkpoint.initial_load_path": str(imported)}
    assert "with checkpoint.enable=false" in both(ranks, tmp_path, given | {"checkpoint.enable": False})["error"]
    assert "set it to -1 for a new run" in both(ranks, tmp_path, {"checkpoint.load_step": 4})["error"]
    (tmp_path / "checkpoint").mkdir()
    assert "would not be loaded" in both(ranks, tmp_path, given)["error"]
    assert both(ranks, tmp_path, {"training.steps": 1})["error"] == ""
