"""Integrations: an aligner inside the trainer you already have.

Each keeps the trainer's loop, precision, accumulation, log and checkpoints, and replaces its
backward pass; with `Sum()` the gradients equal the trainer's own. Import the one you need:
the trainers are optional packages.

    transformers.py     AlignedMixin for any Trainer, AlignedTrainer, AlignedSeq2SeqTrainer,
                        TaskCollator; MeasureConflicts, a callback for a plain Trainer
    accelerate.py       AcceleratedAligner: one line instead of accelerator.backward
    lightning.py        AlignedModule: a mixin for LightningModule
    _loss_parts.py      a trainer's own loss taken apart by the rows of the model's outputs
    _shared.py          what they refuse, record and log

Several processes train replicas (`DistributedDataParallel`) or shards (FSDP2); engines that
run the backward pass themselves (DeepSpeed) are refused by name.
"""

__all__: list[str] = []
