"""Analysis: which tasks help and hurt each other, in which layers, when.

Similarity comes from two places. Training records what its `Alignment` knows anyway, every few
steps and for free (`Recorder`); but its batches are small and differ from task to task. `measure`
compares gradients on given batches, such as a set that says the same things in all languages, and
reports how reliable they are. Both give `Similarities`: steps, components, tasks, cosines.

    similarities.py  the data class; `similarity.npz`; where a component is, by its name
    measurement.py   gradients of any PyTorch model -> Similarities
    record.py        Alignment -> `record.bin` -> Record; a format that NumPy alone can read
    step_log.py      an Alignment as a few numbers and as pixels, for the log of any loop
    run_files.py     the files of a run that reports read: names, scores, weights
    run.py           a run folder as report and figures see it
    table.py         similarities as columns, a data frame, a CSV or parquet file
    statistics/      families, distances, layers, steps, noise, influence (SciPy)
    grouping.py      tasks divided into groups by what they gain from one another
    advice.py        which tasks should learn together, and what chance allows to say (SciPy)
    views.py         which similarities of a run are shown, in which order and by which names
    plots.py         what a heat map and a plot are, for figures and report
    pictures.py      which heat maps and plots some runs give
    figures/         the paper's figures
    report/          one HTML page about runs

A loop of your own:

    recorder = Recorder("record.bin", every=10)
    for step, (losses, tasks) in enumerate(...):
        recorder(step, aligner.backward(losses, tasks))
"""

from gradvac.analysis.grouping import best_groups
from gradvac.analysis.measurement import Measured, measure
from gradvac.analysis.record import Record, Recorder, read_record
from gradvac.analysis.run import KnownDistances, Run, load_run
from gradvac.analysis.similarities import (
    Similarities,
    concatenate,
    load_similarities,
    save_similarities,
)
from gradvac.analysis.step_log import heat_maps, step_values
from gradvac.analysis.table import write_table

__all__ = [
    "KnownDistances",
    "Measured",
    "Record",
    "Recorder",
    "Run",
    "Similarities",
    "best_groups",
    "concatenate",
    "heat_maps",
    "load_run",
    "load_similarities",
    "measure",
    "read_record",
    "save_similarities",
    "step_values",
    "write_table",
]
