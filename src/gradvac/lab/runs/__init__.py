"""The run folder: what a run leaves on disk, for its writers and its readers.

Training, scoring, measuring and reporting share one folder and nothing else. Everything small in
it is written by `gradvac.utils.files`, completely or not at all.

    folder.py     RunFolder: every file by name; `gradvac.analysis.run_files` has what reports read
    manifest.py   one manifest of checksums for any folder: written last, verified first
    counts.py     the counts behind scores, sentence by sentence, for resampling

A recipe of your own:

    folder = RunFolder(Path("runs/mine"))
    write_scores(folder.scores_of("test", "best"), [TaskScores("F1", {"de": 91.2, "fr": 88.0})])
"""

from gradvac.analysis.run_files import TaskScores, read_scores, write_scores
from gradvac.lab.runs.folder import PREPARED_METADATA, RunFolder, prepared_sizes

__all__ = [
    "PREPARED_METADATA",
    "RunFolder",
    "TaskScores",
    "prepared_sizes",
    "read_scores",
    "write_scores",
]
