"""gradvac: one model, many tasks, and control over how their gradients are combined.

Replace `losses.sum().backward()` with `aligner.backward(losses, tasks)`. The aligner obtains each
task's gradient (an *engine*), compares them component by component (a *Gram matrix*), asks a *rule*
for weights, and adds the weighted sum to `.grad`. The rest of a training loop stays the same.

The rule that gave the library its name is Gradient Vaccine (Wang et al., ICLR 2021); PCGrad, MGDA,
GradNorm and plain joint training are available too. See `Aligner` for an example.

    gram.py          norms, cosines and products read off a Gram matrix
    tasks.py         a task's name: direction, source, target, pivot
    hints.py         words that messages share, and the line a warning is for
    sides.py         encoder or decoder: the side of a model, by a name
    devices.py       index tensors and Triton kernels for a GPU
    cuda_graph.py    work on a GPU, recorded once as a CUDA graph and replayed
    models.py        what the aligner asks of a model before it reads its graphs
    rules/           Gram matrix -> weights: one method per file
    engine/          autograd engines: task gradients -> Gram matrix, weights -> .grad
    alignment.py     what one step did, for people and records to look at
    aligner.py       engine -> Gram -> rule -> .grad; state
    runs/            the run folder: every file name, one atomic write, one lock, scores by task
    corpora/         constructed languages with a known family tree
    analysis/        measure, record, statistics, figures, report
    training/        config, sampling, checkpoints, run log, and the one training loop
    nmt/             multilingual translation: data, Transformer, beam search, scores
    tagging/         parts of speech and named entities with Hugging Face encoders
    integrations/    the aligner inside other trainers: Transformers, Accelerate, Lightning
    experiments/     sweeps, and methods compared over seeds and sentences, for any recipe
    cli/             the command `gradvac`
    __main__.py      `python -m gradvac` is `gradvac`

Names are imported when they are first used: the command line answers `--help` without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradvac import rules
    from gradvac.aligner import Aligner, Restored
    from gradvac.alignment import Alignment
    from gradvac.engine import AdamMetric, Components, RowTasks, rows
    from gradvac.rules import *  # noqa: F403

    __version__: str
    __all__ = ["AdamMetric", "Aligner", "Alignment", "Components", "Restored", "RowTasks"]
    __all__ += ["__version__", "rows"]
    __all__ += rules.__all__  # type: ignore[has-type]

_ROOMS = {
    "gradvac.aligner": ("Aligner", "Restored"),
    "gradvac.alignment": ("Alignment",),
    "gradvac.engine": ("AdamMetric", "Components", "RowTasks", "rows"),
    "gradvac.rules": (
        *("EmaTarget", "FixedTarget", "Only"),
        *("Rule", "Weighing", "rule_named"),
    ),
}
_NAMES = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("gradvac")
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
