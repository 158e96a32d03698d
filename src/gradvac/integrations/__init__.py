"""Integrations: an aligner inside the trainer you already have.

Each keeps the trainer's loop, precision, accumulation, log and checkpoints, and replaces its
backward pass; with `Sum()` the gradients are those of the trainer alone. Import the one you need:
the trainers are optional packages.

    transformers.py     AlignedTrainer, AlignedSeq2SeqTrainer, TaskCollator  (gradvac[transformers])
    accelerate.py       AcceleratedAligner: one line in the place of accelerator.backward
    lightning.py        AlignedModule: a mixin for LightningModule
    _row_losses.py      losses of rows from the outputs of a Hugging Face model
    _one_process.py     the refusal of several processes

Several processes are refused with the reason: replicas would align their own gradients each and
drift apart.
"""

__all__: list[str] = []
