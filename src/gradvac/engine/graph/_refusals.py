"""Graphs that are refused: they hide parameters or rows, or are not those of the model.

A function of a graph may run a backward of its own, into `.grad`: reversible layers, tiled layers
and some activation checkpoints do. Such a backward takes part in every pass over the graph, and
what it writes is not among the gradients that the pass returns.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from gradvac.engine.graph._graph import LEAF, Graph
from gradvac.engine.graph._nodes import is_python_function, is_selective
from gradvac.engine.graph._passes import set_aside
from gradvac.hints import some


class Refused(ValueError):  # noqa: N818
    """one_backward cannot separate these losses; nothing was changed."""


def refuse_unreadable(graph: Graph) -> None:
    """Refuse graphs that show no junctions, or none that have rows."""
    if any(graph.names[position] == LEAF for position in graph.root_positions):
        raise Refused('losses: are a parameter themselves; use engine="per_task".')
    if graph.is_reentrant:
        raise Refused(
            "engine: reentrant activation checkpointing hides the parameters it uses; "
            "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or use "
            'engine="per_task".'
        )
    if any(map(is_selective, graph.nodes)):
        raise Refused(
            "engine: a selective activation checkpoint (context_fn=...) lets a backward run only "
            "once, and whose gradients are whose takes several; checkpoint without it, or use "
            'engine="per_task" with a forward for each task, as a mapping task -> loss.'
        )
    if graph.is_nested:
        raise Refused(
            "engine: nested tensors have no rows of one size; pad them "
            '(torch.nested.to_padded_tensor) before the model, or use engine="per_task".'
        )


@contextmanager
def refuse_hidden(names: Mapping[nn.Parameter, str], graph: Graph) -> Iterator[None]:
    """Refuse passes that write gradients of parameters on their way; `.grad` stays as it was."""
    if not any(map(is_python_function, graph.nodes)):
        yield
        return
    with set_aside(names):
        yield
        hidden = [name for parameter, name in names.items() if parameter.grad is not None]
    if hidden:
        raise Refused(
            f"engine: a function runs a backward of its own, which hides {some(hidden)} from this "
            'one. Use engine="per_task".'
        )


def refuse_changed(model: nn.Module, known: Collection[nn.Parameter], graph: Graph) -> None:
    """Raise if a graph of losses is not that of the model some of whose parameters are known."""
    leaves = graph.leaves()
    unknown = {leaf for leaf in leaves if leaf not in known}
    for name, parameter in model.named_parameters() if unknown else ():
        if parameter in unknown:
            raise ValueError(
                f"model: {name} became trainable, or was replaced, after the Aligner was made; "
                "make another Aligner after freezing, unfreezing or replacing parameters."
            )
    is_none_known = len(unknown) == len(leaves) and not graph.is_reentrant
    if is_none_known and any(parameter.requires_grad for parameter in known):
        raise ValueError(
            "losses: reach no parameter of the Aligner's model, so there is nothing to align; were "
            "they computed by another model, such as a copy of it?"
        )
