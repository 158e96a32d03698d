"""Translation on a GPU: packed attention in bf16, training and search."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gradvac import Aligner, GradVac
from gradvac.lab.recipes.nmt import (
    SIZES,
    Batch,
    BeamSearch,
    NmtConfig,
    Ragged,
    Transformer,
    Translator,
    train_translation,
)
from gradvac.lab.recipes.nmt.batches import StaticShape
from gradvac.lab.recipes.nmt.loss import cross_entropy, plain_cross_entropy
from gradvac.lab.recipes.nmt.settings import DecodingConfig
from gradvac.lab.training import Display

from .. import needs
from .test_batches import filled_up

pytestmark = needs.GPU


@pytest.mark.parametrize("most", [256, 0], ids=["short", "long"])
def test_packed_attention_equals_padded(
    random_batch: Callable[..., Batch], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(
        "gradvac.lab.recipes.nmt.model._SHORT", most
    )  # 0: sentences of any length are long
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


def test_tasks_on_the_device_give_the_gradients_of_tasks_on_the_host() -> None:
    """There they are said to ascend instead of being sorted, and a task may be absent unseen."""
    device = torch.device("cuda")
    shape = StaticShape(source=120, target=96, rows=24, longest=11)
    found = []
    for batch in filled_up(shape):
        torch.manual_seed(0)
        model = Transformer(SIZES["tiny"], 50, dropout=0.0).to(device)
        names = ["a", "b", "c", "never"]
        aligner = Aligner(model, names, GradVac(target=0.3), engine="one_backward")
        batch = batch.to(device)
        for _ in range(2):
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                losses = model(batch)
            alignment = aligner.backward(losses / batch.num_tokens, batch.tasks)
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((batch.tasks.device.type, alignment, grads))
    (on_host, three, expected), (on_device, four, ours) = found
    assert (on_host, on_device) == ("cpu", "cuda")
    assert (len(three.tasks), len(four.tasks)) == (3, 4)
    assert not four.norms[:, 3].any()
    torch.testing.assert_close(four.similarity[:, :3, :3], three.similarity, rtol=0, atol=0.02)
    for name, gradient in expected.items():
        assert (ours[name] - gradient).norm() < 0.03 * gradient.norm() + 1e-4, name


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("kind", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_the_loss_of_kernels_is_the_plain_one(
    kind: torch.dtype, limit: float, smoothing: float
) -> None:
    """Also when the backward runs twice, as it does for every task of an engine without tricks."""
    torch.manual_seed(0)
    logits = torch.randn(60, 9001, device="cuda").mul(3).to(kind).requires_grad_()
    labels, starts = torch.randint(0, 9001, (60,), device="cuda"), torch.randn(60, device="cuda")
    losses = cross_entropy(logits, labels, smoothing)
    exact = logits.detach().double().requires_grad_()
    expected = plain_cross_entropy(exact, labels, smoothing)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad((expected * starts).sum(), exact)
    for _ in range(2):
        (found,) = torch.autograd.grad((losses * starts).sum(), logits, retain_graph=True)
        assert found.dtype == kind
        assert (found.double() - gradient).norm() < limit * gradient.norm()


@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_short_sentences(causal: bool) -> None:
    from gradvac.lab.recipes.nmt.triton_kernels import attend_short

    device, heads, width = torch.device("cuda"), 3, 32
    lengths = [1, 5, 32, 33, 70, 31, 64, 3, 0, 0]
    key_lengths = lengths if causal else [2, 40, 32, 1, 33, 65, 64, 3, 7, 0]
    ends, key_ends = ([0, *np.cumsum(side).tolist()] for side in (lengths, key_lengths))
    torch.manual_seed(0)
    query = torch.randn(ends[-1], 1, heads, width, device=device).bfloat16()
    memory = torch.randn(key_ends[-1], 2, heads, width, device=device).bfloat16()
    given = (torch.cat([query, memory], 1), None) if causal else (query, memory)
    inputs = [None if part is None else part.requires_grad_() for part in given]
    sides = (torch.tensor(side, dtype=torch.int32, device=device) for side in (ends, key_ends))
    ours = attend_short(inputs[0], inputs[1], *sides, causal=causal)

    exact = [None if part is None else part.detach().float().requires_grad_() for part in inputs]
    parts = torch.cat([part for part in exact if part is not None], 1) if causal else None
    q, k, v = parts.unbind(1) if parts is not None else (exact[0][:, 0], *exact[1].unbind(1))
    rows = [
        F.scaled_dot_product_attention(
            *(side[a:b].transpose(0, 1)[None] for side, a, b in ((q, *at), (k, *of), (v, *of))),
            is_causal=causal,
        )[0].transpose(0, 1)
        for at, of in zip(itertools.pairwise(ends), itertools.pairwise(key_ends), strict=True)
        if at[0] < at[1]
    ]
    expected = torch.cat(rows)
    incoming = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, [e for e in exact if e is not None], incoming)
    leaves = [part for part in inputs if part is not None]
    grads = torch.autograd.grad(ours, leaves, incoming.bfloat16())
    for found, want in zip((ours, *grads), (expected, *expected_grads), strict=True):
        assert (found.float() - want).norm() < 0.01 * want.norm()


@pytest.mark.parametrize("graph", [False, True])
def test_trains_and_translates(
    toy_config: Callable[..., NmtConfig],
    toy_folder: Path,
    tmp_path: Path,
    quiet: Display,
    graph: bool,
) -> None:
    config = toy_config(
        train={
            "device": "cuda",
            "precision": "bf16",
            "max_steps": 400,
            "validate_every": 200,
            "cuda_graph": graph,
        },
        validation={"bleu_sentences": 20},  # a search between two replayed steps
        data={"limit": {}, "vocabulary": {"size": 400, "threads": 1}},
        decoding={"beams": 2, "cuda_graph": graph},
    )
    train_translation(config, tmp_path / "run", display=quiet)
    translator = Translator.from_run(tmp_path / "run", device="cuda")
    sources, references = (
        (toy_folder / name).read_text(encoding="utf-8").splitlines()
        for name in ("test.en", "test.yy")
    )
    pairs = zip(translator.translate(sources, "yy"), references, strict=True)
    assert sum(ours == theirs for ours, theirs in pairs) > 0.8 * len(sources)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_graphs_and_refilled_slots_say_the_same(num_beams: int) -> None:
    torch.manual_seed(0)
    model = Transformer(SIZES["tiny"], 3000).eval()
    with torch.no_grad():
        model.embedding.weight.mul_(3.0)
    draw = np.random.default_rng(0)
    sources = Ragged.of([draw.integers(4, 3000, n) for n in draw.integers(2, 40, 150)])
    sources = sources.add_special_tokens(3, 2)
    limits = [int(limit) for limit in draw.integers(2, 60, 150)]
    forbidden = (0, 1, 3)
    settings = DecodingConfig(beams=num_beams)
    expected = BeamSearch(model, settings, forbidden).decode(sources, limits)
    on_gpu = model.cuda()
    for graphs, memory in ((False, None), (True, None), (True, 0.03)):
        settings = DecodingConfig(beams=num_beams, cuda_graph=graphs, memory=memory)
        search = BeamSearch(on_gpu, settings, forbidden)
        for _ in range(2):  # the second time graphs are there
            found = search.decode(sources, limits)
            same = [a.tokens == b.tokens for a, b in zip(found, expected, strict=True)]
            assert sum(same) >= 147  # float32 on two devices: a tie may break the other way
