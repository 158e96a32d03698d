"""The config: what is refused, and every config that is shipped loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradvac.analysis import run_files
from gradvac.lab.languages import RESOURCE_LEVELS, real
from gradvac.lab.recipes.nmt import NmtConfig, Transformer, train_translation
from gradvac.lab.training import ConfigError, RunConfig, config

CONFIGS = Path(__file__).parents[2] / "configs" / "nmt"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_config_loads(path: Path) -> None:
    settings = config.load(NmtConfig, path, ["data.root=/elsewhere"])
    assert settings.data.root == Path("/elsewhere")


def test_the_configs_of_the_paper_are_there() -> None:
    paper = {code for code, real in real.LANGUAGES.items() if real.resource_level}
    massive = config.load(NmtConfig, CONFIGS / "massive25.toml")
    assert set(massive.data.languages) == paper
    big, base = (config.load(NmtConfig, CONFIGS / f"transformer_{s}.toml") for s in ("big", "base"))
    assert big.data.languages == ["fr", "es", "ru", "cs", "lv", "lt", "et", "fi"]  # table 5
    assert big.model.dimensions().inner == 8192
    for settings in (big, base):  # appendix B
        optimizer = settings.optimizer
        assert (optimizer.lr, optimizer.warmup_steps, optimizer.schedule) == (
            1e-3,
            30_000,
            "inverse_sqrt",
        )
        assert settings.batch.tokens * optimizer.accumulation == pytest.approx(500_000, rel=0.05)
        assert settings.data.vocabulary.size == 64_000
    # Base and Big share what was prepared.
    assert big.data.model_dump(include={"cleaning", "vocabulary"}) == base.data.model_dump(
        include={"cleaning", "vocabulary"}
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"languages": []}, "languages or pairs"),
        ({"pairs": ["fr-de"]}, "languages or pairs"),
        ({"languages": [], "pairs": ["fr-fr"]}, "two different codes"),
        ({"languages": ["xx", "xx"]}, "twice"),
        ({"languages": ["en"]}, "'en' .*pivot"),
        ({"languages": ["zh-tw"]}, "'zh-tw'"),
        ({"tasks": ["xx-en"]}, "tasks: 'xx-en' .*en-xx, en-yy"),
        ({"limit": {"zz": 5}}, "limit: 'zz' .*en, en-xx, en-yy, xx, yy"),
        ({"extra": {"dev": "x.tsv"}}, "'dev'"),
        ({"max_tokens": 400}, "batch.tokens = 300"),
        ({"resource_levels": {"high": 5, "medium": 6, "low": 1}}, "fall"),
    ],
)
def test_contradictions_are_refused(
    toy_config: Callable[..., NmtConfig], data: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        toy_config(data=data)


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('[data]\nprepared = "p"\nlanguage = ["fr"]\ntrain = "t"\ndev = "d"\n')
    with pytest.raises(ConfigError, match=r"data\.language: .*'languages'"):
        config.load(NmtConfig, path)


def test_levels_are_those_of_the_language_table() -> None:
    assert run_files.RESOURCE_LEVELS == RESOURCE_LEVELS


def test_a_run_remembers_its_config(toy_config: Callable[..., NmtConfig], tmp_path: Path) -> None:
    settings = toy_config(model={"width": 32})
    (tmp_path / "x.toml").write_text(config.dump(settings))
    assert config.load(NmtConfig, tmp_path / "x.toml") == settings
    model = settings.model.build(300)
    assert isinstance(model, Transformer)
    assert model.embedding.weight.shape == (300, 32)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"metric": "dev/lss"}, "'dev/lss' .*dev/loss, dev/loss/en-xx"),
        ({"metric": "dev/loss/en-zz"}, "not measured"),
        ({"metric": "dev/bleu"}, "validation.bleu_sentences"),
        ({"higher_is_better": True}, "higher_is_better .*false"),
    ],
)
def test_a_wrong_metric_is_told_before_training(
    toy_config: Callable[..., NmtConfig], train: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        toy_config(train=train)
    bleu = {"metric": "dev/bleu/en-xx", "higher_is_better": True}
    assert toy_config(train=bleu, validation={"bleu_sentences": 5}).train.metric == bleu["metric"]


@pytest.mark.parametrize("key", ["prepared", "root"])
def test_a_folder_has_a_name(toy_config: Callable[..., NmtConfig], key: str) -> None:
    with pytest.raises(ValueError, match=r'folder, got ""'):
        toy_config(data={key: ""})


def test_a_chunk_that_takes_minutes_to_choose_is_refused(
    toy_config: Callable[..., NmtConfig],
) -> None:
    with pytest.raises(ValueError, match="1000"):
        toy_config(batch={"chunk": 100_000})


def test_a_file_is_no_run(toy_config: Callable[..., NmtConfig], tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ValueError, match="name of a folder"):
        train_translation(toy_config(), tmp_path / "run")
    assert not (tmp_path / "prepared").exists()


def test_steps_are_recorded_unless_asked_not_to_be(toy_config: Callable[..., NmtConfig]) -> None:
    """Translation's own default; other recipes would pay for batches of one size."""
    assert toy_config().train.cuda_graph == "auto"
    assert toy_config(train={"cuda_graph": False}).train.cuda_graph is False
    assert RunConfig().train.cuda_graph is False
