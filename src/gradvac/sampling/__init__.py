"""Sampling over tasks: which task comes next, and which of its rows.

Everything drawn is a function of a seed and a position, so that the state of a sampler is a few
numbers and a resumed run draws what it would have drawn.

    shares.py      what part of the rows each task gets: temperature, caps, repetition
    sampler.py     how often each task is drawn: temperature, schedule, caps, slots
    epochs.py      which rows of a task come next
    batches.py     both at once, for a DataLoader

    sampler = TaskSampler({"en-fr": 20_000, "en-hi": 500}, temperature=5.0)
    epochs = Epochs([20_000, 500], seed=0)
    rows = [epochs.take(task, 1) for task in sampler.draw(32, step=0)]

In a loop of your own, both at once:

    sampler = TaskBatchSampler(dataset["task"], batch_size=32, temperature=5.0)
    loader = DataLoader(dataset, batch_sampler=sampler)
"""

from gradvac.sampling.batches import TaskBatchSampler
from gradvac.sampling.epochs import Epochs
from gradvac.sampling.sampler import TaskEpochs, TaskSampler, costs_by_slot
from gradvac.sampling.shares import cap_epochs, repetition_temperature, task_probabilities

__all__ = [
    "Epochs",
    "TaskBatchSampler",
    "TaskEpochs",
    "TaskSampler",
    "cap_epochs",
    "costs_by_slot",
    "repetition_temperature",
    "task_probabilities",
]
