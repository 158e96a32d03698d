"""One attached module: what its `autograd.Function` needs to know."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gradvac.gradients._contributions import Contribution
from gradvac.gradients._ledger import Ledger, Mode
from gradvac.gradients._rows import RowTasks, Segments, current_rows
from gradvac.gradients._tokens import Tokens


class Forward:
    """What lasts from a forward to its backward: the batch size, and parameters cast once."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.num_rows: int | None = None  # dimension 0 of the model's inputs
        self.unchecked = False  # a module ran whose task gradients were never compared
        self.inside_fallback = False  # a module that runs as a whole runs its parts untouched
        self.checked_alone = False  # they were compared, but for a single task
        self.clear()

    def clear(self) -> None:
        self.begun = False
        self.used_rows = False
        self.ran_without_grad = False
        self.refusal: str | None = None  # why task gradients of this forward would be wrong
        self._input: tuple[Tensor, int, Tensor] | None = None
        self._parameters: dict[Tensor, tuple[int, Tensor]] = {}

    def see_inputs(self, *inputs: object) -> None:
        """Remember the batch size, from what the model was called with."""
        leaves = pytree.tree_leaves(inputs)
        sizes = (leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())
        self.num_rows = next(sizes, None)

    def refuse(self, reason: str) -> None:
        """Let the forward run, but no task gradients be taken from it."""
        self.refusal, self.unchecked = reason, True

    def cast_input(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Queries, keys and values are projected from one input: cast and keep it once."""
        if x.dtype == dtype:
            return x
        if self._input is None or self._input[0] is not x or self._input[1] != x._version:
            self._input = (x, x._version, x.to(dtype))
        return self._input[2]

    def cast_parameter(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        if parameter.dtype == dtype:
            return parameter
        known = self._parameters.get(parameter)
        if known is None or known[0] != parameter._version or known[1].dtype != dtype:
            known = (parameter._version, parameter.detach().to(dtype))
            self._parameters[parameter] = known
        return known[1]


class Site:
    """One attached module.

    Args:
        name: The module's name in the model.
        module: The module.
        original: Its `forward` before it was attached.
        keys: Of the tokens that tell when all uses of its parameters have arrived.
        ledger: Where task gradients go.
        forward: Shared by all sites of a model.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        original: Callable[..., Any],
        keys: Sequence[object],
        ledger: Ledger,
        forward: Forward,
    ) -> None:
        self.name, self.module, self.original = name, module, original
        self._keys, self.ledger, self.forward = tuple(keys), ledger, forward
        self._ran = False

    @property
    def tokens(self) -> list[Tensor]:
        """The tokens, for the stream that is current."""
        if not self.forward.begun:
            self.forward.begun = True
            self.forward.tokens.renew()
        return [self.forward.tokens[key] for key in self._keys]

    def rows(self, x: Tensor) -> tuple[RowTasks | None, int]:
        """Which rows are running now, and how many entries dimension 0 has."""
        inside = current_rows()
        self.forward.used_rows |= inside is not None
        if not self._ran:
            self._ran, self.forward.unchecked, self.forward.checked_alone = True, True, False
        return inside, x.shape[0] if x.dim() else 1

    def broadcast(self) -> Callable[[Tensor, int], Tensor]:
        """How to give what lacks a batch (positions `[1, S]`) the one its gradient is separated by.

        The function takes a tensor, and the dimensions of what it leads to. That is meant to be
        added to activations of as many; fewer, such as `[B, D]`, would meet the wrong dimension of
        `[B, S, D]` and stay as they are.
        """
        inside = current_rows()
        num_rows, least = (self.forward.num_rows, 3) if inside is None else (len(inside), 2)

        def expand(x: Tensor, dim: int) -> Tensor:
            lacks = num_rows is not None and dim >= least and x.shape[0] == 1
            return x.expand(num_rows or 1, *x.shape[1:]) if lacks else x

        return expand

    def cast(self, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, list[Any]]:
        """Cast as autocast would; parameters once per forward."""
        if not torch.is_autocast_enabled(x.device.type):
            return x, list(parameters)
        dtype = torch.get_autocast_dtype(x.device.type)
        low = [p if p is None else self.forward.cast_parameter(p, dtype) for p in parameters]
        return self.forward.cast_input(x, dtype), low

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Run the parts of a module that is attached as a whole as if they were not."""
        outer = self.forward.inside_fallback
        self.forward.inside_fallback = True
        try:
            yield
        finally:
            self.forward.inside_fallback = outer

    def settling(self, ctx: Any) -> "Settlement":
        """What to do with the parameters in the backward that runs now."""
        return Settlement(self, ctx)


class Settlement:
    """Turns a parameter's contribution into what its `autograd.Function` returns for it."""

    def __init__(self, site: Site, ctx: Any) -> None:
        self._site, self._ctx, self._ledger = site, ctx, site.ledger
        self.segments: Segments | None = None
        if self._ledger.mode is not Mode.PLAIN:
            rows, length = ctx.rows
            self.segments = self._ledger.segments(rows, length, site.name)

    def __call__(self, position: int, make: Callable[[], Contribution]) -> Tensor | None:
        """Settle the parameter at `position` of the Function's inputs."""
        if not self._ctx.needs_input_grad[position]:
            return None
        parameter = getattr(self._site.module, {2: "weight", 3: "bias"}[position])
        return self.settle(parameter, make())

    def settle(self, parameter: nn.Parameter, contribution: Contribution) -> Tensor | None:
        """Settle any parameter."""
        if self.segments is None:
            return contribution.plain()
        if parameter not in self._ledger.component_of:
            raise ValueError(
                f"engine: {self._site.name} has a parameter that became trainable after the "
                "Aligner was made; make another Aligner after freezing or unfreezing."
            )
        if self._ledger.mode is Mode.TASKS:
            self._ledger.deliver(parameter, contribution, self.segments)
            return None
        assert self._ledger.weights is not None
        weights = self._ledger.weights[self._ledger.component_of[parameter]]
        return contribution.weighted(self.segments, weights).view(parameter.shape)
