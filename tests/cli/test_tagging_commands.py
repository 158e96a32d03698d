"""`gradvac tagging` from data to scores, on the constructed languages, in-process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from gradvac.cli.commands import app
from gradvac.cli.common import config_folders
from gradvac.lab.languages import default_corpus
from gradvac.lab.recipes.tagging import TaggingConfig
from gradvac.lab.training import config

from ..tiny_encoder import save_tiny_encoder

Gradvac = Callable[..., Result]
CONFIGS = Path(__file__).parents[2] / "configs"
FEW = [
    "data.limit={qsm=60, qpl=60}",
    "train.max_steps=6",
    "batch.epochs=0",
    "train.validate_every=6",
    "train.checkpoint_every=3",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with an encoder and a run, as the configs' own comments make them."""
    folder = tmp_path_factory.mktemp("tagging")
    runner = CliRunner()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        corpus = default_corpus()
        lines = [text for code in ("qsm", "qpl") for _, text in corpus.pairs(code, "dev")]
        save_tiny_encoder(folder / "runs" / "encoder", lines, size=500, layers=1, longest=64)
        done = runner.invoke(app, ["tagging", "train", "tiny", *FEW])
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def gradvac(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Gradvac:
    monkeypatch.chdir(folder)
    runner = CliRunner()
    return lambda *arguments, **options: runner.invoke(app, list(arguments), **options)


def test_scores(gradvac: Gradvac, folder: Path) -> None:
    (folder / "[" / "b]").mkdir(parents=True)  # a name that is markup to rich: the end of "b"
    (folder / "[" / "b]" / "tiny").symlink_to(folder / "runs" / "tiny")
    done = gradvac("tagging", "score", "[/b]/tiny", "--set", "dev")
    assert done.exit_code == 0, done.output
    assert "[/b]/tiny: dev, best weights" in done.output
    assert "F1 as XTREME counts it" in done.output
    done = gradvac("tagging", "score", "runs/tiny", "--json")
    found = json.loads(done.stdout)
    assert set(found["by_task"]) == {"qsm", "qsk", "qpl", "qpt"}
    assert (folder / "runs" / "tiny" / "scores" / "test.best.json").is_file()


def test_similarity_and_report(gradvac: Gradvac, folder: Path) -> None:
    done = gradvac("similarity", "runs/tiny", "--lines", "20")
    assert done.exit_code == 0, done.output
    assert "whole_model" in done.output
    assert (folder / "runs" / "tiny" / "similarity.npz").is_file()
    done = gradvac("report", "runs/tiny", "--out", "report.html")
    assert done.exit_code == 0, done.output
    assert (folder / "report.html").stat().st_size > 100_000


def test_runs_of_another_recipe_are_told_by_name(gradvac: Gradvac) -> None:
    for arguments, trained, needed in (
        (("nmt", "score", "runs/tiny"), "tagging", "nmt"),
        (("nmt", "train", "runs/tiny"), "tagging", "nmt"),
    ):
        done = gradvac(*arguments, input="")
        told = f"{arguments[-1]} is a run of `gradvac {trained}`, but this is for runs of "
        assert done.exit_code == 1
        assert f"{told}`gradvac {needed}`." in done.stderr


def test_runs_are_compared_by_sentences(gradvac: Gradvac) -> None:
    done = gradvac("tagging", "train", "tiny", *FEW, "align.rule=sum", "--run", "runs/joint")
    assert done.exit_code == 0, done.output
    for run in ("runs/tiny", "runs/joint"):
        assert gradvac("tagging", "score", run).exit_code == 0
    done = gradvac("compare", "runs/joint", "runs/tiny")
    assert done.exit_code == 0, done.output
    assert "F1" in done.stdout
    assert "by sentence is not known" not in done.stdout


def test_prediction_gives_a_line_for_every_line(gradvac: Gradvac) -> None:
    text = "pota kela\n\nmira\n"
    done = gradvac("tagging", "predict", "runs/tiny", input=text)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [len(line.split()) for line in lines] == [2, 0, 1]
    assert "1 lines without words (3 lines)." in done.stderr
    done = gradvac("tagging", "predict", "runs/tiny", "--columns", "--window", "1", input=text)
    words = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert words == ["pota", "kela", "", "", "mira", ""]


def test_prediction_of_odd_lines(gradvac: Gradvac) -> None:
    """A tag for every word between blanks, a line for every end of line, whatever is in them."""
    odd = [
        "10\u00a0000 pota",
        "\u200b \U0001f600\u200d",
        "x" * 5000,
        "pota\u2028kela\tmira",
        "a\rb",
    ]
    raw = "\n".join(odd).encode("utf-8-sig") + b"\r\npo\xffta kela"
    done = gradvac("tagging", "predict", "runs/tiny", input=raw)
    assert done.exit_code == 0, done.output
    assert [len(line.split()) for line in done.stdout.split("\n")] == [2, 2, 1, 2, 2, 2, 0]
    assert "1 lines that were not UTF-8" in done.stderr
    assert "1 words without sub-words" in done.stderr


def test_preparing_says_what_was_found(gradvac: Gradvac) -> None:
    done = gradvac("tagging", "prepare", "tiny", *FEW)
    assert done.exit_code == 0, done.output
    assert "1,440 sentences over" in done.output
    assert "labels never seen" in done.output


def test_a_run_goes_on_from_its_folder(gradvac: Gradvac) -> None:
    done = gradvac("tagging", "train", "runs/tiny", "train.max_steps=8")
    assert done.exit_code == 0, done.output
    assert "Continuing from step 6." in done.output
    done = gradvac("tagging", "train", "runs/tiny", "optimizer.lr=0.5")
    assert done.exit_code == 1
    assert "optimizer.lr: the run in" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "tinny"], "there is no file 'tinny'"),
        (["prepare", "tiny", "model.encoder=nowhere"], "model.encoder: nowhere cannot be loaded"),
        (["train", "tiny", "data.langauges=[]"], "data.langauges"),
        (["score", "nowhere"], "is not a run folder"),
        (["predict", "runs/tiny", "--weights", "77"], "there are no weights 77"),
    ],
)
def test_mistakes_are_one_line(gradvac: Gradvac, arguments: list[str], said: str) -> None:
    done = gradvac("tagging", *arguments)
    assert done.exit_code == 1
    assert said in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize("path", sorted((CONFIGS / "tagging").glob("*.toml")), ids=lambda p: p.stem)
def test_every_config_loads(path: Path) -> None:
    assert config.load(TaggingConfig, path).train.max_steps > 0


def test_the_papers_settings() -> None:
    for name in ("pos", "ner"):
        settings = config.load(TaggingConfig, CONFIGS / "tagging" / f"{name}.toml")
        assert settings.model.encoder == "google-bert/bert-base-multilingual-cased"
        assert settings.batch.epochs == 10
        assert settings.with_steps(1600).train.max_steps == 500


@pytest.mark.parametrize("path", sorted((CONFIGS / "sweeps").glob("tagging_*.toml")), ids=str)
def test_sweeps_name_settings_that_exist(path: Path) -> None:
    import tomllib
    from itertools import product

    sweep = tomllib.loads(path.read_text(encoding="utf-8"))
    assert sweep["recipe"] == "tagging"
    grid = sweep["grid"]
    assert len(list(product(*grid.values()))) == 5 * 2 * 3 * 3
    for key, values in grid.items():
        for value in values:
            shown = json.dumps(value)
            settings = config.load(
                TaggingConfig, sweep["base"], [f"{key}={shown}"], folders=config_folders("tagging")
            )
            section, _, name = key.partition(".")
            assert getattr(getattr(settings, section), name) == value
