"""Settings from TOML and overrides: what is right is read, what is wrong is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field

from gradvac.lab.training import ConfigError, RunConfig, Section, config


class DataConfig(Section):
    folder: Path
    pairs: list[str] = Field(default_factory=list)
    limit: int | None = None
    names: dict[str, str] = Field(default_factory=dict)


class FullConfig(RunConfig):
    data: DataConfig
    comment: str = ""


TEXT = """
[data]
folder = "corpus"
pairs = ["en-fr"]

[train]
max_steps = 100

[sampling]
schedule = [{from_step = 10, temperature = 1.0}]
"""


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Any]:
    def read(text: str = TEXT, *overrides: str, kind: type[Any] = FullConfig) -> Any:
        path = tmp_path / "my.toml"
        path.write_text(text, encoding="utf-8")
        return config.load(kind, path, overrides)

    return read


def test_a_byte_order_mark_is_no_part_of_a_config(load: Callable[..., Any]) -> None:
    assert load("\ufeff" + TEXT) == load()


def test_file_and_overrides_are_merged(load: Callable[..., Any]) -> None:
    found = load(
        TEXT,
        "train.max_steps=7",
        "optimizer.lr=3e-4",
        "optimizer.lr=2",  # the last one counts; a whole number is a number
        "align.rule=pcgrad",
        "align.vaccinated=low",
        'data.pairs=["a", "b"]',
        "data.names.en-hi=Hindi",
        "data.folder=/somewhere/else",
        "train.higher_is_better=true",
        "sampling.temperature=inf",
        "comment=2026-01-01",
    )
    assert found.train.max_steps == 7
    assert found.optimizer.lr == 2.0
    assert found.align.vaccinated == "low"
    assert found.data == DataConfig(
        folder=Path("/somewhere/else"), pairs=["a", "b"], names={"en-hi": "Hindi"}
    )
    assert found.train.higher_is_better is True
    assert math.isinf(found.sampling.temperature)
    assert found.sampling.schedule[0].from_step == 10
    assert found.comment == "2026-01-01"


MISTAKES: list[tuple[str, list[str], str]] = [
    # unknown keys: the nearest valid one, or all of them
    (
        "[train]\nmax_step = 3",
        [],
        "my.toml: train.max_step: unknown key; did you mean 'max_steps'?",
    ),
    ("[trian]\nseed = 3", [], "my.toml: trian: unknown key; did you mean 'train'?"),
    (
        "",
        ["optimiser.lr=1"],
        "override optimiser.lr=1: optimiser: unknown key; did you mean 'optim",
    ),
    (
        "",
        ["optimizer.qqq=1"],
        "override optimizer.qqq=1: optimizer.qqq: unknown key; use one of lr,",
    ),
    ("", ["optimizer.acc=2"], "optimizer.acc: unknown key; did you mean 'accumulation'?"),
    (
        "[[sampling.schedule]]\nfrom_step = 1\ntemperature = 1\ntemprature = 2",
        [],
        "my.toml: sampling.schedule.0.temprature: unknown key; did you mean 'temperature'?",
    ),
    # wrong types and values: no guessing
    ("[train]\nseed = '3'", [], "my.toml: train.seed: must be a whole number, got '3'"),
    ("[train]\nseed = 3.0", [], "my.toml: train.seed: must be a whole number, got 3.0"),
    (
        "",
        ["optimizer.lr=fast"],
        "override optimizer.lr=fast: optimizer.lr: must be a number, got 'fa",
    ),
    ("", ["optimizer.lr=-1"], "optimizer.lr: must be greater than 0, got -1"),
    ("", ["train.higher_is_better=True"], "higher_is_better: must be true or false, got 'True'"),
    ("", ["align.vaccinated=3"], "align.vaccinated: must be a string or a list, got 3"),
    ("", ["align.vaccinated=[1]"], "align.vaccinated.0: must be a string, got 1"),
    ("", ["align.weights.fr=x"], "align.weights.fr: must be a number, got 'x'"),
    ("", ["align.rule=gradvax"], "align.rule: got 'gradvax'; did you mean 'gradvac'?"),
    ("", ["align.rule=gradvac", "align.beta=2"], "align.beta: must be in [0, 1], got 2.0"),
    ("", ["optimizer.betas=[0.9]"], "optimizer.betas"),
    ("", ["optimizer.betas=[0.9,1.5]"], "optimizer.betas.1: must be less than 1, got 1.5"),
    ("", ["optimizer.lr=inf"], "optimizer.lr: must be a finite number, got inf"),
    ("", ["align.target=nan"], "align.target"),
    ("", ["train.seed=9223372036854775808"], "train.seed: must be less than"),
    ("", ["train.threads=100000"], "train.threads: must be less than or equal to 1024"),
    ("", ["train.device=tpu"], 'train.device: must be "auto", "cpu", "cuda" or "cuda:1", got'),
    ("train = 3", [], "my.toml: train: must be a section, got 3"),
    ("", ["data.limit=x"], "override data.limit=x: data.limit: must be a whole number, got 'x'"),
    ("[data]\npairs = []", [], "my.toml: data.folder: is missing"),
    # contradictions
    ("[train]\npatience = 2", ["train.validate_every=0"], "train: patience needs validations"),
    ("[train]\naverage_last = 5", [], "my.toml: train: average_last = 5 needs as many checkpoints"),
    ("", ["align.engine=per_task", "align.recompute=true"], "recompute: is for engine="),
    ("", ["align.engine=one_backward", "align.offload=true"], "offload, storage_dtype: are for"),
    ("", ["align.recompute=true", "optimizer.accumulation=2"], "optimizer.accumulation is 2"),
    (
        "",
        ["sampling.schedule=[{from_step=5,temperature=1},{from_step=5,temperature=2}]"],
        "sampling.schedule: from_step must increase",
    ),
    # overrides that are none, and files that are none
    ("", ["train.seed"], "override train.seed: must have the form section.key=value"),
    ("", ["train..seed=1"], "override train..seed=1: must have the form"),
    ("comment = 'x'", ["comment.x=1"], "override comment.x=1: comment is a value, not a section"),
    ("", ["data.pairs=[en-fr]"], "override data.pairs=[en-fr]: not valid TOML"),
    ("[train", [], "my.toml: not valid TOML"),
]


@pytest.mark.parametrize(("text", "overrides", "line"), MISTAKES)
def test_mistake_is_one_line_that_names_origin_and_key(
    load: Callable[..., Any], text: str, overrides: list[str], line: str
) -> None:
    if "data" not in text and not any(o.startswith("data") for o in overrides):
        overrides = [*overrides, "data.folder=x"]
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    said = str(caught.value).splitlines()
    assert any(line in each for each in said), said
    assert "pydantic" not in str(caught.value)


def test_every_mistake_has_its_line(load: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load("[train]\nseeed = 1\nkeep = 0\n[data]\nfolder = 1", "align.beta=x")
    said = str(caught.value).splitlines()
    keys = [line.split(": ")[1] for line in said]
    assert sorted(keys) == ["align.beta", "data.folder", "train.keep", "train.seeed"]


def test_union_with_literals_names_the_choices(load: Callable[..., Any]) -> None:
    class Choice(Section):
        mode: Literal["on", "off"] | None = None

    with pytest.raises(ConfigError, match=r"mode: .*'of'.*'off'"):
        load("mode = 'of'", kind=Choice)


def test_named_configs_are_found_and_suggested(tmp_path: Path) -> None:
    (tmp_path / "nmt").mkdir()
    (tmp_path / "nmt" / "demo.toml").write_text("[train]\nseed = 5\n", encoding="utf-8")
    assert config.load(RunConfig, "nmt/demo", folders=[tmp_path]).train.seed == 5
    with pytest.raises(ConfigError, match=r"'nmt/dmo'.*'nmt/demo'"):
        config.load(RunConfig, "nmt/dmo", folders=[tmp_path])
    with pytest.raises(ConfigError, match="'absent'"):
        config.load(RunConfig, "absent")


def test_dump_is_read_back_to_an_equal_config(load: Callable[..., Any]) -> None:
    tricky = 'quote " backslash \\ tab \t newline \n DEL \x7f ümlaut 漢字 😀'
    first = load(
        TEXT,
        "sampling.temperature=inf",
        "align.rule=sum",
        "optimizer.eps=1e-9",
        'align.weights={"en-fr" = 0.5, "with space" = 2}',
    ).model_copy(update={"comment": tricky})
    text = config.dump(first)
    second = load(text)
    assert second == first
    assert config.dump(second) == text
    assert "seed = 0" in text  # defaults are written out


def test_differences_name_the_keys(load: Callable[..., Any]) -> None:
    old, new = load(), load(TEXT, "optimizer.lr=0.5", "align.weights.fr=2.0", "data.limit=3")
    assert config.compare_settings(old, new) == {
        "optimizer.lr": (1e-3, 0.5),
        "align.weights": ({}, None),
        "align.weights.fr": (None, 2.0),
        "data.limit": (None, 3),
    }
    assert config.compare_settings(old, old) == {}


def test_sections_do_not_change_once_made() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().train.seed = 3  # type: ignore[misc]
