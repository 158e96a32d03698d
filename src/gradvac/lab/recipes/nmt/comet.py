"""COMET, by its own command `comet-score`.

The package cannot stand beside ours: `unbabel-comet` 2.2 wants numpy below 2 and transformers below
5. So its command runs as a process, from whatever environment has it: `pipx install unbabel-comet`
puts it where it is found.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

_COMMAND = "comet-score"
_TAIL = 500  # characters of what the command said before it failed
Scores = NDArray[np.float64]


class Text(NamedTuple):
    """What COMET reads of a task, line by line."""

    sources: Sequence[str]
    lines: Sequence[str]
    references: Sequence[str]


def open_comet(
    model: str, device: torch.device
) -> Callable[[Mapping[str, Text]], dict[str, Scores]]:
    """A function that scores the sentences of all tasks, with the model loaded once: task -> `[N]`.

    Args:
        model: A name on the hub, such as "Unbabel/wmt22-comet-da", or a file `.ckpt`.
        device: Where to run it.

    Raises:
        ValueError: COMET is not installed, or there is no such file.
    """
    command = shutil.which(_COMMAND)
    if command is None:
        raise ValueError(
            f"comet: there is no {_COMMAND} here; `pipx install unbabel-comet`, or pip in another "
            "environment, with its bin folder in PATH: it cannot stand beside gradvac."
        )
    if model.endswith(".ckpt") and not Path(model).is_file():
        raise ValueError(f"comet: there is no file {model}.")
    gpus = "1" if device.type == "cuda" else "0"

    def score(texts: Mapping[str, Text]) -> dict[str, Scores]:
        with TemporaryDirectory() as folder:
            place = Path(folder)
            for name in Text._fields:
                lines = [line for text in texts.values() for line in getattr(text, name)]
                # A carriage return would end a line there.
                written = "".join(line.replace("\r", " ") + "\n" for line in lines)
                (place / name).write_text(written, encoding="utf-8")
            files = [f"-s={place / 'sources'}", f"-t={place / 'lines'}"]
            files += [f"-r={place / 'references'}", f"--to_json={place / 'scores.json'}"]
            options = [f"--model={model}", f"--gpus={gpus}", "--quiet", "--only_system"]
            _run([command, *files, *options])
            read = json.loads((place / "scores.json").read_bytes())
        scores = np.array([one["COMET"] for one in next(iter(read.values()))], dtype=np.float64)
        lengths = [len(text.lines) for text in texts.values()]
        if len(scores) != sum(lengths) or not np.isfinite(scores).all():
            raise ValueError(
                f"comet: {model} scored {int(np.isfinite(scores).sum()):,} of {sum(lengths):,} "
                "sentences."
            )
        return dict(zip(texts, np.split(scores, np.cumsum(lengths)[:-1]), strict=True))

    return score


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-_TAIL:]
        raise ValueError(f"comet: {_COMMAND} failed with code {done.returncode}: {said}")
