"""The report in a real browser: nothing fails, controls work, everything fits."""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from gradvac.analysis import statistics
from gradvac.analysis.plots import SCALE
from gradvac.analysis.report import write_report
from gradvac.analysis.similarities import weighty

from .. import browser
from .made_runs import make_run

CODES = ("fr", "es", "de", "cs", "pl", "fi", "et")
SUM = make_run("joint", codes=CODES, num_layers=2, seed=1)
VAC = make_run("gradvac", codes=CODES, num_layers=2)
COUNT = weighty(VAC.measured[0].components)  # which components count in a mean


class Page(browser.Page):
    """The report in the browser."""

    shown: tuple[Path, int, bool] | None = None
    ready = "document.documentElement.dataset.ready"

    def open(self, path: Path, *, width: int = 1280, dark: bool = False) -> None:
        """Open a report, all of them at one address: their script is compiled once."""
        address = Path(self.driver.capabilities["chrome"]["userDataDir"]) / "report.html"
        shutil.copyfile(path, address)
        super().open(address, width=width, dark=dark)
        self.shown = None

    def look_at(self, path: Path, *, width: int = 1280, dark: bool = False) -> None:
        """Open a report, unless the last test looked at it too: for those that change nothing."""
        if self.shown != (path, width, dark):
            self.open(path, width=width, dark=dark)
            self.unfold()
            self.shown = path, width, dark

    def choose(self, name: str, value: str) -> None:
        Select(self.find(f"#{name}")).select_by_value(value)

    def heat(self, run: int = 0) -> dict[tuple[str, str], float | None]:
        """What a heat map shows, by names of tasks."""
        names, values = self.js(
            f"(() => {{ const t = document.getElementById('heat-{run}').data[0];"
            " return [t.customdata.flat().map(c => c.slice(0, 2)), t.z.flat()]; })()"
        )
        return {tuple(name): v for name, v in zip(names, values, strict=True)}

    def unfold(self) -> None:
        """Open all questions, and wait until what is in them is drawn."""
        self.driver.execute_script(
            "document.querySelectorAll('details.question').forEach(d => { d.open = true; })"
        )
        self.wait_for(
            lambda: self.js(
                "[...document.querySelectorAll('.plot')]"
                ".every(p => p.querySelector('svg') || p.classList.contains('empty'))"
            )
        )


@pytest.fixture(scope="module")
def page(chromium: Any) -> Page:
    return Page(chromium)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([VAC], tmp_path_factory.mktemp("one") / "report.html")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([SUM, VAC], tmp_path_factory.mktemp("two") / "report.html")


def value_of(matrix: np.ndarray, one: str, other: str) -> float | None:
    value = matrix[VAC.tasks.index(one), VAC.tasks.index(other)]
    return None if np.isnan(value) else float(value)


def expected(values: np.ndarray, one: str, other: str) -> float:
    """Mean over what is left of `[..., T, T]` for a pair of tasks."""
    tasks = VAC.tasks
    return float(np.nanmean(values[..., tasks.index(one), tasks.index(other)]))


@pytest.mark.parametrize(("width", "dark"), [(390, False), (820, True), (1440, False)])
def test_looks(page: Page, two: Path, width: int, dark: bool) -> None:
    """In the theme that the system asks for, and in the other."""
    page.open(two, width=width, dark=dark)
    page.unfold()
    check_looks(page, width, dark)
    page.find("#theme").click()
    check_looks(page, width, not dark)


def check_looks(page: Page, width: int, dark: bool) -> None:
    assert page.troubles() == []
    assert page.js("document.documentElement.scrollWidth") <= width
    assert page.js("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    ground = page.js("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in ground[4:-1].split(",")) / 3
    assert (brightness < 60) == dark
    drawn = page.js(
        "[...document.querySelectorAll('.plot:not(#distance-plot)')]"
        ".map(p => p.querySelectorAll('svg').length)"
    )
    assert min(drawn) > 0
    overlapping = page.js(
        "[...document.querySelectorAll('.plot svg')].filter(s => "
        "s.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert overlapping == 0


def test_asks_the_network_for_nothing(page: Page, one: Path) -> None:
    page.open(one)
    assert page.js("performance.getEntriesByType('resource').length") == 0
    page.driver.execute_script("fetch('https://example.org/').catch(() => {})")
    page.wait_for(lambda: any("Content Security" in t for t in page.troubles()))


def test_heat_map_shows_what_is_chosen(page: Page, one: Path) -> None:
    page.open(one)
    same, different = VAC.measured
    pair = ("en-fr", "en-fi")
    assert page.heat()[pair] == pytest.approx(expected(same.values[:, COUNT], *pair), abs=6e-4)
    assert page.heat()["en-fr", "en-fr"] is None
    page.choose("component", "encoder.layers.1")
    assert page.heat()[pair] == pytest.approx(expected(same.values[:, 1], *pair), abs=6e-4)
    page.choose("component", "decoder")
    sides = weighty(same.components, "decoder")
    assert page.heat()[pair] == pytest.approx(expected(same.values[:, sides], *pair), abs=6e-4)
    page.choose("source", "aligned set, different lines, all layer")
    assert page.heat()[pair] == pytest.approx(expected(different.values[:, sides], *pair), abs=6e-4)
    page.choose("quantity", "without noise")
    free = statistics.corrected(different, "decoder")
    assert free is not None
    assert page.heat()[pair] == pytest.approx(value_of(free.values, *pair), abs=6e-4)
    page.choose("source", "batches of training")
    page.choose("quantity", "target")
    assert VAC.record is not None
    shown = page.heat()
    for directed in (pair, pair[::-1]):
        target = expected(VAC.record.target[:, sides], *directed)
        assert shown[directed] == pytest.approx(target, abs=6e-4)
    assert page.troubles() == []


def test_one_value_for_the_whole_training(page: Page, one: Path) -> None:
    page.open(one)
    page.unfold()
    page.choose("source", "batches of training")
    page.choose("quantity", "share of steps active")
    assert page.find("#step-shown").text == "whole training"
    note = "share of steps active, all components, whole training"
    assert page.find("#heat-note-0").text == note
    assert "no steps to follow" in page.find("#steps-plot.empty").text
    assert not page.find("#mean").is_enabled()
    assert not page.find("#mark").is_enabled()
    for drawn in ("heat-0", "layers-pairs-0"):  # orange alone: blue would mean that tasks agree
        shown = page.js(f"document.getElementById('{drawn}').data[0]")
        assert shown["zmin"] == 0
        assert shown["colorscale"][-1] == [1, SCALE[0][1]]
    page.choose("quantity", "similarity")
    assert len(page.js("document.getElementById('steps-plot').data")) == 3
    assert page.find("#step-shown").text == "12 steps"
    assert page.troubles() == []


def test_layers_are_the_ticks(page: Page, tmp_path: Path) -> None:
    deep = make_run("deep", codes=CODES[:3], num_layers=20, num_steps=1, recorded=False)
    path = write_report([deep], tmp_path / "deep.html")
    ticks = "[...document.querySelectorAll('#layers-plot .xtick text')].map(t => t.textContent)"
    page.open(path)
    assert page.js(ticks) == [str(n) for n in range(20)]
    page.open(path, width=390)
    assert page.js(ticks) == [str(n) for n in range(0, 20, 3)]


def test_wide_letters_are_not_cut_off(page: Page, tmp_path: Path) -> None:
    codes = ("mmmmmmmmmmmm", "wwwwwwwwwwww", "fr")
    wide = make_run("wide", codes=codes, num_layers=1, num_steps=1, recorded=False)
    page.open(write_report([wide], tmp_path / "wide.html"), width=390)
    lowest = "Math.max(...[...document.querySelectorAll('#heat-0 .xtick text')].map(t => "
    lowest += "t.getBoundingClientRect().bottom))"
    bar = "document.querySelector('#heat-0 .cbfills').getBoundingClientRect().top"
    assert page.js(lowest) <= page.js(bar)
    left = "Math.min(...[...document.querySelectorAll('#heat-0 .ytick text')].map(t => "
    assert page.js(f"{left}t.getBoundingClientRect().left))") >= page.js(
        "document.getElementById('heat-0').getBoundingClientRect().left"
    )


def test_steps_by_keyboard(page: Page, one: Path) -> None:
    page.open(one)
    step = page.find("#step")
    step.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    position = int(step.get_attribute("value"))
    assert position == 9
    assert page.find("#step-shown").text == "step 1,000"
    assert not page.find("#mean").is_selected()
    same = VAC.measured[0].values[:, COUNT]
    assert page.heat()["en-es", "en-de"] == pytest.approx(
        expected(same[position], "en-es", "en-de"), abs=6e-4
    )
    page.find("#mean").send_keys(Keys.SPACE)
    assert page.heat()["en-es", "en-de"] == pytest.approx(
        expected(same, "en-es", "en-de"), abs=6e-4
    )


def test_cells_by_keyboard(page: Page, one: Path) -> None:
    """The value is shown as if hovered; Enter follows the pair, and a link leads to it."""
    page.open(one)
    page.find("#heat-0").send_keys(Keys.ARROW_RIGHT)
    hovered = "document.querySelector('#heat-0 .hoverlayer').textContent"
    page.wait_for(lambda: "similarity: " in page.js(hovered))
    page.find("#heat-0").send_keys(Keys.ENTER)
    page.find("#heat-note-0 a").click()
    page.wait_for(lambda: page.js("document.getElementById('steps').open"))
    assert len(page.driver.find_elements(By.CSS_SELECTOR, "#followed li")) == 4


def test_every_control_has_a_name_and_takes_focus(page: Page, two: Path) -> None:
    page.open(two)
    page.unfold()
    controls = page.driver.find_elements(By.CSS_SELECTOR, "select, input, button, summary")
    assert len(controls) > 15
    for control in controls:
        assert control.accessible_name
        page.driver.execute_script("arguments[0].focus()", control)
        assert page.driver.switch_to.active_element == control


def test_pairs_are_followed(page: Page, one: Path) -> None:
    page.open(one)
    page.unfold()
    names = "[...document.getElementById('steps-plot').data.map(t => t.name)]"
    assert len(page.js(names)) == 3
    page.choose("one", "en-cs")
    page.choose("other", "en-de")
    page.find("#pairs button[type=submit]").click()
    assert "en-cs, en-de" in page.js(names)
    line = page.js(
        "document.getElementById('steps-plot').data.find(t => t.name === 'en-cs, en-de').y"
    )
    values = VAC.measured[0].values[:, COUNT]
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
    page.unfold()
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


def test_colours_and_marks_mean_the_same_in_all_runs(page: Page, tmp_path: Path) -> None:
    strong = make_run("strong", codes=CODES[3:], num_layers=2, family=0.6)  # other families first
    page.open(write_report([VAC, strong], tmp_path / "page.html"))
    page.unfold()
    limits = page.js(
        "[0, 1].map(n => document.getElementById(`sides-${n}`).data[0])"
        ".map(d => [d.zmin, d.zmax, Math.max(...d.z.flat().map(Math.abs))])"
    )
    most = max(limit[2] for limit in limits)
    assert limits[0][2] != limits[1][2]
    assert [limit[:2] for limit in limits] == [[-most, most]] * 2
    marks = page.js(
        "[0, 1].map(n => Object.fromEntries(document.getElementById(`tree-${n}`).data"
        ".slice(1).map(d => [d.name, d.marker.color + d.marker.symbol])))"
    )
    assert set(marks[1]) == {"West Slavic", "Uralic"}
    assert marks[1].items() <= marks[0].items()
    assert len(set(marks[0].values())) == len(marks[0]) == 3


def test_long_names_leave_the_theme_button_whole(page: Page, tmp_path: Path) -> None:
    names = ("en-to-any", "any-to-en", "any-to-any", "gradvac-" + "x" * 80)
    runs = [replace(SUM, name=name) for name in names]
    page.open(write_report(runs, tmp_path / "page.html"), width=820)
    assert page.js("document.documentElement.scrollWidth") <= 820
    assert page.js("document.getElementById('theme').offsetHeight") < 45  # one line


def test_paper(page: Page, tmp_path: Path) -> None:
    """No table is cut off, and no legend lies on its drawing."""
    runs = [replace(VAC, name=name) for name in ("en-to-any", "any-to-en", "any-to-any", "again")]
    page.open(write_report(runs, tmp_path / "page.html"))
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    page.driver.execute_script("dispatchEvent(new Event('beforeprint'))")
    page.unfold()
    legends = page.js(
        "[...document.querySelectorAll('.plot')].filter(p => p.querySelector('.legend')).map(p =>"
        " p.querySelector('.legend').getBoundingClientRect().bottom"
        " - p.querySelector('.nsewdrag').getBoundingClientRect().top)"
    )
    assert len(legends) > 8
    assert max(legends) < 1
    right = "document.querySelector('{}').getBoundingClientRect().right"
    assert page.js(right.format("#scores table")) <= page.js(right.format("main"))
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


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
    # Of both maps: pairs, and pairs by layer.
    shown = page.js("document.getElementById('layers-pairs-1').data[0].z.flat()")
    assert (
        page.js("(d => [d.zmin, d.zmax])(document.getElementById('layers-pairs-1').data[0])")
        == second
    )
    middle = (min(shown) + max(shown)) / 2  # all close together, but never over less than a tenth
    assert max(shown) - min(shown) < 0.1
    assert second == pytest.approx([middle - 0.05, middle + 0.05])
    assert f"colours from {second[0]:.2f} to {second[1]:.2f}" in page.find("#heat-note-1").text
    scale = page.js("document.getElementById('heat-1').data[0].colorscale")
    assert scale[0] == [0, "#cfe3f1"]  # the first blue: the colour of the page means 0
    assert scale[-1] == [1, "#08306b"]
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
    hole = replace(VAC, measured=(replace(VAC.measured[0], values=values, reliability=None),))
    page.open(write_report([hole], tmp_path / "hole.html"))
    assert page.heat()["en-fr", "en-fi"] is None
    assert page.heat()["en-es", "en-fi"] is not None
    assert page.troubles() == []


def test_large_run_answers_at_once(page: Page, tmp_path: Path) -> None:
    large = make_run("large", num_layers=19, num_steps=20)  # a step is what is drawn
    page.open(write_report([large], tmp_path / "large.html"))
    fastest = page.js(  # the others may have waited for other programs
        "(() => { const step = document.getElementById('step'); const times = [];"
        " for (let n = 0; n < 10; n++) { const begin = performance.now(); step.value = n;"
        " step.dispatchEvent(new Event('input')); times.push(performance.now() - begin); }"
        " return Math.min(...times) / 1000; })()"
    )
    assert fastest < 0.5
    assert page.troubles() == []


def test_prints(page: Page, one: Path) -> None:
    page.open(one, dark=True)
    printed = page.driver.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    assert len(printed["data"]) > 50_000
    assert page.js("document.documentElement.dataset.theme") == "dark"  # and is dark again


def test_sixty_small_families_are_readable(page: Page, tmp_path: Path) -> None:
    """Names of families do not overlap, and the table of scores fits a screen."""
    made = make_run(codes=tuple(f"l{n}" for n in range(60)), num_layers=1, num_steps=2)
    families = {task: f"Family {n}" for n, task in enumerate(made.tasks)}
    page.open(write_report([replace(made, families=families)], tmp_path / "report.html"))
    page.unfold()
    names = page.js(
        "[...document.querySelectorAll('#heat-0 .annotation-text-g')].map(name =>"
        " name.getBoundingClientRect()).map(box => [box.top, box.bottom])"
    )
    names = sorted(names)
    assert len(names) > 10
    assert all(above[1] <= below[0] for above, below in itertools.pairwise(names))
    assert page.js("document.querySelector('#scores .scroll').offsetHeight <= innerHeight")
    assert page.troubles() == []
