"""gradvac: one model, many tasks, and control over how their gradients are combined.

Replace `losses.sum().backward()` with `aligner.backward(losses, tasks)`. The aligner obtains each
task's gradient (an *engine*), compares them component by component (a *Gram matrix*), asks a *rule*
for weights, and adds the weighted sum to `.grad`. The rest of a training loop stays the same.

The rule that gave the library its name is Gradient Vaccine (Wang et al., ICLR 2021); PCGrad, MGDA,
GradNorm and plain joint training are available too. See `Aligner` for an example.

The library, which needs torch and numpy:

    aligner.py       engine -> Gram matrix -> rule -> `.grad`; options; state
    alignment.py     what one step did, for people and records to look at
    by_task.py       task gradients or their Gram matrices, without a rule and an update
    gram.py          norms, cosines and products read off a Gram matrix
    rules/           a method is a function of the Gram matrix: one file each
    engine/          task gradients -> Gram matrices, weights -> `.grad`; one process or many
    sampling/        how often each task is drawn, and which of its rows; resumable
    analysis/        measure, record, statistics, figures, report (extra: report)
    integrations/    inside Hugging Face's Trainer, Accelerate and Lightning
    tasks.py         a task's name: direction, source, target, pivot
    utils/           files, error messages, plugins, GPUs: what several packages use

The laboratory, which trains whole systems with it (extras: nmt, tagging):

    lab/languages/   constructed languages with a known family tree; the table of real ones
    lab/runs/        the run folder: every file name, a manifest of checksums, scores
    lab/training/    config, checkpoints, log, and the one training loop
    lab/recipes/     what is trained: nmt/, tagging/, and what they share in common/
    lab/experiments/ sweeps, and methods compared over seeds and sentences

    cli/             the command `gradvac`, above both

The laboratory imports the library, never the reverse; a test enforces it.

Names are imported when they are first used: the command line answers `--help` without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from gradvac.utils.torch_backend import announce as _announce

__version__ = "0.2.0"  # also what the package is built with: a path needs no metadata

if TYPE_CHECKING:
    from gradvac import rules
    from gradvac.aligner import Aligner, Restored
    from gradvac.alignment import Alignment
    from gradvac.by_task import GradientsByTask
    from gradvac.engine import AdamMetric, Components, RowTasks, rows
    from gradvac.rules import *  # noqa: F403

    __all__ = ["AdamMetric", "Aligner", "Alignment", "Components", "GradientsByTask", "Restored"]
    __all__ += ["RowTasks", "__version__", "rows"]
    __all__ += rules.__all__  # type: ignore[has-type]

_MODULES = {
    "gradvac.aligner": ("Aligner", "Restored"),
    "gradvac.alignment": ("Alignment",),
    "gradvac.by_task": ("GradientsByTask",),
    "gradvac.engine": ("AdamMetric", "Components", "RowTasks", "rows"),
    "gradvac.rules": (
        *("EmaTarget", "FixedTarget", "Only"),
        *("Rule", "Weighing", "rule_named"),
    ),
}
_announce()
_NAMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    registry = importlib.import_module("gradvac.rules").RULES
    rules = {rule.__name__: rule for rule in registry.values()}
    if name == "__all__":
        return sorted([*_NAMES, "__version__", *rules])
    if name in rules:
        return rules[name]
    raise AttributeError(f"module 'gradvac' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
