"""Makes the next prompt of a session: the conversation with the real answer, and the new turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd.bench.load.answers import Answer
    from pd.bench.load.workload import Prompt


def next_prompt(prompt: Prompt, answer: Answer, added: Prompt, *, chat: bool) -> Prompt | None:
    """The prompt that follows an answer.

    Args:
        prompt: the prompt that was answered.
        added: what the user says next.
        chat: whether text is a message of a conversation, not the text itself.

    Returns:
        None where the answer's token ids are needed and the server named none.
    """
    if isinstance(prompt, str) and isinstance(added, str) and not chat:
        return f"{prompt}{answer.text} {added}"
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(added, str):
        answered = {"role": "assistant", "content": answer.text}
        return [*prompt, answered, {"role": "user", "content": added}]
    if answer.ids is None:
        return None
    return [*prompt, *answer.ids, *added]
