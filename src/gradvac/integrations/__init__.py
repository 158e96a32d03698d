"""Integrations: an aligner inside the trainer you already have.

Each keeps the trainer's loop, precision, accumulation, log and checkpoints, and replaces its
backward pass; with `Sum()` the gradients equal the trainer's own. Import the one you need:
the trainers are optional packages.

    transformers.py     AlignedTrainer, AlignedSeq2SeqTrainer, TaskCollator  (gradvac[transformers])
    accelerate.py       AcceleratedAligner: one line instead of accelerator.backward
    lightning.py        AlignedModule: a mixin for LightningModule
    _shared.py          what all of them require of several processes

Several processes train replicas (`DistributedDataParallel`); engines that run the backward pass
themselves (DeepSpeed, FSDP) are refused by name.
"""

__all__: list[str] = []
