"""What a number depends on, in one line, as sacreBLEU does for scores."""

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gradvac import Aligner
from gradvac.lab.training import config
from gradvac.lab.training.settings import EXTENSIBLE, TECHNICAL, RunConfig


@dataclass(frozen=True)
class Signature:
    """Everything that determines the weights of a run.

    `str()` gives the line that goes with every score; two runs with the same line on the same kind
    of device are repetitions of each other.
    """

    fields: Mapping[str, str]

    @classmethod
    def of(
        cls,
        settings: RunConfig,
        aligner: Aligner | None,
        *,
        tasks: Sequence[str],
        data: str,
        device: torch.device,
        num_processes: int = 1,
    ) -> "Signature":
        """The signature of a run.

        Args:
            settings: All settings.
            aligner: Knows the engine that is in use; None for rule "none".
            tasks: Task names.
            data: The recipe's `data_signature()`.
            device: Where it runs.
            num_processes: How many train together, on a device of this kind each.
        """
        several = f"{num_processes}x" if num_processes > 1 else ""
        return cls(
            {
                "rule": settings.align.describe_rule(),
                "granularity": settings.align.granularity,
                "engine": "none" if aligner is None else aligner.engine,
                "tasks": str(len(tasks)),
                "seed": str(settings.train.seed),
                "precision": settings.train.precision,
                "config": config_hash(settings),
                "data": short_hash(data),
                "device": f"{several}{_device_name(device)}",
                "torch": torch.__version__,
                "version": importlib.metadata.version("gradvac"),
            }
        )

    def to_dict(self) -> dict[str, str]:
        """The fields by name."""
        return dict(self.fields)

    def __str__(self) -> str:
        return "|".join(f"{name}:{value}" for name, value in self.fields.items())


def config_hash(settings: RunConfig) -> str:
    """Hash of all settings except technical ones, such as the device."""
    return _hash_without(settings, TECHNICAL)


def weights_hash(settings: RunConfig) -> str:
    """Hash of the settings that determine the weights of a given step."""
    return _hash_without(settings, (*TECHNICAL, *EXTENSIBLE))


def _hash_without(settings: RunConfig, keys: Sequence[str]) -> str:
    default = type(settings.train)()
    train = settings.train.model_copy(update={key: getattr(default, key) for key in keys})
    return short_hash(config.dump(settings.model_copy(update={"train": train})))


def short_hash(text: str) -> str:
    """Eight hex digits that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device).replace(" ", "-")
    return f"{device.type}-{platform.machine()}"
