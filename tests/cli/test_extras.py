"""The command line with packages missing: one line that says what to install, at once."""

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from gradvac.cli.common import _OF_REPORT, needs

Gradvac = Callable[..., Any]


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from gradvac.cli import main; sys.argv[1:] = ['--help']\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'numpy', 'pydantic', 'scipy'} & set(sys.modules)))"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "similarity" in done.stdout
    assert done.stdout.rstrip().endswith("[]")


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "gradvac", "report", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Run folders" in done.stdout


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_any_extra_the_command_says_what_to_install(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from gradvac.cli import main; main()"
    done = run(code)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert f"the command line needs {package}" in done.stderr
    assert 'pip install ".[all]" in the checkout of gradvac.' in done.stderr


COMMANDS = {  # and what to install for them
    ("nmt", "prepare", "demo"): "nmt",
    ("nmt", "train", "demo", "--run", "made"): "nmt",
    ("nmt", "translate", "made"): "nmt",
    ("nmt", "score", "made"): "nmt",
    ("nmt", "export", "made", "out"): "nmt,export",
    ("tagging", "prepare", "tiny"): "tagging",
    ("tagging", "train", "tiny", "--run", "made"): "tagging",
    ("tagging", "score", "made"): "tagging",
    ("demo", "--out", "made"): "nmt,report",
}


def test_every_command_says_what_it_would_import(tmp_path: Path) -> None:
    """One process without some packages for all commands: torch takes its time to import."""
    code = f"""
import os, sys
os.chdir({str(tmp_path)!r})
sys.modules.update(dict.fromkeys(["sentencepiece", "sacrebleu", "safetensors", "transformers"]))
from typer.testing import CliRunner
from gradvac.cli.commands import app
for command in {list(COMMANDS)}:
    done = CliRunner().invoke(app, command)
    print(done.exit_code, repr(done.stderr))
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    for (command, extra), line in zip(COMMANDS.items(), done.stdout.splitlines(), strict=True):
        assert line.startswith("1 'error: this command needs "), command
        said = f'not installed here; pip install ".[{extra}]" in the checkout of gradvac.'
        assert said in line, command
    assert list(tmp_path.iterdir()) == []  # nothing was begun


@pytest.mark.parametrize("command", [("demo", "--out", "made"), ("report", "x"), ("figures", "x")])
def test_what_comes_in_at_the_end_is_looked_for_first(
    gradvac: Gradvac,
    command: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.chdir(tmp_path)
    done = gradvac(*command)
    assert done.exit_code == 1
    assert "this command needs plotly, not installed here; pip install" in done.stderr
    assert list(tmp_path.iterdir()) == []  # nothing was begun


def test_a_package_that_cannot_be_imported_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Installed by its metadata, and yet not there."""

    @needs("nmt")
    def command() -> None:
        import absent_package  # noqa: F401

    with pytest.raises(typer.Exit):
        command()
    said = capsys.readouterr().err
    assert said.startswith("error: this command needs absent_package, not installed here; pip")


def test_the_packages_of_the_extra_are_those_looked_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    lines = project["project"]["optional-dependencies"]["report"]
    assert [line.partition(">")[0] for line in lines] == ["typer", "rich", *_OF_REPORT]
