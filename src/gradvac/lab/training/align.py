"""[align]: which rule combines the task gradients, in which components, by which engine.

The settings of the rules are the arguments of their classes (see `gradvac.rules`), read off there:
a rule that is added to `RULES` can be configured without any change here.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field, NonNegativeInt, create_model, field_validator, model_validator
from torch import nn

from gradvac import AdamMetric, Aligner, Alignment
from gradvac.alignment import whole_tasks
from gradvac.hints import nearest
from gradvac.lab.runs.files import hash_of
from gradvac.lab.training.config import Section
from gradvac.rules import (
    RULES,
    Halves,
    Only,
    Option,
    Rule,
    halves_of,
    options_of,
    rule_named,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ALL = "all"  # tasks
_MOST_SHOWN = 80  # characters of a setting in a signature
NONE = "none"  # no rule: plain autograd
_AROUND = ("only", "from_step", "until_step", "halves", "space")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class _Align(Section):
    """How task gradients are combined.

    Attributes:
        rule: The name of a [rule](guide.md#rules); "sum" is joint training whose task gradients
            are recorded, "none" joint training without them: plain autograd.
        granularity: Which parameters share a component.
        engine: How task gradients are obtained.
        recompute: one_backward: a second backward pass instead of stored task gradients.
        storage_dtype: per_task: dtype of the stored task gradients; unset: that of the parameters.
        offload: per_task: store task gradients in host memory.
        check: one_backward: verify now and then whose gradients are whose.
        seed: Seed of the random order; unset: `train.seed`.
        only: Patterns of the components in which the rule acts, such as ["encoder*"]; the others
            get the plain sum. Unset: it acts in all of them.
        from_step: The first step at which the rule acts; before it, the plain sum.
        until_step: The first step at which it no longer acts; unset: it acts to the end.
        halves: gradvac, pcgrad, control: measure lengths and similarities without the noise of the
            batch, from two halves of every task's rows.
        space: Where lengths and similarities are measured: among the task gradients, or after
            Adam's preconditioning has divided their entries by the roots of its second moments;
            the latter in a single process, and without `recompute`.
    """

    rule: str = "gradvac"
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
    halves: bool = False
    space: Literal["gradients", "preconditioned"] = "gradients"

    @classmethod
    def set_aside(cls, table: dict[str, Any], overridden: Iterable[str]) -> None:
        """Drop a file's settings of its own rule where an override chooses another one.

        Args:
            table: The section as read, with overrides in it; altered.
            overridden: Keys that overrides have set.
        """
        if "rule" in overridden:
            for key in _keys().keys() - _keys_of(str(table["rule"])).keys() - set(overridden):
                table.pop(key, None)

    @field_validator("rule")
    @classmethod
    def _is_known(cls, rule: str) -> str:
        if rule not in (*RULES, NONE):
            raise ValueError(f"got {rule!r}; {nearest(rule, (*RULES, NONE))}")
        return rule

    @model_validator(mode="after")
    def _no_contradiction(self) -> _Align:
        if self.engine == "per_task" and self.recompute:
            raise ValueError(
                'recompute = true needs engine "one_backward", but engine is "per_task"'
            )
        if self.space == "preconditioned" and self.recompute:
            raise ValueError(
                'space = "preconditioned" needs task gradients that are kept, but recompute is true'
            )
        if self.engine == "one_backward" and (self.storage_dtype or self.offload):
            option = "offload" if self.offload else "storage_dtype"
            raise ValueError(f'{option} needs engine "per_task", but engine is "one_backward"')
        keys = _keys_of(self.rule)
        ignored = [key for key in self._changed(_keys()) if key not in keys]
        if ignored:
            takes = ", ".join(keys) or "no settings"
            raise ValueError(
                f"{ignored[0]}: rule {self.rule!r} takes {takes}; leave this one out, or choose "
                "another rule"
            )
        if self.rule in RULES:
            self._check_rule(RULES[self.rule])
        elif around := self._changed(_AROUND):
            raise ValueError(f"{next(iter(around))}: there is no rule to limit; choose one")
        return self

    def _check_rule(self, rule: type[Rule]) -> None:
        """Let the rule itself refuse what it cannot take, before any data are read."""
        lists = dict.fromkeys(rule.task_options)  # resource levels are not known yet
        try:
            self._around(rule_named(self.rule, **(self._options(rule) | lists)))
        except ValueError as error:
            option, colon, reason = str(error).partition(": ")
            key = rule.config_keys.get(option, option)
            raise ValueError(f"{key}{colon}{reason}".removesuffix(".")) from None

    def describe_rule(self) -> str:
        """The rule with what differs from its defaults: "gradvac(beta=0.1,vaccinated=low)"."""
        changed = self._changed([*_keys_of(self.rule), *_AROUND])
        settings = [f"{key}={_short(value)}" for key, value in changed.items()]
        return f"{self.rule}({','.join(settings)})".replace(" ", "").removesuffix("()")

    def _changed(self, keys: Iterable[str]) -> dict[str, Any]:
        fields = type(self).model_fields
        defaults = {key: fields[key].get_default(call_default_factory=True) for key in keys}
        return {key: getattr(self, key) for key in keys if getattr(self, key) != defaults[key]}

    def _options(self, rule: type[Rule]) -> dict[str, Any]:
        """The rule's arguments, as set here."""
        return {option.name: getattr(self, key) for key, option in _keys(rule).items()}

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
        levels = dict(resource_levels or {})
        is_scaled = self.space == "preconditioned"
        if is_scaled and optimizer is None:
            raise ValueError('align.space: "preconditioned" needs the optimizer; give it to build.')
        return Aligner(
            model,
            halves_of(tasks) if self.halves else tasks,
            self.build_rule(tasks, levels, seed=seed),
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
        rule = RULES[self.rule]
        options = self._options(rule)
        for name in rule.task_options:
            options[name] = _by_task(name, options[name], tasks, levels)
        if "seed" in options_of(rule):
            options["seed"] = seed if self.seed is None else self.seed
        return self._around(rule_named(self.rule, **options))

    def _around(self, rule: Rule) -> Rule:
        """The rule, limited to where and when it acts, and given what it sees."""
        if self._changed(["only", "from_step", "until_step"]):
            rule = Only(rule, self.only, self.from_step, self.until_step)
        return Halves(rule) if self.halves else rule

    def by_task(self, alignment: Alignment) -> Alignment:
        """The alignment by task, where the aligner worked with halves of tasks."""
        return whole_tasks(alignment) if self.halves else alignment


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


def _keys_of(rule: str) -> dict[str, Option]:
    """Config key -> option of the rule of this name; empty for "none" and for unknown names."""
    return _keys(RULES[rule]) if rule in RULES else {}


def _keys(*rules: type[Rule]) -> dict[str, Option]:
    """Config key -> option of these rules, or of all."""
    return {
        rule.config_keys.get(name, name): option
        for rule in rules or RULES.values()
        for name, option in options_of(rule).items()
        if name != "seed"  # one for all rules, which defaults to that of training
    }


def _fields() -> dict[str, Any]:
    """Every setting of every rule, with its type and default in a config."""
    fields: dict[str, Any] = {}
    for rule in RULES.values():
        for key, option in _keys(rule).items():
            kind = _kind(option.kind)
            default: Any = option.default if isinstance(option.default, str | float | int) else None
            if option.name in rule.task_options:
                if typing.get_origin(kind) is dict:
                    default = {}
                else:
                    kind, default = str | list[str], ALL
            elif default is None:
                kind = kind | None
            if key in fields and fields[key][0] != kind:
                raise AssertionError(f"{key} means different things to {rule.name} and others")
            fields.setdefault(key, (kind, Field(default=default, description=_about(key))))
    return fields


def _about(key: str) -> str:
    """What the rules with this setting say about it."""
    rules = [rule for rule in RULES.values() if key in _keys(rule)]
    option = _keys(rules[0])[key]
    names = ", ".join(rule.name for rule in rules)
    levels = " Or resource levels, such as low." if option.name in rules[0].task_options else ""
    return f"{names}: {option.about.replace('None: ', 'unset: ')}{levels}"


def _kind(annotation: Any) -> Any:
    """The part of an annotation that a TOML file can express: numbers, strings, lists, tables."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        said = [kind for one in inner if (kind := _kind(one)) is not None]
        return said[0] if len(said) == 1 else typing.Union[tuple(said)]  # noqa: UP007
    if origin is not None and isinstance(origin, type):
        if issubclass(origin, Mapping):
            return types.GenericAlias(dict, inner)
        if issubclass(origin, Sequence):
            return types.GenericAlias(list, inner)
    return annotation if annotation in (bool, int, float, str) else None


def _document(fields: Mapping[str, Any]) -> str:
    entries = [f"    {key}: {field.description}" for key, (_, field) in fields.items()]
    return "\n".join([(_Align.__doc__ or "").rstrip(), *(f"    {line}" for line in entries), ""])


if TYPE_CHECKING:

    class AlignConfig(_Align):
        """[align]; the settings of rules are fields too, but only at run time."""

        def __init__(self, **settings: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

else:
    _FIELDS = _fields()
    AlignConfig = create_model(
        "AlignConfig", __base__=_Align, __module__=__name__, __doc__=_document(_FIELDS), **_FIELDS
    )
