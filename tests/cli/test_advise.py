"""`gradvac advise`: what it says, and that what it writes can be run."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

from gradvac.analysis import Similarities, load_run, save_similarities
from gradvac.analysis.report import render
from gradvac.lab.experiments import Sweep, SweepConfig, plan_trials
from gradvac.lab.recipes.nmt import NmtConfig
from gradvac.lab.training.config import read_config

from ..experiments.conftest import InProcess
from .conftest import write_corpus

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


def write_similarities(folder: Path, codes: Sequence[str], *, kin: float) -> None:
    """As if measured on two halves of lines; neighbours among the codes are related."""
    draw, num = np.random.default_rng(0), len(codes)
    own = draw.normal(size=(3, num // 2, 50)).repeat(2, axis=1)
    vectors = draw.normal(size=(3, 1, 50)) + kin * own
    halves = [vectors + 0.3 * draw.normal(size=(3, num, 50)) for _ in range(2)]
    norms = np.stack([np.linalg.norm(half, axis=-1) for half in halves], axis=1)[None]
    products = halves[0] @ halves[1].swapaxes(-1, -2)
    across = (products / (norms[0, :, 0, :, None] * norms[0, :, 1, None, :]))[None]
    measured = Similarities(
        tuple(f"en-{code}" for code in codes),
        COMPONENTS,
        np.array([1000]),
        ((across + across.swapaxes(-1, -2)) / 2).astype(np.float32),
        across=across.astype(np.float32),
        half_norms=norms.astype(np.float32),
        lines="different",
    )
    save_similarities(folder / "similarity.npz", [measured])


def write_run(folder: Path, *, kin: float) -> Path:
    """What advice is read off, of a run that nobody trained."""
    folder.mkdir()
    write_similarities(folder, CODES, kin=kin)
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
        *("joint", "groups", "chance", "with-en-hi", "chance-en-hi", "last-alone")
    }
    groups = [trial for trial in trials if trial.method == "groups" and trial.seed == 0]
    assert sorted(task for one in groups for task in one.settings["data.tasks"]) == sorted(
        f"en-{code}" for code in CODES
    )
    assert sum(one.settings["train.max_steps"] for one in groups) == 2000
    chance = next(trial for trial in trials if trial.method == "chance-en-hi")
    assert "en-mr" not in chance.settings["data.tasks"]


def test_the_last_fifth_is_divided_among_the_small_ones(
    gradvac: Callable[..., Result], tmp_path: Path
) -> None:
    """Also where nothing is promised; it goes on from what the run kept."""
    run = write_run(tmp_path / "joint", kin=0.0)
    names = ("--out", tmp_path / "next", "--for", "en-hi", "--for", "en-et")
    said = gradvac("advise", run, *names)
    assert "cannot be told" in said.output
    assert "kept no checkpoint near four fifths" in " ".join(said.output.split())
    assert [file.name for file in (tmp_path / "next").iterdir()] == ["check.toml"]
    for step in (1500, 1750, 2000):
        (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    assert "kept no" not in gradvac("advise", run, *names).output
    hindi = read_config(NmtConfig, tmp_path / "next" / "last-alone-en-hi.toml")
    assert hindi.data.tasks == ["en-hi"]
    assert (hindi.model.init, hindi.model.init_weights) == (run, "1500")
    assert hindi.train.max_steps == 250  # half of what was left
    joint = read_config(NmtConfig, run / "config.toml").optimizer
    assert hindi.optimizer.lr == pytest.approx(joint.lr_at(1500, max_steps=2000), rel=1e-2)
    assert (joint.schedule, hindi.optimizer.schedule) == ("inverse_sqrt", "constant")
    text = (run / "config.toml").read_text(encoding="utf-8")
    uneven = text.replace("max_steps = 2000", "max_steps = 2002\npatience = 3")
    (run / "config.toml").write_text(uneven, encoding="utf-8")
    gradvac("advise", run, *names)
    trials = plan_trials(read_config(SweepConfig, tmp_path / "next" / "check.toml"), tmp_path)
    first = next(trial.settings for trial in trials if trial.method == "joint")
    assert first["train.patience"] == 0
    assert first["train.keep"] >= 3, "1,600, 2,000 and the last"
    (run / "config.toml").write_text(
        text + '\n[align]\nrule = "sum"\nweights = { en-hi = 2.0 }\n', encoding="utf-8"
    )
    said = gradvac("advise", run, *names)
    assert said.exit_code == 1
    assert "align.weights" in said.stderr


def test_the_sweep_that_checks_it_runs_and_is_compared(
    gradvac: Callable[..., Result], tmp_path: Path
) -> None:
    """Trained for real, if only for ten steps; every method has seen as many in all."""
    codes = ("aa", "bb", "cc", "dd")
    run, config = tmp_path / "joint", write_corpus(tmp_path, codes) / "tiny.toml"
    trained = gradvac("nmt", "train", config, "--run", run, "train.max_steps=10")
    assert trained.exit_code == 0, trained.output
    write_similarities(run, codes, kin=1.0)
    names = ("--groups", "2", "--for", "en-aa", "--for", "en-cc")
    said = gradvac("advise", run, "--out", tmp_path / "next", *names)
    assert said.exit_code == 0, said.output
    check = read_config(SweepConfig, tmp_path / "next" / "check.toml")
    sweep = Sweep(check, Path(check.base), tmp_path / "out", extra={"train.seed": 0})
    ended = sweep.run(InProcess())
    assert {how.status for how in ended.values()} == {"done"}
    taken = Counter[str]()
    for trial, how in ended.items():
        taken[trial.method] += how.step
    assert taken == {
        "joint": 10,
        "groups": 10,
        "chance": 10,
        "last-alone": 2,
        **{f"{kind}-en-{code}": 5 for kind in ("with", "chance") for code in ("aa", "cc")},
    }
    last = next(trial for trial in ended if trial.method == "last-alone")
    assert last.settings["model.init_weights"] == "8"
    compared = gradvac("compare", sweep.out)
    assert compared.exit_code == 0, compared.output
    for method in taken:
        assert method in compared.output
    assert "without runs to answer them" not in compared.output
    asked = {(one.method, one.on) for one in check.primary}
    assert asked == {
        ("groups", "all"),
        *((f"with-en-{code}", f"en-{code}") for code in ("aa", "cc")),
        *(("last-alone", f"en-{code}") for code in ("aa", "cc")),
    }


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
