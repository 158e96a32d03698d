"""`gradvac report` and `gradvac figures` on run folders of constructed and real languages."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
import warnings
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from gradvac.analysis.similarities import Similarities, save_similarities
from gradvac.cli import figures, report
from gradvac.cli.common import reports_mistakes
from gradvac.lab.languages import default_corpus, genealogical_distances
from gradvac.lab.languages.known import load_runs, sizes_of

COMPONENTS = ("encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1")
app = typer.Typer()
app.command("report")(report.report)
app.command("figures")(figures.figures)


def write_run(folder: Path, tasks: list[str], matrix: np.ndarray, settings: str = "") -> Path:
    """A run folder with one measurement and a config."""
    folder.mkdir(parents=True)
    values = np.broadcast_to(matrix, (2, 4, *matrix.shape)).astype(np.float32)
    found = Similarities(tuple(tasks), COMPONENTS, np.array([100, 200]), values)
    save_similarities(folder / "similarity.npz", [found])
    (folder / "config.toml").write_text(settings, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def constructed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Similarity that falls with the known distance."""
    known = default_corpus().distances()
    tasks = [f"en-{code}" for code in known.codes]
    return write_run(tmp_path_factory.mktemp("runs") / "made", tasks, 0.8 - known.distance)


def test_constructed_languages_are_known(constructed: Path) -> None:
    (run,) = load_runs([constructed])
    corpus = default_corpus()
    assert {run.families[f"en-{code}"] for code in corpus.codes} == set(corpus.families)
    assert run.distances is not None
    assert np.array_equal(run.distances.values, corpus.distances().distance)
    assert sizes_of([run])[f"en-{corpus.codes[0]}"] == corpus.languages[corpus.codes[0]].train


def test_real_languages_and_prepared_sizes(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    sizes = {"sizes": {"train": {"en-fr": 21_000, "en-xx": 7}}}
    (tmp_path / "data" / "prepared.json").write_text(json.dumps(sizes), encoding="utf-8")
    settings = f'[data]\nprepared = "{(tmp_path / "data").as_posix()}"\n'
    folder = write_run(tmp_path / "run", ["fr-en", "en-cs", "xx-en"], np.eye(3), settings)
    (run,) = load_runs([folder])
    expected = {"fr-en": "Western European", "en-cs": "West Slavic", "xx-en": ""}
    assert run.families == expected
    assert run.distances is None  # two are too few
    assert sizes_of([run]) == {"fr-en": 21_000, "xx-en": 7}


def test_report(constructed: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(constructed), "-o", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    assert "page.html (" in done.output
    said = " ".join(done.output.split())  # as the page says it, in the width of a terminal
    assert "Relatives Languages of one family are 0." in said
    assert "Similarity falls with distance by construction in the encoder: r = -1.00" in said
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    falls = "Similarity falls with distance by construction in the encoder: r = -1.00 (p = 0.0002)"
    assert falls in page
    assert "more similar than others in the encoder" in page


def test_report_of_real_languages_in_both_directions(tmp_path: Path) -> None:
    codes = ["fr", "es", "de", "cs", "pl", "fi", "et", "tr"]
    tasks = [f"{code}-en" for code in codes] + [f"en-{code}" for code in codes]
    known = genealogical_distances(codes)
    folder = write_run(tmp_path / "run", tasks, np.tile(0.8 - known, (2, 2)))
    done = CliRunner().invoke(app, ["report", str(folder), "-o", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for where in ("encoder (xx-en)", "decoder (en-xx)"):
        assert f"Similarity falls with genealogical distance in the {where}: r = -1.00" in page


def test_what_a_user_knows(tmp_path: Path) -> None:
    tasks = ["parse", "tag", "chunk", "rank", "count", "sort", "link"]
    place = np.arange(7)
    matrix = 1 - np.abs(place[:, None] - place) / 5
    folder = write_run(tmp_path / "run", tasks, matrix)
    rows = ["," + ",".join(tasks)]
    rows += [
        f"{task}," + ",".join(map(str, 1 - row)) for task, row in zip(tasks, matrix, strict=True)
    ]
    (tmp_path / "far.csv").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "kinds.toml").write_text(
        'parse = "structure"\ntag = "structure"\nrank = "numbers"\ncount = "numbers"\n',
        encoding="utf-8",
    )
    known = ["--distances", str(tmp_path / "far.csv"), "--families", str(tmp_path / "kinds.toml")]
    command = ["report", str(folder), "-o", str(tmp_path / "page.html"), *known]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Similarity falls with the distance of far.csv in the encoder: r = -1.00" in page
    assert "among structure tasks 0.80" in page
    done = CliRunner().invoke(
        app, ["figures", str(folder), "-o", str(tmp_path), "--format", "svg", *known]
    )
    assert done.exit_code == 0, done.output
    assert "the distance of far.csv" in (tmp_path / "distance_run.svg").read_text(encoding="utf-8")


def test_figures(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ["en-qso", "en-qsm", "en-qtu"], np.eye(3))
    command = ["figures", str(run), "-o", str(tmp_path), "--format", "png"]
    done = CliRunner().invoke(app, [*command, "--pair", "en-qso,en-qsm"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "fig07.png").is_file()
    assert "fig06: not drawn, needs at least two runs with scores" in done.output
    wrong = CliRunner().invoke(app, [*command, "--pair", "en-qso"])
    assert wrong.exit_code == 1
    assert "--pair: give two tasks" in wrong.output
    wrong = CliRunner().invoke(app, [*command, "--pair", "en-qso,en-qsn"])
    assert "--pair: 'en-qsn' is not a task of these runs; did you mean" in wrong.output


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    tasks = ["en-fr", "en-es", "en-cs"]
    folders = [write_run(tmp_path / where / "run", tasks, np.eye(3)) for where in ("a", "b")]
    assert [run.name for run in load_runs(folders)] == ["a-run", "b-run"]


def test_nothing_to_show(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 1
    assert "error:" in done.output
    assert "Traceback" not in done.output


def test_names_are_told_apart(tmp_path: Path) -> None:
    tasks, matrix = ["en-fr", "en-es", "en-fi"], np.full((3, 3), 0.5)
    paths = [write_run(tmp_path / folder, tasks, matrix) for folder in ("a/x/run", "b/x/run")]
    assert [run.name for run in load_runs(paths)] == ["a-x-run", "b-x-run"]
    other = write_run(tmp_path / "other", tasks, matrix)
    assert [run.name for run in load_runs([paths[0], other])] == ["run", "other"]
    for command in ("report", "figures"):
        done = CliRunner().invoke(app, [command, str(other), str(other), "-o", str(tmp_path / "o")])
        assert done.exit_code == 1
        assert "other: is given twice" in done.output
        assert not (tmp_path / "o").exists()


def test_names_are_not_read_as_markup(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "[bold]a[seed=1]", ["en-fr", "en-es", "en-fi"], np.full((3, 3), 0.5)
    )
    done = CliRunner().invoke(app, ["report", str(folder), "-o", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    assert "[bold]a[seed=1] ──" in done.output


def test_warnings_are_told_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @reports_mistakes
    def command() -> None:
        warnings.warn("record.bin: the last chunk is cut off.", stacklevel=2)

    monkeypatch.setattr("sys.warnoptions", [])
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        command()
    assert capsys.readouterr().err == "warning: record.bin: the last chunk is cut off.\n"


def test_live(constructed: Path) -> None:
    """The command serves the page until it is interrupted, and writes nothing."""
    before = sorted(constructed.iterdir())
    command = [sys.executable, "-m", "gradvac", "report", str(constructed), "--live"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        said = server.stdout.readline()
        address = re.search(r"http://localhost:\d+/", said)
        assert address is not None, said
        with urllib.request.urlopen(address[0]) as answer:
            page = answer.read().decode()
        with urllib.request.urlopen(address[0] + "version") as answer:
            assert f'"version":"{answer.read().decode()}"' in page
        assert "Similarity falls with distance by construction" in page
        server.send_signal(signal.SIGINT)
        assert server.wait(240) == 0  # it runs at the lowest priority
    assert sorted(constructed.iterdir()) == before
