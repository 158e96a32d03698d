"""Task gradients of several processes, put together exactly.

Every process differentiates its own rows, in whichever engine, and gets m task gradients. The
processes agree on who holds what, and exchange:

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
"""

# W processes, K components, T tasks present on any of them, m on this one, P parameters, S shards

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from gradvac import gram as geometry
from gradvac.engine.choice import LocalEngine
from gradvac.engine.components import Components
from gradvac.engine.kernels import combine, gram, wide
from gradvac.engine.losses import Losses
from gradvac.engine.processes._agreement import Agreed, Agreement
from gradvac.engine.processes._buckets import Bucket, divide
from gradvac.engine.processes._distributed import Arriving, Ranks, device_of
from gradvac.engine.processes._shards import Shards, whole
from gradvac.engine.task_gradients import AccumulatedGradients, Weigh, add_to_grad
from gradvac.indices import index_on

_IN_FLIGHT = 8  # buckets on their way at once: what is sent and received takes memory


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
        # Among whom the columns of a shard are divided, and who of them we are.
        self._copies = self.shards.copies if exact else 1
        self._own_copy = self.shards.own_copy if exact else 0
        self._device = device_of(list(self.shards.leaves.values()))
        self._buckets = divide(components, self.shards)
        self._bucket_of = {p.leaf: n for n, b in enumerate(self._buckets) for p in b.parts}
        self._num_components = len(components)
        self.agreement = Agreement(ranks, tasks, components, self.shards, facts)
        self._stored = AccumulatedGradients()
        self.discard()

    def discard(self) -> None:
        """Forget what waits."""
        self._stored.clear()
        self._used: set[nn.Parameter] = set()
        self._awaited: set[nn.Parameter] = set()  # what the backward has still to deliver
        self._held: tuple[tuple[int, ...], ...] = ()
        self._present: tuple[int, ...] = ()
        self._sent: list[Arriving] = []  # the rows of some buckets, on their way
        self._sums: list[Tensor] = []  # what came of those before: our columns, by task

    def take_part(
        self,
        engines: LocalEngine,
        read: Callable[[], Losses | None],
        losses: dict[int, Tensor],
        *,
        accumulate: bool,
    ) -> Exception | None:
        """Differentiate a micro-batch of this process, while the others differentiate theirs.

        Args:
            engines: How.
            read: Gives the losses; None: this process has no rows.
            losses: Of earlier micro-batches, by task; these are added.
            accumulate: More micro-batches will follow; the others hear nothing of this one.

        Returns:
            What went wrong: `close` tells it to the others.
        """
        given, error = None, None
        with whole(self.shards.modules, self.ranks):
            try:
                self.shards.refuse_changes()
                given = read()
            except Exception as raised:
                error = raised
            if not accumulate:
                held = {*losses, *(given.present if given else ())}
                self._held = self.agreement.hold(held, error)
                self._present = tuple(sorted({t for tasks in self._held for t in tasks}))
            try:
                if error is None and given is not None:
                    self._collect(engines, given)
                    given.add_to(losses)
            except Exception as raised:
                error = raised
        if accumulate and error is not None:
            raise error
        return error

    # -- this process --------------------------------------------------------------------------

    def _collect(self, engines: LocalEngine, losses: Losses) -> None:
        """Add the task gradients of a micro-batch to those that wait; send what is complete."""

        def deliver(parameter: nn.Parameter, by_task: Mapping[int, Tensor]) -> None:
            number = self._bucket_of[parameter]
            assert number >= self.num_sent, "came after its bucket had left"
            if not self._held:  # others will be added to them, in the dtype that is sent
                dtype = self._buckets[number].dtype
                by_task = {t: g if g.is_complex() else g.to(dtype) for t, g in by_task.items()}
            self._stored.add(parameter, by_task)
            self._used.add(parameter)
            self._awaited.discard(parameter)
            self._send_complete()

        outside = engines.stream(losses, deliver, self._expect)
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
        return len(self._sent) + len(self._sums)

    # -- all processes -------------------------------------------------------------------------

    def close(self, losses: Mapping[int, Tensor], error: Exception | None) -> Agreed:
        """After it: send what is left, and learn whether all processes got here.

        With the losses of this process by task, or what it met if it cannot go on.
        """
        self._awaited = set()
        if error is not None and self.ranks.is_broken:  # nobody there to tell
            raise error
        self._send_complete()
        while self._sent:
            self._receive()
        used = self.agreement.conclude(self._used, error)
        own_losses = torch.zeros(len(self._present), dtype=torch.float64, device=self._device)
        for task, loss in losses.items():
            own_losses[self._present.index(task)] = loss / self.ranks.size
        grams = self._grams()
        small = self.ranks.all_reduce(torch.cat([own_losses.to(grams.dtype), grams.view(-1)]))
        every_loss, every_gram = small.split([len(own_losses), grams.numel()])
        return Agreed(self._present, every_loss, used, every_gram.view(grams.shape))

    @torch.no_grad()
    def fold(self, agreed: Agreed, weigh: Weigh) -> None:
        """Gram -> weights -> `.grad`, alike in all processes."""
        every = (part for bucket in self._buckets for part in bucket.parts)
        reached = sorted({part.component for part in every if part.leaf in agreed.used})
        index = index_on(reached, self._device)
        weights = agreed.grams.new_zeros(agreed.grams.shape[:2])
        weights[index] = weigh(reached, agreed.grams[index])
        self._write(weights, agreed)
        self.discard()

    # -- how -----------------------------------------------------------------------------------

    @torch.no_grad()
    def _send_complete(self) -> None:
        """Send the buckets whose gradients are here, in an order that all processes keep."""
        while self._held and self.num_sent < len(self._buckets):
            bucket = self._buckets[self.num_sent]
            if any(part.leaf in self._awaited for part in bucket.parts):
                return
            if len(self._sent) == _IN_FLIGHT:
                self._receive()
            rows = self._side_by_side(bucket)
            if not self.exact:
                self._sent.append(Arriving(rows[:, 0]))
                continue
            by_rank = rows.unflatten(2, (self._copies, -1)).permute(2, 1, 0, 3).flatten(0, 1)
            sizes = [len(tasks) for tasks in self._held]
            self._sent.append(self.ranks.all_to_all(by_rank.contiguous(), sizes))

    def _side_by_side(self, bucket: Bucket) -> Tensor:
        """Task gradients of this process, `[m, S, width]`; zero where a task does not reach.

        Nobody reads the columns that make it divisible among the copies.
        """
        tasks, shards = self._held[self.ranks.rank], self.shards
        width = self._share(bucket) * self._copies
        rows = torch.empty(len(tasks), shards.num, width, dtype=bucket.dtype, device=self._device)
        for leaf, _, _, start, end in bucket.parts:
            by_task = self._stored.take(leaf)
            for row, task in zip(rows, tasks, strict=True):
                if task in by_task:
                    shards.scatter(by_task[task], row[:, start:end])
                else:
                    row[:, start:end] = 0
        return rows

    def _share(self, bucket: Bucket) -> int:
        """Columns of a shard that each of the processes which have it sums up."""
        return -(-bucket.width // self._copies)

    def _own_parts(self, bucket: Bucket) -> list[tuple[int, int, int]]:
        """The components within our columns: (number, first, end)."""
        share = self._share(bucket)
        return bucket.components_within(self._own_copy * share, (self._own_copy + 1) * share)

    def _receive(self) -> None:
        """Of the bucket that left first: the columns of this process, summed by task."""
        rows = self._sent.pop(0).wait()
        held = self._held if self.exact else (self._held[self.ranks.rank],)
        where = [self._present.index(task) for tasks in held for task in tasks]
        dtype = wide(rows.dtype)
        sums = rows.new_zeros(len(self._present), rows.shape[1], dtype=dtype)
        sums.index_add_(0, index_on(where, rows.device), rows.to(dtype))
        self._sums.append(sums)

    @torch.no_grad()
    def _grams(self) -> Tensor:
        """The part of our columns in all Gram matrices, `[K, T, T]`."""
        shape = (self._num_components, len(self._present), len(self._present))
        dtype = geometry.working_dtype(self._device)
        grams = torch.zeros(shape, dtype=dtype, device=self._device)
        for bucket, sums in zip(self._buckets, self._sums, strict=True):
            for component, start, end in self._own_parts(bucket):
                grams[component] += gram(sums[:, start:end])
        return grams / self.ranks.size**2  # of means

    def _write(self, weights: Tensor, agreed: Agreed) -> None:
        """Combine, gather the slices where several processes keep them, and add to `.grad`."""
        updates: list[Arriving] = []
        weights = weights / self.ranks.size  # sums become means
        for bucket in self._buckets:
            sums = self._sums.pop(0)
            update = sums.new_zeros(sums.shape[1], dtype=bucket.dtype)
            for component, start, end in self._own_parts(bucket):
                update[start:end] = combine(weights[component], sums[:, start:end])
            updates.append(self._gather(update))
        for bucket, arriving in zip(self._buckets, updates, strict=True):
            gathered = arriving.wait().view(-1)
            used = [part for part in bucket.parts if part.leaf in agreed.used]
            given = [self.shards.as_gradient(gathered[p.start : p.end], p.kept) for p in used]
            add_to_grad([part.kept for part in used], given, by_hand=True)

    def _gather(self, update: Tensor) -> Arriving:
        if not self.exact:
            return Arriving(self.ranks.all_reduce(update))
        if self._copies == 1:
            return Arriving(update)
        return self.ranks.all_gather_later(update, self._copies, self.shards.among)
