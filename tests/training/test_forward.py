"""What surrounds forward passes."""

import pytest
import torch

from gradvac.lab.training.environment import any_shape_attention, around_forward

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
