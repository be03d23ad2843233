"""The workers of an elastic run, in one of its processes: its row of stacked state, and messages to the others over ZeroMQ."""

from collections.abc import Callable, Sequence
import dataclasses

import jax
import numpy as np

from decjax.elastic.collectives import Stream
from decjax.elastic.membership import Membership
from decjax.elastic.programs import MEMBERS, Program
from decjax.elastic.view import View
from decjax.mesh import Axis, Workers
from decjax.typing import Jitted, PyTree

CHANNELS = 2  # for programs of the main thread, and for those that run at the same time (`ElasticWorkers.aside`)


class Group:
    """State that lasts from view to view: the membership and compiled programs.

    Attributes:
        membership: of this process; only compiling works before it is set.
        view: the current one.
        channels: `CHANNELS` streams of messages in that view.
        compiled: pieces of programs by their text.
    """

    membership: Membership

    def __init__(self, membership: Membership | None = None):
        if membership is not None:
            self.membership = membership
        self.view = View(0, 0, ())
        self.channels: list[Stream] = []
        self.compiled: dict[str, jax.stages.Compiled] = {}

    @property
    def index(self) -> int:
        """The worker index of this process; before the first view, in which all slots take part, its slot."""
        index = self.view.worker_of(self.membership.slot) if self.view.members else self.membership.slot
        assert index is not None
        return index

    def enter(self, left_out: Callable[[], None] = lambda: None) -> View:
        """Wait for the next view and begin it; see `Membership.next_view`."""
        self.view = self.membership.next_view(left_out)
        self.channels = [Stream(self.membership.transport, self.view, self.membership.slot, number) for number in range(CHANNELS)]
        return self.view

    @property
    def channel(self) -> Stream:
        """The main thread's channel in the current view."""
        return self.channels[0]


class _Jitted:
    """A function of one worker, applied to this process's row of stacked state."""

    def __init__(self, workers: "ElasticWorkers", fn: Callable, in_axes: Sequence[int | None]):
        def of_rows(*args):
            rows = [arg if axis is None else jax.tree.map(lambda x: x[0], arg) for arg, axis in zip(args, in_axes, strict=True)]
            return jax.tree.map(lambda x: jax.numpy.asarray(x)[None], fn(*rows))

        self._workers, self._fn = workers, of_rows
        self._executables: dict[tuple, Executable] = {}

    def __call__(self, *args: PyTree) -> PyTree:
        return self.lower(*args)(*args)

    def lower(self, *args: PyTree) -> "Executable":
        leaves, tree = jax.tree.flatten(args)
        key = tree, *((np.shape(x), np.dtype(getattr(x, "dtype", type(x)))) for x in leaves)
        if key not in self._executables:
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), getattr(x, "dtype", np.asarray(x).dtype)), args)
            self._executables[key] = Executable(self._workers, self._fn, like)
        return self._executables[key]


class Executable:
    """A compiled program of this member, with the methods of JAX's lowered and compiled programs that callers use."""

    def __init__(self, workers: "ElasticWorkers", fn: Callable, like: Sequence[PyTree]):
        self._group, self._channel = workers.group, workers.channel
        self._program = Program(fn, workers.num_workers, self._group.compiled, *like)
        self.out_info = self._program.out_info

    def __call__(self, *args: PyTree) -> PyTree:
        # If the view ends meanwhile, its channel raises `ViewChanged`.
        channel = self._group.channels[self._channel] if self._program.num_messages else None
        return self._program(channel, self._group.index, *args)

    def compile(self, options: object = None) -> "Executable":
        return self

    def as_text(self) -> str:
        return ""  # Its messages are not part of a compiled program.


@dataclasses.dataclass(frozen=True)
class ElasticWorkers(Workers):
    """The N workers of a view; stacked state is [1, …], the row of this process.

    Attributes:
        group: of this process.
        channel: number of the channel of their programs' messages.
    """

    group: Group = dataclasses.field(kw_only=True)
    channel: int = 0

    @property
    def aside(self) -> "ElasticWorkers":
        return dataclasses.replace(self, channel=1)

    @property
    def simulated(self) -> bool:
        return False

    @property
    def platform(self) -> str:
        return jax.default_backend()

    @property
    def needs_sender(self) -> bool:
        return self.num_workers > 1  # Messages pass through the host on all platforms.

    @property
    def axis(self) -> Axis:
        return MEMBERS

    @property
    def own(self) -> tuple[int, ...]:
        return (self.group.index,)

    def eval_shape(self, fn: Callable, in_axes: Sequence[int | None], *args: PyTree) -> PyTree:
        return _Jitted(self, fn, in_axes).lower(*args).out_info

    def jit(self, fn: Callable, in_axes: Sequence[int | None], donate_argnums: Sequence[int] = ()) -> Jitted:
        del donate_argnums  # A step that a change of the membership interrupts is repeated from the same state.
        return _Jitted(self, fn, in_axes)

    def stack(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jax.device_put(np.asarray(x)[None]), tree)

    def place(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jax.device_put(np.asarray(x)[self.group.index][None]), tree)

    def _stacked_rows(self, rows: dict[int, np.ndarray], batch_axis: int) -> jax.Array:
        del batch_axis  # A worker is one device.
        (row,) = rows.values()
        return jax.device_put(row[None])

    def fetch(self, tree: PyTree) -> PyTree:
        all_workers = range(self.num_workers)
        return jax.tree.map(lambda x: self.group.channel.gather(np.asarray(x)[0], all_workers), tree)

    def mean(self, tree: PyTree) -> PyTree:
        """Return the mean over workers of stacked floating-point arrays, in float32 or wider; of integers, the value of worker 0."""
        all_workers = range(self.num_workers)

        def one(x):
            x = np.asarray(x)[0]
            if not np.issubdtype(x.dtype, np.floating):
                return self.group.channel.gather(x, all_workers)[0]
            wide = x.astype(np.promote_types(x.dtype, np.float32))
            return self.group.channel.ring_sum(wide, all_workers) / np.asarray(self.num_workers, wide.dtype)

        return jax.tree.map(one, tree)
