"""The Transformer: shapes, masks, and one result by every road."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradvac import Aligner, GradVac
from gradvac.lab.recipes.nmt import SIZES, Batch, Ragged, Transformer, make_batch
from gradvac.lab.recipes.nmt.model import Norm
from gradvac.lab.recipes.nmt.settings import ModelConfig

Build = Callable[..., Any]


def losses_and_gradients(model: Transformer, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    losses = model(batch)
    losses.sum().backward()
    return losses.detach(), gradients(model)


def gradients(model: Transformer) -> torch.Tensor:
    found = [p.grad for p in model.parameters()]
    assert all(grad is not None for grad in found)
    return torch.cat([grad.flatten() for grad in found if grad is not None])


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("equal", [True, False])
def test_packed_equals_padded(
    tiny_model: Build, random_batch: Build, norm_first: bool, equal: bool
) -> None:
    results = [
        losses_and_gradients(
            tiny_model(norm_first=norm_first), random_batch(packed=packed, equal=equal)
        )
        for packed in (False, True)
    ]
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


def test_a_sentence_alone_equals_the_sentence_in_a_batch(
    tiny_model: Build, random_batch: Build
) -> None:
    model, batch = tiny_model(), random_batch(packed=False)
    together = model(batch)
    source, target = batch.source, batch.target
    for row in range(len(batch)):
        own = batch.labels[batch.sentence_of_label == row].numpy()
        length = int(source.ends[row + 1] - source.ends[row])
        alone = make_batch(
            Ragged.of([source.tokens[row, :length].numpy()]),
            Ragged.of([np.concatenate([target.tokens[row, :1].numpy(), own])]),
            [0],
        )
        torch.testing.assert_close(model(alone)[0], together[row], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("packed", [True, False])
def test_the_model_says_whose_rows_are_whose(
    tiny_model: Build, random_batch: Build, packed: bool
) -> None:
    model, batch = tiny_model(), random_batch(packed=packed)
    aligner = Aligner(model, ["aa", "bb", "cc"], engine="one_backward")
    aligner.backward(model(batch), batch.tasks)
    assert re.search(
        r"\(one_backward: declared by gradvac.rows \((\d+) of \1 places", repr(aligner)
    )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("engine", ["one_backward", "per_task"])
def test_task_gradients_by_either_engine_and_layout(
    tiny_model: Build, random_batch: Build, packed: bool, engine: str
) -> None:
    def vaccinate(packed: bool, engine: str) -> torch.Tensor:
        model = tiny_model(logits_per_chunk=50 * 7)
        rule = GradVac(target=0.9, order="fixed")
        aligner = Aligner(model, ["aa", "bb", "cc"], rule=rule, engine=engine)
        batch = random_batch(packed=packed)
        aligner.backward(model(batch), batch.tasks)
        return gradients(model)

    expected = vaccinate(False, "per_task")
    torch.testing.assert_close(vaccinate(packed, engine), expected, rtol=1e-9, atol=1e-12)
    plain = losses_and_gradients(tiny_model(), random_batch(packed=False))[1]
    assert not torch.allclose(expected, plain, rtol=1e-3)  # vaccination did something


@pytest.mark.parametrize("labels_per_chunk", [1, 7, 1000])
def test_chunked_loss_equals_the_whole(
    tiny_model: Build, random_batch: Build, labels_per_chunk: int
) -> None:
    whole = losses_and_gradients(tiny_model(), random_batch(packed=False))
    chunked = losses_and_gradients(
        tiny_model(logits_per_chunk=50 * labels_per_chunk), random_batch(packed=False)
    )
    torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=1e-12)


def test_chunks_keep_all_logits_out_of_memory(tiny_model: Build, random_batch: Build) -> None:
    batch = random_batch(packed=True)

    def largest_saved(labels_per_chunk: int) -> int:
        model = tiny_model(500, logits_per_chunk=500 * labels_per_chunk)
        sizes: list[int] = []

        def remember(saved: torch.Tensor) -> torch.Tensor:
            if saved.data_ptr() != model.head.weight.data_ptr():
                sizes.append(saved.numel())
            return saved

        with torch.autograd.graph.saved_tensors_hooks(remember, lambda saved: saved):
            model(batch)
        return max(sizes)

    assert largest_saved(1000) == len(batch.labels) * 500
    assert largest_saved(7) < len(batch.labels) * 100


def test_label_smoothing_is_for_training_only(tiny_model: Build, random_batch: Build) -> None:
    model, batch = tiny_model(label_smoothing=0.1), random_batch(packed=False)
    logits = model.head(model.decode(batch.target, model.encode(batch.source), batch.source))
    chances = logits.log_softmax(-1)
    truth = chances.gather(1, batch.labels[:, None]).squeeze(1)
    smooth = 0.9 * truth + 0.1 * chances.mean(1)
    model.train()
    torch.testing.assert_close(model(batch).sum(), -smooth.sum())
    model.eval()
    torch.testing.assert_close(model(batch).sum(), -truth.sum())


@pytest.mark.parametrize("packed", [True, False])
def test_no_label_sees_itself_or_what_follows(
    tiny_model: Build, random_batch: Build, packed: bool
) -> None:
    model, batch = tiny_model(), random_batch(packed=packed, equal=True)

    def state_before(label: int, tokens: torch.Tensor) -> torch.Tensor:
        changed = batch.target.tokens.flatten().clone()
        changed[label + 1] = tokens
        side = batch.target
        target = replace(side, tokens=changed.view(side.tokens.shape))
        return model.decode(target, model.encode(batch.source), batch.source)[: label + 1]

    with torch.no_grad():
        first = state_before(3, torch.tensor(11))
        assert torch.equal(first, state_before(3, torch.tensor(12)))
        everything = model.decode(batch.target, model.encode(batch.source), batch.source)
    assert everything.shape == (len(batch.labels), 16)


def test_sentences_do_not_see_each_other(tiny_model: Build, random_batch: Build) -> None:
    for packed in (True, False):
        model, batch = tiny_model(), random_batch(packed=packed)
        states = model.embedding(batch.source.tokens).detach().requires_grad_()
        seen = model.encoder(states, batch.source)
        first = slice(0, int(batch.source.ends[1])) if packed else 0
        # Not their plain sum: after the last normalisation, that hardly depends on anything.
        (gradient,) = torch.autograd.grad(seen[first].pow(3).sum(), states)
        assert gradient[first].abs().sum() > 1e-3
        gradient[first] = 0
        assert gradient.abs().sum() == 0


@pytest.mark.parametrize(("name", "millions"), [("base", 77), ("big", 343)])
def test_paper_sizes_with_64k_pieces(name: str, millions: int) -> None:
    with torch.device("meta"):
        model = Transformer(SIZES[name], 64_000)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


def test_softmax_and_both_embeddings_are_one_matrix(tiny_model: Build) -> None:
    model = tiny_model()
    assert model.head.weight is model.embedding.weight
    assert [n for n, p in model.named_parameters() if p.shape == (50, 16)] == ["embedding.weight"]


def test_dropout_is_for_training_only(tiny_model: Build, random_batch: Build) -> None:
    model, batch = tiny_model(dropout=0.5), random_batch(packed=False)
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))


def test_positions_reach_any_length(tiny_model: Build) -> None:
    model = tiny_model()
    long = make_batch(
        Ragged.of([np.full(700, 5)]), Ragged.of([np.full(600, 6)]).add_special_tokens(1, 2), [0]
    )
    assert model(long).isfinite().all()


def test_single_numbers_of_a_size_can_be_replaced() -> None:
    size = ModelConfig(size="base", decoder_layers=2, width=256).dimensions()
    assert size == SIZES["base"]._replace(decoder_layers=2, width=256)
    with pytest.raises(ValueError, match=r"width = 100 .*heads = 16"):
        ModelConfig(size="base", width=100)


def test_a_norm_keeps_the_type_of_its_input() -> None:
    """So that states stay in 16 bits under autocast, while its own weights do not."""
    torch.manual_seed(0)
    norm = Norm(64)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(50, 64)
    start = torch.randn(50, 64)
    found = []
    for half in (False, True):
        own = x.bfloat16() if half else x.clone()
        own.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            normal = norm(own)
        assert normal.dtype == own.dtype
        parts = (own, norm.weight, norm.bias)
        found.append((normal, *torch.autograd.grad(normal, parts, start.to(normal.dtype))))
    assert [part.dtype for part in found[1][2:]] == [torch.float32] * 2
    for exact, half in zip(*found, strict=True):
        assert (half - exact).norm() < 0.01 * exact.norm()
