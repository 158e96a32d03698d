"""What surrounds forward passes."""

import pytest
import torch

from gradvac.training.forward import any_shape_attention, around_forward

CPU = torch.device("cpu")


@pytest.mark.parametrize(("precision", "is_on"), [("bf16", True), ("fp32", False)])
def test_autocast_is_on_for_bf16(precision: str, is_on: bool) -> None:
    with around_forward(precision, CPU):
        assert torch.is_autocast_enabled("cpu") is is_on
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_only_attention_that_plans_for_a_shape_is_left_out() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with any_shape_attention():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
        assert torch.backends.cuda.math_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() is before
