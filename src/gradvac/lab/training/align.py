"""[align]: which rule combines the task gradients, in which components, by which engine.

Every rule of `gradvac.rules.RULES` has a class of its settings here; `AlignConfig` has them all as
keys of one section, and checks that those which are set go together. A rule that is not in `RULES`,
such as "studies/controls.py:Control", takes its arguments from `options`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeInt, field_validator, model_validator
from torch import nn

from gradvac import AdamMetric, Aligner
from gradvac.aligner import check_together
from gradvac.lab.training.config import Section
from gradvac.rules import RULES, Only, Rule, rule_class, rule_named
from gradvac.utils.files import hash_of
from gradvac.utils.hints import nearest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


ALL = "all"  # tasks
_MOST_SHOWN = 80  # characters of a setting in a signature
NONE = "none"  # no rule: plain autograd
_OPTIONS = "options"  # of rules that have no settings of their own here
_LIMITS = ("only", "from_step", "until_step")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class RuleConfig(Section):
    """The settings of one rule, which are arguments of its class.

    Class attributes:
        rule_name: The rule, as in `RULES`.
        arguments: Key -> argument, where they differ.
    """

    rule_name: ClassVar[str]
    arguments: ClassVar[Mapping[str, str]] = {}


class GradVacConfig(RuleConfig):
    """The rule `gradvac`.

    Attributes:
        beta: gradvac: Weight of the new similarity in the moving average, in [0, 1].
        target: gradvac: unset for the moving average; a number in [-1, 1] for a fixed target (the
            paper's fixed objective is 0.5).
        vaccinated: gradvac, pcgrad: Names of the tasks whose gradients are altered (the paper's set
            G), or resource levels, such as low.
        order: gradvac, pcgrad: "random", or "fixed" to visit the other tasks in task order.
        preserve_norm: gradvac: Rescale every altered gradient to its original length.
    """

    rule_name = "gradvac"

    beta: float = 1e-2
    target: float | None = None
    vaccinated: str | list[str] = ALL
    order: str = "random"
    preserve_norm: bool = False


class PCGradConfig(RuleConfig):
    """The rule `pcgrad`; both settings are those of `gradvac`."""

    rule_name = "pcgrad"

    vaccinated: str | list[str] = ALL
    order: str = "random"


class MGDAConfig(RuleConfig):
    """The rule `mgda`.

    Attributes:
        normalize: mgda: What each gradient is divided by before the weights are sought: "none",
            "l2" (its norm), "loss" (its loss), "loss+" (loss times norm).
    """

    rule_name = "mgda"

    normalize: str = "none"


class GradNormConfig(RuleConfig):
    """The rule `gradnorm`.

    Attributes:
        alpha: gradnorm: Strength of the pull towards equal training rates.
        weight_lr: gradnorm: Adam's step size for the weights.
        component: gradnorm: Name of the component whose norms are used; unset: the last one, in
            model order, that every present task reaches.
    """

    rule_name = "gradnorm"
    arguments = MappingProxyType({"weight_lr": "lr"})  # beside the optimizer's

    alpha: float = 1.5
    weight_lr: float = 0.025
    component: str | None = None


class SumConfig(RuleConfig):
    """The rule `sum`.

    Attributes:
        weights: sum: Task name or resource level -> weight; other tasks have weight 1.
    """

    rule_name = "sum"

    weights: dict[str, float] = Field(default_factory=dict)


class TorchJDConfig(RuleConfig):
    """The rule `torchjd`.

    Attributes:
        weighting: torchjd: The name of a weighting in `torchjd.aggregation`, such as "UPGrad" for
            `UPGradWeighting`.
        weighting_options: torchjd: Arguments of that weighting.
    """

    rule_name = "torchjd"
    arguments = MappingProxyType({"weighting_options": "options"})

    weighting: str | None = None
    weighting_options: dict[str, Any] | None = None


class AlignerConfig(Section):
    """How task gradients are obtained and combined, whatever the rule.

    Attributes:
        rule: The name of a [rule](guide.md#rules); "sum" is plain joint training whose task
            gradients are recorded, "none" the same without them: plain autograd. Or a rule of your
            own: "module:Class" or "file.py:Class".
        options: Arguments of a rule of your own.
        granularity: Which parameters share a component.
        engine: How task gradients are obtained.
        recompute: one_backward: a second backward pass instead of stored task gradients.
        storage_dtype: per_task: dtype of the stored task gradients; unset: that of the parameters.
        offload: per_task: store task gradients in host memory.
        check: one_backward: verify now and then which rows belong to which task.
        seed: Seed of the random order; unset: `train.seed`.
        only: Patterns of the components in which the rule acts, such as ["encoder*"]; the others
            get the plain sum. Unset: it acts in all of them.
        from_step: The first step at which the rule acts; before it, the plain sum.
        until_step: The first step at which it no longer acts; unset: it acts to the end.
        space: Where lengths and similarities are measured: among the task gradients, or after
            Adam's preconditioning has divided their entries by the roots of its second moments;
            the latter in a single process, and without `recompute`.
    """

    rule: str = "sum"
    options: dict[str, Any] = Field(default_factory=dict)
    granularity: Literal["whole_model", "enc_dec", "all_layer", "all_matrix"] = "all_layer"
    engine: Literal["auto", "one_backward", "per_task"] = "auto"
    recompute: bool = False
    storage_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    offload: bool = False
    check: bool = True
    seed: NonNegativeInt | None = None
    only: list[str] | None = None
    from_step: NonNegativeInt = 0
    until_step: NonNegativeInt | None = None
    space: Literal["gradients", "preconditioned"] = "gradients"

    @field_validator("rule")
    @classmethod
    def _is_known(cls, rule: str) -> str:
        if ":" in rule:
            try:
                rule_class(rule)
            except ValueError as error:
                raise ValueError(str(error).removeprefix("rule: ").removesuffix(".")) from None
        elif rule not in (*RULES, NONE):
            raise ValueError(f"got {rule!r}; {nearest(rule, (*RULES, NONE))}")
        return rule


class AlignConfig(  # pydantic lists the fields of the last base first
    TorchJDConfig,
    SumConfig,
    GradNormConfig,
    MGDAConfig,
    PCGradConfig,
    GradVacConfig,
    AlignerConfig,
):
    """How task gradients are combined."""

    @classmethod
    def set_aside(cls, table: dict[str, Any], overridden: Iterable[str]) -> None:
        """Drop a file's settings of its own rule where an override chooses another one.

        Args:
            table: The section as read, with overrides in it; altered.
            overridden: Keys that overrides have set.
        """
        if "rule" in overridden:
            for key in set(_ALL_KEYS) - set(_keys_of(str(table["rule"]))) - set(overridden):
                table.pop(key, None)

    @model_validator(mode="after")
    def _no_contradiction(self) -> AlignConfig:
        check_together(
            self.engine,
            recompute=self.recompute,
            has_storage=self.offload or self.storage_dtype is not None,
            has_metric=self.space == "preconditioned",
        )
        keys = _keys_of(self.rule)
        ignored = [key for key in self._changed(_ALL_KEYS) if key not in keys]
        if ignored:
            takes = ", ".join(keys) or "no settings"
            raise ValueError(
                f"{ignored[0]}: rule {self.rule!r} takes {takes}; leave this one out, or choose "
                "another rule"
            )
        if self.rule == NONE:
            if changed := self._changed((*_LIMITS, "space")):
                raise ValueError(f"{next(iter(changed))}: there is no rule to limit; choose one")
        else:
            self._check_rule()
        return self

    def _check_rule(self) -> None:
        """Let the rule itself refuse what it cannot take, before any data are read."""
        without_tasks = dict.fromkeys(rule_class(self.rule).task_options)  # levels: not known yet
        try:
            self._limited(rule_named(self.rule, **(self._arguments() | without_tasks)))
        except ValueError as error:
            argument, colon, reason = str(error).partition(": ")
            key = {of: key for key, of in _keys_of(self.rule).items()}.get(argument, argument)
            raise ValueError(f"{key}{colon}{reason}".removesuffix(".")) from None

    def describe_rule(self) -> str:
        """The rule with what differs from its defaults: "gradvac(beta=0.1,vaccinated=low)"."""
        changed = self._changed([*_keys_of(self.rule), *_LIMITS, "space"])
        changed |= changed.pop(_OPTIONS, {})
        settings = [f"{key}={_short(value)}" for key, value in changed.items()]
        return f"{self.rule}({','.join(settings)})".replace(" ", "").removesuffix("()")

    def _changed(self, keys: Iterable[str]) -> dict[str, Any]:
        fields = type(self).model_fields
        defaults = {key: fields[key].get_default(call_default_factory=True) for key in keys}
        return {key: getattr(self, key) for key in keys if getattr(self, key) != defaults[key]}

    def _arguments(self) -> dict[str, Any]:
        """The rule's arguments, as set here."""
        if self.rule in RULES:
            return {of: getattr(self, key) for key, of in _keys_of(self.rule).items()}
        return dict(self.options)

    def build(
        self,
        model: nn.Module,
        tasks: Sequence[str],
        resource_levels: Mapping[str, str] | None = None,
        *,
        seed: int = 0,
        process_group: ProcessGroup | Literal["auto"] | None = "auto",
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Aligner | None:
        """The aligner these settings describe; None for rule "none".

        Args:
            model: The model, on its device.
            tasks: Task names.
            resource_levels: Task -> level, for options that name tasks.
            seed: Used where the section has none.
            process_group: As in `Aligner`: the processes that train the model together.
            optimizer: The model's optimizer, whose moments `space = "preconditioned"` needs.
        """
        if self.rule == NONE:
            return None
        is_scaled = self.space == "preconditioned"
        if is_scaled and optimizer is None:
            raise ValueError('align.space: "preconditioned" needs the optimizer; give it to build.')
        return Aligner(
            model,
            tasks,
            self.build_rule(tasks, dict(resource_levels or {}), seed=seed),
            self.granularity,
            self.engine,
            recompute=self.recompute,
            storage_dtype=None if self.storage_dtype is None else _DTYPES[self.storage_dtype],
            offload=self.offload,
            check=self.check,
            process_group=process_group,
            metric=AdamMetric(optimizer) if is_scaled and optimizer is not None else None,
        )

    def build_rule(self, tasks: Sequence[str], levels: Mapping[str, str], *, seed: int) -> Rule:
        """The rule these settings describe; arguments as in `build`."""
        rule, arguments = rule_class(self.rule), self._arguments()
        for name in rule.task_options:
            if name in arguments:
                arguments[name] = _by_task(name, arguments[name], tasks, levels)
        if "seed" in inspect.signature(rule).parameters:
            arguments.setdefault("seed", seed if self.seed is None else self.seed)
        return self._limited(rule_named(self.rule, **arguments))

    def _limited(self, rule: Rule) -> Rule:
        """The rule, limited to where and when it acts."""
        if self._changed(_LIMITS):
            rule = Only(rule, self.only, self.from_step, self.until_step)
        return rule


_CONFIGS = {
    base.rule_name: base for base in reversed(AlignConfig.__bases__) if issubclass(base, RuleConfig)
}
_ALL_KEYS = dict.fromkeys(
    [key for one in _CONFIGS.values() for key in one.model_fields] + [_OPTIONS]
)


def _keys_of(rule: str) -> dict[str, str]:
    """Key -> argument, of the settings of a rule; empty for "none" and for unknown names."""
    if ":" in rule:
        return {_OPTIONS: _OPTIONS}
    if rule not in _CONFIGS:
        return {}
    config = _CONFIGS[rule]
    return {key: config.arguments.get(key, key) for key in config.model_fields}


def _short(value: Any) -> str:
    """A value as a signature shows it; a large table by its hash."""
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else hash_of(value)[:8]


def _by_task(key: str, value: Any, tasks: Sequence[str], levels: Mapping[str, str]) -> Any:
    """A list of tasks, or a value per task, from names that may be resource levels."""
    if isinstance(value, Mapping):
        by_level_first = sorted(value, key=lambda name: name in tasks)
        return {
            task: value[name]
            for name in by_level_first
            for task in _tasks_of(key, name, tasks, levels)
        }
    names = [value] if isinstance(value, str) else value
    if names is None or names == [ALL]:
        return None
    chosen = {task for name in names for task in _tasks_of(key, name, tasks, levels)}
    return [task for task in tasks if task in chosen]


def _tasks_of(key: str, name: str, tasks: Sequence[str], levels: Mapping[str, str]) -> list[str]:
    """A task name, or the tasks of a resource level."""
    if name in tasks:
        return [name]
    of_level = [task for task in tasks if levels.get(task) == name]
    if not of_level:
        level_names = ", ".join(dict.fromkeys(levels.values())) or "none"
        raise ValueError(
            f"align.{key}: {name!r} is neither a task ({', '.join(tasks)}) nor a resource level "
            f"of one ({level_names})."
        )
    return of_level
