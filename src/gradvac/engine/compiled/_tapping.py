"""A Dynamo backend, `torch.compile(model, backend="gradvac")`, that leaves parameters outside.

The graph that Dynamo found is split in two. *Outside*, run as written in every step, is what is
made of parameters alone: taps (`_taps.py`) for weights and tables, scales and shifts expanded to
the rows they serve, a table of positions looked up for all rows. *Inside*, compiled by Inductor,
is the rest. The autograd graph then shows every use of a parameter as a node of its own.

A use without a rule below stays as it is: the region is then a junction, exact and slow.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.node import map_arg

from gradvac.engine.compiled._regions import Region
from gradvac.engine.compiled._split import CannotTap, Rule, Split, fake_of, name_of
from gradvac.engine.compiled._taps import (
    TOKENS,
    lookup_tap,
    product_tap,
    tapped_lookup,
    tapped_product,
)
from gradvac.models import allow_second_passes

Compile = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def compile_tapped(
    graph_module: fx.GraphModule,
    examples: list[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's; `mode` and `options` are those of torch.compile for Inductor.

    Raises:
        ValueError: CUDA graphs of the region alone were asked for: they write over what the region
            handed out before.
    """
    from torch import _inductor as inductor
    from torch._inductor.compile_fx import compile_fx

    patches = dict(inductor.list_mode_options(mode)) if mode else {}
    patches |= options or {}
    if patches.get("triton.cudagraphs"):
        raise ValueError(
            'mode: torch.compile(..., backend="gradvac") records no CUDA graphs of regions, whose '
            'outputs the next step writes over; leave the mode out, or take "default" or '
            '"max-autotune-no-cudagraphs", and record the whole step (torch.cuda.graph).'
        )

    def compile_inside(inside: fx.GraphModule, given: list[Any]) -> Any:
        return compile_fx(inside, given, config_patches=patches)

    return tap(graph_module, examples, compile_inside)


def tap(
    graph_module: fx.GraphModule, examples: list[Any], compile_inside: Compile
) -> Callable[..., Any]:
    """Split a graph, and compile its inside."""
    allow_second_passes()
    if not torch.is_grad_enabled():
        return compile_inside(graph_module, examples)
    split = Split(graph_module, examples, _RULES)
    if not split.num_taps:
        return compile_inside(graph_module, examples)
    inside = fx.GraphModule(graph_module, split.inside)
    inside.meta = {}  # what Dynamo noted there is of other inputs
    outside = fx.GraphModule(graph_module, split.outside)
    region = Region(inside, [given.described for given in split.given.values()], split.sizes)
    compiled = compile_inside(inside, [given.example for given in split.given.values()])
    run_outside = outside.forward

    def run(*arguments: Any) -> Any:
        outputs = compiled(*run_outside(*arguments))
        region.name_node(outputs, arguments)
        return outputs

    return run


def _tap_product(split: Split, node: fx.Node, output: Tensor) -> fx.Node:
    """`x @ W` or `x @ W.T`, and a shift."""
    name = name_of(node)
    if name == "addmm":
        bias, x, weight = _bound(node, "input", "mat1", "mat2")
        if any(node.kwargs.get(factor, 1) != 1 for factor in ("alpha", "beta")):
            raise CannotTap
    else:
        x, weight, bias = _bound(node, "input", "weight" if name == "linear" else "other", "bias")
    if not split.holds_rows(x):
        raise CannotTap
    if weight not in split.parametric and name == "linear":
        shift = split.expanded(bias, output)  # the weight is frozen, or made of the batch
        given = (split.within(x), split.within(weight))
        result = split.inside.call_function(F.linear, given)
        result = split.inside.call_function(operator.add, (result, shift))
        return split.cast(result, output.dtype)
    if weight not in split.parametric or fake_of(weight).dim() != 2:
        raise CannotTap
    if fake_of(x).dim() < 2 or (bias is not None and fake_of(bias).dim() != 1):
        raise CannotTap
    if bias is not None and bias not in split.parametric and fake_of(bias).requires_grad:
        raise CannotTap  # made of the batch, or inside: a tap hands nothing back to it
    dtype, operand = output.dtype, split.within(x)
    operand = operand if fake_of(x).dtype == dtype else split.cast(operand, dtype)
    outer, inner = split.without(weight), split.detached(weight, dtype)
    if name != "linear":  # whose weight is stored by output
        outer = split.outside.call_method("t", (outer,))
        inner = split.inside.call_method("t", (inner,))
    outer_bias = split.without(bias) if bias in split.parametric else None
    sizes = split.shape(output.shape), split.shape(fake_of(x).shape)
    taps = _placeholders(
        split,
        node,
        split.outside.call_function(product_tap, (outer, outer_bias, *sizes, dtype)),
        (output.shape, dtype),
        (fake_of(x).shape, dtype),
    )
    inner_bias = split.detached(bias, dtype)
    return split.inside.call_function(tapped_product, (operand, inner, inner_bias, *taps))


def _tap_lookup(split: Split, node: fx.Node, output: Tensor) -> fx.Node:
    """Rows of a table by token."""
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type")
    tokens, table, padding, most, _, *others = _bound(node, *names, "scale_grad_by_freq", "sparse")
    others.append(most)
    if table not in split.parametric or not split.holds_rows(tokens) or any(others):
        raise CannotTap
    padding = -1 if padding is None else padding % fake_of(table).shape[0]
    sizes = split.shape(output.shape), split.shape(fake_of(tokens).shape)
    taps = _placeholders(
        split,
        node,
        split.outside.call_function(lookup_tap, (split.without(table), padding, *sizes)),
        (output.shape, output.dtype),
        (fake_of(tokens).shape, TOKENS),
    )
    given = split.within(tokens), split.detached(table, output.dtype)
    return split.inside.call_function(tapped_lookup, (*given, *taps))


def _placeholders(
    split: Split, node: fx.Node, tap: fx.Node, *like: tuple[Sequence[Any], torch.dtype]
) -> list[fx.Node]:
    """What a tap hands to the inside."""
    output, placed = fake_of(node), []
    for number, (shape, dtype) in enumerate(like):
        outer = split.outside.call_function(operator.getitem, (tap, number))
        with output.fake_mode:
            fake = torch.empty((), dtype=dtype, device=output.device).expand(shape)
        placed.append(split.pass_in((node, number), outer, fake.requires_grad_()))
    return placed


def _tap_norm(split: Split, node: fx.Node, output: Tensor) -> fx.Node:
    """A normalisation, and then its scale and its shift."""
    shift = ("bias",) if name_of(node) == "layer_norm" else ()
    names = ("input", "normalized_shape", "weight", *shift)
    x, shape, *parameters, eps = _bound(node, *names, "eps")
    if not split.holds_rows(x):
        raise CannotTap
    values = [None if p is None else split.expanded(p, output) for p in parameters]
    given = {} if eps is None else {"eps": map_arg(eps, split.within)}
    sizes = map_arg(shape, split.within)
    normalise: Any = node.target
    result = split.inside.call_function(normalise, (split.within(x), sizes), given)
    for value, combine in zip(values, (operator.mul, operator.add), strict=False):
        if value is not None:
            result = split.inside.call_function(combine, (result, value))
    return split.cast(result, output.dtype)


def _tap_broadcast(split: Split, node: fx.Node, output: Tensor) -> fx.Node:
    """A scale or a shift."""
    parameter, *others = split.parametric.intersection(node.all_input_nodes)
    if others or len(node.args) != 2:
        raise CannotTap
    expanded = split.expanded(parameter, output)
    result = split.inside.node_copy(node, lambda n: expanded if n is parameter else split.within(n))
    # A number (0-dim) does not widen what it is combined with; expanded, it does.
    return result if fake_of(parameter).dim() else split.cast(result, output.dtype)


def _bound(node: fx.Node, *names: str) -> list[Any]:
    """The arguments of a call, None where they were left out."""
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if len(node.args) > len(names) or not set(given) <= {*names, "alpha", "beta"}:
        raise CannotTap
    return [given.get(name) for name in names]


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("linear", "matmul", "mm", "addmm"), _tap_product),
    "embedding": _tap_lookup,
    **dict.fromkeys(("layer_norm", "rms_norm"), _tap_norm),
    **dict.fromkeys(("add", "sub", "mul", "div", "truediv"), _tap_broadcast),
    **dict.fromkeys(("add_", "sub_", "mul_", "div_"), _tap_broadcast),
    **dict.fromkeys(("iadd", "isub", "imul", "itruediv"), _tap_broadcast),
}
