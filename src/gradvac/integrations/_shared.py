"""What the integrations share: what they refuse, what they record and log."""

from __future__ import annotations

import json
import math
import os
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gradvac import Aligner, Alignment
from gradvac.analysis import Recorder, step_values
from gradvac.analysis.run_files import RunFiles
from gradvac.sampling import TaskBatchSampler
from gradvac.utils.files import write_text

_REPLICAS = ("NO", "MULTI_CPU", "MULTI_GPU")
_REASONS = {
    "DEEPSPEED": (
        "DeepSpeed (ZeRO) runs the backward pass in its own engine and divides gradients as they "
        "come, so that nobody sees a task's gradient; use FSDP2, which divides a model as ZeRO 3 "
        "does, or DistributedDataParallel"
    ),
    "FSDP": (
        "the first FSDP flattens parameters and exchanges gradients in its own backward pass; use "
        "the second: fsdp_version 2"
    ),
}


def check_backend(kind: str, argument: str, *, is_fsdp2: bool = False) -> None:
    """Raise for engines that run the backward pass themselves.

    Args:
        kind: Accelerate's word for how processes train together.
        argument: Where the user chose it.
        is_fsdp2: Whether its FSDP is the second.
    """
    if kind not in _REPLICAS and not (kind == "FSDP" and is_fsdp2):
        reason = _REASONS.get(
            kind, f"{kind} runs the backward pass itself; use DistributedDataParallel or FSDP2"
        )
        raise ValueError(f"{argument}: {reason}.")


def has_fsdp2(accelerator: Any) -> bool:
    """Whether Accelerate divides models by FSDP2."""
    return getattr(getattr(accelerator.state, "fsdp_plugin", None), "fsdp_version", 1) == 2


def check_processes(aligner: Aligner, num_processes: int, argument: str) -> None:
    """Raise before replicas drift apart; `argument` is where the aligner comes from."""
    if aligner.num_processes != num_processes:
        raise ValueError(
            f"{argument}: {num_processes} processes train, but the aligner knows of "
            f"{aligner.num_processes}, so replicas would drift apart; give Aligner the model "
            "in DistributedDataParallel, or process_group=torch.distributed.group.WORLD."
        )


def unscaled(alignment: Alignment, scale: Tensor | None) -> Alignment:
    """What a step would have said without loss scaling (None: it had none)."""
    if scale is None:
        return alignment
    gram = alignment.gram / scale.to(alignment.gram).square()
    return replace(alignment, gram=gram, losses=alignment.losses / scale.to(alignment.losses))


def log_values(alignment: Alignment) -> dict[str, float]:
    """What a step's entry in a trainer's log says of it: "gradvac/similarity" and so on."""
    return {f"gradvac/{name}": value for name, value in step_values(alignment).items()}


def sampler_of(loader: Any) -> TaskBatchSampler | None:
    """The sampler over tasks inside a loader, whatever has been put around it."""
    inner = getattr(loader, "batch_sampler", None)
    while inner is not None and not isinstance(inner, TaskBatchSampler):
        inner = getattr(inner, "batch_sampler", None)
    return inner


class RunRecord:
    """The folder that `gradvac report` reads: what steps did, and what was logged.

    Args:
        folder: The folder; made if it does not exist.
        aligner: Whose steps they are.
        every: Steps between records.
        is_first: Whether this is the first of several processes, which alone writes.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        aligner: Aligner,
        *,
        every: int = 10,
        is_first: bool = True,
    ) -> None:
        self._files, self._every, self._is_first = RunFiles(Path(folder)), every, is_first
        self._aligner = aligner
        self._recorder: Recorder | None = None

    def __call__(self, step: int, alignment: Alignment) -> None:
        """Keep a step, counted from 1, if it is due; the first call says where training goes on."""
        if not self._is_first:
            return
        if self._recorder is None:
            self._recorder = self._open(step - 1)
        self._recorder(step, alignment)

    def _open(self, after: int) -> Recorder:
        """Continue after a step: what an earlier training wrote of later ones is removed."""
        self._files.path.mkdir(parents=True, exist_ok=True)
        entries = [one for one in self._files.read_metrics() if one["step"] <= after]
        write_text(self._files.metrics, "".join(json.dumps(one) + "\n" for one in entries))
        vaccinated = getattr(self._aligner.rule, "vaccinated", None)
        recorder = Recorder(
            self._files.record,
            every=self._every,
            tasks=self._aligner.tasks,
            rule=type(self._aligner.rule).__name__,
            vaccinated=self._aligner.tasks if vaccinated is None else vaccinated,
            after=after,
        )
        weakref.finalize(self, recorder.close)  # where nobody says that training has ended
        return recorder

    def log_step(self, step: int, alignment: Alignment, values: Mapping[str, float]) -> None:
        """Append what `log_values` says of a step, and its loss."""
        entry = {name.replace("gradvac/", "train/"): value for name, value in values.items()}
        self.log(step, {"train/loss": float(alignment.losses.sum()), **entry})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append an entry of the log: `{"train/loss": ...}`."""
        if self._recorder is None:
            return
        plain = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with self._files.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **plain}) + "\n")

    def flush(self) -> None:
        """Write everything that was kept."""
        if self._recorder is not None:
            self._recorder.flush()
