"""Which settings differ between runs."""

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from gradvac.analysis.run import Run


def changed_settings(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Settings that are not the same in all runs: name, and the value in each run."""
    if len(runs) < 2:
        return []
    flat = [_flat(_parsed(run.settings)) for run in runs]
    names = dict.fromkeys(name for one in flat for name in one)
    rows = [(name, [one.get(name, "") for one in flat]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def repeats(runs: Sequence[Run]) -> list[list[int]]:
    """Positions of runs that differ by nothing but their seeds, where there are two or more."""
    by_settings: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for position, run in enumerate(runs):
        flat = _flat(_parsed(run.settings))
        key = tuple(sorted(item for item in flat.items() if item[0].split(".")[-1] != "seed"))
        if key:
            by_settings.setdefault(key, []).append(position)
    return [group for group in by_settings.values() if len(group) > 1]


def _parsed(settings: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(settings)
    except tomllib.TOMLDecodeError:
        return {}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = str(value)
    return flat
