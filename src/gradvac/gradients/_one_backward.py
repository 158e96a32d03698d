"""The one_backward engine: vaccination for the price of plain training.

One forward and one backward on a mixed batch. The model is attached to, not wrapped: modules with
parameters get another `forward` on the instance, whose backward forms task gradients for that
module alone. When all uses of a component's parameters have arrived, their Gram matrix is taken,
weighed, the update written to `.grad`, and the task gradients freed.

How the engine knows that all uses have arrived: every use also takes the component's *token*, a
leaf that needs a gradient and never gets one. Autograd counts the edges into a leaf and visits it
when the last has been delivered; that visit is the signal. So weights tied between modules, modules
called twice, modules unused in a step and activation checkpointing need no counting of ours.
"""

# K components, T tasks

import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from gradvac.gradients._adapters import adapt
from gradvac.gradients._batch import Batch, sort_present
from gradvac.gradients._components import Components
from gradvac.gradients._fallback import run_fallback
from gradvac.gradients._layers import find_handler
from gradvac.gradients._graph import graph_nodes
from gradvac.gradients._ledger import Inspect, Ledger, Mode
from gradvac.gradients._per_task import Weigh
from gradvac.gradients._rows import RowTasks, Segments
from gradvac.gradients._site import Forward, Site


class OneBackward:
    """One backward for all tasks.

    Args:
        model: The model to attach to.
        components: Its components.
        tasks: Task names.
        recompute: Two backward passes with the memory of plain training, for components that
            cannot stream (whole_model, enc_dec): the first takes Gram matrices only.
        stream_bytes: See `Ledger`.
        table_bytes: See `Ledger`.
    """

    name = "one_backward"

    def __init__(
        self,
        model: nn.Module,
        components: Components,
        tasks: Sequence[str],
        *,
        recompute: bool = False,
        stream_bytes: int = 1 << 28,
        table_bytes: int = 1 << 32,
    ) -> None:
        self._model, self._tasks, self._recompute = model, tuple(tasks), recompute
        parameters = dict(model.named_parameters())
        members = [[parameters[p] for p in own] for own in components.values()]
        self.ledger = Ledger(members, stream_bytes=stream_bytes, table_bytes=table_bytes)
        self._forward = Forward()
        self._undo: list[Callable[[], None]] = []
        self._tokens: dict[object, Tensor] = {}
        self._nodes: list[object] = []  # autograd holds leaf nodes weakly
        self._last: tuple[Tensor, object, Segments] | None = None
        self._accumulated = False
        self.fallbacks: list[str] = []
        self._attach()

    # -- attaching ---------------------------------------------------------------------------

    def _attach(self) -> None:
        refuse_unsupported(self._model)
        covered: set[nn.Module] = set()
        for name, module in self._model.named_modules():
            if module in covered:
                continue
            own = [p for p in module.parameters(recurse=False) if p.requires_grad]
            handler = find_handler(module)
            if isinstance(module, _BatchNorm):
                self._patch(name, module, _run_batch_norm, list(module.parameters()))
            elif parametrize.is_parametrized(module) or (own and handler is None):
                self.fallbacks.append(f"{name or 'the model'} ({type(module).__name__})")
                covered |= set(module.modules())
                inner = [p for p in module.parameters() if p.requires_grad]
                self._patch(name, module, run_fallback, inner)
            elif own and handler is not None:
                self._patch(name, module, _with_module(handler), own)
            self._undo += adapt(module, self._forward)
        hooks = [self._model.register_forward_pre_hook(self._see_inputs, with_kwargs=True)]
        hooks += [p.register_hook(self.ledger.leak_hook(p)) for p in self.ledger.component_of]
        self._undo += [hook.remove for hook in hooks]
        if self.fallbacks:
            shown = ", ".join(self.fallbacks[:4]) + (", ..." if self.fallbacks[4:] else "")
            warnings.warn(
                f"engine: {len(self.fallbacks)} module(s) have no fast path and run task by task "
                f"in the backward, which is exact but slower: {shown}.",
                stacklevel=5,
            )

    def _patch(
        self,
        name: str,
        module: nn.Module,
        run: Callable[..., Any],
        parameters: Sequence[nn.Parameter],
    ) -> None:
        original = module.forward
        tokens = dict.fromkeys(self._token(p) for p in parameters if p.requires_grad)
        site = Site(name or "the model", module, original, list(tokens), self.ledger, self._forward)

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                self._forward.ran_without_grad = True
                return original(*args, **kwargs)
            if self.ledger.inside_fallback:
                return original(*args, **kwargs)
            if torch.compiler.is_compiling():
                return _run_outside_graph(run, site, *args, **kwargs)
            return run(site, *args, **kwargs)

        module.forward = forward  # type: ignore[method-assign]
        self._undo.append(lambda: module.__dict__.pop("forward", None))

    def _token(self, parameter: nn.Parameter) -> Tensor:
        """The leaf that fires when a component (with recompute: a parameter) is complete."""
        component = self.ledger.component_of[parameter]
        key: object = parameter if self._recompute else component
        if key not in self._tokens:
            token = torch.zeros((), device=parameter.device, requires_grad=True)
            node = torch.autograd.graph.get_gradient_edge(token).node
            if self._recompute:
                node.register_prehook(lambda grads: self.ledger.parameter_done(parameter))
            else:
                node.register_prehook(lambda grads: self.ledger.component_done(component))
            self._tokens[key] = token
            self._nodes.append(node)
        return self._tokens[key]

    def _see_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            leaves = pytree.tree_leaves((args, kwargs))
            sizes = (leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())
            self._forward.num_rows = next(sizes, None)

    @property
    def knows_rows(self) -> bool:
        """Whether the forward said by `gradvac.rows` which rows are whose."""
        return self._forward.used_rows

    @property
    def unchecked(self) -> bool:
        """Whether a module took part whose task gradients were never compared."""
        return self._forward.unchecked

    @unchecked.setter
    def unchecked(self, value: bool) -> None:
        self._forward.unchecked = value

    def detach(self) -> None:
        """Leave the model as it was."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []

    # -- backward ----------------------------------------------------------------------------

    def backward(self, batch: Batch, weigh: Weigh, *, present: Sequence[int]) -> None:
        """Differentiate all tasks at once and add the updates to `.grad`."""
        everyone = self._everyone if self._accumulated else tuple(present)
        if everyone != tuple(present):
            weigh = _for_some(weigh, [everyone.index(task) for task in present])
        self._open(batch, everyone, None if self._recompute else weigh)
        try:
            self._run(batch, retain_graph=self._recompute)
            if self._recompute:
                grams = self.ledger.grams(batch.device)
                self.ledger.weights = weigh(range(len(self.ledger.members)), grams)
                self.ledger.mode = Mode.WEIGHTED
                self._run(batch, retain_graph=False)
            else:
                self.ledger.close()
            self._refuse_leaks()
        finally:
            self.discard()

    def accumulate(self, batch: Batch) -> None:
        """Add a micro-batch to the stored task gradients: `[T, P]` for all tasks and parameters."""
        if self._recompute:
            raise ValueError(
                "accumulate: recompute=True keeps no task gradients to add to; leave out one of "
                'the two, or use engine="per_task".'
            )
        self._accumulated = True
        self._open(batch, self._everyone, None)
        try:
            self._run(batch, retain_graph=False)
            self._refuse_leaks()
        finally:
            self.ledger.mode = Mode.PLAIN
            self._forward.clear()

    def inspect(self, batch: Batch, look: Inspect) -> None:
        """Show every parameter's task gradients to `look`; graph and `.grad` are left alone."""
        self._open(batch, batch.present, None)
        self.ledger.inspect = look
        try:
            self._run(batch, retain_graph=True)
            self.ledger.close()
            self._refuse_leaks()
        finally:
            self.ledger.mode = Mode.PLAIN
            self.ledger.clear()

    def discard(self) -> None:
        """Forget the batch and what was accumulated."""
        self.ledger.mode = Mode.PLAIN
        self.ledger.clear()
        self._forward.clear()
        self._accumulated = False

    @property
    def _everyone(self) -> tuple[int, ...]:
        return sort_present(range(len(self._tasks)), self._tasks)

    def _open(self, batch: Batch, present: tuple[int, ...], weigh: Weigh | None) -> None:
        def resolve(rows: RowTasks | None) -> Segments:
            if rows is not None:
                return rows.resolve(self._tasks, present, batch.device)
            return self._rows_of_losses(batch, present)

        self.ledger.streaming = not self._accumulated and not self._holds_reentrant(batch)
        self.ledger.open(weigh, len(present), resolve)

    @staticmethod
    def _run(batch: Batch, *, retain_graph: bool) -> None:
        torch.autograd.backward(batch.roots(), batch.starts(), retain_graph=retain_graph)

    def _refuse_leaks(self) -> None:
        if self.ledger.leaked:
            names = {p: name for name, p in self._model.named_parameters()}
            which = ", ".join(sorted(names[p] for p in self.ledger.leaked))
            raise ValueError(
                f"engine: {which} is used outside the forward of the module that owns it (as in "
                "F.linear(x, layer.weight)), where its gradient cannot be separated by task. Call "
                "the module (a tied nn.Linear for a tied embedding), or use "
                'engine="per_task".'
            )

    def _rows_of_losses(self, batch: Batch, present: tuple[int, ...]) -> Segments:
        if batch.index is None:
            raise ValueError(
                "losses: a mapping does not say which rows of the batch belong to which task; "
                "give losses per row with tasks_of_rows, run the forward inside "
                'gradvac.rows(...), or use engine="per_task".'
            )
        index = batch.index
        if present != batch.present:
            moved = torch.tensor([present.index(task) for task in batch.present])
            index = moved.to(index.device)[index]
        key = (len(present), batch.device)
        if self._last is not None and index.device.type == "cpu":
            known, known_key, segments = self._last  # batches are often laid out alike
            if known_key == key and torch.equal(known, index):
                return segments
        segments = Segments(index, len(present), batch.device)
        self._last = (index, key, segments)
        return segments

    def _holds_reentrant(self, batch: Batch) -> bool:
        """Whether the graph holds reentrant checkpoints, whose edges autograd cannot count ahead.

        They run their forward without grad first, so the graph is searched only after that.
        """
        if not self._forward.ran_without_grad:
            return False
        self._forward.ran_without_grad = False
        found = any("CheckpointFunction" in node.name() for node in graph_nodes(batch.roots()))
        if found and self._forward.used_rows:
            raise ValueError(
                "engine: reentrant activation checkpointing runs the forward again outside "
                "gradvac.rows(...); use torch.utils.checkpoint.checkpoint(..., "
                "use_reentrant=False)."
            )
        return found


def _for_some(weigh: Weigh, chosen: list[int]) -> Weigh:
    """Weigh the chosen tasks of stored gradients that have room for all."""

    def weigh_some(components: Sequence[int], gram: Tensor) -> Tensor:
        index = torch.tensor(chosen, device=gram.device)
        own = weigh(components, gram[:, index][:, :, index])
        return own.new_zeros(gram.shape[:-1]).index_copy(1, index, own)

    return weigh_some


def _with_module(handler: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(site: Site, *args: Any, **kwargs: Any) -> Tensor:
        return handler(site, site.module, *args, **kwargs)

    return run


@torch.compiler.disable
def _run_outside_graph(run: Callable[..., Any], site: Site, *args: Any, **kwargs: Any) -> Any:
    """A compiled model calls its attached layers between its graphs."""
    return run(site, *args, **kwargs)


def _run_batch_norm(site: Site, *args: Any, **kwargs: Any) -> Any:
    if site.module.training:
        raise ValueError(_coupling(site.name, site.module))
    return run_fallback(site, *args, **kwargs)


def _coupling(name: str, module: nn.Module) -> str:
    return (
        f"engine: {name} ({type(module).__name__} in training mode) couples the rows of a batch, "
        'so their gradients cannot be separated by task; use engine="per_task", or put it in '
        "eval mode."
    )


def refuse_unsupported(model: nn.Module) -> None:
    """Raise a ValueError that names the first module this engine cannot be right for."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise ValueError(_coupling(name, module))
        has_batch_second = isinstance(module, nn.MultiheadAttention | nn.RNNBase)
        if has_batch_second and not module.batch_first:
            raise ValueError(
                f"engine: {name or 'the model'} ({type(module).__name__}) has the batch as "
                "dimension 1; build it with batch_first=True, or use "
                'engine="per_task".'
            )
