"""The report as it is read: the picture first, names as they are, honest scales, for everybody."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium.webdriver.common.keys import Keys

from gradvac.analysis import KnownDistances
from gradvac.analysis.report import write_report
from gradvac.analysis.run import Run

from .made_runs import FAMILIES, make_run
from .test_report_page import CODES, VAC, Page

HEAT = "document.getElementById('heat-0')"
LINK = '<a href="https://example.org">click</a> & <b>x</b>'


@pytest.fixture(scope="module")
def page(chromium: Any) -> Page:
    return Page(chromium)


def renamed(run: Run, names: list[str]) -> Run:
    given = dict(zip(run.tasks, names, strict=True))
    assert run.record is not None
    assert run.scores is not None
    return replace(
        run,
        measured=tuple(replace(one, tasks=tuple(names)) for one in run.measured),
        record=replace(run.record, tasks=tuple(names)),
        families={given[task]: family for task, family in run.families.items()},
        scores=replace(
            run.scores,
            by_task={given[task]: score for task, score in run.scores.by_task.items()},
            levels={},
        ),
    )


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve tasks with names of 40 letters, one of which is markup; every kind of drawing."""
    names = [f"{n:02d}-a-task-whose-name-has-forty-letters-ok" for n in range(12)]
    names[0] = LINK
    run = renamed(make_run(codes=tuple(FAMILIES)[:12], num_layers=2, num_steps=4), names)
    draw = np.random.default_rng(0).uniform(0.2, 1, (12, 12))
    run = replace(run, distances=KnownDistances(run.tasks, (draw + draw.T) / 2, "how <b>far</b>"))
    return write_report([run], tmp_path_factory.mktemp("odd") / "report.html")


@pytest.mark.parametrize("width", [1440, 390])
def test_picture_first(page: Page, odd: Path, tmp_path: Path, width: int) -> None:
    plain = write_report([VAC], tmp_path / "plain.html")
    for path in (plain, odd):
        page.open(path, width=width)
        top = "document.querySelector('.plot svg').getBoundingClientRect().top"
        controls = "document.querySelector('#view').getBoundingClientRect().bottom"
        assert page.js(controls) <= page.js(top) < 600
        assert page.find(".headline").is_displayed()
        cells = page.js(
            "(r => [r.width, r.height, r.bottom])"
            "(document.querySelector('#heat-0 .nsewdrag').getBoundingClientRect())"
        )
        assert cells[0] == pytest.approx(cells[1], abs=1.5)  # square
        assert cells[2] <= 900  # whole, on the first screen
    assert page.js("document.querySelectorAll('#heat-0 .hm text').length") == 12 * 11


def test_what_is_read_in_a_cell(page: Page, tmp_path: Path) -> None:
    page.open(write_report([VAC], tmp_path / "page.html"))
    text = page.js(f"{HEAT}.data[0].text")
    for row, shown in zip(text, page.js(f"{HEAT}.data[0].z"), strict=True):
        for said, value in zip(row, shown, strict=True):
            assert said == ("" if value is None else f"{value:.2f}".replace("0.", "."))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_borders_of_controls_are_seen(page: Page, odd: Path, dark: bool) -> None:
    """Contrast with the page and with the control: 3 to 1, as WCAG 1.4.11 asks."""
    page.look_at(odd, width=1440, dark=dark)

    def brightness(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    ground = page.js("getComputedStyle(document.body).backgroundColor")
    border, inside = page.js(
        "(s => [s.borderTopColor, s.backgroundColor])"
        "(getComputedStyle(document.querySelector('#source')))"
    )
    for other in (ground, inside):
        light, low = sorted([brightness(border), brightness(other)], reverse=True)
        assert (light + 0.05) / (low + 0.05) >= 3


def test_markup_in_names_stays_text(page: Page, odd: Path) -> None:
    for dark in (True, False):
        page.look_at(odd, width=1440, dark=dark)
        assert page.js("document.querySelectorAll('svg a, .plot a').length") == 0
        assert page.js("document.querySelectorAll('.plot b, .plot tspan[style*=bold]').length") == 0
    texts = page.js("[...document.querySelectorAll('#heat-0 .ytick text')].map(t => t.textContent)")
    assert any(text.startswith("<a hre") for text in texts)
    assert page.js("document.documentElement.scrollWidth") <= 1440
    assert page.troubles() == []


def test_everything_has_a_role_and_words(page: Page, odd: Path) -> None:
    page.look_at(odd, width=1440)
    bare = page.js(
        "[...document.querySelectorAll('.plot:not(.empty)')].filter(p =>"
        " p.getAttribute('role') !== 'img' || p.getAttribute('aria-label').length < 8)"
        ".map(p => p.id)"
    )
    assert bare == []
    maps = ["heat-0", "layers-pairs-0", "sides-0", "influence-0"]
    for one in (*maps, "distance-plot", "scores-plot"):
        rows = page.js(
            f"(() => {{ const d = document.querySelector('#{one} + .tools details');"
            " d.open = true; d.dispatchEvent(new Event('toggle'));"
            " return [...d.querySelectorAll('tbody tr')].map(r => r.textContent); })()"
        )
        assert len(rows) >= 12, one
    assert page.js("document.documentElement.scrollWidth") <= 1440  # tables scroll in themselves


def test_scatters(page: Page, odd: Path) -> None:
    page.look_at(odd, width=1440)
    data = page.js("document.getElementById('distance-plot').data.map(t => [t.name, t.x.length])")
    assert data == [["encoder", 66], ["decoder", 66]]
    assert page.js("document.getElementById('scores-plot').data[0].x.length") == 12
    names = page.js("document.getElementById('distance-plot').data[0].customdata")
    assert any("&lt;a href" in name for name in names)


def test_scales_do_not_stretch_little(page: Page, tmp_path: Path) -> None:
    values = VAC.measured[0].values.copy()
    values[:] = 0.02 + 0.001 * values
    flat = replace(VAC, measured=(replace(VAC.measured[0], values=values),))
    page.open(write_report([flat], tmp_path / "flat.html"))
    page.unfold()
    limits = page.js(f"(d => [d.zmin, d.zmax])({HEAT}.data[0])")
    assert limits[1] - limits[0] >= 0.1
    for plot in ("steps-plot", "layers-plot"):
        low, high = page.js(f"document.getElementById('{plot}').layout.yaxis.range")
        assert high - low >= 0.1
        assert low <= 0 <= high  # 0 is on the axis, and marked


def test_unknown_is_hatched_and_unreliable_is_marked(page: Page, tmp_path: Path) -> None:
    same = VAC.measured[0]
    values, reliability = same.values.copy(), np.full_like(same.reliability, 0.6)
    values[..., 0, 1] = values[..., 1, 0] = np.nan
    reliability[..., 2] = 0.05
    run = replace(VAC, measured=(replace(same, values=values, reliability=reliability),))
    page.open(write_report([run], tmp_path / "page.html"))
    assert "hatched: unknown" in page.find("#heat-note-0").text
    ground = page.js(f"decodeURIComponent({HEAT}.layout.images[0].source)")
    assert ground.count("url(#h)") == 2
    assert ground.count("<rect x") == 2 + len(CODES)  # and the diagonal
    order = [names[0] for names in page.heat()][:: len(CODES)]
    marked = page.js(
        f"(d => d.x.map((x, n) => [Math.floor(d.y[n]), Math.floor(x)]))({HEAT}.data[1])"
    )
    odd = order.index("en-de")
    assert sorted(map(tuple, marked)) == sorted(
        pair for n in range(len(CODES)) if n != odd for pair in ((n, odd), (odd, n))
    )
    page.find("#mark").click()
    assert len(page.js(f"{HEAT}.data")) == 1


def test_direction_is_in_words(page: Page, odd: Path) -> None:
    page.open(odd, width=1440)
    page.choose("source", "batches of training")
    page.choose("quantity", "target")
    titles = page.js(f"(l => [l.yaxis.title.text, l.xaxis.title.text])({HEAT}.layout)")
    assert titles == ["the task that is altered", "against this task"]
    page.unfold()
    label = page.find("#influence-0").get_attribute("aria-label")
    assert "Rows: whose loss; columns: who moves it" in label
    shares = np.array(page.js("document.getElementById('influence-0').data[0].z"), dtype=float)
    np.testing.assert_allclose(shares.sum(axis=1), 1, atol=2e-3)


def test_smoothing_zoom_and_download(page: Page, tmp_path: Path) -> None:
    page.open(write_report([VAC], tmp_path / "page.html"))
    page.unfold()
    lines = "document.getElementById('steps-plot').data"
    before = page.js(f"{lines}[0].y")
    page.driver.execute_script(
        "(s => { s.value = 30; s.dispatchEvent(new Event('input')); })"
        "(document.getElementById('smooth'))"
    )
    after = page.js(f"{lines}.filter(t => t.showlegend !== false)[0].y")
    assert len(page.js(lines)) == 6  # as it is, pale, and smooth
    assert np.std(np.diff(after)) < np.std(np.diff(before))
    assert page.js("document.getElementById('steps-plot').layout.xaxis.fixedrange") is False
    for format_ in ("png", "svg"):
        made = page.driver.execute_async_script(
            "const done = arguments[1];"
            f"Plotly.toImage({HEAT}, {{format: arguments[0]}}).then(done)",
            format_,
        )
        assert made.startswith("data:image/")
    downloads = tmp_path / "down"
    page.driver.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)}
    )
    page.find("#heat-0 + .tools button").click()
    page.wait_for(lambda: list(downloads.glob("heat-0*.png")))


def test_a_thinned_page_means_over_all_steps(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradvac.analysis.report import payload

    monkeypatch.setattr(payload, "MAX_PACKED", 20_000)
    run = make_run(codes=CODES, num_layers=2, num_steps=64)
    path = write_report([run], tmp_path / "page.html")
    assert re.search(r"holds at most \d+ steps of a source; means are of all", path.read_text())
    page.open(path)
    kept = page.js("document.getElementById('step').max")
    assert int(kept) < 40
    values = run.measured[0].values
    layers = [n for n, name in enumerate(run.measured[0].components) if "norm" not in name]
    i, j = run.tasks.index("en-fr"), run.tasks.index("en-fi")
    assert page.heat()["en-fr", "en-fi"] == pytest.approx(
        float(values[:, layers, i, j].mean()), abs=6e-4
    )
    assert page.find("#step-shown").text == "64 steps"


def test_names_survive_json(odd: Path) -> None:
    data = re.search(r'id="data">(.*?)</script>', odd.read_text(encoding="utf-8"), re.DOTALL)
    assert data is not None
    assert LINK in json.loads(data[1])["runs"][0]["sources"][0]["tasks"]


def test_cells_by_keyboard(page: Page, tmp_path: Path) -> None:
    """Arrows go from cell to cell and say what is there; Enter follows the pair."""
    page.open(write_report([VAC], tmp_path / "page.html"))
    heat = page.find("#heat-0")
    heat.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    names = list(page.heat())
    size = len(CODES)
    said = page.js(
        "document.querySelector('#heat-0').parentElement.querySelector('.said').textContent"
    )
    assert said.startswith(", ".join(names[2 * size + 1]))
    before = page.js("document.querySelectorAll('#followed button').length")
    heat.send_keys(Keys.ENTER)
    assert page.js("document.querySelectorAll('#followed button').length") == before + 1


def test_runs_are_compared_in_a_map(page: Page, tmp_path: Path) -> None:
    other = replace(VAC, name="other")
    values = VAC.measured[0].values - 0.05
    other = replace(other, measured=(replace(VAC.measured[0], values=values),))
    page.open(
        write_report([replace(VAC, measured=VAC.measured[:1]), other], tmp_path / "page.html")
    )
    page.unfold()
    shown = page.js(
        "document.getElementById('difference-1').data[0].z.flat().filter(v => v !== null)"
    )
    np.testing.assert_allclose(shown, -0.05, atol=2e-3)
