"""Fault injection: kill or freeze processes, cut off hosts, slow down links.

    --chaos='kill=3@120s,freeze=1@200s+15s,cut=2@300s+30s,rate=0:5mbit@400s'
    --chaos='storm(per_hour=125,seed=0)'

`kill=3@120s` kills process 3 after 120 s; `freeze=1@200s+15s` stops process 1 for 15 s; `cut=2@300s+30s` takes the link of host 2 down
for 30 s; `rate=0:5mbit@400s` sets the rate of host 0's link. A storm kills a random process at random times with exponential pauses;
`storm(per_hour=125,kinds=all,lasts_s=10)` also freezes processes and cuts off hosts.
"""

from collections.abc import Callable, Iterator
import contextlib
import heapq
import math
import os
import random
import re
import signal
import sys
import time
from typing import NamedTuple, NoReturn, Protocol

from decjax import registry
from launch import command

KINDS = ("kill", "freeze", "cut", "rate")
_EVENT = re.compile(r"(\w+)=(\d{1,9})(?::([\w.]+))?@(\d{1,9}(?:\.\d+)?)s(?:\+(\d{1,9}(?:\.\d+)?)s)?", re.ASCII)
_LASTING = ("freeze", "cut")
_STORM = {
    "per_hour": registry.Option(125.0, float, False),
    "seed": registry.Option(0, int, False),
    "kinds": registry.Option("kill", str, False, ("all", "kill", *_LASTING)),
    "lasts_s": registry.Option(10.0, float, False),
}
LEAST_PER_HOUR = 1e-6
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
        return _storm(text, processes, hosts)
    events = []
    for part in filter(None, text.split(",")):
        found = _EVENT.fullmatch(part.strip())
        if not found or found[1] not in KINDS:
            command.refuse(f"--chaos: {part.strip()!r} is not a fault", _EXAMPLE)
        event = Event(float(found[4]), found[1], int(found[2]), float(found[5] or 0), found[3] or "")
        _check(event, processes, hosts)
        events.append(event)
    return iter(sorted(events))


def _check(event: Event, processes: int, hosts: int) -> None:
    of_link = event.kind in ("cut", "rate")
    most = hosts if of_link else processes
    if of_link and not hosts:
        _refuse_link(event.kind)
    if event.target >= most:
        command.refuse(
            f"--chaos: {event.kind}={event.target}: there are {most} {'hosts' if of_link else 'processes'}, from 0 to {most - 1}"
        )
    if (event.kind in _LASTING) != bool(event.lasts_s) or (event.kind == "rate") != bool(event.rate):
        command.refuse(f"--chaos: {event.kind}={event.target} is incomplete or has extra values", _EXAMPLE)
    if event.rate:
        from launch import iproute  # It imports this module.

        iproute.checked_rate(event.rate)


def _refuse_link(kind: str) -> NoReturn:
    command.refuse(f"--chaos: {kind} needs an emulated cluster", "use launch.cluster run")


def _storm(text: str, processes: int, hosts: int) -> Iterator[Event]:
    try:
        name, given = registry.parse("--chaos:", text)
        options = registry.fill("--chaos: option ", given, _STORM)
    except (ValueError, OverflowError) as error:
        command.refuse(str(error))
    per_hour, lasts_s, seed = options["per_hour"], options["lasts_s"], options["seed"]
    if name != "storm" or given.keys() - _STORM or not (LEAST_PER_HOUR <= per_hour < math.inf and 0 < lasts_s < math.inf):
        command.refuse(f"--chaos={text}: must be like 'storm(per_hour=125,seed=0,kinds=all,lasts_s=10)'")
    kinds = ["kill", "freeze", *(["cut"] if hosts else [])] if options["kinds"] == "all" else [options["kinds"]]
    if "cut" in kinds and not hosts:
        _refuse_link("cut")

    def events():
        chance, at_s = random.Random(seed), 0.0
        while True:
            at_s += chance.expovariate(per_hour / 3600)
            kind = chance.choice(kinds)
            target = chance.randrange(hosts if kind == "cut" else processes)
            yield Event(at_s, kind, target, lasts_s if kind in _LASTING else 0.0)

    return events()


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
        print(
            f"chaos: {event.kind} {event.target}{f' for {event.lasts_s:g} s' if event.lasts_s else ''}", file=sys.stderr, flush=True
        )
        end = self._on_process(event) if event.kind in ("kill", "freeze") else self._on_link(event)
        if end:
            heapq.heappush(self._ends, (event.at_s + event.lasts_s, len(self.done), end))

    def _on_process(self, event: Event) -> Callable[[], None] | None:
        """Kill or stop a process; return a function that continues it."""
        if (process := self._process_of(event.target)) is None:
            return None

        def send(number: signal.Signals) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

        if event.kind == "kill":
            send(signal.SIGKILL)
            return None
        send(signal.SIGSTOP)
        return lambda: send(signal.SIGCONT)

    def _on_link(self, event: Event) -> Callable[[], None] | None:
        """Take a link down or change its rate; return a function that restores it."""
        links = self._links
        assert links
        if event.kind == "rate":
            links.set_rate(event.rate, event.target)
            return None
        links.set_link(event.target, up=False)
        return lambda: links.set_link(event.target, up=True)
