"""Device, seeds and random state."""

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
    with pytest.raises(ValueError, match=r"device: 'cuda:1' .* 1 GPU\(s\) were found"):
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
