"""Scores by task, whatever the metric."""

import json
from pathlib import Path

import pytest

from gradvac.lab.runs import (
    PREPARED_METADATA,
    RunFolder,
    TaskScores,
    prepared_sizes,
    read_scores,
    write_scores,
)

F1 = TaskScores("F1", {"de": 91.0, "fr": 88.0, "hi": 70.0}, {"de": "low", "fr": "high"}, "test set")


def test_means_by_level() -> None:
    assert F1.by_level() == {"high": 88.0, "low": 91.0, "all": 83.0}
    assert TaskScores("loss", {"a": 1.0}).by_level() == {"all": 1.0}


def test_shown_with_the_digits_of_the_metric() -> None:
    assert F1.show(3.14159) == "3.1"
    assert TaskScores("loss", {}, digits=3).show(3.14159) == "3.142"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    accuracy = TaskScores("accuracy", {"de": 0.5}, higher_is_better=True, digits=3)
    write_scores(folder.scores_of("dev", "last"), [accuracy])
    assert folder.read_scores() == (accuracy,)
    write_scores(folder.scores_of("test", "best"), [F1, accuracy], {"anything": [1, None]})
    assert folder.read_scores() == (F1, accuracy)
    assert json.loads(folder.scores_of("test", "best").read_text())["details"] == {
        "anything": [1, None]
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is damaged"),
        ("[]", "no scores"),
        ('{"by_task": {"de": {"bleu": 1.0}}}', "'scores'.*score again"),
        ('{"scores": []}', "none"),
        ('{"scores": [{"metric": "F1"}]}', "by_task"),
        (
            '{"scores": [{"metric": "F1", "by_task": {"de": "91"}}]}',
            "F1 of de .*91",
        ),
        ('{"scores": [{"metric": "F1", "by_task": {"de": NaN}}]}', "F1 of de .*nan"),
        ('{"scores": [{"metric": 3, "by_task": {}}]}', "metric is 3"),
        ('{"scores": [{"metric": "F1", "by_task": 3}]}', "no scores"),
    ],
)
def test_other_files_are_refused_in_words(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "test.best.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"test\.best\.json: .*{message}"):
        read_scores(path)


def test_sizes_of_prepared_data(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert prepared_sizes(run) == {}
    run.config.write_text(f'[data]\nprepared = "{tmp_path.as_posix()}"\n')
    (tmp_path / PREPARED_METADATA).write_text('{"sizes": {"train": {"en-fr": 7}}}')
    assert prepared_sizes(run) == {"en-fr": 7}


def test_a_folder_that_is_no_checkpoint_is_none(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for name in ("step-latest", "step-00000010", "step-00000002", "other"):
        (run.checkpoints / name).mkdir(parents=True)
    assert [step for step, _ in run.kept_checkpoints()] == [2, 10]
