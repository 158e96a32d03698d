"""Attaching to a model: another `forward` on its modules, and back.

Nothing is wrapped: module classes, names and `state_dict` stay. The new `forward` is a method of
the instance, so a copy or a pickle of an attached model binds it to its own modules, sees that it
is not attached, and runs as the class says.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from gradvac.gradients._adapters import adapt
from gradvac.gradients._fallback import run_fallback
from gradvac.gradients._layers import find_handler
from gradvac.gradients._ledger import Ledger, Mode
from gradvac.gradients._site import Forward, Site

Run = Callable[..., Any]
_CONTAINERS = (nn.ParameterList, nn.ParameterDict)


class Attachment:
    """The attached modules of a model.

    Args:
        model: The model.
        ledger: Where task gradients go.
        forward: What the modules share.
        token_key: The key of the token that says when a parameter is complete.
    """

    def __init__(
        self,
        model: nn.Module,
        ledger: Ledger,
        forward: Forward,
        token_key: Callable[[nn.Parameter], object],
    ) -> None:
        refuse_unsupported(model)
        for module in model.modules():
            if _attached_to(module) is not None:
                del module.forward  # copied from an attached model
        self._ledger, self._forward, self._token_key = ledger, forward, token_key
        self._undo: list[Callable[[], None]] = []
        self.fallbacks: list[str] = []  # modules that run task by task
        inside: set[nn.Module] = set()  # parts of those; their own `forward` is for other callers
        for name, module in model.named_modules():
            if isinstance(module, parametrize.ParametrizationList):
                inside |= set(module.modules())
                continue
            run, parameters = _choose(module)
            if run is run_fallback and module not in inside:
                self.fallbacks.append(f"{name or 'the model'} ({type(module).__name__})")
                inside |= set(module.modules())
            if module is model:
                self._patch("the model", module, run, parameters, sees_batch=True)
            elif run is not None or isinstance(module, _BatchNorm):
                self._patch(name, module, run, parameters)
            self._undo += adapt(module, forward)
        for parameter in ledger.component_of:
            self._undo.append(parameter.register_hook(self._leak_hook(parameter)).remove)

    @property
    def holds(self) -> bool:
        """Whether the model is still attached."""
        return bool(self._undo)

    def detach(self) -> None:
        """Leave the model as it was."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []

    def _patch(
        self,
        name: str,
        module: nn.Module,
        run: Run | None,
        parameters: Sequence[nn.Parameter],
        *,
        sees_batch: bool = False,
    ) -> None:
        earlier, original = module.__dict__.get("forward"), module.forward
        shared, couples = self._forward, isinstance(module, _BatchNorm)
        keys = list(dict.fromkeys(self._token_key(p) for p in parameters))
        site = Site(name, module, original, keys, self._ledger, shared)

        @wraps(getattr(original, "__func__", original))
        def forward(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if own is not module:
                return type(own).forward(own, *args, **kwargs)  # a copy is nobody's
            if not torch.is_grad_enabled():
                shared.ran_without_grad = True
                return original(*args, **kwargs)
            if couples and module.training:
                shared.refuse(_coupling(name, module))
                return original(*args, **kwargs)
            compiling = torch.compiler.is_compiling()
            if sees_batch:
                (_see_outside_graph if compiling else Forward.see_inputs)(shared, args, kwargs)
            if run is None or shared.inside_fallback:
                return original(*args, **kwargs)
            if compiling:
                return _run_outside_graph(run, site, *args, **kwargs)
            return run(site, *args, **kwargs)

        forward.__dict__["attached_to"] = module
        module.forward = MethodType(forward, module)

        def undo() -> None:
            del module.forward
            if earlier is not None:
                module.forward = earlier

        self._undo.append(undo)

    def _leak_hook(self, parameter: nn.Parameter) -> Callable[[Tensor | None], None]:
        """Notices gradients that reach a parameter past the attached modules."""

        def hook(grad: Tensor | None) -> None:
            collecting = self._ledger.mode is Mode.TASKS and not self._forward.inside_fallback
            if grad is not None and collecting:
                self._ledger.leaked.add(parameter)

        return hook


def _choose(module: nn.Module) -> tuple[Run | None, list[nn.Parameter]]:
    """How a module is run, and which of its parameters that concerns."""
    own = [p for p in _own_parameters(module) if p.requires_grad]
    every = [p for p in module.parameters() if p.requires_grad]
    handler = find_handler(module)
    if (own and handler is None) or (every and parametrize.is_parametrized(module)):
        return run_fallback, every
    if not own or handler is None:
        return None, []

    def run(site: Site, *args: Any, **kwargs: Any) -> Tensor:
        return handler(site, module, *args, **kwargs)

    return run, own


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that the module's own `forward` uses: containers of parameters have none."""
    if not isinstance(module, _CONTAINERS):
        yield from module.parameters(recurse=False)
        for child in module.children():
            if isinstance(child, _CONTAINERS):
                yield from child.parameters()


def _run(run: Run, site: Site, *args: Any, **kwargs: Any) -> Any:
    return run(site, *args, **kwargs)


# A compiled model calls its attached layers between its graphs.
_run_outside_graph = torch.compiler.disable(_run)
_see_outside_graph = torch.compiler.disable(Forward.see_inputs)


def _attached_to(module: nn.Module) -> nn.Module | None:
    found: nn.Module | None = getattr(module.forward, "attached_to", None)
    return found


def _coupling(name: str, module: nn.Module) -> str:
    return (
        f"engine: {name} ({type(module).__name__} in training mode) couples the rows of a batch, "
        'so their gradients cannot be separated by task; use engine="per_task", or put it in '
        "eval mode."
    )


def refuse_unsupported(model: nn.Module) -> None:
    """Raise a ValueError that names the first module this engine cannot be right for."""
    for name, module in model.named_modules():
        name = name or "the model"
        if _attached_to(module) is module:
            raise ValueError(
                f"engine: {name} is attached to another Aligner; call its detach() first."
            )
        if isinstance(module, _BatchNorm) and module.training:
            raise ValueError(_coupling(name, module))
        has_batch_second = isinstance(module, nn.MultiheadAttention | nn.RNNBase)
        if has_batch_second and not module.batch_first:
            raise ValueError(
                f"engine: {name} ({type(module).__name__}) has the batch as dimension 1; build it "
                'with batch_first=True, or use engine="per_task".'
            )
