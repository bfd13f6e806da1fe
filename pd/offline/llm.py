"""The offline model in vLLM's shape."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from tqdm.auto import tqdm

from pd.core.errors import PDError, SetupError, UnavailableError, UsageError
from pd.core.sampling_params import choice_seed
from pd.offline.client import PATIENCE_SECONDS, OfflineClient, run_batch
from pd.offline.connection import connect_local, connect_remote
from pd.offline.native_service import make_backend
from pd.offline.outputs import read_chat, read_completion
from pd.offline.sampling_params import SamplingParams, refuse_arguments
from pd.offline.settings import check_remote, read_settings
from pd.offline.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from pathlib import Path
    from types import TracebackType

    from pd.lang.native import NativeBackend
    from pd.offline.connection import Connection
    from pd.offline.outputs import RequestOutput

    T = TypeVar("T")
    # A text or token ids, plain or as vLLM's dictionaries.
    Prompt = str | Sequence[int] | Mapping[str, Any]
    Params = SamplingParams | Sequence[SamplingParams]
    Message = Mapping[str, Any]
    ProgressBar = bool | Callable[..., Any]

API_KEY_VARIABLE = "PD_API_KEY"
# Requests under way at a deployment, unless `max_num_seqs` says otherwise.
_CONCURRENCY = 256
# An engine orders waiting prompts by their cached prefixes, so it gets more than it can run.
_QUEUED_PER_RUNNING = 4
_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


class LLM:
    """A model that answers batches of prompts.

    ``LLM(model)`` runs an engine for this program, on one device and without a port. ``LLM(url=…)``
    makes the same calls to a running deployment. Both give the answers of ``POST /v1/completions``
    and ``/v1/chat/completions``.

    Use it in a ``with`` statement or call :meth:`close`. Otherwise the engine ends with the
    program, or when nothing refers to the LLM any more. Several threads may call its methods.

    Args:
        model: directory of a checkpoint, or its id in the Hugging Face cache. With ``url``, the
            name of a served model, by default the first.
        url: address of a proxy.
        api_key: key for ``url``; by default ``$PD_API_KEY``.
        arguments: settings of the engine under vLLM's names (``dtype``, ``max_model_len``,
            ``gpu_memory_utilization``, ``max_num_seqs``, ``seed``, ``tokenizer``,
            ``speculative_config``, …) or ours (those of ``pd-launch unified``), with underscores.

    Raises:
        UsageError: an argument is unsupported or impossible. The message names it.
        SetupError: the machine lacks something, such as memory.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        url: str | None = None,
        api_key: str | None = None,
        **arguments: Any,
    ) -> None:
        self._model: str | None = None
        self._prompts_so_far = 0
        self._lock = threading.Lock()
        self._token_texts: dict[int, str] = {}
        self._connection: Connection
        if url is None:
            if api_key is not None:
                raise UsageError("LLM: api_key is for url=…; leave it out")
            settings = read_settings("LLM", model, arguments)
            self._seed = settings.seed
            self._concurrency = settings.node.max_running_requests * _QUEUED_PER_RUNNING
            self._connection = connect_local(settings)
            self._client = OfflineClient(self._connection.transport, 0.0)
        else:
            self._model = None if model is None else str(model)
            self._seed = arguments.pop("seed", None)
            self._concurrency = arguments.pop("max_num_seqs", None) or _CONCURRENCY
            if not isinstance(self._concurrency, int) or self._concurrency < 1:
                raise UsageError(
                    f"LLM: max_num_seqs must be a number from 1 on, not {self._concurrency!r}"
                )
            check_remote("LLM", arguments)
            key = os.environ.get(API_KEY_VARIABLE) if api_key is None else api_key
            self._connection = connect_remote(url, key, self._concurrency)
            self._client = OfflineClient(self._connection.transport, PATIENCE_SECONDS)
            self._check_deployment()

    # ---- answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None = None,
        *,
        use_tqdm: ProgressBar = True,
        **unsupported: Any,
    ) -> list[RequestOutput]:
        """Complete prompts, and return the results in their order.

        Ctrl-C ends the batch and aborts its requests.

        Args:
            prompts: a text, ``{"prompt": …}``, ``{"prompt_token_ids": …}``, or a list of them.
            sampling_params: for all prompts, or a list with one for each. By default as the model
                recommends, and at most 16 tokens.
            use_tqdm: whether to show progress, or what makes the progress bar.

        Raises PDError, which names the prompt, for the first that cannot be answered.
        """
        refuse_arguments("generate", unsupported, {})
        return self._connection.run(self._generate(prompts, sampling_params, use_tqdm))

    async def async_generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None = None,
        *,
        use_tqdm: ProgressBar = False,
        **unsupported: Any,
    ) -> list[RequestOutput]:
        """Do the same as :meth:`generate`. Cancelling the task aborts the requests."""
        refuse_arguments("async_generate", unsupported, {})
        work = self._generate(prompts, sampling_params, use_tqdm)
        return await self._connection.run_for_loop(work)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | None = None,
        use_tqdm: ProgressBar = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **unsupported: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation or a list of them, and return the results in their order.

        Args:
            sampling_params: as for :meth:`generate`.
            tools: functions that the model may call, in OpenAI's shape.
            tool_choice: ``auto``, ``required`` or a function, as at ``/v1/chat/completions``: calls
                are parsed, and those of strict functions constrained. Without it, ``text`` has
                everything that the model wrote, also calls and reasoning.

        Raises PDError, which names the conversation, for the first that cannot be answered.
        """
        refuse_arguments("chat", unsupported, {"chat_template_content_format": "auto"})
        template = _make_template_fields(
            tools, tool_choice, add_generation_prompt, continue_final_message, chat_template_kwargs
        )
        return self._connection.run(self._chat(messages, sampling_params, use_tqdm, template))

    async def async_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | None = None,
        use_tqdm: ProgressBar = False,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **unsupported: Any,
    ) -> list[RequestOutput]:
        """Do the same as :meth:`chat`. Cancelling the task aborts the requests."""
        refuse_arguments("async_chat", unsupported, {"chat_template_content_format": "auto"})
        template = _make_template_fields(
            tools, tool_choice, add_generation_prompt, continue_final_message, chat_template_kwargs
        )
        work = self._chat(messages, sampling_params, use_tqdm, template)
        return await self._connection.run_for_loop(work)

    # ---- the model

    @cached_property
    def endpoint(self) -> NativeBackend:
        """The backend for programs of :mod:`pd.lang`, so an LLM may be their ``backend``."""
        return make_backend(self._connection)

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, with the methods of transformers' that programs use most."""
        return Tokenizer(self._post, self._get, self._model)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling that the model's ``generation_config.json`` recommends.

        Raises UsageError for a running deployment, which does not tell. It applies the
        recommendation to calls without sampling parameters.
        """
        engine = self._connection.engine
        if engine is None:
            raise UsageError(
                "get_default_sampling_params: a running deployment does not tell; leave "
                "sampling_params out, and it applies them"
            )
        return SamplingParams(**engine.info.sampling_defaults.as_arguments())

    def reset_prefix_cache(self) -> bool:
        """Forget the cached prefixes that no request uses."""
        self._post("/flush_cache", {})
        return True

    def close(self) -> None:
        """End requests that are under way, and the engine. A deployment at ``url`` stays."""
        self._connection.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- on the event loop's thread

    async def _generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None,
        use_tqdm: ProgressBar,
    ) -> list[RequestOutput]:
        read = [_read_prompt(prompt) for prompt in _list_prompts(prompts)]
        params = _spread_params(sampling_params, len(read))
        seeds = self._draw_seeds(len(read))

        async def complete(number: int, prompt: _ReadPrompt) -> RequestOutput:
            sampling, top = _make_sampling(params[number], seeds[number])
            if top is not None:
                sampling |= {"logprobs": top, "return_tokens_as_token_ids": True}
            body = self._make_body(sampling | prompt.fields)
            body["prompt"] = prompt.value
            if "max_tokens" not in sampling and params[number] is not None:
                body |= await self._fill_context(prompt)
            answer = await self._client.post("/v1/completions", body)
            text = prompt.value if isinstance(prompt.value, str) else None
            return read_completion(answer, text, top or 0)

        outputs = await self._run_batch("prompt", read, complete, use_tqdm)
        await self._name_tokens(outputs)
        return outputs

    async def _chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | None,
        use_tqdm: ProgressBar,
        template: dict[str, Any],
    ) -> list[RequestOutput]:
        conversations = cast(
            "list[Sequence[Message]]",
            [messages] if messages and not isinstance(messages[0], list | tuple) else messages,
        )
        params = _spread_params(sampling_params, len(conversations))
        seeds = self._draw_seeds(len(conversations))

        async def answer_chat(number: int, conversation: Sequence[Message]) -> RequestOutput:
            sampling, top = _make_sampling(params[number], seeds[number])
            if top is not None:
                sampling |= {"logprobs": True, "top_logprobs": top}
            body = self._make_body(sampling | template)
            body["messages"] = [dict(message) for message in conversation]
            return read_chat(await self._client.post("/v1/chat/completions", body))

        outputs = await self._run_batch("conversation", conversations, answer_chat, use_tqdm)
        await self._name_tokens(outputs)
        texts = await self._detokenize([output.prompt_token_ids for output in outputs])
        for output, text in zip(outputs, texts, strict=True):
            output.prompt = text
        return outputs

    async def _run_batch(
        self,
        noun: str,
        items: Sequence[T],
        work: Callable[[int, T], Coroutine[Any, Any, RequestOutput]],
        use_tqdm: ProgressBar,
    ) -> list[RequestOutput]:
        async def work_named(number: int, item: T) -> RequestOutput:
            try:
                return await work(number, item)
            except PDError as error:
                raise type(error)(f"{noun} {number}: {error.message}", param=error.param) from None

        if not use_tqdm:
            return await run_batch(items, work_named, self._concurrency, lambda: None)
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        with make_bar(total=len(items), desc="Processed prompts", dynamic_ncols=True) as bar:
            return await run_batch(items, work_named, self._concurrency, bar.update)

    def _make_body(self, fields: dict[str, Any]) -> dict[str, Any]:
        named = {} if self._model is None else {"model": self._model}
        return named | fields | {"return_token_ids": True}

    async def _fill_context(self, prompt: _ReadPrompt) -> dict[str, Any]:
        """Return the prompt's tokens, and as limit of the answer the rest of the context."""
        text = prompt.value if isinstance(prompt.value, str) else ""
        body: dict[str, Any] = {"prompt": text}
        if self._model is not None:
            body["model"] = self._model
        tokenized = await self._client.post("/tokenize", body)
        ids = tokenized["tokens"] if isinstance(prompt.value, str) else prompt.value
        return {"prompt": ids, "max_tokens": max(1, tokenized["max_model_len"] - len(ids))}

    async def _name_tokens(self, outputs: Sequence[RequestOutput]) -> None:
        """Fill in the texts of tokens in log probabilities."""
        unnamed = [
            (token, entry)
            for output in outputs
            for completion in output.outputs
            for position in completion.logprobs or ()
            for token, entry in position.items()
        ]
        unknown = list({token for token, _ in unnamed} - self._token_texts.keys())
        texts = await self._detokenize([[token] for token in unknown])
        self._token_texts.update(zip(unknown, texts, strict=True))
        for token, entry in unnamed:
            entry.decoded_token = self._token_texts[token]

    async def _detokenize(self, lists: Sequence[list[int]]) -> list[str]:
        """Return the texts of lists of tokens, with special tokens."""
        texts: list[str] = []
        for part in _split_lists(lists):
            body: dict[str, Any] = {"tokens": part, "skip_special_tokens": False}
            if self._model is not None:
                body["model"] = self._model
            texts += (await self._client.post("/detokenize", body))["text"]
        return texts

    # ---- on the caller's thread

    def _check_deployment(self) -> None:
        """Raise SetupError if nobody answers, and the server's error if it wants another key."""
        try:
            self._connection.run(OfflineClient(self._connection.transport, 0.0).get("/v1/models"))
        except UnavailableError as error:
            self.close()
            remedy = "start a proxy there, or give another url"
            raise SetupError(f"{error.message}; {remedy}") from None
        except BaseException:
            self.close()
            raise

    def _draw_seeds(self, count: int) -> list[int | None]:
        """Draw seeds for prompts without one, the same in every run of a program."""
        if self._seed is None:
            return [None] * count
        with self._lock:
            first = self._prompts_so_far
            self._prompts_so_far += count
        return [choice_seed(self._seed, first + number) for number in range(count)]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._connection.run(self._client.post(path, body))

    def _get(self, path: str) -> Any:
        return self._connection.run(self._client.get(path))


class _ReadPrompt(NamedTuple):
    """A prompt as a text or token ids, and further fields of its request."""

    value: str | list[int]
    fields: dict[str, Any]


def _list_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return the prompts of a batch, or the only prompt as a batch."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast("Prompt", prompts)]
    return cast("Sequence[Prompt]", prompts)


def _read_prompt(prompt: Prompt) -> _ReadPrompt:
    """Read one prompt. Raises UsageError for unsupported parts."""
    if isinstance(prompt, str):
        return _ReadPrompt(prompt, {})
    if not isinstance(prompt, Mapping):
        return _ReadPrompt(list(prompt), {})
    given = {name: value for name, value in prompt.items() if value is not None}
    refuse_arguments("prompt", {n: v for n, v in given.items() if n not in _PROMPT_KEYS}, {})
    tokens, text = given.get("prompt_token_ids"), given.get("prompt")
    if tokens is None and text is None:
        raise UsageError("prompt: give a text, {'prompt': …} or {'prompt_token_ids': …}")
    fields = {"cache_salt": given["cache_salt"]} if "cache_salt" in given else {}
    return _ReadPrompt(cast("str", text) if tokens is None else list(tokens), fields)


def _spread_params(params: Params | None, count: int) -> Sequence[SamplingParams | None]:
    """Return the parameters of each of ``count`` prompts. Raises UsageError for a wrong number."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise UsageError(
            f"sampling_params: {len(params)} for {count} prompts; give one, or one for each"
        )
    return params


def _make_sampling(
    params: SamplingParams | None, seed: int | None
) -> tuple[dict[str, Any], int | None]:
    """Return the fields of a request, and the number of likeliest tokens to show."""
    drawn = {} if seed is None else {"seed": seed}
    if params is None:
        return drawn | {"max_tokens": SamplingParams.max_tokens}, None
    return drawn | params.to_json(), params.logprobs


def _make_template_fields(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the fields of a chat apart from messages and sampling."""
    fields: dict[str, Any] = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        # Without a choice, we return everything that the model wrote.
        "separate_reasoning": tool_choice is not None,
    }
    if chat_template_kwargs:
        fields["chat_template_kwargs"] = dict(chat_template_kwargs)
    if tools:
        fields["tools"] = [dict(tool) for tool in tools]
        fields["tool_choice"] = "none" if tool_choice is None else tool_choice
    elif tool_choice is not None:
        raise UsageError(f"chat: tool_choice={tool_choice!r} needs tools")
    return fields


# Limits of one request, below those of the proxy.
_MAX_LISTS, _MAX_TOKENS = 4096, 1 << 17


def _split_lists(lists: Sequence[list[int]]) -> list[list[list[int]]]:
    """Split lists of tokens into parts for a request each."""
    parts: list[list[list[int]]] = []
    left = 0
    for tokens in lists:
        if not parts or len(parts[-1]) == _MAX_LISTS or left < len(tokens):
            parts.append([])
            left = _MAX_TOKENS
        parts[-1].append(tokens)
        left -= len(tokens)
    return parts
