"""The model's tokenizer, loaded from a Hugging Face directory without transformers."""

from __future__ import annotations

import asyncio
import json
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pd.core.errors import InvalidRequestError, UsageError
from pd.proxy.text.chat_template import (
    SPECIAL_TOKENS,
    ChatTemplate,
    find_special_tokens,
    load_templates,
    read_config,
)
from pd.proxy.text.detokenizer import Detokenizer, NoDetokenizer, TokenTable
from pd.proxy.text.normalized_lengths import MAX_CHARACTERS, NormalizedLengths
from pd.proxy.text.reasoning import find_reasoning_tags
from pd.proxy.text.special_tokens import SpecialTokens
from pd.proxy.text.tokenized_pieces import (
    PieceEncoder,
    TooManyTokensError,
    group_short,
    tokenize_texts,
)
from pd.proxy.text.tokenizer_files import load_tokenizer
from pd.proxy.text.tokenizer_info import describe_tokenizer
from pd.proxy.text.tools.families import find_tool_family

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from pd.proxy.text.reasoning import ReasoningTags
    from pd.proxy.text.tools.families import ToolFamily

    IntArray = npt.NDArray[np.int32]

logger = logging.getLogger(__name__)

# Limit on the token ids of one text. No model has a longer context, and more would take long.
MAX_TEXT_TOKENS = 1 << 20
_MIN_LONGEST = 64
# We look again for the tokenizer of a node's model directory after this time.
RETRY_SECONDS = 30.0


class TextModel:
    """Converts between text and token ids for one model.

    Attributes:
        special: separates a template's special tokens from clients' texts; None if clients may
            write special tokens.
        info: facts for clients, see :mod:`pd.proxy.text.tokenizer_info`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        need_templates: bool = True,
        split_special_tokens: bool = False,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        """Load a model's tokenizer. Raises UsageError if the directory has no readable one.

        Args:
            need_templates: raise UsageError for unreadable chat templates, too, instead of logging
                it.
            split_special_tokens: treat special tokens in clients' texts as text.
            tool_call_parser: the proxy's flag.
            reasoning_parser: the proxy's flag.
        """
        self._tool_call_parser = tool_call_parser
        self._reasoning_parser = reasoning_parser
        self._tokenizer = load_tokenizer(directory)
        # We drop settings for training, because they would silently cut prompts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.special = SpecialTokens(self._tokenizer) if split_special_tokens else None
        self._encoder = self._tokenizer if self.special is None else self.special.tokenizer
        self._pieces = PieceEncoder.from_tokenizer(self._encoder)
        self._normalized = NormalizedLengths.from_tokenizer(self._tokenizer)
        decoder: dict[str, Any] | None = json.loads(self._tokenizer.to_str()).get("decoder")
        self.table = TokenTable(self._tokenizer, decoder)
        # Longest text of one token. Only fused unknown tokens can be longer.
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        self.longest_token = max(_MIN_LONGEST, *map(len, vocabulary))
        self._lengths = np.zeros(max(vocabulary.values(), default=0) + 1, np.int64)
        self._lengths[list(vocabulary.values())] = list(map(len, vocabulary))
        self.templates: dict[str, ChatTemplate] = {}
        config: dict[str, Any] = {}
        try:
            config = read_config(directory)
            self.templates = load_templates(directory, config)
        except UsageError as error:
            if need_templates:
                raise
            logger.error("serving no chat: %s", error)
        template = self.templates.get("default")
        self.info = describe_tokenizer(
            config,
            dict.fromkeys(SPECIAL_TOKENS) | find_special_tokens(config),
            None if template is None else template.source,
        )

    def encode(
        self, text: str, *, add_special_tokens: bool, param: str = "prompt", namespace: str = ""
    ) -> IntArray:
        """Return token ids as int32. A character takes up to a microsecond; other threads can run.

        ``namespace``: scope in which texts with the same beginning are not tokenized again.

        Raises InvalidRequestError for more than MAX_TEXT_TOKENS, and for a text that would become
        too long when normalized.
        """
        (ids,) = self.encode_texts(
            [text], add_special_tokens=add_special_tokens, param=param, namespace=namespace
        )
        return ids

    def encode_texts(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        param: str = "prompt",
        namespace: str = "",
    ) -> Iterator[IntArray]:
        """Yield the token ids of each text, as :meth:`encode` returns them.

        We tokenize short texts together, because between two calls this thread may have to wait for
        the event loop, which costs more than a short text.
        """
        limit, special = MAX_TEXT_TOKENS, {"add_special_tokens": add_special_tokens}
        try:
            for together in group_short(texts):
                self._check_normalized(together, param)
                ids = None
                if self._pieces is not None and len(together) == 1:
                    ids = self._pieces.encode(together[0], namespace, limit, **special)
                if ids is None:
                    yield from tokenize_texts(self._encoder, together, limit, **special)
                    continue
                if len(ids) > limit:
                    raise TooManyTokensError(len(ids))
                yield ids
        except TooManyTokensError as error:
            raise InvalidRequestError(
                f"{param} has {error.count} tokens or more; at most {limit} are allowed",
                param=param,
            ) from None

    def _check_normalized(self, texts: list[str], param: str) -> None:
        """Raise InvalidRequestError for a text that needs too much memory to tokenize."""
        if self._normalized is None:
            return
        for text in texts:
            length = self._normalized.find_excess(text)
            if length is not None:
                raise InvalidRequestError(
                    f"{param} has {len(text)} characters, of which the model's tokenizer makes "
                    f"{length} before it counts tokens; at most {MAX_CHARACTERS} are allowed",
                    param=param,
                )

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of tokens. Other threads can run meanwhile."""
        (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def list_token_names(self, ids: list[int]) -> list[str]:
        """List the vocabulary's entries of tokens."""
        return [self._tokenizer.id_to_token(token) or "" for token in ids]

    def estimate_characters(self, ids: IntArray) -> int:
        """Estimate the length of the tokens' text. The text is hardly longer."""
        return int(self._lengths[ids[ids < len(self._lengths)]].sum())

    def get_token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text."""
        return self.table.get_bytes(token_id)

    def decode_token(self, token_id: int) -> str:
        """Return a token as text. A part of a character becomes ``bytes:\\xf0\\x9f``, because
        different tokens must stay different.
        """
        data = self.table.get_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def make_detokenizer(
        self, *, skip_special_tokens: bool, kept: frozenset[str] = frozenset()
    ) -> Detokenizer:
        """Make a detokenizer for a sequence. It never skips the special tokens in ``kept``."""
        return self.table.make_detokenizer(skip_special_tokens, kept)

    def find_template(self, *, with_tools: bool = False) -> ChatTemplate:
        """Find the chat template. With tools, prefer the model's template for tools.

        Raises InvalidRequestError if the model has none.
        """
        template = self.templates.get("tool_use") if with_tools else None
        template = template or self.templates.get("default")
        if template is None:
            known = ", ".join(self.templates) or "none"
            raise InvalidRequestError(
                f"the model has no default chat template (it has: {known}); use /v1/completions "
                "with a prompt instead",
                param="messages",
            )
        return template

    def shows_tools(self, template: ChatTemplate) -> bool:
        """Tell whether a template may get tools: it shows them, or the operator chose a parser."""
        return template.takes_tools or self._tool_call_parser not in ("auto", "none")

    def find_tool_family(self, template: ChatTemplate) -> ToolFamily | None:
        """Find the format of the model's calls; None if it is unknown."""
        return find_tool_family(self._tool_call_parser, template.source)

    def find_reasoning_tags(self, template: ChatTemplate) -> ReasoningTags | None:
        """Find the tags of the model's reasoning; None if it is not known to reason."""
        return find_reasoning_tags(self._reasoning_parser, template.source)


class TextModels:
    """Loads each model directory once, off the event loop. Failed ones are tried again."""

    def __init__(self, directory: str | None, **options: Any) -> None:
        """``options``: arguments of :class:`TextModel`."""
        self._configured = directory
        self._options = options
        self._models: dict[str, asyncio.Future[TextModel | None]] = {}

    async def load(self, model_path: str | None) -> TextModel | None:
        """Return the configured tokenizer, or that of a node's model directory if it is on this
        host.

        Raises UsageError if the configured one is unreadable. A node's unreadable one leaves the
        proxy without text.
        """
        directory = self._configured or model_path
        if directory is None:
            return None
        if directory not in self._models:
            loop = asyncio.get_running_loop()
            loading = loop.run_in_executor(None, self._load_model, directory)
            self._models[directory] = loading
            loading.add_done_callback(partial(self._forget_failed, directory))
        return await asyncio.shield(self._models[directory])

    def _forget_failed(self, directory: str, loaded: asyncio.Future[TextModel | None]) -> None:
        if loaded.cancelled() or loaded.exception() is not None:
            del self._models[directory]
        elif loaded.result() is None:
            # The directory may be mounted later. Until then we serve requests without text.
            loop = asyncio.get_running_loop()
            loop.call_later(RETRY_SECONDS, self._models.pop, directory, None)

    def _load_model(self, directory: str) -> TextModel | None:
        if self._configured is not None:
            return TextModel(Path(directory), **self._options)
        try:
            return TextModel(Path(directory), need_templates=False, **self._options)
        except UsageError as error:
            logger.warning("%s; without --tokenizer DIR this proxy serves token ids only", error)
            return None


def decode_token(model: TextModel | None, token_id: int) -> str:
    """Return a token as text; empty without a tokenizer."""
    return "" if model is None else model.decode_token(token_id)


def make_detokenizer(
    model: TextModel | None, skip_special_tokens: bool, kept: frozenset[str] = frozenset()
) -> Detokenizer:
    """Make a detokenizer. Without a tokenizer it returns no text."""
    if model is None:
        return NoDetokenizer()
    return model.make_detokenizer(skip_special_tokens=skip_special_tokens, kept=kept)
