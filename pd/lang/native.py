"""Runs programs on anything with pd's native requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pd.lang.backend import ModelAnswer, TokenUsage
from pd.lang.choices import ChoicesDecision, ServerMethod
from pd.lang.settings import global_config
from pd.proxy.text.chat_template import ChatTemplate, find_special_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd.lang.backend import NativeService, ProgramPrompt
    from pd.lang.choices import AnyMethod
    from pd.lang.ir import GenSettings

# Without these, a number could only end where the model ends its whole answer.
_STOPS_OF_NUMBERS = (" ", "\n")
# Settings outside `sampling_params`, in the body itself.
_BODY_FIELDS = ("return_logprob", "logprob_start_len", "top_logprobs_num")
_SAMPLING_FIELDS = (
    "max_new_tokens",
    "min_new_tokens",
    "n",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "ignore_eos",
    "seed",
    "json_schema",
)


class NativeBackend:
    """Runs programs on a :class:`pd.lang.backend.NativeService`."""

    is_chat_model = False

    def __init__(self, service: NativeService) -> None:
        """Ask for the model's chat template. Raises PDError as the service does."""
        self._service = service
        self._model = service.describe_model()
        self._template = _load_template(service.describe_tokenizer())
        self.token_usage = TokenUsage()

    def get_model_name(self) -> str:
        return str(self._model["model_path"])

    def get_chat_template(self) -> ChatTemplate | None:
        return self._template

    def generate(self, prompt: ProgramPrompt, settings: GenSettings, rid: str) -> ModelAnswer:
        answers = self._service.generate(_make_body(prompt, settings, rid))
        if not isinstance(answers, list):
            self._count(answers["meta_info"])
            return _read_answer(answers)
        # The answers share their prompt.
        metas = [answer["meta_info"] for answer in answers]
        tokens = sum(meta["completion_tokens"] for meta in metas)
        self.token_usage.add_call(metas[0]["prompt_tokens"], tokens)
        return ModelAnswer(tuple(answer["text"] for answer in answers), metas)

    def stream(
        self, prompt: ProgramPrompt, settings: GenSettings, rid: str
    ) -> Iterator[ModelAnswer]:
        body = _make_body(prompt, settings, rid) | {"stream": True, "incremental": True}
        events = self._service.stream(body)
        meta = None
        for event in events:
            piece = _read_answer(event)
            meta = piece.meta
            yield piece
        if meta is not None:
            self._count(meta)

    def select(
        self, prompt: ProgramPrompt, choices: Sequence[str], method: AnyMethod, rid: str
    ) -> ChoicesDecision:
        if isinstance(method, ServerMethod):
            name = method.name
        elif method.requires_unconditional_logprobs:
            name = "unconditional_likelihood"
        else:
            name = "token_length_normalized"
        body = _make_prompt(prompt, rid) | {"choices": list(choices), "choices_method": name}
        answer = self._service.generate(body)
        self._count(answer["meta_info"])
        return _decide(answer, list(choices), method)

    def cache_prefix(self, prompt: ProgramPrompt, rid: str) -> None:
        body = _make_prompt(prompt, rid) | {"sampling_params": {"max_new_tokens": 0}}
        if global_config.prefix_lease:
            body["prefix_lease"] = global_config.prefix_lease
        self._count(self._service.generate(body)["meta_info"])

    def abort(self, rid: str) -> None:
        self._service.abort(rid)

    def flush_cache(self) -> None:
        self._service.flush_cache()

    def get_server_info(self) -> dict[str, Any]:
        return self._service.describe_server()

    def _count(self, meta: dict[str, Any]) -> None:
        self.token_usage.add_call(meta["prompt_tokens"], meta["completion_tokens"])


def _load_template(facts: dict[str, Any]) -> ChatTemplate | None:
    source = facts.get("chat_template")
    return ChatTemplate(source, find_special_tokens(facts)) if source else None


def _make_prompt(prompt: ProgramPrompt, rid: str) -> dict[str, Any]:
    body: dict[str, Any] = {"text": prompt.text, "rid": rid}
    if prompt.is_rendered:
        body["add_special_tokens"] = False
    return body


def _make_body(prompt: ProgramPrompt, settings: GenSettings, rid: str) -> dict[str, Any]:
    """Make a body of ``POST /generate``. The server's defaults hold for unset settings."""
    sampling: dict[str, Any] = {
        name: value
        for name in _SAMPLING_FIELDS
        if (value := getattr(settings, name)) not in (None, ())
    }
    stops = [*settings.stops, *(_STOPS_OF_NUMBERS if settings.is_number else ())]
    if stops:
        sampling["stop"] = stops
    if settings.pattern is not None:
        sampling["regex"] = settings.pattern
    body = _make_prompt(prompt, rid) | {"sampling_params": sampling}
    for name in _BODY_FIELDS:
        if (value := getattr(settings, name)) is not None:
            body[name] = value
    return body


def _read_answer(answer: dict[str, Any]) -> ModelAnswer:
    meta = answer["meta_info"]
    finish = meta.get("finish_reason") or {}
    # A matched stop string is a text, and the model's own end is a token id.
    is_whole = finish.get("type") == "stop" and not isinstance(finish.get("matched"), str)
    return ModelAnswer((answer["text"],), meta, is_whole)


def _decide(answer: dict[str, Any], choices: list[str], method: AnyMethod) -> ChoicesDecision:
    """Read the server's decision, or make it by a method of the program's own."""
    meta = answer["meta_info"]
    scored = meta.pop("choices")
    data: dict[str, Any] = {
        "normalized_prompt_logprobs": [option["normalized_logprob"] for option in scored],
        "input_token_logprobs": [option["token_logprobs"] for option in scored],
        "output_token_logprobs": [[] for _ in scored],
    }
    if "unconditional_token_logprobs" in scored[0]:
        data["unconditional_token_logprobs"] = [
            option["unconditional_token_logprobs"] for option in scored
        ]
    if isinstance(method, ServerMethod):
        data["scores"] = [option["score"] for option in scored]
        return ChoicesDecision(answer["text"], meta | data)
    return method(choices=choices, **data)
