"""The surface of the command line, and the small commands."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result

from gradvac import __version__
from gradvac.cli import main
from gradvac.cli.commands import app
from gradvac.cli.common import load_config, reports_mistakes

Gradvac = Callable[..., Result]
# Every command with its options: a change here is a change of the contract.
SURFACE = {
    (): {"--version"},
    ("demo",): {"--out", "--open"},
    ("nmt", "prepare"): set(),
    ("nmt", "train"): {"--run"},
    ("nmt", "translate"): {"--to", "--weights", "--device", "--window", "--n-best"},
    ("nmt", "serve"): {"--weights", "--device", "--port", "--open"},
    ("nmt", "score"): {
        *("--set", "--weights", "--device", "--json", "--comet"),
        *("--source", "--reference", "--from", "--to"),
    },
    ("nmt", "export"): {"--to", "--weights", "--quantization"},
    ("tagging", "prepare"): set(),
    ("tagging", "train"): {"--run"},
    ("tagging", "predict"): {"--weights", "--device", "--columns", "--repair", "--window"},
    ("tagging", "score"): {"--set", "--weights", "--device", "--json"},
    ("similarity",): {
        *("--set", "--lines", "--weights", "--granularity"),
        *("--engine", "--offload", "--device"),
    },
    ("advise",): {"--groups", "--side", "--for", "--out"},
    ("report",): {"--out", "--table", "--distances", "--families", "--open", "--live", "--port"},
    ("figures",): {"--out", "--format", "--pair", "--distances", "--families"},
    ("sweep",): {
        *("--out", "--jobs", "--retry", "--halving"),
        *("--proxy", "--launcher", "--dry-run"),
    },
    ("compare",): {
        *("--baseline", "--set", "--weights", "--metric"),
        *("--out", "--pictures", "--json"),
    },
    ("corpus", "write"): {"--families", "--languages", "--seed"},
}


def commands_of(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All commands by their names, and the program itself."""
    if not path:
        yield path, group
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, (*path, name))
        else:
            yield (*path, name), command


def test_the_surface_is_frozen() -> None:
    assert {
        path: {
            name
            for parameter in command.params
            for name in parameter.opts
            if name.startswith("--") and name != "--help"
        }
        for path, command in commands_of(typer.main.get_command(app))
    } == SURFACE


@pytest.mark.parametrize("command", SURFACE, ids=" ".join)
def test_help_names_what_there_is(gradvac: Gradvac, command: tuple[str, ...]) -> None:
    result = gradvac(*command, "--help")
    assert result.exit_code == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    for name in SURFACE[command]:
        assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", shown), name


def test_version(gradvac: Gradvac) -> None:
    assert gradvac("--version").output == f"gradvac {__version__}\n"


def test_corpus_write(gradvac: Gradvac, tmp_path: Path) -> None:
    result = gradvac("corpus", "write", tmp_path / "out", "--languages", "qpl,qsm")
    assert result.exit_code == 0
    assert "Linawe" in result.output
    facts = json.loads((tmp_path / "out" / "languages.json").read_text())
    assert list(facts["languages"]) == ["qpl", "qsm"]
    pairs = (tmp_path / "out" / "train.en-qpl.tsv").read_text().splitlines()
    assert len(pairs) == 1500
    assert all(line.count("\t") == 1 for line in pairs)


def test_corpus_write_refuses_strange_folders_and_languages(
    gradvac: Gradvac, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").touch()
    result = gradvac("corpus", "write", tmp_path, "--languages", "qpl")
    assert result.exit_code == 1
    assert "not empty" in result.stderr
    result = gradvac("corpus", "write", tmp_path / "new", "--languages", "klingon")
    assert result.exit_code == 1
    assert "klingon" in result.stderr


def test_named_configs_are_found() -> None:
    assert load_config("nmt", "demo", ["train.max_steps=7"]).train.max_steps == 7


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(28, "No space left on device", "x.npz"), "make room, and start the same command"),
        (OSError(13, "Permission denied", "x"), "change its permissions"),
        (OSError(20, "Not a directory", "x/text"), "choose another name"),
        (OSError(21, "Is a directory", "x"), "name a file in it"),
        (OSError("disk: x; make room and go on"), "go on"),  # says it already
    ],
)
def test_what_the_system_says_of_a_file_is_told_with_what_to_do(
    capsys: pytest.CaptureFixture[str], error: Exception, remedy: str
) -> None:
    @reports_mistakes
    def write() -> None:
        raise error

    with pytest.raises(typer.Exit):
        write()
    told = capsys.readouterr().err
    assert remedy in told
    assert told.count(";") == 1


def test_stopped_while_it_starts_it_shows_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gradvac.cli.commands.app", stop)
    with pytest.raises(SystemExit, match="130"):
        main()


def test_a_port_is_one(gradvac: Gradvac, tmp_path: Path) -> None:
    result = gradvac("report", tmp_path, "--live", "--port", "99999")
    assert result.exit_code == 2
    assert "65535" in result.output
