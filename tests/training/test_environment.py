"""Device, random state, precision, threads and signals."""

from __future__ import annotations

import random
import signal
import threading

import numpy as np
import pytest
import torch

from gradvac.lab.training import choose_device, seed_everything
from gradvac.lab.training.environment import (
    StopSignals,
    any_shape_attention,
    around_forward,
    random_state,
    restore_random_state,
    untouched_random_state,
)


def draw() -> list[float]:
    values = [random.random(), random.gauss(0, 1), np.random.random(), np.random.normal()]
    return [*values, float(torch.rand(())), float(torch.randn(()))]


def test_seed_covers_all_generators() -> None:
    seed_everything(5)
    first = draw()
    seed_everything(5)
    assert draw() == first
    seed_everything(6)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_random_state_is_restored_everywhere() -> None:
    draw()  # leaves half a pair in the Gaussian generators
    state = random_state()
    first = draw()
    restore_random_state(state)
    assert draw() == first
    with untouched_random_state():
        draw()
    second = draw()
    restore_random_state(state)
    draw()
    assert draw() == second


def test_random_state_is_restored_after_an_error() -> None:
    seed_everything(1)
    first = draw()
    seed_everything(1)

    def draw_and_fail() -> None:
        with untouched_random_state():
            draw()
            raise KeyError

    with pytest.raises(KeyError):
        draw_and_fail()
    assert draw() == first


def test_auto_is_a_device_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == torch.device("cuda")


def test_missing_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ValueError, match=r"device: 'cuda:1' .* 1 GPU"):
        choose_device("cuda:1")


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGTERM)
    entered = []

    def run() -> None:
        with StopSignals() as signals:
            entered.append(signals.received)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert entered == [None]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_stop_is_noted_once_and_then_acts_as_before(name: str) -> None:
    number, seen = getattr(signal, name), []
    before = signal.signal(number, lambda *_: seen.append(name))
    try:
        with StopSignals() as signals:
            signal.raise_signal(number)
            assert (signals.received, seen) == (name, [])
            signal.raise_signal(number)
            assert seen == [name]
    finally:
        signal.signal(number, before)


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


CPU, GPU = torch.device("cpu"), torch.device("cuda")


def enabled() -> tuple[bool, bool, bool, bool]:
    """Kinds of attention: cuDNN's, the one without masks, the one with masks, the plain one."""
    of = torch.backends.cuda
    return (
        of.cudnn_sdp_enabled(),
        of.flash_sdp_enabled(),
        of.mem_efficient_sdp_enabled(),
        of.math_sdp_enabled(),
    )


@pytest.mark.parametrize(("precision", "is_on"), [("bf16", True), ("fp32", False)])
def test_autocast_is_on_for_bf16(precision: str, is_on: bool) -> None:
    with around_forward(precision, CPU):
        assert torch.is_autocast_enabled("cpu") is is_on
    assert not torch.is_autocast_enabled("cpu")


def test_attention_on_a_gpu_neither_plans_for_a_shape_nor_depends_on_a_mask() -> None:
    before = enabled()
    with any_shape_attention(GPU):
        assert enabled() == (False, False, True, True)
    with any_shape_attention(CPU):
        assert enabled() == before
    assert enabled() == before


def test_a_mask_that_hides_nothing_makes_no_other_graph() -> None:
    """So a step that is recorded with a mask is the one that was verified without."""

    def node(mask: torch.Tensor | None) -> object:
        query, key, value = torch.empty(3, 2, 2, 8, 16, device="meta", requires_grad=True)
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, True
        )[0].grad_fn

    with_mask, without = node(torch.empty(2, 2, 8, 8, device="meta")), node(None)
    assert type(with_mask) is type(without)
    shown = [[child is None for child, _ in n.next_functions] for n in (with_mask, without)]
    assert shown[0] == shown[1] == [False, False, False, True]
