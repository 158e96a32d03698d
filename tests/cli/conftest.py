"""Fixtures of the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from gradvac.cli.commands import app


@pytest.fixture(scope="session")
def gradvac() -> Callable[..., Result]:
    """Runs `gradvac` in this process."""

    def run(*arguments: str | Path, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)

    return run


def write_corpus(folder: Path, codes: Sequence[str] = ("xx", "yy")) -> Path:
    """A config and a small corpus of languages: the first copies, the others turn round."""
    words = ["ba", "de", "fi", "go", "hu", "ka", "le", "mi", "no", "pu"]
    lines = [f"{a} {b} {c}" for a in words for b in words for c in words[:5]]
    for code in codes:
        said = [
            line if code == codes[0] else " ".join(reversed(line.split())).upper() for line in lines
        ]
        pairs = [f"{a}\t{b}\n" for a, b in zip(lines, said, strict=True)]
        for split, own in (("test", pairs[:20]), ("dev", pairs[20:40]), ("train", pairs[40:])):
            (folder / f"{split}.en-{code}.tsv").write_text("".join(own))
    (folder / "tiny.toml").write_text(
        f"""
[data]
prepared = "{folder}/prepared"
root = "{folder}"
languages = {list(codes)}
train = "train.{{pair}}.tsv"
dev = "dev.{{pair}}.tsv"
test = "test.{{pair}}.tsv"
max_tokens = 20
cleaning = {{ drop_identical = false }}
vocabulary = {{ size = 320, threads = 1, character_coverage = 1.0 }}
[model]
size = "tiny"
width = 32
[batch]
tokens = 200
chunk = 2
[train]
max_steps = 4
validate_every = 4
checkpoint_every = 2
log_every = 2
threads = 1
device = "cpu"
writers = []
"""
    )
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path)
