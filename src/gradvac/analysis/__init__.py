"""Analysis: which tasks help and hurt each other, in which layers, when.

Similarity comes from two places. Training records what its `Alignment` knows anyway, every few
steps and for free (`Recorder`); but its batches are small and differ from task to task. `measure`
compares gradients on given batches, such as a set that says the same things in all languages, and
reports how reliable they are. Both give `Similarities`: steps, components, tasks, cosines.

    similarities.py      the data class; `similarity.npz`
    measurement.py       gradients of any PyTorch model -> Similarities
    recorder.py          Alignment -> `record.bin`, while training
    record.py            `record.bin` -> Record; a format that NumPy alone can read
    components.py        where a component is in the model, by its name
    heat_map_images.py   an Alignment as pixels, for TensorBoard
    step_log.py          an Alignment as a few numbers, for the log of any loop
    run.py               a run folder as report and figures see it
    scores.py            scores of several runs, by one metric
    statistics/          families, distances, layers, steps, runs (SciPy)
    views.py             what figures and report have in common
    figures/             the paper's figures
    report/              one HTML page about runs

A loop of your own:

    recorder = Recorder("record.bin", every=10)
    for step, (losses, tasks) in enumerate(...):
        recorder(step, aligner.backward(losses, tasks))
"""

from gradvac.analysis.heat_map_images import heat_maps
from gradvac.analysis.measurement import Measured, measure
from gradvac.analysis.record import Record, read_record
from gradvac.analysis.recorder import Recorder
from gradvac.analysis.run import KnownDistances, Run, load_run
from gradvac.analysis.similarities import (
    Similarities,
    concatenate,
    load_similarities,
    save_similarities,
)
from gradvac.analysis.step_log import step_values

__all__ = [
    "KnownDistances",
    "Measured",
    "Record",
    "Recorder",
    "Run",
    "Similarities",
    "concatenate",
    "heat_maps",
    "load_run",
    "load_similarities",
    "measure",
    "read_record",
    "save_similarities",
    "step_values",
]
