"""Any server with OpenAI's API, through the ``openai`` package."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from pd.core.errors import PDError, ProgramError, SetupError, UnavailableError, UsageError
from pd.lang.backend import ModelAnswer, TokenUsage
from pd.lang.choices import ChoicesDecision
from pd.lang.statuses import error_of_status
from pd.proxy.text.chat_template import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pd.lang.backend import ProgramPrompt
    from pd.lang.choices import AnyMethod
    from pd.lang.ir import GenSettings

_COMPLETION_MODELS = ("gpt-3.5-turbo-instruct", "davinci-002", "babbage-002")
# OpenAI's own models that know only the newer name of the limit.
_REASONING_MODELS = ("o1", "o3", "o4", "gpt-5")
_FIELDS = ("n", "temperature", "top_p", "frequency_penalty", "presence_penalty", "seed")
# Fields of other servers. OpenAI refuses them.
_EXTRA_FIELDS = {
    "min_new_tokens": "min_tokens",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "ignore_eos": "ignore_eos",
    "stop_token_ids": "stop_token_ids",
}
_REFUSED = ("regex", "stop_regex", "logprob_start_len")
# OpenAI's limits on the likeliest tokens of an answer.
_TOP_OF_COMPLETIONS, _TOP_OF_CHATS = 5, 20
_MAX_RETRIES = 5


class OpenAI:
    """Runs programs on a server with OpenAI's API, of completions or of chats.

    A chat model answers a whole turn: ``gen`` must be the first in the assistant's turn, unless
    ``num_api_spec_tokens`` is set. ``select`` compares the first tokens in which choices differ.
    ``dtype`` is checked, but the model is not made to obey it.
    """

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: str | None = None,
        is_azure: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Make a client.

        Args:
            is_chat_model: use the API of chats. By default, true for all but OpenAI's models of
                completions.
            chat_template: source of a template, for turns on a model of completions.
            args, kwargs: for ``openai.OpenAI``, such as ``base_url`` and ``api_key``.

        Raises SetupError if the ``openai`` package is missing.
        """
        try:
            import openai
        except ImportError as error:
            raise SetupError(
                "the backend OpenAI needs the openai package: pip install 'pd-serve[lang]'"
            ) from error
        self._openai = openai
        make: Any = openai.AzureOpenAI if is_azure else openai.OpenAI
        self._client: Any = make(*args, **{"max_retries": _MAX_RETRIES, **kwargs})
        self._model = model_name
        chats = model_name not in _COMPLETION_MODELS
        self.is_chat_model = chats if is_chat_model is None else is_chat_model
        self._template = None if chat_template is None else ChatTemplate(chat_template, {})
        self.token_usage = TokenUsage()

    def get_model_name(self) -> str:
        return self._model

    def get_chat_template(self) -> ChatTemplate | None:
        return self._template

    def generate(self, prompt: ProgramPrompt, settings: GenSettings, rid: str) -> ModelAnswer:
        quoted = settings.dtype == "str" and not self.is_chat_model
        body = self._make_body(prompt, settings)
        if quoted:
            body |= {"prompt": prompt.text + '"', "stop": ['"']}
        response = self._send(body)
        self._count(response.usage)
        choices = response.choices
        texts = [self._read_text(choice) for choice in choices]
        if quoted:
            texts = [f'"{text}"' for text in texts]
        elif settings.pattern is not None:
            texts = [_check_form(text, settings.pattern, settings.dtype) for text in texts]
        metas = [_describe_choice(choice, response) for choice in choices]
        is_whole = choices[0].finish_reason == "stop" and not settings.stops
        return ModelAnswer(tuple(texts), metas[0] if len(metas) == 1 else metas, is_whole)

    def stream(
        self, prompt: ProgramPrompt, settings: GenSettings, rid: str
    ) -> Iterator[ModelAnswer]:
        if settings.dtype is not None:
            yield self.generate(prompt, settings, rid)
            return
        body = self._make_body(prompt, settings)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with self._send(body) as events:
            for event in self._translate(iter(events)):
                if event.usage is not None:
                    self._count(event.usage)
                for choice in event.choices:
                    yield ModelAnswer((self._read_text(choice),), _describe_choice(choice, event))

    def select(
        self, prompt: ProgramPrompt, choices: Sequence[str], method: AnyMethod, rid: str
    ) -> ChoicesDecision:
        """Compare choices by the first token in which they differ, and then by the next.

        We ask for one token and the likeliest alternatives to it. A chat model cannot go on from
        there, so its choices must differ in their first token. ``method`` has no effect.

        Raises ProgramError if the model prefers something else to all choices.
        """
        steps: list[dict[str, float]] = []

        def ask(said: str) -> dict[str, float]:
            steps.append(self._ask_token(prompt, said))
            return steps[-1]

        given = [choice.strip() for choice in choices] if self.is_chat_model else list(choices)
        chosen = choose_by_tokens(given, ask, can_continue=not self.is_chat_model)
        return ChoicesDecision(choices[chosen], {"top_logprobs": steps})

    def cache_prefix(self, prompt: ProgramPrompt, rid: str) -> None:
        """Do nothing, because the API has no request to compute a prompt alone."""

    def abort(self, rid: str) -> None:
        """Do nothing, because the API cannot abort requests. They end with the process."""

    def flush_cache(self) -> None:
        """Do nothing, because the API has no request for this."""

    def get_server_info(self) -> dict[str, Any]:
        raise UsageError("get_server_info: OpenAI's API does not describe servers")

    def _make_body(self, prompt: ProgramPrompt, settings: GenSettings) -> dict[str, Any]:
        """Make the arguments of a request. Raises ProgramError for settings unknown to the API."""
        for name in _REFUSED:
            if getattr(settings, name) not in (None, ()):
                raise ProgramError(f"{name} is not part of OpenAI's API; leave it out")
        body = {name: value for name in _FIELDS if (value := getattr(settings, name)) is not None}
        body |= self._make_prompt(prompt) | {self._limit: settings.max_new_tokens}
        if settings.stops:
            body["stop"] = list(settings.stops)
        if settings.return_logprob:
            top = settings.top_logprobs_num or 0
            chat = {"logprobs": True, "top_logprobs": top}
            body |= chat if self.is_chat_model else {"logprobs": top}
        if settings.json_schema is not None:
            body["extra_body"] = {"response_format": _make_format(settings.json_schema)}
        extra = {
            other: value
            for name, other in _EXTRA_FIELDS.items()
            if (value := getattr(settings, name)) not in (None, ())
        }
        if extra:
            body["extra_body"] = body.get("extra_body", {}) | extra
        return body

    @property
    def _limit(self) -> str:
        is_new = self.is_chat_model and self._model.startswith(_REASONING_MODELS)
        return "max_completion_tokens" if is_new else "max_tokens"

    def _make_prompt(self, prompt: ProgramPrompt, said: str = "") -> dict[str, Any]:
        if not self.is_chat_model:
            return {"prompt": prompt.text + said}
        if not prompt.is_assistant_turn:
            raise ProgramError(
                "a chat model answers whole turns, so nothing can come before gen or select in the "
                "assistant's turn; use a model of completions, or num_api_spec_tokens"
            )
        return {"messages": list(prompt.messages)}

    def _ask_token(self, prompt: ProgramPrompt, said: str) -> dict[str, float]:
        """Return the log probabilities of the likeliest next tokens, or 0 for the only one."""
        body = self._make_prompt(prompt, said) | {self._limit: 1, "temperature": 0.0}
        if self.is_chat_model:
            body |= {"logprobs": True, "top_logprobs": _TOP_OF_CHATS}
        else:
            body["logprobs"] = _TOP_OF_COMPLETIONS
        response = self._send(body)
        self._count(response.usage)
        choice = response.choices[0]
        found = choice.logprobs
        if self.is_chat_model and found is not None and found.content:
            return {top.token: top.logprob for top in found.content[0].top_logprobs}
        if not self.is_chat_model and found is not None and found.top_logprobs:
            return dict(found.top_logprobs[0])
        return {self._read_text(choice): 0.0}

    def _read_text(self, choice: Any) -> str:
        if not self.is_chat_model:
            return str(choice.text)
        message = getattr(choice, "message", None) or choice.delta
        return message.content or ""

    def _send(self, body: dict[str, Any]) -> Any:
        chats = self._client.chat.completions if self.is_chat_model else self._client.completions
        try:
            return chats.create(model=self._model, **body)
        except self._openai.APIError as error:
            raise self._name_error(error) from error

    def _translate(self, events: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from events
        except self._openai.APIError as error:
            raise self._name_error(error) from error

    def _name_error(self, error: Any) -> PDError:
        if isinstance(error, self._openai.APIStatusError):
            return error_of_status(error.status_code, error.message)
        return UnavailableError(f"the request to {self._client.base_url} failed: {error}")

    def _count(self, usage: Any) -> None:
        if usage is not None:
            self.token_usage.add_call(usage.prompt_tokens, usage.completion_tokens)


def choose_by_tokens(
    choices: Sequence[str], ask: Callable[[str], dict[str, float]], *, can_continue: bool
) -> int:
    """Return the index of the choice that the likeliest tokens lead to.

    Args:
        ask: returns the likeliest next tokens after a text, with their log probabilities.
        can_continue: whether ``ask`` takes other texts than the empty one.

    Raises ProgramError if no likely token belongs to a choice.
    """
    left, said = list(range(len(choices))), ""
    while len({choices[number] for number in left}) > 1:
        if said and not can_continue:
            names = ", ".join(repr(choices[number]) for number in left)
            raise ProgramError(
                f"a chat model cannot tell {names} apart, because they begin with the same token; "
                "use choices that begin differently, or a model of completions"
            )
        top = ask(said)
        ended = [number for number in left if choices[number] == said]
        fitting: list[int] = []
        for token in sorted(top, key=lambda token: -top[token]):
            rests = {number: choices[number][len(said) :] for number in left}
            fitting = [n for n, rest in rests.items() if token and _fit(rest, token)]
            if fitting or ended:
                break
        if not fitting:
            if ended:
                return ended[0]
            raise ProgramError(f"select: the model prefers {list(top)} to all of {list(choices)}")
        left = [number for number in fitting if rests[number].startswith(token)]
        if not left:
            return max(fitting, key=lambda number: len(choices[number]))
        said += token
    return left[0]


def _fit(rest: str, token: str) -> bool:
    """Tell whether a token begins the rest of a choice, or goes on after it."""
    return bool(rest) and (rest.startswith(token) or token.startswith(rest))


def _check_form(text: str, pattern: str, dtype: str | None) -> str:
    """Return the value at the beginning of a text. Raises ProgramError if it has another form."""
    match = re.match(pattern, text.lstrip())
    if match is None:
        raise ProgramError(f"the model answered {text!r}, which is no {dtype}")
    return match[0].rstrip()


def _make_format(schema: str) -> dict[str, Any]:
    described = {"name": "answer", "schema": json.loads(schema)}
    return {"type": "json_schema", "json_schema": described}


def _describe_choice(choice: Any, response: Any) -> dict[str, Any]:
    """Describe an answer with the names of `meta_info` of ``POST /generate``."""
    meta: dict[str, Any] = {
        "id": response.id,
        "finish_reason": choice.finish_reason and {"type": choice.finish_reason},
    }
    if response.usage is not None:
        meta["prompt_tokens"] = response.usage.prompt_tokens
        meta["completion_tokens"] = response.usage.completion_tokens
    found = choice.logprobs
    if found is not None:
        content = getattr(found, "content", None)
        if content is not None:
            pairs = [(entry.logprob, entry.token) for entry in content]
        else:
            pairs = list(zip(found.token_logprobs or (), found.tokens or (), strict=True))
        meta["output_token_logprobs"] = [[logprob, None, token] for logprob, token in pairs]
    return meta
