"""[align]: which rule combines the task gradients, in which components, by which engine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator
from torch import nn

from gradvac import MGDA, Aligner, GradNorm, GradVac, PCGrad, Sum
from gradvac.rules import Rule
from gradvac.training.config import Section

_USED_BY = {
    "gradvac": ("beta", "target", "vaccinated", "order", "preserve_norm"),
    "pcgrad": ("vaccinated", "order"),
    "mgda": ("normalize",),
    "gradnorm": ("alpha", "weight_lr", "component"),
    "sum": ("weights",),
    "none": (),
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class AlignConfig(Section):
    """How task gradients are combined; the rules' own documentation explains their settings.

    Attributes:
        rule: "gradvac", "pcgrad", "mgda", "gradnorm"; "sum" for joint training whose task gradients
            are recorded, "none" for joint training without them: plain autograd.
        beta: gradvac: weight of the new similarity in the moving average.
        target: gradvac: a fixed target instead of the moving average.
        vaccinated: gradvac, pcgrad: "all", a resource level such as "low", or a list of tasks and
            levels.
        order: gradvac, pcgrad: in which order a task visits the others.
        preserve_norm: gradvac: give altered gradients their former length back.
        normalize: mgda: what gradients are divided by before the weights are sought.
        alpha: gradnorm: strength of the pull towards equal training rates.
        weight_lr: gradnorm: step size of the learned weights.
        component: gradnorm: the component whose norms count; unset: the last shared one.
        weights: sum: weight by task or by resource level; 1 for the others. A task's own entry
            goes before its level's.
        granularity: Which parameters share a component.
        engine: How task gradients are obtained.
        recompute: one_backward: a second backward pass instead of stored task gradients.
        storage_dtype: per_task: dtype of the stored task gradients; unset: that of the parameters.
        offload: per_task: store task gradients in host memory.
        check: one_backward: compare with plain autograd on the first batch.
        seed: Of the random order; unset: `train.seed`.
    """

    rule: Literal["gradvac", "pcgrad", "mgda", "gradnorm", "sum", "none"] = "gradvac"
    beta: Annotated[float, Field(ge=0, le=1)] = 1e-2
    target: Annotated[float, Field(ge=-1, le=1)] | None = None
    vaccinated: str | list[str] = "all"
    order: Literal["random", "fixed"] = "random"
    preserve_norm: bool = False
    normalize: Literal["none", "l2", "loss", "loss+"] = "none"
    alpha: float = 1.5
    weight_lr: PositiveFloat = 0.025
    component: str | None = None
    weights: dict[str, float] = Field(default_factory=dict)
    granularity: Literal["whole_model", "enc_dec", "all_layer", "all_matrix"] = "all_layer"
    engine: Literal["auto", "one_backward", "per_task"] = "auto"
    recompute: bool = False
    storage_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    offload: bool = False
    check: bool = True
    seed: NonNegativeInt | None = None

    @model_validator(mode="after")
    def _no_contradiction(self) -> "AlignConfig":
        if self.engine == "per_task" and self.recompute:
            raise ValueError(
                'recompute = true is of engine "one_backward", but engine is "per_task"'
            )
        if self.engine == "one_backward" and (self.storage_dtype or self.offload):
            option = "offload" if self.offload else "storage_dtype"
            raise ValueError(f'{option} is of engine "per_task", but engine is "one_backward"')
        return self

    def describe_rule(self) -> str:
        """The rule with what differs from its defaults: "gradvac(beta=0.1,vaccinated=low)"."""
        own = [f"{key}={value}" for key, value in self._changed(_USED_BY[self.rule]).items()]
        return f"{self.rule}({','.join(own)})".replace(" ", "").removesuffix("()")

    def unused(self) -> list[str]:
        """Settings that were changed, but mean nothing to the chosen rule."""
        own = _USED_BY[self.rule]
        others = dict.fromkeys(key for keys in _USED_BY.values() for key in keys if key not in own)
        ignored = list(self._changed(others))
        if self.rule == "gradvac" and self.target is not None:  # fixed: nothing is averaged
            ignored += self._changed(["beta"])
        return ignored

    def _changed(self, keys: Iterable[str]) -> dict[str, Any]:
        default = type(self)()
        return {
            key: getattr(self, key) for key in keys if getattr(self, key) != getattr(default, key)
        }

    def build(
        self,
        model: nn.Module,
        tasks: Sequence[str],
        resource_levels: Mapping[str, str] | None = None,
        *,
        seed: int = 0,
    ) -> Aligner | None:
        """The aligner these settings describe; None for rule "none".

        Args:
            model: The model, on its device.
            tasks: Task names.
            resource_levels: Task -> level, for `vaccinated` and `weights`.
            seed: Used where the section has none.
        """
        if self.rule == "none":
            return None
        levels = dict(resource_levels or {})
        return Aligner(
            model,
            tasks,
            self._build_rule(tasks, levels, seed if self.seed is None else self.seed),
            self.granularity,
            self.engine,
            recompute=self.recompute,
            storage_dtype=None if self.storage_dtype is None else _DTYPES[self.storage_dtype],
            offload=self.offload,
            check=self.check,
        )

    def _build_rule(self, tasks: Sequence[str], levels: Mapping[str, str], seed: int) -> Rule:
        def vaccinated() -> list[str] | None:
            names = [self.vaccinated] if isinstance(self.vaccinated, str) else self.vaccinated
            if names == ["all"]:
                return None
            chosen = {t for name in names for t in _resolve("vaccinated", name, tasks, levels)}
            return [task for task in tasks if task in chosen]

        def weights() -> dict[str, float]:
            by_level_first = sorted(self.weights, key=lambda name: name in tasks)
            return {
                task: self.weights[name]
                for name in by_level_first
                for task in _resolve("weights", name, tasks, levels)
            }

        rules: dict[str, Callable[[], Rule]] = {
            "gradvac": lambda: GradVac(
                self.beta, self.target, vaccinated(), self.order, seed, self.preserve_norm
            ),
            "pcgrad": lambda: PCGrad(vaccinated(), self.order, seed),
            "mgda": lambda: MGDA(self.normalize),
            "gradnorm": lambda: GradNorm(self.alpha, self.weight_lr, self.component),
            "sum": lambda: Sum(weights()),
        }
        return rules[self.rule]()


def _resolve(key: str, name: str, tasks: Sequence[str], levels: Mapping[str, str]) -> list[str]:
    """A task name, or the tasks of a resource level."""
    if name in tasks:
        return [name]
    found = [task for task in tasks if levels.get(task) == name]
    if not found:
        known = ", ".join(dict.fromkeys(levels.values())) or "none"
        raise ValueError(
            f"align.{key}: {name!r} is neither a task ({', '.join(tasks)}) nor a resource level "
            f"of one ({known})."
        )
    return found
