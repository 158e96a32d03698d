"""The run folder: what a run leaves on disk, for its writers and its readers.

Training, scoring, measuring and reporting meet in one folder and nowhere else. Its file names
are in `folder.py`; everything small in it is written by `files.replacing`, whole or not at all.
Nothing here needs torch.

    folder.py     RunFolder: the name of every file, and readers that say what is wrong with one
    files.py      one atomic write, one lock, hashes, JSON
    kept.py       copies of files that a run needs wherever it is moved
    scores.py     TaskScores: a metric by task, which any recipe writes and any report reads
    sentences.py  the counts behind scores, sentence by sentence, for resampling

A recipe of your own:

    folder = RunFolder(Path("runs/mine"))
    write_scores(folder.scores_of("test", "best"), [TaskScores("F1", {"de": 91.2, "fr": 88.0})])
"""

from gradvac.lab.runs.folder import (
    PREPARED_MANIFEST,
    RunFolder,
    other_data,
    other_settings,
    prepared_sizes,
)
from gradvac.lab.runs.scores import TaskScores, read_scores, write_scores

__all__ = [
    "PREPARED_MANIFEST",
    "RunFolder",
    "TaskScores",
    "other_data",
    "other_settings",
    "prepared_sizes",
    "read_scores",
    "write_scores",
]
