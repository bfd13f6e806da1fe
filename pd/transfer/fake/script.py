"""Faults of the ``fake`` backend (``--fake-script FILE``, JSON or YAML).

A script is a seed and a list of rules::

    seed: 7
    rules:
      - {do: delay_write, seconds: 0.5}
      - {do: late_write, seconds: [0.1, 0.4], rooms: [2, 3]}
      - {do: duplicate_write, seconds: 0.2, probability: 0.1}
      - {do: link_down, from: 1.0, to: 4.0, peer: "decode-*"}

Each rule has ``do`` and may select by

- ``rooms``: a number or a list: the n-th room (from 1) that this node opens a sender for; for
  ``delay_reservation`` the n-th reservation that it makes;
- ``probability``: drawn once for each write (for each room by ``fail_room``, for each reservation
  by ``delay_reservation``), from the seed, the rule's place and the room's and write's number, so
  that the draws do not depend on timing;
- ``peer``: instance id of the other node; ``*`` and ``?`` are wildcards.

``seconds`` is a number or ``[least, most]``. The rules:

==================  ================================================================================
delay_write         hold a write back for ``seconds``; an abort recalls it
late_write          the same, but the write is in the link already: an abort does not recall it, and
                    the sender is drained only after it landed
duplicate_write     the write lands again, ``seconds`` after it landed first; the sender counts as
                    undrained (and is not DONE) until then
lose_write          the write never lands; the sender fails after ``seconds``
corrupt             flip ``byte`` (0) of ``part`` (k or v; k) of ``token`` in ``layer`` on the way;
                    layers are numbered through all planes, and a plane with one vector has only
                    ``k``; ``byte`` counts in the token's row of all heads, and wraps at its end
fail_room           the sender fails when it begins to send
link_down           writes due between ``from`` and ``to`` are stuck in the link and land when it
                    is back, aborted or not; seconds since this node's first room
delay_reservation   decode node: send the reservation ``seconds`` late
==================  ================================================================================

If several rules delay one write, their delays add up.
"""

from __future__ import annotations

import fnmatch
import random
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
import yaml

from pd.core.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

MAX_SECONDS = 3600.0
_Time = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_SECONDS)]
# We check this by hand, because msgspec 0.22 reads beyond its type table when a union holds both a
# constrained number and an array.
_Seconds: TypeAlias = float | list[float]
_Index = Annotated[int, msgspec.Meta(ge=0)]


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", kw_only=True):
    """Base of all rules, with the fields for their selection."""

    rooms: int | list[int] | None = None
    probability: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 1.0
    peer: str = "*"

    def applies_to(self, peer: str, room: int, draw: random.Random) -> bool:
        """Whether the rule applies to this room of this peer, by the next number drawn."""
        rooms = [self.rooms] if isinstance(self.rooms, int) else self.rooms
        return (
            draw.random() < self.probability
            and (rooms is None or room in rooms)
            and fnmatch.fnmatchcase(peer, self.peer)
        )


class DelayWrite(Rule, frozen=True, tag="delay_write"):
    seconds: _Seconds


class LateWrite(Rule, frozen=True, tag="late_write"):
    seconds: _Seconds


class DuplicateWrite(Rule, frozen=True, tag="duplicate_write"):
    seconds: _Seconds


class LoseWrite(Rule, frozen=True, tag="lose_write"):
    seconds: _Seconds = 0.0


class Corrupt(Rule, frozen=True, tag="corrupt"):
    token: _Index
    layer: _Index
    part: Literal["k", "v"] = "k"
    byte: _Index = 0


class FailRoom(Rule, frozen=True, tag="fail_room"):
    pass


class LinkDown(Rule, frozen=True, tag="link_down", rename={"start": "from", "stop": "to"}):
    start: _Time
    stop: _Time


class DelayReservation(Rule, frozen=True, tag="delay_reservation"):
    seconds: _Seconds


AnyRule: TypeAlias = (
    DelayWrite
    | LateWrite
    | DuplicateWrite
    | LoseWrite
    | Corrupt
    | FailRoom
    | LinkDown
    | DelayReservation
)


@dataclass
class WritePlan:
    """The faults of one write.

    Attributes:
        delay: seconds before it goes out.
        recallable: an abort in the meantime stops it.
        lost: it never goes out, and the sender fails after ``delay``.
        duplicate_after: seconds from its landing to its second landing.
        corrupt: rules that name a byte to flip.
    """

    delay: float
    recallable: bool
    lost: bool
    duplicate_after: float | None
    corrupt: list[Corrupt]


class FaultScript(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A seed and rules; see the module's docstring."""

    seed: int = 0
    rules: list[AnyRule] = []

    def plan_write(self, peer: str, room: int, write: int) -> WritePlan:
        """Return the faults of the ``write``-th write of the ``room``-th room."""
        plan = WritePlan(0.0, True, False, None, [])
        for place, rule in enumerate(self.rules):
            draw = self._make_random(place, room, write)
            if isinstance(rule, LinkDown | FailRoom | DelayReservation):
                continue
            if not rule.applies_to(peer, room, draw):
                continue
            if isinstance(rule, Corrupt):
                plan.corrupt.append(rule)
            elif isinstance(rule, DuplicateWrite):
                plan.duplicate_after = _pick_seconds(rule.seconds, draw)
            else:
                plan.delay += _pick_seconds(rule.seconds, draw)
                plan.recallable &= not isinstance(rule, LateWrite)
                plan.lost |= isinstance(rule, LoseWrite)
        return plan

    def fails_room(self, peer: str, room: int) -> bool:
        """Whether the ``room``-th room's sender fails."""
        return any(
            isinstance(rule, FailRoom)
            and rule.applies_to(peer, room, self._make_random(place, room, 0))
            for place, rule in enumerate(self.rules)
        )

    def link_returns(self, peer: str, room: int, now: float) -> float | None:
        """Return when a link that is down at ``now`` comes back, or None if it is up. Both are in
        seconds since the first room."""
        back = [
            rule.stop
            for place, rule in enumerate(self.rules)
            if isinstance(rule, LinkDown)
            and rule.start <= now < rule.stop
            and rule.applies_to(peer, room, self._make_random(place, room, 0))
        ]
        return max(back, default=None)

    def reservation_delay(self, reservation: int) -> float:
        """Return the seconds by which to hold back the n-th reservation."""
        delay = 0.0
        for place, rule in enumerate(self.rules):
            draw = self._make_random(place, reservation, 0)
            if isinstance(rule, DelayReservation) and rule.applies_to("", reservation, draw):
                delay += _pick_seconds(rule.seconds, draw)
        return delay

    def _make_random(self, place: int, room: int, write: int) -> random.Random:
        return random.Random(f"{self.seed}/{place}/{room}/{write}")


def _pick_seconds(seconds: _Seconds, draw: random.Random) -> float:
    return draw.uniform(*seconds) if isinstance(seconds, list) else seconds


def load_script(path: Path) -> FaultScript:
    """Read and check a script. Raises UsageError naming the place and the mistake."""
    try:
        content: Any = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the fake script {path}: {error}") from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"the fake script {path} is neither JSON nor YAML: {reason}") from error
    try:
        script = msgspec.convert({} if content is None else content, FaultScript)
    except msgspec.ValidationError as error:
        raise UsageError(f"the fake script {path} is wrong: {error}") from error
    for place, rule in enumerate(script.rules):
        wrong = _find_mistake(rule)
        if wrong:
            raise UsageError(f"the fake script {path} is wrong: {wrong} - at `$.rules[{place}]`")
    return script


def _find_mistake(rule: AnyRule) -> str:
    """Describe the mistake in a rule whose types are right; empty if there is none."""
    seconds = getattr(rule, "seconds", 0.0)
    bounds = seconds if isinstance(seconds, list) else [seconds, seconds]
    if len(bounds) != 2 or not 0.0 <= bounds[0] <= bounds[1] <= MAX_SECONDS:
        return (
            f"`seconds` must be a number or [least, most] between 0 and {MAX_SECONDS:g}, "
            f"not {seconds}"
        )
    rooms = rule.rooms if isinstance(rule.rooms, list) else [rule.rooms]
    if any(room is not None and room < 1 for room in rooms):
        return f"`rooms` are numbered from 1, not {rule.rooms}"
    if isinstance(rule, LinkDown) and rule.start >= rule.stop:
        return f"`from` ({rule.start:g}) must be before `to` ({rule.stop:g})"
    if isinstance(rule, DelayReservation) and rule.peer != "*":
        return "`delay_reservation` cannot select by `peer`"
    return ""


class RoomCounter:
    """Numbers the rooms of a node from 1. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def next_number(self) -> int:
        with self._lock:
            self._last += 1
            return self._last
