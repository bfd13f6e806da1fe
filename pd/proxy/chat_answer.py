"""One answer to a chat as its client gets it: a message, or the deltas of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pd.proxy.tools.events import CallStart, Content, Event, Reasoning

if TYPE_CHECKING:
    from pd.proxy.chat_output import OutputPlan
    from pd.proxy.generation import Delta


class ChatAnswer:
    """Turns the text of one answer into content, reasoning and calls."""

    def __init__(self, plan: OutputPlan) -> None:
        self._parser = None if plan.new_parser is None else plan.new_parser()
        self._calls_end = plan.calls_end
        self._calls = 0
        self._reasoning = plan.reasoning
        # Clients of models that reason read this field of every delta.
        self._beside: dict[str, Any] = {"reasoning_content": None} if plan.start else {}
        self._held: list[str] = []

    @property
    def ended_by_calls(self) -> bool:
        """Whether calls are why the answer ends here."""
        return self._calls_end and self._calls > 0

    def deltas(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the client's deltas for a part of the answer, in OpenAI's shape; at least one."""
        found = [self._delta(event) for event in merged(self._read(delta))]
        if not found and delta.finish and not self._beside:
            # SGLang's clients read this field of every delta without content.
            return [{"reasoning_content": None}]
        return found or [{"content": ""} | self._beside]

    def whole(self, delta: Delta) -> dict[str, Any]:
        """The message of a whole answer."""
        content, reasoning, calls = "", "", []
        for event in merged(self._read(delta)):
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, Reasoning):
                reasoning += event.text
            elif isinstance(event, CallStart):
                calls.append(_call(event))
            else:
                calls[-1]["function"]["arguments"] += event.text
        self._calls = len(calls)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message |= _reasoning(reasoning or None)
        if calls:
            message["tool_calls"] = calls
            # What is asked to call a certain function says nothing else.
            empty = None if self._calls_end else ""
            message["content"] = content if content.strip() else empty
        return message

    def _read(self, delta: Delta) -> list[Event]:
        if self._parser is None:
            return [Content(delta.text)] if delta.text else []
        events = self._parser.push(delta.text)
        if delta.finish is not None:
            events += self._parser.close()
        if self._reasoning == "streamed":
            return events
        return self._without_reasoning(events, is_last=delta.finish is not None)

    def _without_reasoning(self, events: list[Event], *, is_last: bool) -> list[Event]:
        """The events but for reasoning, which comes before all others if it is wanted as a
        whole."""
        if self._reasoning == "whole":
            self._held += [e.text for e in events if isinstance(e, Reasoning)]
        others: list[Event] = [event for event in events if not isinstance(event, Reasoning)]
        if self._held and (others or is_last):
            held, self._held = self._held, []
            return [Reasoning("".join(held)), *others]
        return others

    def _delta(self, event: Event) -> dict[str, Any]:
        if isinstance(event, Content):
            return {"content": event.text} | self._beside
        if isinstance(event, Reasoning):
            return _reasoning(event.text)
        if isinstance(event, CallStart):
            self._calls += 1
            return {"tool_calls": [{"index": self._calls - 1} | _call(event)]} | self._beside
        more = {"index": self._calls - 1, "function": {"arguments": event.text}}
        return {"tool_calls": [more]} | self._beside


def _reasoning(text: str | None) -> dict[str, Any]:
    """Reasoning under the name of SGLang and of vLLM before, and under vLLM's now."""
    return {"reasoning_content": text, "reasoning": text}


def merged(events: list[Event]) -> list[Event]:
    """The same events, with texts of one kind that follow each other joined."""
    runs: list[list[Event]] = []
    for event in events:
        if runs and type(event) is type(runs[-1][0]) and not isinstance(event, CallStart):
            runs[-1].append(event)
        else:
            runs.append([event])
    return [_joined(run) for run in runs]


def _joined(run: list[Event]) -> Event:
    first = run[0]
    if isinstance(first, CallStart):
        return first
    return type(first)("".join(event.text for event in run if not isinstance(event, CallStart)))


def _call(start: CallStart) -> dict[str, Any]:
    return {
        "id": start.id,
        "type": "function",
        "function": {"name": start.name, "arguments": ""},
    }
