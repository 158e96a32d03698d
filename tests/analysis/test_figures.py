"""The paper's figures: drawn where the data allow, and right."""

import itertools
import logging
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from gradvac.analysis import statistics
from gradvac.analysis.figures import paper, write_figures
from gradvac.analysis.figures.method import altered
from gradvac.analysis.figures.style import (
    DIVERGING,
    SEQUENTIAL,
    STYLE,
    name_points,
    new_figure,
    save_figure,
)
from gradvac.analysis.run import KnownDistances, Run
from gradvac.analysis.similarities import weighty
from gradvac.engine.components import side_of
from gradvac.lab.runs import TaskScores
from gradvac.rules import GradVac, PCGrad

from .made_runs import FAMILIES, make_run

EUROPE = ("fr", "es", "cs", "pl", "fi")


def stems(paths: list[Path]) -> set[str]:
    return {path.stem for path in paths}


def texts(path: Path) -> list[str]:
    """All text of an SVG; mathematical text is drawn, not written."""
    return ["".join(node.itertext()) for node in ET.parse(path).iter() if node.tag.endswith("text")]


def drawn(draw: Callable[..., dict[str, Figure]], *args: object) -> dict[str, Figure]:
    """The figures of one kind alone: all kinds take seconds."""
    with mpl.rc_context(dict(STYLE)):
        return draw(*args)


def written(figure: Figure, folder: Path) -> list[str]:
    """All text of a figure, written as SVG."""
    (path,) = save_figure(figure, folder / "figure", ["svg"])
    return texts(path)


def test_two_runs(tmp_path: Path) -> None:
    runs = [
        make_run(name, codes=EUROPE, num_layers=2, num_steps=4) for name in ("joint", "gradvac")
    ]
    said: list[str] = []
    sizes = {f"en-{code}": 1000 for code in EUROPE}
    done = write_figures(runs, tmp_path, ["png"], sizes=sizes, on_written=said.append)
    assert said == [path.stem for path in done.paths]  # each as it is written
    assert all(path.stat().st_size > 2000 for path in done.paths)
    names, sides = ("joint", "gradvac"), ("encoder", "decoder")
    expected = {"fig03", "fig04b", "fig05", "fig06", "fig07", "fig09_joint_gradvac"}
    expected |= {f"fig01_{name}_{side}_en-xx" for name in names for side in sides}
    expected |= {f"{figure}_{name}" for figure in ("fig04a", "fig04c") for name in names}
    assert stems(done.paths) == expected
    assert set(done.missing) == {"fig02a", "fig02b", "distance"}
    assert all(reason.startswith("needs") for reason in done.missing.values())


def test_the_same_data_give_the_same_file(tmp_path: Path) -> None:
    run = make_run(codes=("fr", "es", "fi"), num_layers=1, num_steps=2)

    def files(folder: Path) -> list[Path]:
        paths = write_figures([run], folder, ["svg"]).paths
        return paths + save_figure(
            drawn(paper.draw_sides, [run])["gradvac"], folder / "one", ["pdf"]
        )

    first, second = files(tmp_path / "a"), files(tmp_path / "b")
    assert [a.read_bytes() for a in first] == [b.read_bytes() for b in second]


def test_all_languages_and_families_are_named(tmp_path: Path) -> None:
    run = make_run(num_layers=1, num_steps=2)
    figures = drawn(paper.draw_families, [run])
    said = written(figures["gradvac_encoder_en-xx"], tmp_path)
    assert set(FAMILIES) | set(FAMILIES.values()) <= set(said)


def test_both_directions(tmp_path: Path) -> None:
    run = make_run("both", codes=EUROPE, directions=("xx-en", "en-xx"), num_layers=2, num_steps=3)
    assert "both_encoder_xx-en" in drawn(paper.draw_families, [run])
    into = run.measured[0].select(tasks=[f"{code}-en" for code in EUROPE])
    matrix = into.values[:, weighty(into.components)].mean(axis=(0, 1))
    mean = matrix[np.tril_indices(len(EUROPE), -1)].mean()
    figure = drawn(paper.draw_directions, [run])["both"]
    assert f"xx-en, mean {mean:.2f}" in written(figure, tmp_path)


def test_score_against_similarity(tmp_path: Path) -> None:
    others = ("es", "de", "cs", "fi", "hi")
    runs = []
    for n, code in enumerate(others):
        run = make_run(f"fr-{code}", codes=("fr", code), num_layers=1, num_steps=2, seed=n)
        values = np.full_like(run.measured[0].values, 0.1 * n)
        scores = TaskScores("BLEU", {"en-fr": 20.0 + n})
        similarities = replace(run.measured[0], values=values, reliability=None)
        runs.append(replace(run, measured=(similarities,), scores=scores))
    said = written(drawn(paper.draw_score_of_one_task, runs)["en-fr"], tmp_path)
    assert set(others) <= set(said)
    title = next(text for text in said if text.startswith("Spearman"))
    assert re.match(r"Spearman 1\.00 \[1\.00, 1\.00\], p = 0\.0[0-2]", title)


def test_distance(tmp_path: Path) -> None:
    run = make_run("both", codes=EUROPE, directions=("xx-en", "en-xx"), num_layers=2, num_steps=2)
    tasks = run.measured[0].tasks
    place = np.array([EUROPE.index(task.replace("en", "").strip("-")) for task in tasks])
    distances = KnownDistances(tasks, np.abs(place[:, None] - place) / 4.0, "steps apart")
    figures = drawn(paper.draw_distance, [replace(run, distances=distances)])
    said = written(figures["both"], tmp_path)
    assert {"both: encoder", "both: decoder", "steps apart"} <= set(said)
    for way in ("xx-en", "en-xx"):
        assert sum(text.startswith(f"{way}: r = -0.") for text in said) == 2


def uniform(low: float, high: float) -> Run:
    """A run whose pairs are all between two values."""
    run = make_run(codes=EUROPE, num_layers=1, num_steps=2, recorded=False, bleu=None)
    (same, *_), draw = run.measured, np.random.default_rng(0)
    pairs = np.tril(draw.uniform(low, high, same.values.shape[2:]))
    values = np.broadcast_to(pairs + np.tril(pairs, -1).T, same.values.shape).astype(np.float32)
    values[:, 0] *= 0.99  # encoder and decoder differ a little
    return replace(run, measured=(replace(same, values=values),))


def test_colours_show_differences() -> None:
    """Centred at 0, but not where that would make all pairs look the same."""

    def image(draw: Callable[..., dict[str, Figure]], run: Run) -> AxesImage:
        return next(iter(draw([run]).values())).axes[0].images[0]

    wide = image(paper.draw_families, uniform(0.1, 0.5))
    assert (wide.get_cmap().name, wide.norm.vmin) == (DIVERGING.name, -wide.norm.vmax)
    mixed = image(paper.draw_families, uniform(-0.9, 0.1))
    assert (mixed.get_cmap().name, mixed.norm.vmin) == (DIVERGING.name, -mixed.norm.vmax)
    close = image(paper.draw_families, uniform(0.8, 0.9))
    assert close.get_cmap().name == SEQUENTIAL.name
    assert 0.76 < close.norm.vmin < 0.81 < 0.87 < close.norm.vmax < 0.91
    assert close.norm.vmax - close.norm.vmin >= 0.1 - 1e-9  # little does not look like much
    difference = image(paper.draw_sides, uniform(0.8, 0.9))
    assert (difference.get_cmap().name, difference.norm.vmin) == (
        DIVERGING.name,
        -difference.norm.vmax,
    )


def test_long_names_unknown_pairs_and_equal_scales() -> None:
    names = tuple(f"{n:02d}-a-task-whose-name-has-forty-letters-ok" for n in range(25))
    run = make_run(num_layers=2, num_steps=2)
    values = run.measured[0].values.copy()
    values[..., 0, 1] = values[..., 1, 0] = np.nan
    measured = (replace(run.measured[0], tasks=names, values=values),)
    figures = paper.draw_families([replace(run, measured=measured, families={})])
    encoder, decoder = (figures[f"gradvac_{side}"].axes for side in ("encoder", "decoder"))
    assert encoder[0].images[0].get_clim() == decoder[0].images[0].get_clim()
    labels = [text.get_text() for text in encoder[0].get_yticklabels()]
    assert max(map(len, labels)) == 20
    assert len(set(labels)) == 25
    assert encoder[1].get_xlabel() == "cosine"
    hatched = [patch for patch in encoder[0].patches if patch.get_hatch()]
    assert len(hatched) == 2
    figure = figures["gradvac_encoder"]
    figure.canvas.draw()
    assert encoder[0].get_aspect() == 1  # square
    assert encoder[0].bbox.width > 0.55 * figure.bbox.width


@pytest.mark.parametrize("has_families", [True, False])
def test_nothing_sticks_out_of_a_map(has_families: bool) -> None:
    run = make_run(codes=tuple(FAMILIES)[:20], num_layers=1, num_steps=1)
    run = run if has_families else replace(run, families={})
    figure = drawn(paper.draw_families, [run])["gradvac_encoder_en-xx"]
    with mpl.rc_context(dict(STYLE)):
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        inside = figure.get_tightbbox(canvas.get_renderer())
    width, height = figure.get_size_inches()
    assert min(inside.x0, inside.y0, width - inside.x1, height - inside.y1) >= 0


def test_few_tasks_have_numbers_in_their_cells() -> None:
    run = make_run(codes=EUROPE, num_layers=1, num_steps=1)
    axes = paper.draw_families([run])["gradvac_encoder_en-xx"].axes[0]
    numbers = [text.get_text() for text in axes.texts]
    assert sum(bool(re.fullmatch(r"-?\.\d\d", text)) for text in numbers) == 20


def test_the_palest_stretched_colour_is_not_that_of_0(tmp_path: Path) -> None:
    assert SEQUENTIAL(0.0) == pytest.approx(DIVERGING(0.56), abs=0.02)
    assert SEQUENTIAL(1.0) == pytest.approx(DIVERGING(1.0), abs=0.02)
    for low, high, said in ((0.8, 0.9, 1), (0.1, 0.5, 0)):
        figures = drawn(paper.draw_families, [uniform(low, high)])
        legend = re.compile(r"cosine, colours from 0\.\d\d to 0\.\d\d$")
        told = written(figures["gradvac_encoder_en-xx"], tmp_path)
        assert sum(bool(legend.match(text)) for text in told) == said


ODD = ("_old", "a$^$b", "\u65e5\u672c \u0939\u093f", "$x$", "\\$")


def renamed(name: str, *, seed: int = 0) -> Run:
    """A run whose own name, tasks, families and distance all are odd."""
    run = make_run(name, codes=EUROPE, num_layers=1, num_steps=2, seed=seed)
    assert run.record is not None
    assert run.scores is not None
    bleu = dict(zip(ODD, run.scores.by_task.values(), strict=True))
    place = np.arange(len(ODD))
    return replace(
        run,
        record=replace(run.record, tasks=ODD),
        measured=tuple(replace(measured, tasks=ODD) for measured in run.measured),
        scores=replace(run.scores, by_task=bleu, levels={}),
        families={task: f"{task} kin" for task in ODD},
        distances=KnownDistances(ODD, np.abs(place[:, None] - place) / 4.0, "_$d^$"),
    )


def test_names_are_drawn_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No name is set as mathematics, left out, or the cause of a warning."""
    names = ODD[:3]
    runs = [renamed(name, seed=n) for n, name in enumerate(names)]
    sizes = {task: 10**n for n, task in enumerate(ODD)}
    with caplog.at_level(logging.WARNING):
        write_figures(runs[2:], tmp_path, ["png"], sizes=sizes)
        save_figure(drawn(paper.draw_sides, runs[2:])[names[2]], tmp_path / "one", ["pdf"])
        done = write_figures(runs, tmp_path, ["svg"], sizes=sizes)
    assert set(done.missing) == {"fig02a"}
    assert caplog.records == []

    def said(stem: str) -> set[str]:
        return set(texts(tmp_path / f"{stem}.svg"))

    families = {f"{task} kin" for task in ODD}
    assert {"_old: cosine of encoder gradients", *ODD, *families} <= said("fig01__old_encoder")
    assert {*names, "BLEU of _old"} <= said("fig02b__old")
    assert set(names) <= said("fig03")
    sides = ("encoder", "decoder")
    assert {f"{side}, {name}" for name in names for side in sides} <= said("fig04b")
    assert "a$^$b: encoder" in said("fig04c_a$^$b")
    assert {"BLEU minus _old", *names[1:]} <= said("fig06")
    assert {*ODD, *families, "100", "1,000"} <= said("fig07")
    assert any(text.startswith("a$^$b, mean") for text in said("fig09__old_a$^$b"))
    assert {"a$^$b: encoder", "_$d^$"} <= said("distance_a$^$b")
    assert not any("$" in text for text in said("fig05"))  # the method's own mathematics is drawn


def test_active_pairs_are_shares(tmp_path: Path) -> None:
    """Runs with other numbers of tasks and components compare."""
    small = make_run("small", codes=EUROPE[:3], num_layers=1, num_steps=4)
    large = make_run("large", codes=EUROPE, num_layers=3, num_steps=4)
    assert small.record is not None
    similarity = small.record.similarity.copy()
    similarity[:, :, 0, 1] = np.nan
    similarity[1] = np.nan  # nothing is known of a step
    active = small.record.active & ~np.isnan(similarity)
    small = replace(small, record=replace(small.record, similarity=similarity, active=active))
    left, right = paper.draw_active([small, large])[""].axes
    for run, row in ((small, 0), (large, 2)):  # a pale and a strong line of each run
        assert run.record is not None
        counts = statistics.rule_counts(run.record)
        known = counts.eligible
        for axes, count in ((left, counts.conflicts), (right, counts.active)):
            shown = np.array(axes.lines[row].get_ydata())
            assert np.isnan(shown).tolist() == (known == 0).tolist()
            assert shown * known == pytest.approx(np.where(known > 0, count, np.nan), nan_ok=True)
    assert left.yaxis.get_major_formatter()(0.25, 0) == "25%"


def test_panels_that_share_a_scale_show_all_lines() -> None:
    """The second side is far above the first."""
    run = make_run(codes=EUROPE[:3], num_layers=2, num_steps=4)
    (main,) = run.measured[:1]
    values = main.values.copy()
    for number, component in enumerate(main.components):
        values[:, number] = 0.9 if side_of(component) == "decoder" else 0.1
    measured = (replace(main, values=values), *run.measured[1:])
    figure = paper.draw_steps([replace(run, measured=measured)], None)[run.name]
    for axes in figure.axes:
        low, high = axes.get_ylim()
        for line in axes.lines:
            shown = np.asarray(line.get_ydata(), dtype=float)
            assert low <= shown.min() <= shown.max() <= high


@pytest.mark.parametrize(("num_layers", "ticks"), [(4, [0, 1, 2, 3]), (30, list(range(0, 30, 3)))])
def test_ticks_are_layers(num_layers: int, ticks: list[int]) -> None:
    run = make_run(codes=EUROPE[:3], num_layers=num_layers, num_steps=2)
    (axes,) = paper.draw_layers([run])[""].axes
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == ticks


def test_scores_are_compared_where_tasks_are_shared(tmp_path: Path) -> None:
    runs = [
        make_run("first", codes=EUROPE),
        make_run("second", codes=EUROPE, seed=1),
        make_run("back", codes=EUROPE, directions=("xx-en",)),
    ]
    said = written(drawn(paper.draw_scores, runs, {})[""], tmp_path)
    assert "second" in said
    assert "back" not in said


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    bare = make_run(codes=("fr",), num_layers=1, num_steps=1, recorded=False, bleu=None)
    done = write_figures([bare], tmp_path)
    assert {path.name for path in done.paths} == {"fig05.pdf", "fig05.svg", "fig05.png"}
    assert "layer" in done.missing["fig04b"]
    assert "at least two tasks" in done.missing["fig01"]
    assert "recorded" in done.missing["fig03"]
    assert "scores" in done.missing["fig06"]


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"formats: .*pdf, svg, png.*'gif'"):
        write_figures([make_run(codes=EUROPE)], tmp_path, ["gif"])
    with pytest.raises(ValueError, match=r"runs: .*at least one"):
        write_figures([], tmp_path)
    with pytest.raises(ValueError, match=r"same name .*gradvac, gradvac"):
        write_figures([make_run(codes=EUROPE)] * 2, tmp_path)


@pytest.mark.parametrize("degrees", [70.0, 120.0])
def test_the_method_is_drawn_by_the_rules(degrees: float) -> None:
    angle = np.deg2rad(degrees)
    first, second = np.array([np.cos(angle), np.sin(angle)]), np.array([1.15, 0.0])

    def cosine(vector: np.ndarray) -> float:
        return float(vector @ second / np.linalg.norm(vector) / np.linalg.norm(second))

    projected = altered(PCGrad(vaccinated=["i"]), first, second)
    assert cosine(projected) == pytest.approx(max(0.0, np.cos(angle)), abs=1e-6)
    vaccinated = altered(GradVac(target=0.7, vaccinated=["i"]), first, second)
    assert cosine(vaccinated) == pytest.approx(0.7, abs=1e-6)
    assert vaccinated[1] == pytest.approx(first[1])  # only moved along g_j


def test_names_of_points_meet_neither_each_other_nor_points() -> None:
    with mpl.rc_context(dict(STYLE)):
        figure = new_figure(4.6, 3.6)
        axes = figure.subplots()
        points = [(0.0, 0.0), (0.01, 0.004), (0.012, -0.004), (0.02, 0.0), (1.0, 1.0)]
        axes.scatter(*zip(*points, strict=True))
        axes.margins(0.15)
        name_points(figure, ["a name"] * len(points), points, ["black"] * len(points))
        figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == len(points)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    places = axes.transData.transform(points)
    assert not any(box.contains(*place) for box in boxes for place in places)
