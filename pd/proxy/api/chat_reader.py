"""Reads an answer to a chat, and renders it as a message or as the deltas of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pd.proxy.text.tools.events import CallStart, Content, Event, Reasoning

if TYPE_CHECKING:
    from pd.proxy.api.chat_plan import OutputPlan
    from pd.proxy.dispatch.generation import Delta


class ChatReader:
    """Splits the text of one answer into content, reasoning and calls."""

    def __init__(self, plan: OutputPlan) -> None:
        self._parser = None if plan.new_parser is None else plan.new_parser()
        self._calls_end = plan.calls_end
        self._calls = 0
        self._reasoning = plan.reasoning
        # Clients of reasoning models read this field from every delta.
        self._reasoning_field: dict[str, Any] = {"reasoning_content": None} if plan.start else {}
        self._held: list[str] = []

    @property
    def ended_by_calls(self) -> bool:
        """Whether the answer ends here because of its calls; inside a call it was cut off."""
        return self._calls_end and self._calls > 0 and not self.call_is_open

    @property
    def call_is_open(self) -> bool:
        """Whether the answer ends inside a call."""
        return self._parser is not None and self._parser.call_is_open

    def make_deltas(self, delta: Delta) -> list[dict[str, Any]]:
        """Make the deltas in OpenAI's shape for a part of the answer. There is at least one."""
        deltas = [self._make_delta(event) for event in merge_events(self.read_events(delta))]
        if not deltas and delta.finish and not self._reasoning_field:
            # SGLang's clients read this field from every delta without content.
            return [{"reasoning_content": None}]
        return deltas or [{"content": ""} | self._reasoning_field]

    def make_message(self, delta: Delta) -> dict[str, Any]:
        """Make the message of a whole answer."""
        content, reasoning, calls = "", "", []
        for event in merge_events(self.read_events(delta)):
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, Reasoning):
                reasoning += event.text
            elif isinstance(event, CallStart):
                calls.append(_render_call(event))
            else:
                calls[-1]["function"]["arguments"] += event.text
        self._calls = len(calls)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message |= _render_reasoning(reasoning or None)
        if calls:
            message["tool_calls"] = calls
            # A client that forces a certain function expects no other text.
            empty = None if self._calls_end else ""
            message["content"] = content if content.strip() else empty
        return message

    def read_events(self, delta: Delta) -> list[Event]:
        """Read the next part of the answer."""
        if self._parser is None:
            return [Content(delta.text)] if delta.text else []
        events = self._parser.add_text(delta.text)
        if delta.finish is not None:
            events += self._parser.close()
        if self._reasoning == "streamed":
            return events
        return self._hold_reasoning(events, is_last=delta.finish is not None)

    def _hold_reasoning(self, events: list[Event], *, is_last: bool) -> list[Event]:
        """Take the reasoning out of the events, or put all of it before the first other event."""
        if self._reasoning == "whole":
            self._held += [e.text for e in events if isinstance(e, Reasoning)]
        others: list[Event] = [event for event in events if not isinstance(event, Reasoning)]
        if self._held and (others or is_last):
            held, self._held = self._held, []
            return [Reasoning("".join(held)), *others]
        return others

    def _make_delta(self, event: Event) -> dict[str, Any]:
        if isinstance(event, Content):
            return {"content": event.text} | self._reasoning_field
        if isinstance(event, Reasoning):
            return _render_reasoning(event.text)
        if isinstance(event, CallStart):
            self._calls += 1
            return {
                "tool_calls": [{"index": self._calls - 1} | _render_call(event)]
            } | self._reasoning_field
        more = {"index": self._calls - 1, "function": {"arguments": event.text}}
        return {"tool_calls": [more]} | self._reasoning_field


def _render_reasoning(text: str | None) -> dict[str, Any]:
    # The first name is SGLang's and older vLLM's, the second one vLLM's today.
    return {"reasoning_content": text, "reasoning": text}


def merge_events(events: list[Event]) -> list[Event]:
    """Join adjacent events of the same kind, except the starts of calls."""
    runs: list[list[Event]] = []
    for event in events:
        if runs and type(event) is type(runs[-1][0]) and not isinstance(event, CallStart):
            runs[-1].append(event)
        else:
            runs.append([event])
    merged: list[Event] = []
    for run in runs:
        first = run[0]
        if not isinstance(first, CallStart):
            texts = [event.text for event in run if not isinstance(event, CallStart)]
            first = type(first)("".join(texts))
        merged.append(first)
    return merged


def _render_call(start: CallStart) -> dict[str, Any]:
    return {
        "id": start.id,
        "type": "function",
        "function": {"name": start.name, "arguments": ""},
    }
