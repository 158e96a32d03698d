"""A sweep of seconds: English into the constructed languages, and runs without processes."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradvac.lab.experiments import Sweep, SweepConfig
from gradvac.lab.experiments.worker import work
from gradvac.lab.training.config import load

ROOT = Path(__file__).parents[2]
TWIN = ROOT / "configs" / "nmt" / "twin.toml"
LANGUAGES = ROOT / "src" / "gradvac" / "lab" / "languages" / "default.toml"


class InProcess:
    """A launcher that runs workers at once, here: torch takes its time to import."""

    jobs = 1

    def __init__(self) -> None:
        self.ended: dict[Path, int] = {}
        self.started: list[str] = []

    def start(self, task: Path, log: Path) -> None:
        self.started.append(task.stem)
        with log.open("a") as file, contextlib.redirect_stdout(file):
            try:
                self.ended[task] = work(**json.loads(task.read_text()))
            except Exception as error:
                print(error, file=file)
                self.ended[task] = 1

    def wait_for_one(self) -> dict[Path, int]:
        ended, self.ended = self.ended, {}
        return ended

    def stop(self) -> None:
        pass


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The constructed languages with few sentences: making and scoring them outlast training."""
    file = tmp_path_factory.mktemp("languages") / "small.toml"
    text = LANGUAGES.read_text(encoding="utf-8")
    small, num = re.subn(r"(?m)^splits = .*$", "splits = { dev = 60, test = 60 }", text)
    assert num == 1
    small = small.replace("train = 20000", "train = 2000")
    file.write_text(small, encoding="utf-8")
    return {f"data.{split}": f"constructed:{file}:{split}" for split in ("train", "dev", "test")}


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the data of all sweeps are, prepared by the first."""
    return tmp_path_factory.mktemp("prepared") / "data"


@pytest.fixture
def sweep(tmp_path: Path, prepared: Path, sources: dict[str, str]) -> Callable[..., Sweep]:
    """Makes a sweep over the twin of table 1, from the text of its config."""

    def make(
        text: str, *, out: str = "out", base: Path = TWIN, recipe: str = "nmt", **extra: Any
    ) -> Sweep:
        path = tmp_path / "sweep.toml"
        path.write_text(f'recipe = "{recipe}"\nbase = "twin"\n{text}')
        few = {"data.prepared": str(prepared), "train.max_steps": 8} | SMALL | sources
        return Sweep(load(SweepConfig, path), base, tmp_path / out, extra=few | extra)

    return make


SMALL = {"data.tasks": ["en-qsm", "en-qsk"], "decoding.max_ratio": 0.1}
