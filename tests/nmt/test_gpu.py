"""Translation on a GPU: packed attention in bf16, training and search."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gradvac.nmt import SIZES, Batch, NmtConfig, Transformer, Translator, train_translation
from gradvac.training import Display

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_packed_attention_equals_padded(random_batch: Callable[..., Batch]) -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    model = Transformer(SIZES["tiny"], 50, dropout=0.0).to(device)
    results = []
    for packed, half in ((False, False), (True, False), (True, True)):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            losses = model(random_batch(packed=packed).to(device))
        losses.sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        results.append((losses.detach().float(), torch.cat([g.flatten() for g in grads])))
    exact, packed_exact, packed_half = results
    torch.testing.assert_close(packed_exact, exact, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(packed_half, exact, strict=True):
        assert (ours - theirs).norm() < 0.03 * theirs.norm()


def test_trains_and_translates(
    toy_config: Callable[..., NmtConfig], tmp_path: Path, quiet: Display
) -> None:
    config = toy_config(
        train={"device": "cuda", "precision": "bf16", "max_steps": 400, "validate_every": 400},
        data={"limit": {}, "vocabulary": {"size": 400, "threads": 1}},
    )
    train_translation(config, tmp_path / "run", display=quiet)
    translator = Translator.from_run(tmp_path / "run", device="cuda")
    assert translator.translate(["ba de fi go", "ka le"], "yy") == ["AB ED IF OG", "AK EL"]
