"""The method in the plane: the drawing of the theory page does what the rules do."""

# K cases, T = 2 tasks

import itertools
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from selenium.webdriver import ActionChains
from selenium.webdriver.common.keys import Keys

from gradvac import GradVac, PCGrad
from gradvac import gram as geometry
from gradvac.analysis.figures import write_figures
from gradvac.analysis.figures.method import altered
from gradvac.rules import Rule

from .. import browser
from ..analysis.made_runs import make_run

ROOT = Path(__file__).parents[2]
OTHER = np.array([1.15, 0.0])  # g_j of the drawing
NEAR = [0.0, 1e-7, 1e-3, 0.05]  # degrees from pointing the same way, and from the opposite
ANGLES = [*NEAR, *range(5, 180, 5), *(180 - angle for angle in NEAR), 215.0, 270.0, 330.0]
TARGETS = [-1.0, -1 + 1e-9, -0.6, 0.0, 0.3, 0.7, 0.999, 1 - 1e-6, 1 - 1e-9, 1.0]
SLIDERS = ("angle", "length", "target")


class Page(browser.Page):
    """The theory page in the browser."""

    ready = "document.querySelector('#plane svg') !== null"

    def show(self, name: str, **sliders: float) -> list[str]:
        """A row of the table, after setting sliders."""
        for slider, value in sliders.items():
            self.driver.execute_script(
                "const slider = document.getElementById(`plane-${arguments[0]}`);"
                "slider.value = arguments[1]; slider.dispatchEvent(new Event('input'))",
                *(slider, value),
            )
        cells = self.js(f"[...document.querySelectorAll('[data-row={name}] td')]")
        return [cell.text for cell in cells]

    def sliders(self) -> list[float]:
        return [self.js(f"document.getElementById('plane-{s}').valueAsNumber") for s in SLIDERS]

    def tip(self, panel: int, arrow: str) -> np.ndarray:
        """Where an arrow ends, in the units of the gradients."""
        path = self.js(
            f"document.querySelectorAll('#plane svg')[{panel}].querySelector('.{arrow} path')"
            ".getAttribute('d')"
        )
        x, y = path[1:].split("L")[0].split()
        return np.array([float(x), -float(y)]) / 100


@pytest.fixture(scope="module")
def page(chromium: Any) -> Page:
    return Page(chromium)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    return folder


@pytest.fixture(scope="module")
def theory(site: Path) -> Path:
    return site / "theory.html"


def gradient(degrees: float, length: float) -> np.ndarray:
    angle = np.deg2rad(degrees)
    return length * np.array([np.cos(angle), np.sin(angle)])


def weigh(rule: Rule, gradients: np.ndarray) -> dict[str, Any]:
    """What a rule that alters the first of two gradients `[K, T, 2]` does to them."""
    # Products as a browser forms them: no fused multiply-add.
    gram = torch.from_numpy((gradients[:, :, None] * gradients[:, None]).sum(-1))  # [K, T, T]
    rule.bind(["i", "j"], [f"case {n}" for n in range(len(gradients))])
    rule.start_step([0, 1], torch.zeros(2))
    weighing = rule.weigh(range(len(gradients)), gram)
    step = weighing.weights[:, 1:].numpy() - 1
    return {
        "altered": gradients[:, 0] + step * gradients[:, 1],
        "active": weighing.active[:, 0, 1].numpy(),
        "inert": (geometry.norms(gram) == 0).any(-1).numpy(),
        "before": geometry.cosine(gram)[:, 0, 1].numpy(),
        "turned": geometry.update_cosine(gram, weighing.weights).numpy(),
        "stretched": geometry.update_ratio(gram, weighing.weights).numpy(),
        "reach": (np.abs(step) + 1).max(-1) * np.abs(gradients).max(axis=(-1, -2)),
    }


def rules(target: float) -> Mapping[str, Rule]:
    return {
        "PCGrad": PCGrad(vaccinated=["i"]),
        "GradVac": GradVac(target=target, vaccinated=["i"]),
    }


@pytest.mark.parametrize("target", TARGETS)
def test_the_script_does_what_the_rules_do(page: Page, theory: Path, target: float) -> None:
    lengths, scales = [0.0, 0.01, 1.0, 80.0], [0.0, 1e-170, 1e-20, 1.0, 1e20]
    pairs = [
        [scale * gradient(degrees + 10, length), scale * gradient(10, 1.15)]
        for degrees, length, scale in itertools.product(ANGLES, lengths, scales)
    ]
    gradients = np.array(pairs)  # [K, T, 2]
    page.open(theory)
    for name, rule in rules(target).items():
        expected = weigh(rule, gradients)
        found = page.js(
            "arguments[0].map(([i, j]) => gradvacPlane.alter(i, j, arguments[1]))",
            *(gradients.tolist(), 0.0 if name == "PCGrad" else target),
        )
        states = np.array([case["state"] for case in found])
        assert np.array_equal(states == "active", expected["active"])
        assert np.array_equal(states == "inert", expected["inert"])
        away = np.abs(np.array([case["altered"] for case in found]) - expected["altered"]).max(-1)
        assert np.all(away <= 1e-12 * expected["reach"])
    assert expected["active"].any() == (target > -1)
    assert expected["inert"].any()


@pytest.mark.parametrize(
    ("degrees", "length", "target"),
    [
        (120, 1.0, 0.7),
        (70, 1.0, 0.7),
        (70, 0.35, 0.2),
        (165, 1.2, 0.9),
        (12, 0.5, 1.0),
        (33, 1, -1),
    ],
)
def test_what_is_shown(
    page: Page, theory: Path, degrees: float, length: float, target: float
) -> None:
    page.open(theory)
    first = gradient(degrees, length)
    state = page.show("state", angle=degrees, length=length, target=target)
    for panel, (name, rule) in enumerate(rules(target).items()):
        truth = {key: value[0] for key, value in weigh(rule, np.array([[first, OTHER]])).items()}
        changed = altered(rules(target)[name], first, OTHER)
        assert changed == pytest.approx(truth["altered"], abs=1e-12)
        truth["after"] = changed @ OTHER / np.linalg.norm(changed) / np.linalg.norm(OTHER)
        truth["length"] = np.linalg.norm(changed) / length
        for row in ("before", "after", "length", "turned", "stretched"):
            assert page.show(row)[panel] == f"{truth[row]:z.2f}".replace("-", "\u2212")
        assert state[panel] == ("active" if truth["active"] else "idle")
        assert page.tip(panel, "first") == pytest.approx(first)
        assert page.tip(panel, "update") == pytest.approx(changed + OTHER)
        if truth["active"]:
            assert page.tip(panel, "altered") == pytest.approx(changed)
            assert page.tip(panel, "plain") == pytest.approx(first + OTHER)
    assert page.troubles() == []


def test_vanished_gradients(page: Page, theory: Path) -> None:
    page.open(theory)
    assert page.show("state", length=0) == ["inert", "inert"]
    assert page.show("before") == page.show("after") == ["none", "none"]
    assert page.show("stretched") == ["1.00", "1.00"]
    assert page.show("state", length=1.15, angle=180) == ["active", "active"]
    assert page.show("after") == ["none", "none"]  # cancelled
    assert page.show("stretched") == ["none", "none"]  # so did the plain sum
    assert page.show("state", target=-1) == ["active", "idle"]
    assert page.show("after") == ["none", "\u22121.00"]
    assert page.troubles() == []


def test_keyboard(page: Page, theory: Path) -> None:
    page.open(theory)
    assert page.sliders() == [120, 1.0, 0.7]
    for slider in SLIDERS:
        assert page.find(f"#plane-{slider}").accessible_name.startswith(slider.capitalize())
    page.find("#plane-angle").send_keys(*[Keys.ARROW_LEFT] * 50)
    assert page.show("before") == [f"{np.cos(np.deg2rad(70)):.2f}"] * 2
    assert page.show("state") == ["idle", "active"]
    page.find("#plane-target").send_keys(Keys.HOME)
    assert page.show("target") == ["0.00", "\u22121.00"]
    assert page.show("state") == ["idle", "idle"]
    page.find("#plane-length").send_keys(Keys.HOME)
    assert page.show("state") == ["inert", "inert"]


@pytest.mark.parametrize("panel", [0, 1])
def test_drag(page: Page, theory: Path, panel: int) -> None:
    page.open(theory)
    page.driver.execute_script("document.getElementById('plane').scrollIntoView()")
    scale = page.js(f"document.querySelectorAll('#plane svg')[{panel}].getScreenCTM().a * 100")
    goal = np.array([0.6, 0.8])
    right, up = (goal - page.tip(panel, "first")) * scale
    handle = page.driver.find_elements("css selector", "#plane .handle")[panel]
    mouse = ActionChains(page.driver).move_to_element(handle).click_and_hold()
    mouse.move_by_offset(round(right), round(-up)).release().perform()
    assert page.tip(panel, "first") == pytest.approx(goal, abs=2 / scale)  # whole pixels
    moved = page.sliders()
    ActionChains(page.driver).move_by_offset(5, 5).perform()  # released: it stays
    assert page.sliders() == moved


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)`, as the web's contrast guidelines define it."""
    parts = [int(part) / 255 for part in colour[4:-1].split(",")]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 820, 1440])
def test_looks(page: Page, theory: Path, width: int, dark: bool) -> None:
    page.open(theory, width=width)
    page.js("document.getElementById(`__palette_${Number(arguments[0])}`).click()", dark)
    assert page.js("document.body.dataset.mdColorScheme") == ("slate" if dark else "default")
    assert page.js("document.documentElement.scrollWidth") <= width
    beyond = "[...document.querySelectorAll('#plane *')].filter(e => !e.closest('svg g')"
    assert page.js(f"{beyond} && e.getBoundingClientRect().right > innerWidth)") == []
    ground = luminance(page.js("getComputedStyle(document.body).backgroundColor"))
    for ink in ("first", "altered", "second"):
        fill = f"getComputedStyle(document.querySelectorAll('#plane .{ink} text')[0]).fill"
        light, deep = sorted([luminance(page.js(fill)), ground], reverse=True)
        assert (light + 0.05) / (deep + 0.05) >= 4.5
    figure = "document.querySelector('img[src$=\"plane/method.svg\"]')"
    assert page.js(f"{figure}.complete && {figure}.naturalWidth > 0")
    assert page.js(f"getComputedStyle({figure}).filter.includes('invert')") == dark
    assert page.troubles() == []


def test_works_offline_and_leaves_other_pages_alone(page: Page, site: Path, theory: Path) -> None:
    page.open(theory)
    asked = page.js("performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in asked if not name.startswith("file:")] == []
    page.driver.get((site / "guide" / "index.html").as_uri())
    assert page.troubles() == []


def test_the_figure_is_what_the_code_draws(tmp_path: Path) -> None:
    bare = make_run(codes=("fr",), num_layers=1, num_steps=1, recorded=False, bleu=None)
    write_figures([bare], tmp_path, ["svg"])
    drawn = tmp_path / "fig05.svg"
    shown = ROOT / "docs" / "plane" / "method.svg"
    same = drawn.read_bytes() == shown.read_bytes()
    assert same, f"the code draws another figure now; look at it, and: cp {drawn} {shown}"
    assert "cmsy10" not in drawn.read_text(encoding="utf-8")  # a font that browsers do not have


def test_formulas_are_drawn(page: Page, theory: Path) -> None:
    page.open(theory)
    assert page.js("document.querySelectorAll('.formula mfrac').length") > 2
    assert "\\frac" not in page.find("article").text


CUT = """[...document.querySelectorAll('article :is(table, pre, img, math)')].filter(e =>
    e.getBoundingClientRect().right > e.closest('article').getBoundingClientRect().right + 1 ||
    e.scrollWidth > e.clientWidth + 1 && e.tagName == 'PRE').map(e => e.outerHTML.slice(0, 200))"""


@pytest.mark.parametrize(
    "name", ["index", "guide", "settings", "api/rules", "results/index", "results/transfer"]
)
def test_nothing_is_cut(chromium: Any, site: Path, name: str) -> None:
    """And what was found fits into two screens."""
    page = browser.Page(chromium)
    page.open(site / f"{name}.html", width=1400)
    assert page.js(CUT) == []
    if name == "results/index":
        assert page.js("document.documentElement.scrollHeight") <= 2 * 900
