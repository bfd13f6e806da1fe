"""Types of the bodies of answers and events, for the API's description and mypy."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypeAliasType, TypedDict

from pd.proxy.storage.batches import BatchStatus  # noqa: TC001  (read at run time)

# [log probability (null for the first token of a prompt), token id, text]
LogprobTriple = tuple[float | None, int, str]


class ErrorDetail(TypedDict):
    """Description of an error."""

    message: Annotated[str, Field(description="Names the field, its value and the remedy.")]
    type: str
    param: Annotated[str | None, Field(description="The field of the request.")]
    code: Annotated[
        str, Field(description="The kind of error for programs, such as `invalid_request`.")
    ]


class ErrorBody(TypedDict):
    """An error, as an answer or as the last event of a stream, after which no `[DONE]` comes."""

    error: ErrorDetail


class PromptTokensDetails(TypedDict):
    """Parts of the prompt."""

    cached_tokens: Annotated[int, Field(description="Tokens from the prefill node's cache.")]


class CompletionTokensDetails(TypedDict):
    """Parts of the answers."""

    reasoning_tokens: Annotated[
        int,
        Field(
            description="Tokens up to the end of the reasoning, including its closing tag; all "
            "tokens if the answer does not close it, 0 if it does not reason."
        ),
    ]


class Usage(TypedDict):
    """Tokens of all prompts and choices; a prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: Annotated[
        int, Field(description="Including the token that ended the answer.")
    ]
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[
        Annotated[
            CompletionTokensDetails,
            Field(description="Only for chats of a model with a reasoning parser."),
        ]
    ]
    reasoning_tokens: Annotated[
        int, Field(description="The same as in `completion_tokens_details`, or 0 without them.")
    ]


StopReason = Annotated[
    int | str | None,
    Field(description="The matched stop string or stop token id of the request."),
]


MatchedStop = Annotated[
    int | str | None,
    Field(description="What ended the choice. This may be one of the model's own tokens."),
]


class Ending(TypedDict):
    """Reasons why a choice ended; null before it does."""

    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: StopReason
    matched_stop: NotRequired[MatchedStop]


ChatFinish = Annotated[
    Literal["stop", "length", "tool_calls", "abort"] | None,
    Field(
        description="`tool_calls`: the message has calls and ended by itself. It is `stop` if "
        "`tool_choice` named the function."
    ),
]


class PromptToken(TypedDict):
    """A token at a place of the prompt."""

    logprob: float
    rank: Annotated[int | None, Field(description="Null unless the token is one of the likeliest.")]
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptToken] | None] | None,
    Field(description="An object by token id for each token of the prompt; null for the first."),
]


class CompletionLogprobs(TypedDict):
    """Log probabilities in parallel lists, with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: Annotated[list[int], Field(description="Offset of each token in the text.")]


class CompletionChoice(Ending):
    """Answer to a prompt, or its new part."""

    index: Annotated[
        int, Field(description="Index of the prompt times `n`, plus the index of the answer.")
    ]
    text: str
    logprobs: CompletionLogprobs | None
    token_ids: NotRequired[list[int] | None]
    prompt_token_ids: NotRequired[list[int] | None]
    prompt_logprobs: NotRequired[PromptLogprobs]


class CompletionHead(TypedDict):
    """Fields shared by an answer and all events of one request."""

    id: str
    object: Literal["text_completion"]
    created: Annotated[int, Field(description="Seconds since 1970.")]
    model: str


class Completion(CompletionHead):
    """Completions of all prompts."""

    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(CompletionHead):
    """An event of a stream: the new part of one choice, or none and the request's usage."""

    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class LikelyToken(TypedDict):
    """A token and its log probability."""

    token: str
    token_id: int
    logprob: float | None
    bytes: list[int] | None


class ChatToken(LikelyToken):
    """A token of the answer, and the likeliest tokens at its place."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(TypedDict):
    """Log probabilities of an answer's tokens."""

    content: list[ChatToken]
    refusal: None


class FunctionCall(TypedDict):
    """The function to call, and its arguments."""

    name: str
    arguments: Annotated[
        str, Field(description="JSON of an object. Check it, because a model may write anything.")
    ]


class ToolCall(TypedDict):
    """A call for the client to make."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(TypedDict):
    """The assistant's message."""

    role: Literal["assistant"]
    content: Annotated[str | None, Field(description="Null if there are only calls.")]
    refusal: None
    reasoning_content: str | None
    reasoning: str | None
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One of `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    stop_reason: StopReason
    matched_stop: NotRequired[MatchedStop]
    token_ids: list[int] | None


class ChatHead(TypedDict):
    """Fields shared by an answer and all events of one request."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: Annotated[int, Field(description="Seconds since 1970.")]
    model: str


class ChatCompletion(ChatHead):
    """The next message of a chat, `n` times."""

    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs


class FunctionCallDelta(TypedDict):
    """The new part of a call."""

    name: NotRequired[str]
    arguments: Annotated[str, Field(description="More of the JSON of the arguments.")]


class ToolCallDelta(TypedDict):
    """The beginning of a call with its name, or a new part of its arguments."""

    index: Annotated[int, Field(description="Index of the call in the message.")]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCallDelta


class ChatDelta(TypedDict, total=False):
    """The new part of a message. The first event of a choice has the role."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str | None
    reasoning: str
    tool_calls: list[ToolCallDelta]


class ChatChunkChoice(TypedDict):
    """The new part of an answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    stop_reason: NotRequired[int | str | None]
    matched_stop: NotRequired[MatchedStop]
    token_ids: NotRequired[list[int]]


class ChatChunk(ChatHead):
    """An event of a stream: the new part of one choice, or none and the request's usage."""

    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]


InvocationAnswer = ChatCompletion | Completion
InvocationEvent = TypeAliasType("InvocationEvent", ChatChunk | CompletionChunk)


class NativeFinish(TypedDict):
    """Reason why an answer ended."""

    type: Literal["stop", "length", "abort"]
    matched: NotRequired[
        Annotated[
            int | str, Field(description="The token id or stop string that ended the answer.")
        ]
    ]
    length: NotRequired[Annotated[int, Field(description="Number of tokens, with `length`.")]]
    message: NotRequired[Annotated[str, Field(description="Reason for the end, with `abort`.")]]


class ScoredOption(TypedDict):
    """One of the `choices`. Its tokens begin at the first one that differs from the prompt's."""

    text: str
    score: Annotated[
        float,
        Field(
            description="The value that `choices_method` compares. With `greedy_token`, that "
            "of the first token."
        ),
    ]
    normalized_logprob: Annotated[
        float, Field(description="Mean log probability of the tokens after the prompt.")
    ]
    token_logprobs: list[LogprobTriple]
    unconditional_token_logprobs: NotRequired[
        Annotated[
            list[LogprobTriple],
            Field(description="Without the prompt, for `unconditional_likelihood`."),
        ]
    ]


class NativeFailover(TypedDict):
    """A node failed or left, and the answer went on elsewhere."""

    position: Annotated[int, Field(description="Number of tokens before the failover.")]
    choice: Annotated[
        int | None,
        Field(description="Index of the answer; null for all answers, before any token."),
    ]
    reason: str
    pause: Annotated[float, Field(description="Seconds without a token.")]


class MetaInfo(TypedDict):
    """Facts about an answer."""

    id: str
    finish_reason: NativeFinish | None
    prompt_tokens: int
    completion_tokens: Annotated[
        int, Field(description="Including the token that ended the answer.")
    ]
    cached_tokens: Annotated[int, Field(description="Prompt tokens from the prefill node's cache.")]
    e2e_latency: Annotated[float, Field(description="Seconds.")]
    stages: Annotated[
        dict[str, float],
        Field(
            description="Seconds in `queue`, `bootstrap`, `prefill`, `transfer` and `decode`, as "
            "the nodes measured them; stages overlap."
        ),
    ]
    failovers: NotRequired[list[NativeFailover]]
    input_token_logprobs: NotRequired[list[LogprobTriple]]
    input_top_logprobs: NotRequired[list[list[LogprobTriple] | None]]
    output_token_logprobs: NotRequired[list[LogprobTriple]]
    output_top_logprobs: NotRequired[list[list[LogprobTriple] | None]]
    input_token_ids_logprobs: NotRequired[list[list[LogprobTriple] | None]]
    output_token_ids_logprobs: NotRequired[list[list[LogprobTriple] | None]]
    output_token_logprobs_length: NotRequired[
        Annotated[int, Field(description="Number of tokens of the answer so far.")]
    ]
    choices_method: NotRequired[str]
    choices: NotRequired[
        Annotated[
            list[ScoredOption],
            Field(description="In the request's order. Empty if the request was aborted."),
        ]
    ]


class NativeResult(TypedDict):
    """An answer to a prompt; in a stream what there is so far, with `incremental` what is new."""

    index: NotRequired[Annotated[int, Field(description="Only in streams of several answers.")]]
    text: str
    output_ids: list[int]
    meta_info: MetaInfo


NativeAnswer = NativeResult | list[NativeResult]


class TokenizeResult(TypedDict):
    """Token ids of a text, or of each of several."""

    tokens: list[int] | list[list[int]]
    count: int | list[int]
    token_strs: list[str] | list[list[str]] | None
    max_model_len: Annotated[int, Field(description="Tokens of the model's context.")]


class DetokenizeResult(TypedDict):
    """The text of token ids, or of each of several lists, under the names of vLLM and SGLang."""

    prompt: str | list[str]
    text: str | list[str]


@with_config(ConfigDict(extra="allow"))
class TokenizerFacts(TypedDict):
    """Facts about a tokenizer. Other fields are scalar settings of its `tokenizer_config.json`."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    sep_token: str | None
    cls_token: str | None
    chat_template: Annotated[str | None, Field(description="Null if the model has none.")]


class AbortResult(TypedDict):
    """Number of ended requests."""

    aborted: int


class FlushResult(TypedDict):
    """Nodes with dropped caches (instance ids), and skipped nodes (URLs)."""

    flushed: list[str]
    skipped: list[str]


class Status(TypedDict):
    """The proxy's state."""

    status: str


class Version(TypedDict):
    """The proxy's version."""

    version: str


class ModelInfo(TypedDict):
    """Facts about the first model, under SGLang's names."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: None
    weight_version: str
    has_image_understanding: bool
    has_audio_understanding: bool


class InternalState(TypedDict):
    """Measured values, under SGLang's names."""

    last_gen_throughput: Annotated[
        float,
        Field(description="Generated tokens per second since the last request to this process."),
    ]
    avg_spec_accept_length: Annotated[
        None, Field(description="Always null; nodes have it as a metric.")
    ]


class ServerFacts(TypedDict):
    """Facts about the deployment of the first model, under SGLang's names."""

    version: str
    model_path: str
    tokenizer_path: str
    served_model_name: str
    context_length: int
    page_size: Annotated[int, Field(description="Tokens of a page. The smallest, if nodes differ.")]
    max_total_num_tokens: Annotated[
        int, Field(description="Tokens whose KV fits into all generating nodes together.")
    ]
    internal_states: list[InternalState]


class ServerLoad(TypedDict):
    """The load."""

    server_load: Annotated[int, Field(description="Number of running requests.")]


class ModelCard(TypedDict):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: Annotated[int, Field(description="Tokens of the model's context.")]


class ModelList(TypedDict):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]


class WorkerEntry(TypedDict):
    """A node as the proxy sees it."""

    role: Literal["prefill", "decode", "unified"]
    url: str
    instance_id: Annotated[str | None, Field(description="Null until the node was reached.")]
    model: str | None
    ready: bool
    draining: Annotated[bool, Field(description="The node gets no new requests.")]
    running: Annotated[int, Field(description="Number of requests.")]
    queued_tokens: Annotated[int, Field(description="Prompt tokens that the node has to compute.")]
    problem: Annotated[str | None, Field(description="Why the node cannot be used.")]


class WorkerList(TypedDict):
    """All nodes."""

    workers: list[WorkerEntry]


class AnthropicUsage(TypedDict):
    """Tokens of a message. The prompt has the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: Annotated[
        int, Field(description="New tokens of a prompt with `cache_control`.")
    ]
    cache_read_input_tokens: Annotated[int, Field(description="Tokens found in the cache.")]
    output_tokens: int


class AnthropicMessage(TypedDict):
    """An answer in the shape of Anthropic's Messages API."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: Annotated[
        list[dict[str, object]],
        Field(description="Blocks: `text`, `thinking` and `tool_use`."),
    ]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicEvent(TypedDict):
    """An event of a streamed message. Its name is its type."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]


class Scores(TypedDict):
    """Scores in SGLang's shape."""

    id: str
    object: Literal["scoring"]
    model: str
    scores: Annotated[
        list[list[float]], Field(description="For each item, the scores of the labels.")
    ]
    usage: Usage


class TokenCount(TypedDict):
    """Number of tokens of a prompt."""

    input_tokens: int


class ResponseUsage(TypedDict):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


@with_config(ConfigDict(extra="allow"))
class ResponseObject(TypedDict):
    """A response of OpenAI's Responses API. Other fields repeat the request."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: Annotated[
        list[dict[str, object]],
        Field(description="Items: `reasoning`, `message` and `function_call`."),
    ]
    error: dict[str, object] | None
    incomplete_details: dict[str, object] | None
    usage: ResponseUsage | None


@with_config(ConfigDict(extra="allow"))
class ResponseEvent(TypedDict):
    """An event of a streamed response. Its name is its type."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: Annotated[int, Field(description="Counts the events from 0.")]


class DeletedObject(TypedDict):
    """A stored object that is gone."""

    id: str
    object: str
    deleted: Literal[True]


class FileObject(TypedDict):
    """An uploaded file."""

    id: str
    object: Literal["file"]
    bytes: Annotated[int, Field(description="Size of the content.")]
    created_at: Annotated[int, Field(description="In seconds since 1970.")]
    expires_at: Annotated[int, Field(description="In seconds since 1970.")]
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(TypedDict):
    """Files of a key."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: Annotated[bool, Field(description="Ask for more with `after=last_id`.")]


class BatchErrorObject(TypedDict):
    """Why a batch failed."""

    code: str
    message: str
    line: Annotated[int | None, Field(description="Number of the input's line, from 1.")]
    param: str | None


class BatchErrorList(TypedDict):
    """Why a batch failed: its first errors."""

    object: Literal["list"]
    data: list[BatchErrorObject]


class BatchRequestCounts(TypedDict):
    """Numbers of requests of a batch."""

    total: int
    completed: int
    failed: int


class BatchObject(TypedDict):
    """A batch. Its times are in seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrorList | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: Annotated[str | None, Field(description="Results of successful requests.")]
    error_file_id: Annotated[str | None, Field(description="Results of other requests.")]
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchRequestCounts
    metadata: dict[str, str] | None


class BatchList(TypedDict):
    """Batches of a key."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: Annotated[bool, Field(description="Ask for more with `after=last_id`.")]
