"""`gradvac advise`: what it says, and that what it writes can be run."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

from gradvac.analysis import Similarities, load_run, save_similarities
from gradvac.analysis.report import render
from gradvac.lab.experiments import SweepConfig, plan_trials
from gradvac.lab.recipes.nmt import NmtConfig
from gradvac.lab.training.config import read_config

CODES = ("uk", "ru", "fi", "et", "hi", "mr", "fr", "es")
COMPONENTS = ("encoder.layers.0", "decoder.layers.0", "decoder.layers.1")
CONFIG = f"""
[data]
prepared = "data"
languages = {list(CODES)}
train = "train.{{pair}}.tsv"
dev = "dev.{{pair}}.tsv"
[train]
max_steps = 2000
validate_every = 250
seed = 3
"""


def write_run(folder: Path, *, kin: float) -> Path:
    """A run in which neighbours in CODES are related, measured on two halves of lines."""
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(3, 1, 50)) + kin * draw.normal(size=(3, 4, 50)).repeat(2, axis=1)
    halves = [vectors + 0.3 * draw.normal(size=(3, 8, 50)) for _ in range(2)]
    norms = np.stack([np.linalg.norm(half, axis=-1) for half in halves], axis=1)[None]
    products = halves[0] @ halves[1].swapaxes(-1, -2)
    across = (products / (norms[0, :, 0, :, None] * norms[0, :, 1, None, :]))[None]
    measured = Similarities(
        tuple(f"en-{code}" for code in CODES),
        COMPONENTS,
        np.array([1000]),
        ((across + across.swapaxes(-1, -2)) / 2).astype(np.float32),
        across=across.astype(np.float32),
        half_norms=norms.astype(np.float32),
        lines="different",
    )
    folder.mkdir()
    save_similarities(folder / "similarity.npz", [measured])
    (folder / "config.toml").write_text(CONFIG, encoding="utf-8")
    return folder


def test_what_is_written_can_be_run(gradvac: Callable[..., Result], tmp_path: Path) -> None:
    run = write_run(tmp_path / "joint", kin=1.0)
    said = gradvac("advise", run, "--out", tmp_path / "next", "--for", "en-hi")
    assert said.exit_code == 0, said.output
    assert "Hindi with Marathi" in " ".join(said.output.split())
    files = {file.name for file in (tmp_path / "next").iterdir()}
    assert files == {*(f"groups-{n}.toml" for n in range(1, 5)), "with-en-hi.toml", "check.toml"}
    hindi = read_config(NmtConfig, tmp_path / "next" / "with-en-hi.toml")
    assert hindi.data.tasks == ["en-hi", "en-mr"]
    assert hindi.train.metric == "dev/loss/en-hi"
    assert (hindi.train.max_steps, hindi.train.validate_every) == (500, 63)  # 2 tasks of 8
    assert hindi.train.seed == 3
    sweep = read_config(SweepConfig, tmp_path / "next" / "check.toml")
    trials = plan_trials(sweep, tmp_path / "out")
    assert {trial.method for trial in trials} == {
        *("joint", "groups", "chance", "with-en-hi", "chance-en-hi")
    }
    groups = [trial for trial in trials if trial.method == "groups" and trial.seed == 0]
    assert sorted(task for one in groups for task in one.settings["data.tasks"]) == sorted(
        f"en-{code}" for code in CODES
    )
    assert sum(one.settings["train.max_steps"] for one in groups) == 2000
    chance = next(trial for trial in trials if trial.method == "chance-en-hi")
    assert "en-mr" not in chance.settings["data.tasks"]


def test_where_nothing_is_promised_nothing_is_written(
    gradvac: Callable[..., Result], tmp_path: Path
) -> None:
    run = write_run(tmp_path / "joint", kin=0.0)
    said = gradvac("advise", run, "--out", tmp_path / "next")
    assert said.exit_code == 0, said.output
    assert "cannot be told" in said.output
    assert "no config was written" in " ".join(said.output.split())
    assert not (tmp_path / "next").exists()


def test_mistakes(gradvac: Callable[..., Result], tmp_path: Path) -> None:
    run = write_run(tmp_path / "joint", kin=1.0)
    said = gradvac("advise", run, "--for", "en-xx")
    assert said.exit_code == 1
    assert "--for: 'en-xx' is none of" in said.stderr
    (run / "config.toml").unlink()  # as of a loop of one's own
    said = gradvac("advise", run, "--out", tmp_path / "next")
    assert said.exit_code == 1
    assert "leave out --out" in said.stderr


@pytest.mark.parametrize(("kin", "expected"), [(1.0, "Learn together"), (0.0, "Cannot be told")])
def test_the_page_says_what_to_do(tmp_path: Path, kin: float, expected: str) -> None:
    page = render([load_run(write_run(tmp_path / "joint", kin=kin))])
    section = page.partition('<section id="advice"')[2].partition("</section>")[0]
    assert expected in section
    assert "How good is such advice?" in section
