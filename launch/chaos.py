"""Fault injection: kill or freeze processes, cut off hosts, slow down links.

    --chaos='kill=3@120s,freeze=1@200s+15s,cut=2@300s+30s,rate=0:5mbit@400s'
    --chaos='storm(per_hour=125,seed=0)'

`kill=3@120s` kills process 3 after 120 s; `freeze=1@200s+15s` stops process 1 for 15 s; `cut=2@300s+30s` takes the link of host 2 down
for 30 s; `rate=0:5mbit@400s` sets the rate of host 0's link. A storm kills a random process at random times with exponential pauses;
`storm(per_hour=125,kinds=all,lasts_s=10)` also freezes processes and cuts off hosts.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import heapq
import os
import random
import re
import signal
import sys
import time
from typing import Annotated, Literal, NamedTuple, Protocol

from decjax import registry
from decjax.options import Positive, Range
from launch import command

_NUMBER = r"(\d{1,9}(?:\.\d+)?)s"
# Kind -> what it does to which target; groups: target, rate, time, duration.
_FAULTS = {
    "kill": re.compile(rf"(\d{{1,9}})()@{_NUMBER}()", re.ASCII),
    "freeze": re.compile(rf"(\d{{1,9}})()@{_NUMBER}\+{_NUMBER}", re.ASCII),
    "cut": re.compile(rf"(\d{{1,9}})()@{_NUMBER}\+{_NUMBER}", re.ASCII),
    "rate": re.compile(rf"(\d{{1,9}}):([\w.]+)@{_NUMBER}()", re.ASCII),
}
_OF_LINKS, _LASTING = ("cut", "rate"), ("freeze", "cut")
_EXAMPLE = "write --chaos='kill=3@120s,freeze=1@200s+15s,cut=2@300s+30s,rate=0:5mbit@400s'"


class Links(Protocol):
    """Links of an emulated cluster."""

    def set_link(self, host: int, up: bool) -> None: ...
    def set_rate(self, rate: str, host: int | None = None) -> None: ...


class Event(NamedTuple):
    """A fault."""

    at_s: float  # since the start
    kind: str
    target: int  # process or host
    lasts_s: float = 0.0
    rate: str = ""


def parse(text: str, processes: int, hosts: int = 0) -> Iterator[Event]:
    """Parse faults, in the order of their times; a storm has no end.

    Args:
        text: as in the module's examples.
        processes: their number.
        hosts: their number; 0: no emulated cluster, so links cannot be cut or slowed down.
    """
    if text.startswith("storm"):
        return Storm.parse(text, hosts).events(processes, hosts)
    events = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        kind, _, values = part.partition("=")
        if kind not in _FAULTS or not (match := _FAULTS[kind].fullmatch(values)):
            command.refuse(f"--chaos: {part!r} is not a fault", _EXAMPLE)
        events.append(Event(float(match[3]), kind, int(match[1]), float(match[4] or 0), match[2]))
        _check_target(kind, int(match[1]), processes, hosts)
        if match[2]:
            from launch import network  # It imports this module.

            network.checked_rate(match[2])
    return iter(sorted(events))


def _check_target(kind: str, target: int, processes: int, hosts: int) -> None:
    """Refuse a fault of a link without an emulated cluster, and a process or host that does not exist."""
    most, what = (hosts, "hosts") if kind in _OF_LINKS else (processes, "processes")
    if not most:
        command.refuse(f"--chaos: {kind} needs an emulated cluster", "use launch.cluster run")
    if target >= most:
        command.refuse(f"--chaos: {kind}={target}: there are {most} {what}, from 0 to {most - 1}")


@dataclasses.dataclass(frozen=True)
class Storm:
    """Faults at random times with exponential pauses, of random kinds and targets.

    Attributes:
        per_hour: their mean number per hour.
        seed: of the random numbers.
        kinds: one kind, or all that are possible.
        lasts_s: duration of those that end.
    """

    per_hour: Annotated[float, Range(1e-6)] = 125.0
    seed: int = 0
    kinds: Literal["all", "kill", "freeze", "cut"] = "kill"
    lasts_s: Positive = 10.0

    @classmethod
    def parse(cls, text: str, hosts: int) -> "Storm":
        """Parse a storm; refuse one that needs hosts where there are none."""
        known = registry.options_of(cls)
        with command.refusing("--chaos", errors=(ValueError, OverflowError)):
            name, options = registry.parse("a storm", text)
            example = "storm(per_hour=125,seed=0,kinds=all,lasts_s=10)"
            command.check((name == "storm" and not options.keys() - known, f"{text!r} must be like {example!r}", ""))
            storm = cls(**registry.fill("option ", options, known))
        _check_target(storm.kinds, 0, 1, hosts)
        return storm

    def events(self, processes: int, hosts: int) -> Iterator[Event]:
        """Yield faults without end."""
        kinds = ["kill", "freeze", *(["cut"] if hosts else [])] if self.kinds == "all" else [self.kinds]
        chance, at_s = random.Random(self.seed), 0.0
        while True:
            at_s += chance.expovariate(self.per_hour / 3600)
            kind = chance.choice(kinds)
            target = chance.randrange(hosts if kind in _OF_LINKS else processes)
            yield Event(at_s, kind, target, self.lasts_s if kind in _LASTING else 0.0)


class Chaos:
    """Injects faults at their times; `look` must be called several times a second.

    Args:
        events: from `parse`.
        process_of: maps a slot to the id of its process; None: there is none.
        links: of the emulated cluster, if there is one.
        begun: start of the clock in `time.monotonic`; None: now.
    """

    def __init__(
        self,
        events: Iterator[Event],
        process_of: Callable[[int], int | None],
        links: Links | None = None,
        begun: float | None = None,
    ):
        self._events, self._process_of, self._links = events, process_of, links
        self._begun = time.monotonic() if begun is None else begun
        self._next = next(events, None)
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self.done: list[Event] = []

    def look(self) -> None:
        """Inject the faults that are due, and end those that are over."""
        now_s = time.monotonic() - self._begun
        while self._ends and self._ends[0][0] <= now_s:
            heapq.heappop(self._ends)[2]()
        while self._next and self._next.at_s <= now_s:
            event, self._next = self._next, next(self._events, None)
            self._do(event)
            self.done.append(event)

    def close(self) -> None:
        """End all faults."""
        while self._ends:
            heapq.heappop(self._ends)[2]()

    def _do(self, event: Event) -> None:
        duration = f" for {event.lasts_s:g} s" if event.lasts_s else ""
        print(f"chaos: {event.kind} {event.target}{duration}", file=sys.stderr, flush=True)
        if end := self._on_link(event) if event.kind in _OF_LINKS else self._on_process(event):
            heapq.heappush(self._ends, (event.at_s + event.lasts_s, len(self.done), end))

    def _on_process(self, event: Event) -> Callable[[], None] | None:
        """Kill or stop a process; return a function that continues it."""
        if (process := self._process_of(event.target)) is None:
            return None

        def send(number: signal.Signals) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

        send(signal.SIGKILL if event.kind == "kill" else signal.SIGSTOP)
        return None if event.kind == "kill" else lambda: send(signal.SIGCONT)

    def _on_link(self, event: Event) -> Callable[[], None] | None:
        """Take a link down or change its rate; return a function that restores it."""
        links = self._links
        assert links
        if event.kind == "rate":
            links.set_rate(event.rate, event.target)
            return None
        links.set_link(event.target, up=False)
        return lambda: links.set_link(event.target, up=True)
