"""A comparison as pictures and as a page: what they show is what the tables say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradvac.cli.commands import app
from gradvac.lab.experiments import compare_runs
from gradvac.lab.experiments.page import (
    answer,
    beyond_the_mixtures,
    comparison_figures,
    describe_trade_off,
)

from .. import browser
from .made_runs import make_run

# temperature, or rule -> share of words right in high- and low-resource tasks
POINTS = {"t1": (0.70, 0.30), "t2": (0.66, 0.42), "t5": (0.55, 0.50), "bad": (0.5, 0.3)}


def mixtures(folder: Path, *, gradvac: tuple[float, float]) -> Path:
    for seed in range(4):
        for name, (high, low) in POINTS.items():
            make_run(
                folder / name / f"seed-{seed}",
                seed=seed,
                quality={"en-fr": high, "en-hi": low},
                settings={"sampling.temperature": list(POINTS).index(name) + 1.0},
            )
        quality = dict(zip(("en-fr", "en-hi"), gradvac, strict=True))
        make_run(folder / "gradvac" / f"seed-{seed}", rule="gradvac", seed=seed, quality=quality)
    return folder


def test_the_front_is_that_of_the_mixtures_and_every_method_has_its_point(tmp_path: Path) -> None:
    found = compare_runs([mixtures(tmp_path, gradvac=(0.68, 0.52))], baseline="t5")
    assert found.mixtures == ["t5", "bad", "t1", "t2"]
    axes = comparison_figures(found)["trade_off"].axes[0]
    shown = {text.get_text(): text.xy for text in axes.texts}  # type: ignore[attr-defined]
    high, low = (next(r for r in found.rows if r.name == level) for level in ("high", "low"))
    assert shown == {
        name: (high.cells[name].mean, low.cells[name].mean)
        for name in ("t5", "bad", "t1", "t2", "gradvac")
    }
    (front,) = (line for line in axes.lines if len(line.get_xdata()) == 3)  # type: ignore[arg-type]
    corners = list(zip(front.get_xdata(), front.get_ydata(), strict=True))  # type: ignore[arg-type]
    assert corners == sorted(shown[name] for name in ("t1", "t2", "t5"))
    assert "high resource tasks" in axes.get_xlabel()
    assert beyond_the_mixtures(found) == ["gradvac"]
    assert "no mixture equals or beats gradvac" in describe_trade_off(found)


def test_a_method_below_the_front_is_said_to_be(tmp_path: Path) -> None:
    found = compare_runs([mixtures(tmp_path, gradvac=(0.6, 0.35))], baseline="t5")
    assert beyond_the_mixtures(found) == []
    assert "equalled or beaten by one of them" in describe_trade_off(found)


def test_differences_are_drawn_with_their_intervals(tmp_path: Path) -> None:
    found = compare_runs([mixtures(tmp_path, gradvac=(0.68, 0.52))], baseline="t5")
    axes = comparison_figures(found)["differences"].axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["bad", "gradvac", "t1", "t2"]
    intervals = [line.get_xdata() for line in axes.lines if len(line.get_xdata()) == 2][1:]  # type: ignore[arg-type]
    for name, interval in zip(names, intervals, strict=True):
        against = found.rows[0].cells[name].against
        assert against is not None
        assert list(interval) == [against.low, against.high]  # type: ignore[arg-type]
    assert answer(found).startswith("gradvac against t5, on average: clearly better, +7.05 ")
    assert answer(found).endswith("Of the others: 2 clearly worse, 1 clearly better.")


def test_small_differences_are_not_drawn_large(tmp_path: Path) -> None:
    """Axes reach 5 % of the score at least, both ways; across and up are of one scale."""
    close = dict.fromkeys(("en-fr", "en-hi"), 0.6)
    for seed in range(4):
        for rule in ("sum", "gradvac"):
            options = {"seed": seed, "quality": close, "num_sentences": 1000}
            make_run(tmp_path / rule / f"seed-{seed}", rule=rule, **options)
    found = compare_runs([tmp_path])
    against = found.rows[0].cells["gradvac"].against
    assert against is not None
    assert against.largest < 2.0
    drawn = comparison_figures(found)
    low, high = drawn["differences"].axes[0].get_xlim()
    assert high == -low
    assert high >= 3.0
    axes = drawn["trade_off"].axes[0]
    spans = [high - low for low, high in (axes.get_xlim(), axes.get_ylim())]
    assert spans[0] == pytest.approx(spans[1])
    assert spans[0] >= 6.0


def test_scores_that_are_all_equal_say_nothing_about_other_seeds(tmp_path: Path) -> None:
    for seed in range(3):
        for rule in ("sum", "gradvac"):
            make_run(tmp_path / rule / f"seed-{seed}", rule=rule, seed=seed, quality=0.0)
    found = compare_runs([tmp_path])
    assert answer(found) == "These runs cannot tell whether anything differs from sum."
    assert "| - | **cannot tell** |" in CliRunner().invoke(app, ["compare", str(tmp_path)]).output


def test_the_page_in_a_browser(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, chromium: Any
) -> None:
    folder = mixtures(tmp_path / "sweep", gradvac=(0.68, 0.52))
    out, pictures = tmp_path / "page.html", tmp_path / "pictures"
    command = ["compare", str(folder), "--baseline", "t5", "-o", str(out)]
    done = CliRunner().invoke(app, [*command, "--pictures", str(pictures)])
    assert done.exit_code == 0, done.output
    assert not caplog.messages  # of fonts that this machine does not have
    assert {path.name for path in pictures.iterdir()} == {
        f"{name}.{kind}" for name in ("differences", "trade_off") for kind in ("pdf", "svg", "png")
    }
    page = browser.Page(chromium)
    for width in (390, 1440):
        page.open(out, width=width, dark=width == 390)
        assert page.js("document.documentElement.scrollWidth") <= width
        top = "document.querySelector('#differences svg').getBoundingClientRect().top"
        assert page.js(top) < 600
        assert page.js("document.documentElement.dataset.theme") == (
            "dark" if width == 390 else "light"
        )
    assert "gradvac against t5, on average: clearly better" in page.find("main").text
    assert page.find("td.better").is_displayed()
    assert "; clear after Holm" in page.find("main").text  # without the stars of Markdown
    page.find("#theme").click()
    assert page.js("document.documentElement.dataset.theme") == "dark"
    assert not page.troubles()
