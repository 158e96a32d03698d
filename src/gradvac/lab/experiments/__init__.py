"""Experiments: does a method help? For any recipe that writes scores by task.

`compare_runs` groups runs by everything but their seed and tells, per task, by resource level and
on average, which method is better, worse or within noise of a baseline, at what cost. `Sweep` makes
the runs: from one config, several at a time, resumable.

    groups.py       runs read from their folders, and grouped into methods
    statistics.py   is a difference more than other seeds and other sentences make?
    curves.py       losses at equal steps and equal time; what training cost
    verdicts.py     better, worse or within noise: one row of a table
    comparison.py   methods against a baseline
    tables.py       a comparison as Markdown and JSON
    pictures.py     a comparison in pictures
    page.py         a comparison as one offline page
    plan.py         the config of a sweep, and the runs it stands for
    sweep.py        runs executed, resumed and retried
    pace.py         how long runs take, so that none begins in vain
    worker.py       one run in a process of its own
    launchers.py    processes of this machine, or submitit
    halving.py      the weaker half stops early
    prediction.py   how far short runs predict long ones
    budget.py       what every method was given
    frozen.py       a rule's mean weights, from the record of a run
"""

from gradvac.lab.experiments.budget import Budget, budget_table, budgets
from gradvac.lab.experiments.comparison import Comparison, compare_groups, compare_runs
from gradvac.lab.experiments.groups import Group, ScoredRun, find_runs, group_runs, read_run
from gradvac.lab.experiments.plan import SweepConfig, Trial, expand
from gradvac.lab.experiments.prediction import Prediction, prediction_table, predictions
from gradvac.lab.experiments.sweep import Ended, Sweep
from gradvac.lab.experiments.tables import to_json, to_markdown

__all__ = [
    "Budget",
    "Comparison",
    "Ended",
    "Group",
    "Prediction",
    "ScoredRun",
    "Sweep",
    "SweepConfig",
    "Trial",
    "budget_table",
    "budgets",
    "compare_groups",
    "compare_runs",
    "expand",
    "find_runs",
    "group_runs",
    "prediction_table",
    "predictions",
    "read_run",
    "to_json",
    "to_markdown",
]
