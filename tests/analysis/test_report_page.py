"""The report in a real browser: nothing fails, controls work, everything fits."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gradvac.analysis.report import write_report

from .. import browser
from .made_runs import make_run

pytest.importorskip("selenium", reason="the browser is driven by selenium")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

CODES = ("fr", "es", "de", "cs", "pl", "fi", "et")
SUM = make_run("joint", codes=CODES, num_layers=2, seed=1)
VAC = make_run("gradvac", codes=CODES, num_layers=2)


class Page(browser.Page):
    """The report in the browser."""

    ready = "document.documentElement.dataset.ready"

    def choose(self, name: str, value: str) -> None:
        Select(self.find(f"#{name}")).select_by_value(value)

    def heat(self, run: int = 0) -> dict[tuple[str, str], float | None]:
        """What a heat map shows, by names of tasks."""
        names, values = self.js(
            f"(() => {{ const t = document.getElementById('heat-{run}').data[0];"
            " return [t.customdata.flat(), t.z.flat()]; })()"
        )
        return {tuple(name.split(" and ")): v for name, v in zip(names, values, strict=True)}


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser.start() as driver:
        yield Page(driver)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([VAC], tmp_path_factory.mktemp("one") / "report.html")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([SUM, VAC], tmp_path_factory.mktemp("two") / "report.html")


def expected(values: np.ndarray, one: str, other: str) -> float:
    """Mean over what is left of `[..., T, T]` for a pair of tasks."""
    tasks = VAC.tasks
    return float(np.nanmean(values[..., tasks.index(one), tasks.index(other)]))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 820, 1440])
def test_looks(page: Page, two: Path, width: int, dark: bool) -> None:
    page.open(two, width=width, dark=dark)
    assert page.troubles() == []
    assert page.js("document.documentElement.scrollWidth") <= width
    assert page.js("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    ground = page.js("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in ground[4:-1].split(",")) / 3
    assert (brightness < 60) == dark
    drawn = page.js(
        "[...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('svg').length)"
    )
    assert min(drawn) > 0
    overlapping = page.js(
        "[...document.querySelectorAll('.plot')].filter(p => "
        "p.querySelector('svg').getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert overlapping == 0


def test_asks_the_network_for_nothing(page: Page, one: Path) -> None:
    page.open(one)
    assert page.js("performance.getEntriesByType('resource').length") == 0
    page.driver.execute_script("fetch('https://example.org/').catch(() => {})")
    WebDriverWait(page.driver, 10).until(
        lambda _: any("Content Security" in t for t in page.troubles())
    )


def test_heat_map_shows_what_is_chosen(page: Page, one: Path) -> None:
    page.open(one)
    same, different = VAC.measured
    pair = ("en-fr", "en-fi")
    assert page.heat()[pair] == pytest.approx(expected(same.values, *pair), abs=6e-4)
    assert page.heat()["en-fr", "en-fr"] is None
    page.choose("component", "encoder.layers.1")
    assert page.heat()[pair] == pytest.approx(expected(same.values[:, 1], *pair), abs=6e-4)
    page.choose("component", "decoder")
    sides = [name.startswith("decoder") for name in same.components]
    assert page.heat()[pair] == pytest.approx(expected(same.values[:, sides], *pair), abs=6e-4)
    page.choose("quantity", "corrected for noise")
    assert same.corrected is not None
    assert page.heat()[pair] == pytest.approx(expected(same.corrected[:, sides], *pair), abs=6e-4)
    page.choose("source", "aligned set, different lines, all layer")
    assert page.heat()[pair] == pytest.approx(expected(different.values[:, sides], *pair), abs=6e-4)
    page.choose("source", "batches of training")
    page.choose("quantity", "target")
    assert VAC.record is not None
    shown = page.heat()
    for directed in (pair, pair[::-1]):
        target = expected(VAC.record.target[:, sides], *directed)
        assert shown[directed] == pytest.approx(target, abs=6e-4)
    assert page.troubles() == []


def test_steps_by_keyboard(page: Page, one: Path) -> None:
    page.open(one)
    step = page.find("#step")
    step.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    position = int(step.get_attribute("value"))
    assert position == 9
    assert page.find("#step-shown").text == "step 1,000"
    assert not page.find("#mean").is_selected()
    same = VAC.measured[0].values
    assert page.heat()["en-es", "en-de"] == pytest.approx(
        expected(same[position], "en-es", "en-de"), abs=6e-4
    )
    page.find("#mean").send_keys(Keys.SPACE)
    assert page.heat()["en-es", "en-de"] == pytest.approx(
        expected(same, "en-es", "en-de"), abs=6e-4
    )


def test_every_control_has_a_name_and_takes_focus(page: Page, two: Path) -> None:
    page.open(two)
    controls = page.driver.find_elements(By.CSS_SELECTOR, "select, input, button, summary, nav a")
    assert len(controls) > 15
    for control in controls:
        assert control.accessible_name
        page.driver.execute_script("arguments[0].focus()", control)
        assert page.driver.switch_to.active_element == control


def test_pairs_are_followed(page: Page, one: Path) -> None:
    page.open(one)
    names = "[...document.getElementById('steps-plot').data.map(t => t.name)]"
    assert len(page.js(names)) == 3
    page.choose("one", "en-cs")
    page.choose("other", "en-de")
    page.find("#pairs button[type=submit]").click()
    assert "en-cs, en-de" in page.js(names)
    line = page.js(
        "document.getElementById('steps-plot').data.find(t => t.name === 'en-cs, en-de').y"
    )
    values = VAC.measured[0].values
    tasks = VAC.tasks
    truth = values[..., tasks.index("en-cs"), tasks.index("en-de")].mean(axis=1)
    assert line == pytest.approx(truth.tolist(), abs=6e-4)
    page.find("#followed li:last-child button").click()
    assert "en-cs, en-de" not in page.js(names)
    row, column = divmod(list(page.heat()).index(("en-cs", "en-de")), len(CODES))
    page.driver.execute_script(
        "document.getElementById('heat-0').emit('plotly_click', {points: [arguments[0]]})",
        {"x": column, "y": row},
    )
    assert "en-cs, en-de" in page.js(names)


def test_theme_button(page: Page, one: Path) -> None:
    page.open(one)
    font = "document.getElementById('heat-0').layout.font.color"
    before = page.js(font)
    page.find("#theme").send_keys(Keys.ENTER)
    assert page.js("document.documentElement.dataset.theme") == "dark"
    assert page.js(font) != before
    page.find("#theme").click()
    assert page.js(font) == before


def test_runs_side_by_side(page: Page, two: Path) -> None:
    page.open(two)
    assert page.heat(0).keys() == page.heat(1).keys()
    assert list(page.heat(0)) == list(page.heat(1))  # the same order, so that they compare
    limits = page.js("[0, 1].map(n => document.getElementById(`heat-${n}`).data[0].zmax)")
    assert limits[0] == limits[1]
    page.choose("metric", "validation loss of each task")
    assert len(page.js("document.getElementById('metrics-plot').data")) == 2 * len(CODES)
    table = page.find("#scores table").text
    assert "gradvac" in table
    assert "average" in table
    assert "align.rule" in page.find("#settings table").text


def test_colours(page: Page, tmp_path: Path) -> None:
    close = make_run("close", codes=CODES, num_layers=1, num_steps=2, recorded=False)
    values = 0.85 + 0.1 * close.measured[0].values
    close = replace(close, measured=(replace(close.measured[0], values=values),))
    page.open(write_report([VAC, close], tmp_path / "page.html"))
    bounds = (
        "[0, 1].map(n => document.getElementById(`heat-${n}`).data[0]).map(d => [d.zmin, d.zmax])"
    )
    first, second = page.js(bounds)
    assert first == second
    assert first[0] == -first[1]  # centred at 0
    page.choose("colours", "own")
    first, second = page.js(bounds)
    assert first[0] == -first[1]
    shown = [value for value in page.heat(1).values() if value is not None]
    assert second == [min(shown), max(shown)]  # all close together: spread over what there is
    assert f"colours from {second[0]:.2f} to {second[1]:.2f}" in page.find("#heat-note-1").text
    page.choose("colours", "all")
    before = page.js(bounds)
    page.choose("component", "decoder.norm")
    assert page.js(bounds) == before


def test_little_data(page: Page, tmp_path: Path) -> None:
    alone = make_run("alone", codes=("fr",), num_layers=1, num_steps=1)
    bare = replace(
        make_run("bare", codes=CODES, num_layers=1, num_steps=1, measured=False, bleu=None),
        metrics=[],
        settings="",
        signature={},
        families={},
    )
    page.open(write_report([bare], tmp_path / "bare.html"))
    assert page.troubles() == []
    page.open(write_report([alone, bare], tmp_path / "alone.html"))
    assert page.troubles() == []
    assert page.find("#trouble").is_displayed() is False


def test_unknown_pairs_are_blank(page: Page, tmp_path: Path) -> None:
    values = VAC.measured[0].values.copy()
    values[..., 0, :] = values[..., :, 0] = np.nan
    hole = replace(
        VAC, measured=(replace(VAC.measured[0], values=values, corrected=None, reliability=None),)
    )
    page.open(write_report([hole], tmp_path / "hole.html"))
    assert page.heat()["en-fr", "en-fi"] is None
    assert page.heat()["en-es", "en-fi"] is not None
    assert page.troubles() == []


def test_large_run_answers_at_once(page: Page, tmp_path: Path) -> None:
    large = make_run("large", num_layers=19, num_steps=200)
    page.open(write_report([large], tmp_path / "large.html"))
    seconds = page.js(
        "(() => { const begin = performance.now(); const step = document.getElementById('step');"
        " for (let n = 0; n < 10; n++) { step.value = n; step.dispatchEvent(new Event('input')); }"
        " return (performance.now() - begin) / 10000; })()"
    )
    assert seconds < 0.5
    assert page.troubles() == []


def test_prints(page: Page, one: Path) -> None:
    page.open(one, dark=True)
    printed = page.driver.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    assert len(printed["data"]) > 50_000
    assert page.js("document.documentElement.dataset.theme") == "dark"  # and is dark again
