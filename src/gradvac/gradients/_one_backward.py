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
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradvac.gradients._attachment import Attachment
from gradvac.gradients._batch import Batch
from gradvac.gradients._components import Components
from gradvac.gradients._graph import graph_leaves, graph_nodes, set_aside
from gradvac.gradients._ledger import Inspect, Ledger, Mode
from gradvac.gradients._per_task import Weigh
from gradvac.gradients._rows import RowTasks, Segments
from gradvac.gradients._site import Forward
from gradvac.gradients._tokens import Tokens
from gradvac.indices import index_on


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
        self._tokens = Tokens(members[0][0].device)
        self._forward = Forward(self._tokens)
        self._last: tuple[Tensor, object, Segments] | None = None
        self._everyone: tuple[int, ...] = ()  # order of the tasks while accumulating
        self._accumulated = False
        self._attachment = Attachment(model, self.ledger, self._forward, self._token_key)
        _announce(self._attachment.fallbacks)

    def _token_key(self, parameter: nn.Parameter) -> object:
        """What completes together: a component, or with recompute a parameter."""
        ledger, component = self.ledger, self.ledger.component_of[parameter]
        if self._recompute:
            self._tokens.add(parameter, lambda: ledger.parameter_done(parameter))
            return parameter
        self._tokens.add(component, lambda: ledger.component_done(component))
        return component

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

    @property
    def checked_alone(self) -> bool:
        """Whether they were compared in a batch of a single task, which shows less."""
        return self._forward.checked_alone

    @checked_alone.setter
    def checked_alone(self, value: bool) -> None:
        self._forward.checked_alone = value

    def detach(self) -> None:
        """Leave the model as it was."""
        self._attachment.detach()

    # -- backward ----------------------------------------------------------------------------

    def backward(self, batch: Batch, weigh: Weigh, *, present: Sequence[int]) -> None:
        """Differentiate all tasks at once and add the updates to `.grad`."""
        everyone = self._everyone if self._accumulated else tuple(present)
        if everyone != tuple(present):
            weigh = _for_some(weigh, [everyone.index(task) for task in present])
        self._open(batch, everyone, None if self._recompute else weigh)
        try:
            if self._recompute:
                self._run_aside(batch)
                grams = self.ledger.grams(batch.device)
                self.ledger.weights = weigh(range(len(self.ledger.members)), grams)
                self.ledger.mode = Mode.WEIGHTED
            torch.autograd.backward(batch.roots(), batch.starts())
            self._refuse_leaks()
            if not self._recompute:
                self.ledger.close()
        finally:
            self.discard()

    def accumulate(self, batch: Batch) -> None:
        """Add a micro-batch to the stored task gradients: `[T, P]` for all tasks and parameters."""
        if self._recompute:
            raise ValueError(
                "accumulate: recompute=True keeps no task gradients to add to; leave out one of "
                'the two, or use engine="per_task".'
            )
        if not self._accumulated:
            rest = set(range(len(self._tasks))) - set(batch.present)
            self._everyone = (*batch.present, *sorted(rest, key=self._tasks.__getitem__))
        self._accumulated = True
        self._open(batch, self._everyone, None)
        try:
            torch.autograd.backward(batch.roots(), batch.starts())
            self._refuse_leaks()
        finally:
            self.ledger.pause()
            self._forward.clear()

    def inspect(self, batch: Batch, look: Inspect) -> None:
        """Show every parameter's task gradients to `look`; graph and `.grad` are left alone."""
        with self.ledger.afresh():
            self._open(batch, batch.present, None)
            self.ledger.inspect = look
            self._run_aside(batch)
            self.ledger.close()

    def plain_gradients(
        self, batch: Batch, weights: Tensor, parameters: Sequence[nn.Parameter]
    ) -> list[Tensor | None]:
        """Gradients of sum_t weights[t] loss_t by plain autograd; graph and `.grad` stay."""
        roots, starts = batch.roots(), batch.starts(weights)
        if not self._holds_reentrant(batch):
            found = torch.autograd.grad(
                roots, parameters, starts, retain_graph=True, allow_unused=True
            )
            return list(found)
        with set_aside([*parameters, *graph_leaves(roots)]):
            torch.autograd.backward(roots, starts, retain_graph=True)
            return [p.grad for p in parameters]

    def discard(self) -> None:
        """Forget the batch and what was accumulated."""
        self.ledger.clear()
        self._forward.clear()
        self._accumulated = False

    def _run_aside(self, batch: Batch) -> None:
        """A backward that concerns the ledger alone: `.grad` of every leaf stays as it is."""
        roots = batch.roots()
        parameters = [p for p in self.ledger.component_of if p.requires_grad]
        inputs: list[Tensor] | None = [*self._tokens.made(), *parameters]
        aside: list[Tensor] = [*parameters]
        if self._holds_reentrant(batch):  # reentrant checkpoints refuse `inputs`
            inputs, aside = None, [*parameters, *graph_leaves(roots)]
        with set_aside(aside):
            torch.autograd.backward(roots, batch.starts(), retain_graph=True, inputs=inputs)
        self._refuse_leaks()

    def _open(self, batch: Batch, present: tuple[int, ...], weigh: Weigh | None) -> None:
        if not self._attachment.holds:
            raise ValueError("engine: this Aligner was detached from its model; make another one.")
        refusal = self._forward.refusal
        if refusal is not None:
            self._forward.clear()  # of this forward; the next may be right
            raise ValueError(refusal)

        def resolve(rows: RowTasks | None) -> Segments:
            if rows is not None:
                return rows.resolve(self._tasks, present, batch.device)
            return self._rows_of_losses(batch, present)

        self.ledger.streaming = not self._holds_reentrant(batch)
        self.ledger.open(weigh, len(present), resolve)

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
            moved = [present.index(task) for task in batch.present]
            index = index_on(moved, index.device)[index]
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
        index = index_on(chosen, gram.device)
        own = weigh(components, gram[:, index][:, :, index])
        return own.new_zeros(gram.shape[:-1]).index_copy(1, index, own)

    return weigh_some


def _announce(fallbacks: Sequence[str]) -> None:
    if fallbacks:
        shown = ", ".join(fallbacks[:4]) + (", ..." if fallbacks[4:] else "")
        warnings.warn(
            f"engine: {len(fallbacks)} module(s) have no fast path and run task by task in the "
            f"backward, which is exact but slower: {shown}.",
            stacklevel=5,
        )
