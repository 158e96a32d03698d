"""The demo's printing and files; how well it learns is the demo's own business."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from gradvac.analysis import load_run
from gradvac.nmt import NmtConfig
from gradvac.nmt.demo import run_demo
from gradvac.training import config

CONFIGS = Path(__file__).parents[2] / "configs" / "nmt"


def test_the_demo_shows_samples_scores_and_honest_verdicts(tmp_path: Path) -> None:
    settings = config.load(
        NmtConfig,
        CONFIGS / "demo.toml",
        [
            'data.languages=["qsm", "qpl"]',
            "data.limit={qsm = 300, qpl = 300}",
            "data.vocabulary.size=1500",
            "model.width=32",
            "align.vaccinated=all",
            "train.max_steps=2",
            "train.threads=1",
            "validation.sentences=10",
            "decoding.beams=1",
        ],
    )
    console = Console(file=io.StringIO(), width=120)
    result = run_demo(settings, tmp_path / "out", console=console, num_lines=10)
    shown: str = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("Marvene", "Linawe", "within noise", "one seed each", "dictionary"):
        assert text in shown
    assert set(result.bleu) == {"dictionary", "joint", "gradvac"}
    assert result.bleu["dictionary"]["en-qsm"] > 5
    saved = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert saved["bleu"]["joint"].keys() == {"en-qsm", "en-qpl"}
    for name, rule in (("joint", "sum"), ("gradvac", "gradvac")):
        run = config.load(NmtConfig, tmp_path / "out" / name / "config.toml")
        assert run.align.rule == rule
        assert run.data.prepared == tmp_path / "out" / "data"
        seen = load_run(tmp_path / "out" / name)  # all that the report shows
        assert seen.scores is not None
        assert seen.scores.by_task["en-qsm"] == result.bleu[name]["en-qsm"]
        assert seen.measured[0].steps.tolist() == [2]
        assert seen.record is None  # two steps are fewer than record_every
