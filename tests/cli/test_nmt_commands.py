"""`gradvac nmt`: the whole way, and mistakes told in one line."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from gradvac.analysis.similarities import load_similarities

from .conftest import write_corpus

Gradvac = Callable[..., Result]


@pytest.fixture(scope="module")
def trained(gradvac: Gradvac, tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus = write_corpus(tmp_path_factory.mktemp("trained"))
    result = gradvac("nmt", "train", corpus / "tiny.toml", "--run", corpus / "run")
    assert result.exit_code == 0, result.output
    assert "What training will see" in result.output
    return corpus / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def test_prepare_reports_and_is_resumable(gradvac: Gradvac, corpus: Path) -> None:
    first = gradvac("nmt", "prepare", corpus / "tiny.toml")
    assert first.exit_code == 0
    assert "Cleaning train en-xx" in first.output
    assert "460" in first.output  # kept pairs, in the table
    second = gradvac("nmt", "prepare", corpus / "tiny.toml")
    assert "Cleaning" not in second.output
    assert "460" in second.output


def test_train_translate_score(gradvac: Gradvac, run: Path) -> None:
    translated = gradvac("nmt", "translate", run, "--to", "xx", stdin="ba de fi\n\nka le\n")
    assert translated.exit_code == 0
    assert translated.stdout.count("\n") == 3
    assert translated.stdout.split("\n")[1] == ""
    assert "1 of 3 lines were empty." in translated.stderr
    scored = gradvac("nmt", "score", run, "--weights", "last", "--json")
    assert scored.exit_code == 0
    assert set(json.loads(scored.stdout)["by_task"]) == {"en-xx", "en-yy"}
    table = gradvac("nmt", "score", run, "--set", "dev")
    assert "chrF++" in table.stdout
    (run / "in.txt").write_text("ba de fi\n")
    named = gradvac("nmt", "translate", run, run / "in.txt", "decoding.beams=1", "--to", "xx")
    assert named.exit_code == 0, named.output
    assert named.stdout.count("\n") == 1
    fails(gradvac("nmt", "translate", run, "nowhere.txt", "--to", "xx"), "there is no such file")
    fails(gradvac("nmt", "translate", run, run, "--to", "xx"), "is a folder; give its files")
    os.mkfifo(run / "pipe")  # as in translate RUN <(zcat in.gz)
    writer = threading.Thread(target=(run / "pipe").write_bytes, args=(b"\xef\xbb\xbfba de fi\n",))
    writer.start()
    piped = gradvac("nmt", "translate", run, run / "pipe", "decoding.beams=1", "--to", "xx")
    writer.join()
    (run / "pipe").unlink()
    assert piped.stdout == named.stdout  # the mark of the encoding is no text
    fails(gradvac("nmt", "translate", run, "--to", "xx", stdin="ba".encode("utf-16")), "UTF-16")
    files = ("--source", run / "in.txt", "--reference", run / "in.txt", "--from", "en")
    scored = gradvac("nmt", "score", run, *files, "--to", "yy", "--json")
    assert json.loads(scored.stdout)["num_lines"] == 1
    fails(gradvac("nmt", "score", run, *files, "--to", "yy", "--set", "dev"), "--set")
    fails(
        gradvac("nmt", "score", run, *files), "--source, --reference, --from and --to go together"
    )
    exported = gradvac("nmt", "export", run, run / "hf")
    assert exported.exit_code == 0, exported.output
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (run / "hf").iterdir()
    }
    fails(gradvac("nmt", "export", run, run / "hf"), "is there and not empty")


def test_similarity(gradvac: Gradvac, run: Path) -> None:
    first = gradvac("similarity", run, "--lines", "12", "--granularity", "enc_dec")
    assert first.exit_code == 0, first.output
    assert "step 4, mean over pairs" in first.output
    assert "Steps 2, 4 are in" in first.output  # step 0 is untrained
    measured, _ = load_similarities(run / "similarity.npz")
    assert [(s.granularity, s.lines) for s in measured] == [
        ("enc_dec", "same"),
        ("enc_dec", "different"),
    ]
    fails(gradvac("similarity", run, "--lines", "14", "--granularity", "enc_dec"), "lines = 12")
    fails(gradvac("similarity", run, "--set", "extra"), "extra")
    fails(gradvac("similarity", run, "--engine", "foo"), "per_task or one_backward, got 'foo'")
    fails(gradvac("similarity", run, "--device", "foo"), "device: 'foo' is unknown")
    fails(gradvac("similarity", run, "--lines", "1"), "at least 2 lines, got 1")
    fails(
        gradvac("similarity", run, "--weights", "3"), "no weights 3; there are: best, last, 0, 2, 4"
    )
    wrong = gradvac("similarity", run, "--granularity", "layers", "--lines", "12")
    fails(wrong, "granularit")
    again = gradvac(
        "similarity", run, "--lines", "12", "--granularity", "enc_dec", "--weights", "2"
    )
    assert "step 2, mean over pairs" in again.output


def test_similarity_of_other_weights_is_not_continued(gradvac: Gradvac, run: Path) -> None:
    first = gradvac("similarity", run, "--lines", "12")
    assert first.exit_code == 0, first.output
    longer = gradvac("nmt", "train", run, "train.max_steps=6")
    assert longer.exit_code == 0, longer.output
    more = gradvac("similarity", run, "--lines", "12")
    assert "Steps 2, 4, 6 are in" in more.output
    text = (run / "config.toml").read_text().replace("seed = 0", "seed = 7", 1)
    (run / "config.toml").write_text(text)  # as if trained anew in the same folder
    fails(
        gradvac("similarity", run, "--lines", "12"), "was measured with weights = ", "move it away"
    )


def test_train_continues_a_run_folder(gradvac: Gradvac, run: Path) -> None:
    result = gradvac("nmt", "train", run, "train.max_steps=6")
    assert result.exit_code == 0, result.output
    assert "Continuing from step 4" in result.output
    assert "Finished after 6 steps" in result.output


def test_overrides_follow_the_config(gradvac: Gradvac, corpus: Path) -> None:
    result = gradvac(
        "nmt", "train", corpus / "tiny.toml", 'data.tasks=["en-yy"]', "train.max_steps=1",
        "align.rule=sum", "--run", corpus / "bilingual",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = gradvac("nmt", "translate", corpus / "bilingual", stdin="ba de\n")
    assert lines.exit_code == 0  # one target language: --to may be left out


def fails(result: Result, *texts: str) -> None:
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    for text in texts:
        assert text in result.stderr


def test_a_missing_file_is_named(gradvac: Gradvac, corpus: Path) -> None:
    (corpus / "train.en-yy.tsv").unlink()
    fails(gradvac("nmt", "train", corpus / "tiny.toml"), "train.en-yy.tsv", "data.root")


def test_an_empty_language_is_named(gradvac: Gradvac, corpus: Path) -> None:
    (corpus / "train.en-yy.tsv").write_text("\t\n")
    fails(gradvac("nmt", "prepare", corpus / "tiny.toml"), "train en-yy", "1 empty")


def test_a_language_with_fewer_sentences_than_a_batch_trains(
    gradvac: Gradvac, corpus: Path
) -> None:
    (corpus / "train.en-yy.tsv").write_text("pu pu pu\tUP UP UP\n")
    result = gradvac("nmt", "train", corpus / "tiny.toml", "--run", corpus / "run")
    assert result.exit_code == 0, result.output


def test_an_unknown_target_language_names_the_known(gradvac: Gradvac, run: Path) -> None:
    fails(gradvac("nmt", "translate", run, "--to", "fr", stdin="ba\n"), "'fr'", "xx, yy")
    fails(gradvac("nmt", "translate", run, stdin="ba\n"), "--to", "xx, yy")


def test_long_and_undecodable_lines_are_counted(gradvac: Gradvac, run: Path) -> None:
    text = b"ba de \xff\n" + b"ba " * 100 + b"\n"
    result = gradvac("nmt", "translate", run, "--to", "xx", stdin=text)
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 2
    assert "1 of 2 lines were longer" in result.stderr
    assert "1 of 2 lines were not UTF-8" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("train", "nowhere"), "there is no file 'nowhere'"),
        (("train", "demo", "optimizer.lrr=1"), "did you mean 'lr'?"),
        (("train", "demo", "optimizer.lr=fast"), "optimizer.lr"),
        (
            ("prepare", "demo", "data.vocabulary.model=nowhere"),
            "data.vocabulary.model: there is no file nowhere",
        ),
        (("score", "nowhere"), "is not a run folder"),
        (("translate", "nowhere"), "is not a run folder"),
    ],
)
def test_mistakes_in_arguments(gradvac: Gradvac, arguments: tuple[str, ...], text: str) -> None:
    fails(gradvac("nmt", *arguments), text)


def test_a_folder_that_is_no_run(gradvac: Gradvac, tmp_path: Path) -> None:
    fails(gradvac("nmt", "train", tmp_path), "without config.toml")


def test_missing_weights_and_sets_name_those_there(gradvac: Gradvac, run: Path) -> None:
    fails(gradvac("nmt", "score", run, "--weights", "averaged"), "best", "last")
    fails(gradvac("nmt", "score", run, "--set", "novel"), "'novel'", "test")
