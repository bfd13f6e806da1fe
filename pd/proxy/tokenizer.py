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
from pd.proxy.chat_template import (
    SPECIAL_TOKENS,
    ChatTemplate,
    load_templates,
    read_config,
    special_tokens,
)
from pd.proxy.detokenizer import Detokenizer, NoDetokenizer, TokenTable
from pd.proxy.reasoning import reasoning_tags
from pd.proxy.special_tokens import SpecialTokens
from pd.proxy.tokenized_pieces import (
    PieceEncoder,
    TooManyTokensError,
    short_together,
    tokenize_together,
)
from pd.proxy.tokenizer_files import load_tokenizer
from pd.proxy.tokenizer_info import tokenizer_info
from pd.proxy.tools.families import tool_family

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from pd.proxy.reasoning import ReasoningTags
    from pd.proxy.tools.families import ToolFamily

    IntArray = npt.NDArray[np.int32]

logger = logging.getLogger(__name__)

# Token ids of one text. Above it no model's context ends, and what is made of them would take long.
MAX_TEXT_TOKENS = 1 << 20
_MIN_LONGEST = 64
# A node's model directory that has no tokenizer is looked at again after this long.
RETRY_SECONDS = 30.0


class TextModel:
    """Text to token ids and back for one model.

    Attributes:
        special: tells a template's special tokens from those of clients; None where a special token
            is one whoever wrote it.
        info: facts for clients, see :mod:`pd.proxy.tokenizer_info`.
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
        """Raises UsageError if the directory holds no tokenizer that can be read.

        Args:
            need_templates: chat templates that cannot be read are an error too, not just logged.
            split_special_tokens: special tokens that clients write are text.
            tool_call_parser, reasoning_parser: the proxy's flags of these names.
        """
        self._tool_call_parser = tool_call_parser
        self._reasoning_parser = reasoning_parser
        self._tokenizer = load_tokenizer(directory)
        # Such settings belong to training; applied here they would cut prompts silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.special = SpecialTokens(self._tokenizer) if split_special_tokens else None
        self._encoder = self._tokenizer if self.special is None else self.special.tokenizer
        self._pieces = PieceEncoder.of(self._encoder)
        decoder: dict[str, Any] | None = json.loads(self._tokenizer.to_str()).get("decoder")
        self.table = TokenTable(self._tokenizer, decoder)
        # Characters that one token may stand for; more than that only where unknown ones are fused.
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
        self.info = tokenizer_info(
            config,
            dict.fromkeys(SPECIAL_TOKENS) | special_tokens(config),
            None if template is None else template.source,
        )

    def encode(
        self, text: str, *, add_special_tokens: bool, param: str = "prompt", namespace: str = ""
    ) -> IntArray:
        """Token ids, int32. A character takes up to a microsecond, in which other threads run.

        ``namespace``: texts of the same one that begin alike are not tokenized there again.

        Raises InvalidRequestError for a text of more than MAX_TEXT_TOKENS.
        """
        (ids,) = self.encode_each(
            [text], add_special_tokens=add_special_tokens, param=param, namespace=namespace
        )
        return ids

    def encode_each(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        param: str = "prompt",
        namespace: str = "",
    ) -> Iterator[IntArray]:
        """Token ids of texts, one after the other, as of :meth:`encode`.

        A few short texts are tokenized by one call: between two calls this thread may have to wait
        for the event loop, which costs more than tokenizing a short text.
        """
        most, special = MAX_TEXT_TOKENS, {"add_special_tokens": add_special_tokens}
        try:
            for together in short_together(texts):
                ids = None
                if self._pieces is not None and len(together) == 1:
                    ids = self._pieces.encode(together[0], namespace, most, **special)
                if ids is None:
                    yield from tokenize_together(self._encoder, together, most, **special)
                    continue
                if len(ids) > most:
                    raise TooManyTokensError(len(ids))
                yield ids
        except TooManyTokensError as error:
            raise InvalidRequestError(
                f"{param} has {error.count} tokens or more; at most {most} are taken", param=param
            ) from None

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of these tokens. Other threads run meanwhile."""
        (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_names(self, ids: list[int]) -> list[str]:
        """The tokens as the vocabulary writes them."""
        return [self._tokenizer.id_to_token(token) or "" for token in ids]

    def max_characters(self, ids: IntArray) -> int:
        """Roughly how long the text of these tokens is, and hardly longer."""
        return int(self._lengths[ids[ids < len(self._lengths)]].sum())

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text."""
        return self.table.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """One token as text; one that holds part of a character as ``bytes:\\xf0\\x9f``, so that
        different tokens stay different."""
        data = self.table.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def detokenizer(
        self, *, skip_special_tokens: bool, kept: frozenset[str] = frozenset()
    ) -> Detokenizer:
        """``kept``: special tokens that are never skipped."""
        return self.table.detokenizer(skip_special_tokens, kept)

    def template(self, *, with_tools: bool = False) -> ChatTemplate:
        """The chat template, for tools the one that the model has for them. Raises
        InvalidRequestError if the model has none."""
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
        """Whether a template may be given tools: it shows them, or an operator chose a parser."""
        return template.takes_tools or self._tool_call_parser not in ("auto", "none")

    def tool_family(self, template: ChatTemplate) -> ToolFamily | None:
        """Return the format in which the model writes calls; None if that is not known."""
        return tool_family(self._tool_call_parser, template.source)

    def reasoning_tags(self, template: ChatTemplate) -> ReasoningTags | None:
        """Return the tags of the model's reasoning; None if it is not known to reason."""
        return reasoning_tags(self._reasoning_parser, template.source)


class TextModels:
    """Loads each model directory once, off the event loop; one that failed is tried again when it
    is asked for."""

    def __init__(self, directory: str | None, **options: Any) -> None:
        """``options``: those of :class:`TextModel`."""
        self._configured = directory
        self._options = options
        self._models: dict[str, asyncio.Future[TextModel | None]] = {}

    async def get(self, model_path: str | None) -> TextModel | None:
        """The configured tokenizer, or that of a node's model directory if it is on this host.

        Raises UsageError if the configured one cannot be read; one of a node that cannot be read
        leaves the proxy without text.
        """
        directory = self._configured or model_path
        if directory is None:
            return None
        if directory not in self._models:
            loop = asyncio.get_running_loop()
            loading = loop.run_in_executor(None, self._load, directory)
            self._models[directory] = loading
            loading.add_done_callback(partial(self._forget_failed, directory))
        return await asyncio.shield(self._models[directory])

    def _forget_failed(self, directory: str, loaded: asyncio.Future[TextModel | None]) -> None:
        if loaded.cancelled() or loaded.exception() is not None:
            del self._models[directory]
        elif loaded.result() is None:
            # The directory may be mounted later. Meanwhile requests are served without text.
            loop = asyncio.get_running_loop()
            loop.call_later(RETRY_SECONDS, self._models.pop, directory, None)

    def _load(self, directory: str) -> TextModel | None:
        if self._configured is not None:
            return TextModel(Path(directory), **self._options)
        try:
            return TextModel(Path(directory), need_templates=False, **self._options)
        except UsageError as error:
            logger.warning("%s; without --tokenizer DIR this proxy serves token ids only", error)
            return None


def token_text(model: TextModel | None, token_id: int) -> str:
    """One token as text; empty without a tokenizer."""
    return "" if model is None else model.token_text(token_id)


def new_detokenizer(
    model: TextModel | None, skip_special_tokens: bool, kept: frozenset[str] = frozenset()
) -> Detokenizer:
    """See :meth:`TextModel.detokenizer`; one without text where there is no tokenizer."""
    if model is None:
        return NoDetokenizer()
    return model.detokenizer(skip_special_tokens=skip_special_tokens, kept=kept)
