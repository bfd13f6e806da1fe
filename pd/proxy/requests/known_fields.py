"""All fields defined by OpenAI, vLLM and SGLang.

A model of a request obeys its own fields, and refuses the other fields in this table. We refuse
them because the client could not tell whether we obeyed or ignored a field. The error names the
right place or name of the field, or a remedy. We ignore fields unknown to all these systems.

``scripts/render_fields.py`` makes the table in docs/fields.md from this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
SCORE = "/v1/score"
BATCHES = "/v1/batches"
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"
RESPONSES = "/v1/responses"


# Paths of an API of its own, whose fields we do not recommend to clients of others.
OTHER_APIS = frozenset(
    (MESSAGES, COUNT_TOKENS, SCORE, OLLAMA_CHAT, OLLAMA_GENERATE, RESPONSES, BATCHES)
)


class FieldPlace(NamedTuple):
    """An object in requests whose members are fields.

    Attributes:
        endpoints: paths of the requests.
        inside: the field that holds the object; empty for the body itself.
    """

    endpoints: tuple[str, ...]
    inside: str = ""

    def __str__(self) -> str:
        paths = " and ".join(self.endpoints)
        return f"{self.inside} of {paths}" if self.inside else paths


# The obeyed fields of each place. The models of requests add themselves.
OBEYED: dict[FieldPlace, frozenset[str]] = {}

_OFF: tuple[object, ...] = (False,)
_ON: tuple[object, ...] = (True,)
_MEDIA: tuple[object, ...] = ("", [], [None])

# Maps each field to its neutral values. A neutral value asks for nothing, so it passes even where
# the field is refused. Null is always neutral.
KNOWN: Mapping[str, tuple[object, ...]] = {
    # The prompt.
    "model": (),
    "messages": (),
    "prompt": (),
    "text": (),
    "input_ids": (),
    "tokens": (),
    "prompt_token_ids": (),
    "prompt_embeds": (),
    "input_embeds": (),
    "positional_embed_overrides": (),
    "suffix": ("",),
    "echo": _OFF,
    "add_special_tokens": _ON,
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "image_data": _MEDIA,
    "audio_data": _MEDIA,
    "video_data": _MEDIA,
    "images_config": (),
    "video_config": (),
    "mm_hashes": ([],),
    "mm_content_hashes": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "use_audio_in_video": _OFF,
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "image_max_dynamic_patch": (),
    "video_max_dynamic_patch": (),
    "session_params": ({},),
    # Chats.
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": _ON,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "add_generation_prompt": _ON,
    "continue_final_message": _OFF,
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "reasoning_effort": (),
    "reasoning": (),
    "separate_reasoning": _ON,
    "include_reasoning": _ON,
    "stream_reasoning": _ON,
    "thinking_token_budget": (-1,),
    "max_thinking_tokens": (),
    "require_reasoning": _OFF,
    "task": (),
    "modalities": (["text"], []),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "prediction": (),
    # Sampling.
    "sampling_params": ({}, []),
    "max_tokens": (),
    "max_completion_tokens": (),
    "max_new_tokens": (),
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "seed": (),
    "sampling_seed": (),
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": _OFF,
    "length_penalty": (1,),
    "early_stopping": _OFF,
    "typical_p": (1,),
    "no_repeat_ngram_size": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "stop_regex": ([], ""),
    "no_stop_trim": _OFF,
    "include_stop_str_in_output": _OFF,
    "ignore_eos": _OFF,
    "skip_special_tokens": _ON,
    "spaces_between_special_tokens": _ON,
    "min_tokens_penalty": (),
    "repetition_detection": (),
    "watermarking": _OFF,
    "logits_processors": ([],),
    "custom_logit_processor": ("", [], [None]),
    "custom_params": ({},),
    "vllm_xargs": ({},),
    "extra_args": ({},),
    "lora_path": ("", [], [None]),
    "lora_id": ("", [], [None]),
    "ngram_corpus_id": (),
    # Structured output.
    "response_format": ({"type": "text"},),
    "regex": (),
    "json_schema": (),
    "ebnf": (),
    "structural_tag": (),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_grammar": (),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "json": (),
    "grammar": (),
    "choice": (),
    "json_object": _OFF,
    "whitespace_pattern": (),
    "disable_any_whitespace": _OFF,
    "disable_additional_properties": _OFF,
    "disable_fallback": _OFF,
    "choices": (),
    "choices_method": (),
    # The content of the answer.
    "stream": _OFF,
    "stream_options": ({},),
    "include_usage": _OFF,
    "continuous_usage_stats": _OFF,
    "include_obfuscation": _OFF,
    "stream_interval": (),
    "incremental": _OFF,
    "logprobs": _OFF,
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "return_logprob": _OFF,
    "logprob_start_len": (-1,),
    "top_logprobs_num": (0,),
    "token_ids_logprob": ([],),
    # Log probabilities of /generate always include the texts of their tokens.
    "return_text_in_logprobs": (True, False),
    "flat_logprobs": _OFF,
    "return_flat_raw_top_logprobs": _OFF,
    "return_flat_raw_top_logprobs_b64": _OFF,
    "return_sampling_mask": _OFF,
    "return_entropy": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "return_token_ids": _OFF,
    "return_prompt_token_ids": _OFF,
    "return_prompt_text": _OFF,
    "return_token_strs": _OFF,
    "return_token_offsets": _OFF,
    "return_hidden_states": _OFF,
    "return_routed_experts": _OFF,
    "routed_experts_start_len": (0,),
    "routed_experts_prompt_start": (0,),
    "return_indexer_topk": _OFF,
    "return_cached_tokens_details": _OFF,
    "return_meta_info": _OFF,
    "return_mm_kwargs": _ON,
    "return_bytes": _OFF,
    # The request itself.
    "rid": (),
    "request_id": (),
    "priority": (0,),
    "prefix_lease": (0,),
    "cache_salt": ("",),
    "extra_key": ("",),
    "timeout": (),
    "user": (),
    "metadata": ({},),
    "safety_identifier": (),
    "session_id": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": ("in-memory", "in_memory"),
    "store": _OFF,
    "service_tier": ("auto", "default"),
    "custom_labels": ({},),
    "log_metrics": _ON,
    "no_logs": _OFF,
    "conversation_id": (),
    "routing_key": (),
    "background": _OFF,
    "extra_body": ({},),
    # Fields between the processes of other systems.
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "bootstrap_pair_key": (),
    "decode_tp_size": (),
    "data_parallel_rank": (),
    "routed_dp_rank": (),
    "disagg_prefill_dp_rank": (),
    "kv_router_hint": (),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "http_worker_ipc": (),
    "external_trace_header": (),
    "received_time": (),
    "need_wait_for_mm_inputs": (),
    "num_items_assigned": (),
    "encoder_urls": ([],),
    "multi_item_delimiter_indices": (),
    # OpenAI's Responses API.
    "input": (),
    "instructions": (),
    "include": ([],),
    "max_output_tokens": (),
    "max_tool_calls": (),
    "previous_response_id": (),
    "conversation": (),
    "truncation": ("disabled",),
    "context_management": ([],),
    "moderation": (),
    # Fields of clients for Anthropic, Hugging Face and Ollama.
    "system": (),
    "stop_sequences": ([],),
    "thinking": ({"type": "disabled"},),
    "enable_thinking": (),
    "mcp_servers": ([],),
    "inputs": (),
    "parameters": ({},),
    "options": ({},),
    "format": ("",),
    "do_sample": _ON,
    "max_length": (),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "num_predict": (),
    "repeat_penalty": (1,),
    "images": ([],),
    "template": ("",),
    "context": ([],),
    "repeat_last_n": (-1,),
    "mirostat": (0,),
    "tfs_z": (1,),
    "penalize_newline": _ON,
}

# Values that are neutral at one endpoint only.
_NEUTRAL: Mapping[tuple[str, str], tuple[object, ...]] = {
    # The chat template writes the special tokens itself.
    (CHAT, "add_special_tokens"): (False,),
}

_LENGTH = ("max_tokens", "max_new_tokens", "num_predict")
_OTHER_LENGTHS = ("max_completion_tokens", "max_output_tokens", "max_length")
# Maps a field to fields of the same meaning. An error names the first one obeyed by the place.
_SAME: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((*_LENGTH, *_OTHER_LENGTHS), (*_LENGTH, "max_output_tokens")),
    **dict.fromkeys(("min_tokens", "min_new_tokens"), ("min_tokens", "min_new_tokens")),
    **dict.fromkeys(("seed", "sampling_seed"), ("seed", "sampling_seed")),
    **dict.fromkeys(("num_return_sequences",), ("n",)),
    **dict.fromkeys(
        ("repeat_penalty", "repetition_penalty"), ("repetition_penalty", "repeat_penalty")
    ),
    **dict.fromkeys(("response_format", "json_schema"), ("response_format", "format")),
    **dict.fromkeys(("thinking", "enable_thinking", "reasoning_effort"), ("think",)),
    **dict.fromkeys(("stop_sequences",), ("stop",)),
    **dict.fromkeys(
        ("no_stop_trim", "include_stop_str_in_output"),
        ("include_stop_str_in_output", "no_stop_trim"),
    ),
    **dict.fromkeys(("prompt", "text", "inputs", "input"), ("text", "prompt", "messages")),
    **dict.fromkeys(("input_ids", "prompt_token_ids", "tokens"), ("input_ids", "prompt", "tokens")),
    **dict.fromkeys(("logprobs", "return_logprob"), ("logprobs", "return_logprob")),
    **dict.fromkeys(
        ("top_logprobs", "top_logprobs_num"), ("top_logprobs", "top_logprobs_num", "logprobs")
    ),
    **dict.fromkeys(("prompt_logprobs", "logprob_start_len"), ("prompt_logprobs",)),
    **dict.fromkeys(("guided_json", "json"), ("json_schema", "json")),
    **dict.fromkeys(("guided_regex",), ("regex",)),
    **dict.fromkeys(("guided_grammar", "grammar"), ("ebnf", "grammar")),
    **dict.fromkeys(("guided_choice", "choice"), ("guided_choice", "choice")),
    **dict.fromkeys(("rid", "request_id"), ("rid", "request_id")),
    **dict.fromkeys(("return_prompt_token_ids",), ("return_token_ids",)),
    **dict.fromkeys(("functions",), ("tools",)),
    **dict.fromkeys(("function_call",), ("tool_choice",)),
    **dict.fromkeys(("reasoning",), ("reasoning_effort",)),
}

# The key of ``sampling_params`` in the table below.
_OF_GENERATE = f"{GENERATE} sampling_params"
_GRAMMARS = "is written as regex, json_schema, ebnf or structural_tag of sampling_params here"
_OPTIONS = "is written as regex or ebnf of sampling_params here; or score the texts with choices"
_OF_PROMPT = (
    "is written as return_logprob with logprob_start_len and top_logprobs_num at the top level of "
    "the request"
)
_NO_PROMPT = "is for /v1/completions; a chat has messages"
_TEXT_ONLY = "is not a field here, where texts become token ids; leave it out"
_OF_TEMPLATE = "is a variable of some chat templates; put it into chat_template_kwargs"
_MESSAGE = "is not a field here; send a message with the role system"
_INPUT = "is called input here"
# Remedies that follow from no rule, for one place or for all places.
_ADVICE: Mapping[tuple[str, str] | str, str] = {
    (CHAT, "prompt"): _NO_PROMPT,
    (CHAT, "text"): _NO_PROMPT,
    (CHAT, "input_ids"): _NO_PROMPT,
    (CHAT, "prompt_token_ids"): _NO_PROMPT,
    (TOKENIZE, "input_ids"): _TEXT_ONLY,
    (TOKENIZE, "tokens"): _TEXT_ONLY,
    (TOKENIZE, "prompt_token_ids"): _TEXT_ONLY,
    (CHAT, "add_special_tokens"): "is not supported for chats, whose template writes the special "
    "tokens; leave it out",
    (CHAT, "system"): _MESSAGE,
    (CHAT, "instructions"): _MESSAGE,
    (CHAT, "thinking"): _OF_TEMPLATE,
    (CHAT, "enable_thinking"): _OF_TEMPLATE,
    (TOKENIZE, "thinking"): _OF_TEMPLATE,
    (TOKENIZE, "enable_thinking"): _OF_TEMPLATE,
    (COMPLETIONS, "sampling_params"): "is for /generate; put its fields into the request itself",
    (CHAT, "sampling_params"): "is for /generate; put its fields into the request itself",
    (COMPLETIONS, "parameters"): "is not a field here; put its fields into the request itself",
    (CHAT, "parameters"): "is not a field here; put its fields into the request itself",
    (COMPLETIONS, "options"): "is not a field here; put its fields into the request itself",
    (CHAT, "options"): "is not a field here; put its fields into the request itself",
    (COMPLETIONS, "format"): "is written as response_format here",
    (CHAT, "format"): "is written as response_format here",
    (GENERATE, "parameters"): "is called sampling_params here",
    (GENERATE, "options"): "is called sampling_params here",
    **dict.fromkeys(
        [
            (path, name)
            for path in (GENERATE, _OF_GENERATE)
            for name in ("format", "response_format", "structured_outputs")
        ],
        _GRAMMARS,
    ),
    (GENERATE, "guided_choice"): _OPTIONS,
    (_OF_GENERATE, "guided_choice"): _OPTIONS,
    (GENERATE, "prompt_logprobs"): _OF_PROMPT,
    (_OF_GENERATE, "prompt_logprobs"): _OF_PROMPT,
    **dict.fromkeys(((RESPONSES, name) for name in ("messages", "inputs", "input_ids")), _INPUT),
    (RESPONSES, "prompt"): "is not supported; send instructions and input",
    (RESPONSES, "system"): "is called instructions here",
    (RESPONSES, "response_format"): "is written as text.format here",
    (RESPONSES, "format"): "is written as text.format here",
    (RESPONSES, "reasoning_effort"): "is written as reasoning.effort here",
    (RESPONSES, "conversation"): "is not supported; send previous_response_id, or all items as "
    "input",
    "background": "is not supported; leave it out and keep the connection open, or send a batch",
    "truncation": "is not supported; send fewer items",
    "extra_body": "is an argument of OpenAI's Python client, which sends its members as fields of "
    "the request; put them there",
    "do_sample": "is not supported; set temperature to 0 for greedy sampling",
    "best_of": "is not supported; ask for n answers and choose among them",
    "service_tier": "is not supported; set priority",
    "mcp_servers": "is not supported; call the servers' tools in the client",
    "prompt_embeds": "is not supported; send text or token ids",
    "input_embeds": "is not supported; send text or token ids",
    "image_data": "is not supported; this server takes text only",
    "audio_data": "is not supported; this server takes text only",
    "video_data": "is not supported; this server takes text only",
    "images": "is not supported; this server takes text only",
    "template": "is not supported; the model's own template is used, or none with raw",
    "context": "is not supported; send the whole chat as messages, whose beginning is cached",
    "repeat_last_n": "is not supported; a repetition penalty covers the whole prompt and answer",
    "custom_logit_processor": "is not supported, since it would run a client's program; leave it "
    "out",
    "lora_path": "is not supported yet; ask for a model that is served by its name",
    "prediction": "is not supported; nodes speculate by --speculative-algorithm",
    "verbosity": "is not supported; say in a message how long the answer should be",
    "session_params": "is not supported; send the whole prompt, whose beginning is cached",
    "previous_response_id": "is not supported; send the whole chat as messages",
    "conversation": "is not supported; send the whole chat as messages",
    "thinking_token_budget": "is not supported yet; reasoning_effort sets how long a model thinks "
    "if its template knows it",
}


def add_place(place: FieldPlace, names: frozenset[str]) -> frozenset[str]:
    """Register the fields obeyed by a place, and return the known fields it refuses."""
    OBEYED[place] = names
    return frozenset(KNOWN) - names


def asks_for_nothing(place: FieldPlace, name: str, value: object) -> bool:
    """Return whether a refused field may pass, because its value is neutral."""
    if value is None:
        return True
    neutral = _NEUTRAL.get((place.endpoints[0], name), KNOWN[name])
    return any(
        isinstance(value, bool) == isinstance(each, bool) and value == each for each in neutral
    )


def explain_refusal(place: FieldPlace, name: str) -> str:
    """Explain why a place refuses a known field, and name the remedy. The text follows the field's
    name.
    """
    where = f"{place.endpoints[0]} {place.inside}".strip()
    if (where, name) in _ADVICE:
        return _ADVICE[where, name]
    above = [
        other
        for other in OBEYED
        if place.inside and not other.inside and _share_endpoint(place, other)
    ]
    within = [
        other
        for other in OBEYED
        if not place.inside and other.inside and _share_endpoint(place, other)
    ]
    if any(name in OBEYED[other] for other in above):
        return f"belongs at the top level of the request, not in {place.inside}"
    for other in within:
        if name in OBEYED[other]:
            return f"belongs in {other.inside}"
    for same in _SAME.get(name, ()):
        if same in OBEYED[place]:
            return f"is called {same} here"
        if any(same in OBEYED[other] for other in above):
            return f"is called {same} here, and belongs at the top level of the request"
        for other in within:
            if same in OBEYED[other]:
                return f"is called {other.inside}.{same} here"
    return _ADVICE.get(name) or _explain_elsewhere(place, name)


def _share_endpoint(place: FieldPlace, other: FieldPlace) -> bool:
    return bool(set(place.endpoints) & set(other.endpoints))


def _explain_elsewhere(place: FieldPlace, name: str) -> str:
    others = [
        other
        for other, names in OBEYED.items()
        if name in names and OTHER_APIS.isdisjoint(other.endpoints)
    ]
    places = [str(other) for other in others if not other.inside] or list(map(str, others))
    if not places:
        return "is not supported yet; leave it out"
    return f"is for {', '.join(places)}, not for {place}; leave it out"
