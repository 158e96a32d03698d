"""Task gradients of several processes, put together exactly.

Every process differentiates its own rows, in whichever engine, and gets m task gradients. The
processes agree on who has which tasks, and exchange:

    all-to-all   every process gets a slice of all parameters from all others: m P / W numbers each,
                 a bucket of parameters at a time, while the backward goes on
    locally      rows of one task are summed, and the slice's part of the Gram matrix is taken
    all-reduce   of the parts, [K, T, T]: a Gram matrix is a sum over parameters
    locally      the rule gives all processes the same weights; each combines its slice
    all-gather   of the combined slices, among the processes that keep the same parameters

So a process sends (m + 1) P numbers where an all-reduce sends 2 P, and m P where FSDP2, whose
slices stay where they are, sends P. A Gram matrix is *not* a sum over processes: `exact=False`
treats it as one, leaves out the products between gradients of different processes, and sends what
an all-reduce sends.

FSDP2 divides every parameter along its first dimension and shows the modules all of it only while
they run. For an aligned backward, `unsharded_backward` shows all modules all parameters: then the
leaves of the graph are the parameters, each process may run as many backward passes as it needs,
and nothing but the exchange has to know of shards.
"""

# W processes, K components, T tasks present on any of them, m on this one, P parameters
# S shards, R replicas: processes with the same shard, W = R S

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradvac import gram as geometry
from gradvac.engine.choice import LocalEngine
from gradvac.engine.collectives import Pending, RankError, Ranks
from gradvac.engine.components import Components
from gradvac.engine.kernels import combine, gram, wide
from gradvac.engine.losses import Losses
from gradvac.engine.task_gradients import AccumulatedGradients, Weigh, add_to_grad
from gradvac.utils.devices import index_on

BUCKET_BYTES = 1 << 25  # of one task's gradients
_IN_FLIGHT = 8  # buckets on their way at once: what is sent and received takes memory

# -- shards ----------------------------------------------------------------------------------------


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules whose parameters FSDP2 gathers one by one; none of a model without shards."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextmanager
def unsharded_backward(modules: Sequence[Any], ranks: Ranks | None = None) -> Iterator[None]:
    """All parameters in this process, and no gradients exchanged by FSDP2 itself.

    All processes have to come here together.

    Args:
        modules: Those of `sharded_modules`.
        ranks: The processes, to name one that does not come.
    """
    groups = _parameter_groups(modules)
    saved = [(g.reduce_grads, g.all_reduce_grads, g.reshard_after_backward) for g in groups]
    for module in modules:
        module.unshard() if ranks is None else ranks.run(module.unshard)
    try:
        for group in groups:
            group.reduce_grads = group.all_reduce_grads = group.reshard_after_backward = False
        yield
    finally:
        for state in [module._get_fsdp_state() for module in modules]:
            if state._state_ctx.post_backward_final_callback_queued:  # a backward broke off
                state._root_post_backward_final_callback()
        for group, values in zip(groups, saved, strict=True):
            group.reduce_grads, group.all_reduce_grads, group.reshard_after_backward = values
            if group.reshard_after_backward:
                group.reshard()


def _parameter_groups(modules: Sequence[Any]) -> list[Any]:
    """Parameters that FSDP2 gathers at once; older versions of torch have one group a module."""
    groups: list[Any] = []
    for state in [module._get_fsdp_state() for module in modules]:
        several = hasattr(state, "_fsdp_param_groups")
        groups += state._fsdp_param_groups if several else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


class Shards:
    """What this process keeps of a model that `ranks` train together.

    Attributes:
        every: Name -> parameter, or the local shard of it; frozen ones too.
        parameters: Those that are trained: what the optimizer of this process updates.
        leaves: Name -> the unsharded parameter, a leaf of graphs.
        modules: Those that FSDP2 shards.
        num: Shards of a parameter, S; 1: every process keeps all of it.
        index: Of the local shard.
        num_replicas: Processes with the same shard, R.
        replica: Which of them this process is.
        replica_group: Their process group; None: all processes.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self.every: dict[str, Any] = dict(model.named_parameters())
        self.parameters = {n: p for n, p in self.every.items() if p.requires_grad}
        self.leaves: dict[str, nn.Parameter] = self.parameters
        self.num, self.index = 1, 0
        self.num_replicas, self.replica = ranks.size, ranks.rank
        self.replica_group: Any = None
        self.modules = sharded_modules(model)
        self._reduce_dtypes: dict[int, torch.dtype] = {}
        if not self.modules:
            return
        mesh = next(iter(self.parameters.values())).device_mesh
        self.num, self.index = mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1)
        self.num_replicas, self.replica = ranks.size // self.num, ranks.rank // self.num
        self.replica_group = mesh.get_group(0) if mesh.ndim == 2 else None
        with unsharded_backward(self.modules):
            self.leaves = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.check_settings()
        for group in _parameter_groups(self.modules):
            for fsdp_param in group.fsdp_params:
                if reduce_dtype := fsdp_param.mp_policy.reduce_dtype:
                    self._reduce_dtypes[id(fsdp_param.sharded_param)] = reduce_dtype

    def check_settings(self) -> None:
        """Raise for settings that change what plain FSDP2 does with gradients."""
        for group in _parameter_groups(self.modules):
            changed = {
                "CPUOffloadPolicy": any(param.offload_to_cpu for param in group.fsdp_params),
                "set_gradient_divide_factor": group.gradient_divide_factor is not None,
                "set_all_reduce_hook": group._all_reduce_hook is not None,
            }
            for setting in [name for name, is_set in changed.items() if is_set]:
                raise ValueError(
                    f"model: {setting} changes what FSDP2 does with gradients, which the Aligner "
                    "does in its place: means over all processes of the mesh, on their devices. "
                    "Leave it out; scale the losses instead of gradients."
                )

    def __str__(self) -> str:
        """What there is to report beside the number of processes."""
        return f", {self.num} shards, unsharded during the backward" if self.modules else ""

    def local_values(self) -> dict[str, Tensor]:
        """What this process keeps of all parameters, trained or not, by what it is."""
        if not self.modules:
            return self.every
        shards = {n: p for n, p in self.every.items() if hasattr(p, "to_local")}
        return {f"shard {self.index} of {name}": p.to_local() for name, p in shards.items()}

    def reduce_dtype(self, name: str) -> torch.dtype:
        """The dtype in which gradients are exchanged: the parameter's, or FSDP2's policy."""
        default = self.leaves[name].dtype.to_real()
        return self._reduce_dtypes.get(id(self.parameters[name]), default)

    def width(self, parameter: Tensor) -> int:
        """Real numbers of a shard of an unsharded parameter, padded to that of the first."""
        size = _num_reals(parameter)
        if self.num == 1 or not size:
            return size
        return -(-parameter.shape[0] // self.num) * (size // parameter.shape[0])

    def scatter(self, gradient: Tensor, shards: Tensor) -> None:
        """Write a gradient into `shards` `[S, width]`, and zeros after its end."""
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient.resolve_conj())
        flat = gradient.reshape(-1)
        if missing := shards.numel() - len(flat):
            flat = nn.functional.pad(flat, (0, missing))
        shards.copy_(flat.view_as(shards))

    def as_gradient(self, update: Tensor, parameter: Any) -> Tensor:
        """From real numbers `[width]` to what belongs into `.grad`."""
        local = parameter.to_local() if self.modules else parameter
        values = update[: _num_reals(local)].clone()  # of a bucket, which is let go
        values = torch.view_as_complex(values.view(-1, 2)) if local.is_complex() else values
        values = values.view(local.shape).to(local.dtype)
        if not self.modules:
            return values
        from torch.distributed.tensor import DTensor

        mesh, placements = parameter.device_mesh, parameter.placements
        full = {"shape": parameter.shape, "stride": parameter.stride()}
        return DTensor.from_local(values, mesh, placements, run_check=False, **full)


def _num_reals(values: Tensor) -> int:
    return values.numel() * (2 if values.is_complex() else 1)


# -- buckets ---------------------------------------------------------------------------------------


class BucketEntry(NamedTuple):
    """One parameter in a bucket."""

    leaf: nn.Parameter  # of graphs
    local: nn.Parameter  # what this process keeps of it
    component: int
    start: int  # of its columns
    end: int


@dataclass
class Bucket:
    """Parameters that are exchanged at once, side by side, in one dtype."""

    dtype: torch.dtype
    entries: list[BucketEntry] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Their numbers in one shard."""
        return self.entries[-1].end if self.entries else 0

    def components_within(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """The components within columns start..end: (number, first, end), counted from start."""
        found: list[tuple[int, int, int]] = []
        for entry in self.entries:
            first, last = max(entry.start, start) - start, min(entry.end, end) - start
            if first < last:
                if found and found[-1][0] == entry.component and found[-1][2] == first:
                    first = found.pop()[1]
                found.append((entry.component, first, last))
        return found


def make_buckets(components: Mapping[str, Collection[str]], shards: Shards) -> list[Bucket]:
    """The parameters in the order in which a backward completes them, by and large."""
    buckets: list[Bucket] = []
    unfilled: dict[torch.dtype, Bucket] = {}
    every = [(name, k) for k, names in enumerate(components.values()) for name in names]
    for name, component in reversed(every):
        dtype, leaf = shards.reduce_dtype(name), shards.leaves[name]
        bucket = unfilled.get(dtype)
        if bucket is None or bucket.width * shards.num * dtype.itemsize >= BUCKET_BYTES:
            bucket = unfilled[dtype] = Bucket(dtype)
            buckets.append(bucket)
        start, end = bucket.width, bucket.width + shards.width(leaf)
        bucket.entries.append(BucketEntry(leaf, shards.parameters[name], component, start, end))
    return buckets


# -- agreement -------------------------------------------------------------------------------------

_FINE, _FAILED, _CHANGED = 0, 1, 2  # the state of a process before the exchange


@dataclass(frozen=True)
class Agreed:
    """What all processes know of a step."""

    present: tuple[int, ...]  # tasks that any of them has
    losses: Tensor  # of these, [T]: means over processes, as gradients are
    used: frozenset[nn.Parameter]  # that any task of any process reached
    grams: Tensor  # of all components, [K, T, T]


class Agreement:
    """A few numbers of every process, twice a step; everything they were set up with, once.

    `facts` gives what else must be the same; it is called again when the state has changed.
    """

    def __init__(
        self,
        ranks: Ranks,
        tasks: Sequence[str],
        components: Components,
        shards: Shards,
        facts: Callable[[], Mapping[str, object]],
    ) -> None:
        self._ranks, self._tasks, self._components = ranks, tuple(tasks), components
        self._shards, self._facts = shards, facts
        self._parameters = list(shards.leaves.values())
        self._state, self._is_compared = _CHANGED, False

    def state_changed(self) -> None:
        """Compare the rule's state with that of the other processes before the next step."""
        self._state = _CHANGED

    def tasks_by_rank(
        self, local: Iterable[int], error: Exception | None
    ) -> tuple[tuple[int, ...], ...]:
        """Before the backward: the tasks of every process.

        Raises:
            Exception: What this process met.
            RuntimeError: Another process met something.
            ValueError: The processes are not set up alike, or none has a row.
        """
        if not self._is_compared:
            self._compare("setup", self._setup())
            self._state, self._is_compared = _FINE, True
        state = self._state if error is None else _FAILED
        states, by_rank = self._gather(state, local, len(self._tasks), error)
        if _CHANGED in states:
            self._compare("state", self._facts())
            self._state = _FINE
        if not any(by_rank):
            raise ValueError("losses: no process has a row; at least one needs a batch.")
        return tuple(tuple(tasks) for tasks in by_rank)

    def used_by_any(
        self, local: Collection[nn.Parameter], error: Exception | None
    ) -> frozenset[nn.Parameter]:
        """After the backward: the parameters that any process reached.

        Raises like `tasks_by_rank`.
        """
        reached = [n for n, p in enumerate(self._parameters) if p in local]
        state = _FINE if error is None else _FAILED
        _, by_rank = self._gather(state, reached, len(self._parameters), error)
        return frozenset(self._parameters[n] for numbers in by_rank for n in numbers)

    def _gather(
        self, state: int, positions: Iterable[int], num: int, error: Exception | None
    ) -> tuple[list[int], list[list[int]]]:
        """The state of every process, and its choice of `num` positions."""
        local = torch.zeros(1 + num, dtype=torch.uint8)
        local[[1 + position for position in positions]] = 1
        local[0] = state
        every = self._ranks.gather_words(local)
        states = every[:, 0].tolist()
        if _FAILED in states:
            message = None if error is None else f"{type(error).__name__}: {error}"
            messages = self._ranks.gather_objects(message)
            if error is not None:
                raise error
            rank = states.index(_FAILED)
            raise RuntimeError(
                f"processes: rank {rank} could not take this step, so none does: {messages[rank]}"
            )
        return states, [words[1:].nonzero().flatten().tolist() for words in every]

    def _setup(self) -> dict[str, object]:
        """What must be the same before the first exchange."""
        shards = self._shards
        values = shards.local_values().items()
        return {
            "tasks": self._tasks,
            "granularity": dict(self._components),
            "parameters": [(n, tuple(p.shape), str(p.dtype)) for n, p in shards.every.items()],
            "the number of shards": shards.num,
            **self._facts(),
            **{f"the values of {what}": digest(value) for what, value in values},
        }

    def _compare(self, what: str, local: Mapping[str, object]) -> None:
        """Raise in all processes if one differs from the first that has the same."""
        by_rank = self._ranks.gather_objects({key: _shown(value) for key, value in local.items()})
        first: dict[str, int] = {}
        for rank, shown in enumerate(by_rank):
            for key, value in shown.items():
                other = first.setdefault(key, rank)
                if value != by_rank[other][key]:
                    raise ValueError(
                        f"processes: rank {rank} and rank {other} differ in {key}: {value} and "
                        f"{by_rank[other][key]}. All processes need the same Aligner and the same "
                        f"{what}; only their rows differ."
                    )


def _shown(value: object) -> str:
    """A value to compare and to show: all of it, or its beginning and a hash."""
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # addresses of functions differ
    if len(text) <= 160:
        return text
    return f"{text[:120]}... ({hashlib.blake2b(text.encode(), digest_size=6).hexdigest()})"


def digest(state: object) -> str:
    """A hash of nested state, tensors by their bytes."""
    hashed = hashlib.blake2b(digest_size=8)

    def add(value: object) -> None:
        if isinstance(value, Tensor):
            hashed.update(str((value.dtype, tuple(value.shape))).encode())
            values = value.detach().cpu().contiguous().flatten()
            hashed.update(values.view(torch.uint8).numpy().data)
        elif isinstance(value, Mapping):
            for key in value:
                hashed.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        else:
            hashed.update(repr(value).encode())

    add(state)
    return hashed.hexdigest()


# -- the exchange ----------------------------------------------------------------------------------


class Exchange:
    """Sends the task gradients of this process, and combines them with those of the others.

    A replica of the model, or a shard, is in every process; `facts` are those of `Agreement`.
    """

    def __init__(
        self,
        model: nn.Module,
        components: Components,
        tasks: Sequence[str],
        ranks: Ranks,
        *,
        exact: bool,
        facts: Callable[[], Mapping[str, object]],
    ) -> None:
        self.ranks, self.exact = ranks, exact
        self.shards = Shards(model, ranks)
        # Replicas divide the columns of their shard among them.
        self._num_slices = self.shards.num_replicas if exact else 1
        self._slice = self.shards.replica if exact else 0
        self._device = _only_device(self.shards.leaves.values())
        self._buckets = make_buckets(components, self.shards)
        self._bucket_of = {e.leaf: n for n, b in enumerate(self._buckets) for e in b.entries}
        self._num_components = len(components)
        self.agreement = Agreement(ranks, tasks, components, self.shards, facts)
        self._stored = AccumulatedGradients()
        self.discard()

    def discard(self) -> None:
        """Forget the micro-batches of an unfinished step."""
        self._stored.clear()
        self._used: set[nn.Parameter] = set()
        self._awaited: set[nn.Parameter] = set()  # what the backward has still to deliver
        self._tasks_by_rank: tuple[tuple[int, ...], ...] = ()
        self._present: tuple[int, ...] = ()
        self._in_flight: list[Pending] = []  # the rows of some buckets
        self._sums: list[Tensor] = []  # of the buckets before: the columns of this process, by task

    def take_part(
        self,
        engine: LocalEngine,
        read: Callable[[], Losses | None],
        losses: dict[int, Tensor],
        *,
        accumulate: bool,
    ) -> Exception | None:
        """Differentiate a micro-batch of this process, while the others differentiate theirs.

        Args:
            engine: How.
            read: Gives the losses; None: this process has no rows.
            losses: Of earlier micro-batches, by task; these are added.
            accumulate: More micro-batches will follow; nothing is sent of this one.

        Returns:
            What went wrong, for `close`, which lets the others know.
        """
        given, error = None, None
        with unsharded_backward(self.shards.modules, self.ranks):
            try:
                self.shards.check_settings()
                given = read()
            except Exception as raised:
                error = raised
            if not accumulate:
                local = {*losses, *(given.present if given else ())}
                self._tasks_by_rank = self.agreement.tasks_by_rank(local, error)
                self._present = tuple(sorted({t for tasks in self._tasks_by_rank for t in tasks}))
            try:
                if error is None and given is not None:
                    self._collect(engine, given)
                    given.add_to(losses)
            except Exception as raised:
                error = raised
        if accumulate and error is not None:
            raise error
        return error

    def _collect(self, engine: LocalEngine, losses: Losses) -> None:
        """Add the task gradients of a micro-batch to those that wait; send what is complete."""

        def deliver(parameter: nn.Parameter, by_task: Mapping[int, Tensor]) -> None:
            number = self._bucket_of[parameter]
            assert number >= self.num_sent, "came after its bucket had left"
            if not self._tasks_by_rank:  # others will be added to them, in the dtype that is sent
                dtype = self._buckets[number].dtype
                by_task = {t: g if g.is_complex() else g.to(dtype) for t, g in by_task.items()}
            self._stored.add(parameter, by_task)
            self._used.add(parameter)
            self._awaited.discard(parameter)
            self._send_complete()

        outside = engine.stream(losses, deliver, self._expect)
        if outside:
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in list(outside)[:3])
            raise ValueError(
                f"losses: they also reach {len(outside)} tensor(s) outside the model (shapes "
                f"{shapes}), whose gradients no process would share with the others; make one "
                "nn.Module of everything that is trained, and give that to the Aligner."
            )

    def _expect(self, parameters: Iterable[nn.Parameter]) -> None:
        """What the backward is going to deliver: buckets without any of it may leave."""
        self._awaited = set(parameters)
        self._send_complete()

    @property
    def num_sent(self) -> int:
        """Buckets that have left in this step."""
        return len(self._in_flight) + len(self._sums)

    @torch.no_grad()
    def _send_complete(self) -> None:
        """Send the buckets whose gradients are here, in an order that all processes keep."""
        while self._tasks_by_rank and self.num_sent < len(self._buckets):
            bucket = self._buckets[self.num_sent]
            if any(entry.leaf in self._awaited for entry in bucket.entries):
                return
            if len(self._in_flight) == _IN_FLIGHT:
                self._receive()
            rows = self._side_by_side(bucket)
            if not self.exact:
                self._in_flight.append(Pending(rows[:, 0]))
                continue
            by_rank = rows.unflatten(2, (self._num_slices, -1)).permute(2, 1, 0, 3).flatten(0, 1)
            sizes = [len(tasks) for tasks in self._tasks_by_rank]
            self._in_flight.append(self.ranks.all_to_all(by_rank.contiguous(), sizes))

    def _side_by_side(self, bucket: Bucket) -> Tensor:
        """Task gradients of this process, `[m, S, width]`; zero where a task does not reach.

        The columns that make it divisible into slices are never read.
        """
        tasks, shards = self._tasks_by_rank[self.ranks.rank], self.shards
        width = self._slice_width(bucket) * self._num_slices
        rows = torch.empty(len(tasks), shards.num, width, dtype=bucket.dtype, device=self._device)
        for leaf, _, _, start, end in bucket.entries:
            by_task = self._stored.take(leaf)
            for row, task in zip(rows, tasks, strict=True):
                if task in by_task:
                    shards.scatter(by_task[task], row[:, start:end])
                else:
                    row[:, start:end] = 0
        return rows

    def _slice_width(self, bucket: Bucket) -> int:
        return -(-bucket.width // self._num_slices)

    def _local_components(self, bucket: Bucket) -> list[tuple[int, int, int]]:
        """The components within the slice of this process: (number, first, end)."""
        width = self._slice_width(bucket)
        return bucket.components_within(self._slice * width, (self._slice + 1) * width)

    def _receive(self) -> None:
        """Of the bucket that left first: the slice of this process, summed by task."""
        rows = self._in_flight.pop(0).wait()
        by_rank = self._tasks_by_rank if self.exact else (self._tasks_by_rank[self.ranks.rank],)
        where = [self._present.index(task) for tasks in by_rank for task in tasks]
        dtype = wide(rows.dtype)
        sums = rows.new_zeros(len(self._present), rows.shape[1], dtype=dtype)
        sums.index_add_(0, index_on(where, rows.device), rows.to(dtype))
        self._sums.append(sums)

    def close(self, losses: Mapping[int, Tensor], error: Exception | None) -> Agreed:
        """After the backward: send what is left, and learn whether all processes got here.

        Args:
            losses: Of this process, by task.
            error: What this process met, if it cannot go on.
        """
        self._awaited = set()
        if error is not None and self.ranks.is_broken:  # no process is left to inform
            raise error
        self._send_complete()
        while self._in_flight:
            self._receive()
        used = self.agreement.used_by_any(self._used, error)
        local_losses = torch.zeros(len(self._present), dtype=torch.float64, device=self._device)
        for task, loss in losses.items():
            local_losses[self._present.index(task)] = loss / self.ranks.size
        grams = self._local_grams()
        small = self.ranks.all_reduce(torch.cat([local_losses.to(grams.dtype), grams.view(-1)]))
        every_loss, every_gram = small.split([len(local_losses), grams.numel()])
        return Agreed(self._present, every_loss, used, every_gram.view(grams.shape))

    @torch.no_grad()
    def _local_grams(self) -> Tensor:
        """The part of this process's slices in all Gram matrices, `[K, T, T]`."""
        shape = (self._num_components, len(self._present), len(self._present))
        dtype = geometry.working_dtype(self._device)
        grams = torch.zeros(shape, dtype=dtype, device=self._device)
        for bucket, sums in zip(self._buckets, self._sums, strict=True):
            for component, start, end in self._local_components(bucket):
                grams[component] += gram(sums[:, start:end])
        return grams / self.ranks.size**2  # of means

    @torch.no_grad()
    def apply(self, agreed: Agreed, weigh: Weigh) -> None:
        """Gram -> weights -> `.grad`, alike in all processes."""
        every = (entry for bucket in self._buckets for entry in bucket.entries)
        reached = sorted({entry.component for entry in every if entry.leaf in agreed.used})
        index = index_on(reached, self._device)
        weights = agreed.grams.new_zeros(agreed.grams.shape[:2])
        weights[index] = weigh(reached, agreed.grams[index])
        self._write(weights, agreed)
        self.discard()

    def _write(self, weights: Tensor, agreed: Agreed) -> None:
        """Combine, gather the slices where several processes keep them, and add to `.grad`."""
        updates: list[Pending] = []
        weights = weights / self.ranks.size  # sums become means
        for bucket in self._buckets:
            sums = self._sums.pop(0)
            update = sums.new_zeros(sums.shape[1], dtype=bucket.dtype)
            for component, start, end in self._local_components(bucket):
                update[start:end] = combine(weights[component], sums[:, start:end])
            updates.append(self._gather_slices(update))
        for bucket, pending in zip(self._buckets, updates, strict=True):
            gathered = pending.wait().view(-1)
            used = [entry for entry in bucket.entries if entry.leaf in agreed.used]
            gradients = [self.shards.as_gradient(gathered[e.start : e.end], e.local) for e in used]
            add_to_grad([entry.local for entry in used], gradients, by_hand=True)

    def _gather_slices(self, update: Tensor) -> Pending:
        if not self.exact:
            return Pending(self.ranks.all_reduce(update))
        if self._num_slices == 1:
            return Pending(update)
        return self.ranks.all_gather(update, self._num_slices, self.shards.replica_group)


def _only_device(parameters: Iterable[Tensor]) -> torch.device:
    """The device of a model that several processes train."""
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        raise ValueError(
            f"model: its parameters are on {len(devices)} devices "
            f"({', '.join(sorted(map(str, devices)))}); with several processes, each process needs "
            "its replica on one device."
        )
    return devices.pop()


__all__ = ["Exchange", "RankError", "Ranks", "digest", "sharded_modules", "unsharded_backward"]
