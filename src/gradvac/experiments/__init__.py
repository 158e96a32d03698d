"""Experiments: does a method help? For any recipe that writes scores by task.

`compare_runs` groups runs by everything but their seed and tells, per task, by resource level and
on average, which method is better, worse or within noise of a baseline, at what cost.

    groups.py       runs read from their folders, and grouped into methods
    statistics.py   is a difference more than other seeds and other sentences make?
    curves.py       losses at equal steps and equal time; what training cost
    verdicts.py     better, worse or within noise: one row of a table
    comparison.py   methods against a baseline
    tables.py       a comparison as Markdown and JSON
"""

from gradvac.experiments.comparison import Comparison, compare_groups, compare_runs
from gradvac.experiments.groups import Group, ScoredRun, find_runs, group_runs, read_run
from gradvac.experiments.tables import to_json, to_markdown

__all__ = [
    "Comparison",
    "Group",
    "ScoredRun",
    "compare_groups",
    "compare_runs",
    "find_runs",
    "group_runs",
    "read_run",
    "to_json",
    "to_markdown",
]
