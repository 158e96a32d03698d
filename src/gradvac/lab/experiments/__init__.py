"""Experiments: does a method help? For any recipe that writes scores by task.

`Sweep` makes the runs: from one config, several at a time, resumable. `compare_runs` groups runs by
everything but their seed and says, per task, by resource level and on average, which method is
better or worse than a baseline and how surely, at what cost.

    trials.py       the config of a sweep, and the runs it stands for
    sweep.py        runs executed, resumed, retried and halved
    follow_up.py    the runs that follow advice, and the sweep that checks it
    demo.py         joint training, advice, and what following it brings, in a few minutes
    worker.py       one run in a process of its own, of this machine or of a cluster
    methods.py      runs read from their folders and grouped into methods; what they cost
    verdicts.py     is a difference more than other seeds and other sentences make? verdicts
    comparison.py   methods against a baseline
    tables.py       a comparison as Markdown and JSON
    page.py         a comparison in pictures, and as one offline page
"""

from gradvac.lab.experiments.comparison import Comparison, compare_runs
from gradvac.lab.experiments.methods import Method, find_runs
from gradvac.lab.experiments.sweep import InterruptedSweep, Sweep, budget_table
from gradvac.lab.experiments.tables import to_json, to_markdown
from gradvac.lab.experiments.trials import SweepConfig, plan_trials
from gradvac.lab.experiments.worker import Processes, Submitit

__all__ = [
    "Comparison",
    "InterruptedSweep",
    "Method",
    "Processes",
    "Submitit",
    "Sweep",
    "SweepConfig",
    "budget_table",
    "compare_runs",
    "find_runs",
    "plan_trials",
    "to_json",
    "to_markdown",
]
