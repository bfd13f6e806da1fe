"""Facts about a checkpoint's tokenizer that a node needs, read without a tokenizer library: the
token that ends an answer, and digests by which two nodes compare their tokenizers.

The proxy reads the same files (:mod:`pd.proxy.text.tokenizer`, :mod:`pd.proxy.text.chat_template`)
and refuses broken ones. A node only handles token ids, so for an unreadable file it just hashes the
bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, NamedTuple

from pd.core.brief import short_repr
from pd.core.errors import UsageError
from pd.models.settings import read_json

if TYPE_CHECKING:
    from pathlib import Path

    from pd.models.settings import Settings

CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILE = "tokenizer.json"
NONE = "none"
# Older files: texts of special tokens missing in tokenizer_config.json, and ids of added tokens.
_SPECIAL_FILE, _ADDED_FILE = "special_tokens_map.json", "added_tokens.json"
_SENTENCEPIECE_FILE = "tokenizer.model"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_DIGEST_CHARACTERS = 16
# Parts of tokenizer.json that do not affect prompts. The proxy turns the first two off.
_UNUSED_PARTS = ("truncation", "padding", "version")


class TokenizerFiles(NamedTuple):
    """A tokenizer, as far as it determines answers.

    Attributes:
        eos_token: text of the token that ends an answer; None if no file names one.
        eos_token_id: its id; None if unknown.
        identity: digests and values of everything that determines how a prompt becomes token ids.
        problem: why the token that ends an answer is unknown, for people; empty if it is known, or
            if no file names one.
    """

    eos_token: str | None
    eos_token_id: int | None
    identity: dict[str, str]
    problem: str = ""


# For a model whose directory we do not know.
NO_TOKENIZER = TokenizerFiles(None, None, {})


def read_tokenizer(directory: Path) -> TokenizerFiles:
    """Read the tokenizer files that exist in a model directory."""
    config, problem = _read_settings(directory / CONFIG_FILE)
    named = {**_read_settings(directory / _SPECIAL_FILE)[0], **config}
    texts = {
        name: text
        for name in _SPECIAL_TOKENS
        if (text := _get_token_text(named.get(name))) is not None
    }
    tokenizer = _read_tokenizer_file(directory / TOKENIZER_FILE)
    eos = texts.get("eos_token")
    token_id = None if eos is None else _find_token_id(eos, tokenizer, config, directory)
    if eos is not None and token_id is None:
        problem = f"the tokenizer's eos_token {short_repr(eos)} is not in its vocabulary"
    identity = {
        **{name: texts.get(name, NONE) for name in _SPECIAL_TOKENS},
        **_hash_tokenizer(tokenizer, directory),
        "chat_template": _hash_templates(config, directory),
    }
    return TokenizerFiles(eos, token_id, identity, problem)


def hash_bytes(data: bytes) -> str:
    """Return the first hex digits of a SHA-256 hash."""
    return hashlib.sha256(data).hexdigest()[:_DIGEST_CHARACTERS]


def _read_settings(path: Path) -> tuple[Settings, str]:
    """Read a file of settings. Returns its content, empty if there is none, and the error of an
    unreadable file."""
    if not path.is_file():
        return {}, ""
    try:
        return read_json(path), ""
    except UsageError as error:
        return {}, error.message


def _get_token_text(token: object) -> str | None:
    """Return the text of a token. Settings hold it directly or inside an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _read_tokenizer_file(path: Path) -> Settings:
    """The content of tokenizer.json; empty if there is none, or if it cannot be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _find_token_id(text: str, tokenizer: Settings, config: Settings, directory: Path) -> int | None:
    """Find the id of a token. The files that the tokenizer is loaded from come first."""
    for entry in _list_objects(tokenizer.get("added_tokens")):
        if entry.get("content") == text and (found := _parse_id(entry.get("id"))) is not None:
            return found
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict) and (found := _parse_id(vocabulary.get(text))) is not None:
        return found
    if isinstance(vocabulary, list):  # of pieces and their scores
        for index, piece in enumerate(vocabulary):
            if isinstance(piece, list) and piece[:1] == [text]:
                return index
    decoder = config.get("added_tokens_decoder")
    for key, token in decoder.items() if isinstance(decoder, dict) else ():
        if _get_token_text(token) == text and re.fullmatch(r"[0-9]{1,9}", key):
            return int(key)
    return _parse_id(_read_settings(directory / _ADDED_FILE)[0].get(text))


def _list_objects(value: object) -> list[dict[str, object]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _parse_id(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _hash_tokenizer(tokenizer: Settings, directory: Path) -> dict[str, str]:
    """Hash the ids of tokens, and separately the way in which text is split into tokens."""
    if not tokenizer:
        file = directory / _SENTENCEPIECE_FILE
        found = hash_bytes(_read_bytes(file)) if file.is_file() else NONE
        return {"vocabulary": found, "tokenizer": found}
    model = tokenizer.get("model")
    model = model if isinstance(model, dict) else {}
    rest = {key: value for key, value in tokenizer.items() if key not in _UNUSED_PARTS}
    rest["model"] = {key: value for key, value in model.items() if key != "vocab"}
    vocabulary = [model.get("vocab"), rest.pop("added_tokens", None)]
    return {"vocabulary": _hash_json(vocabulary), "tokenizer": _hash_json(rest)}


def _hash_json(value: object) -> str:
    # NOTE: not msgspec, which refuses the lone surrogates that a file may hold.
    return hash_bytes(json.dumps(value, sort_keys=True).encode())


def _hash_templates(config: Settings, directory: Path) -> str:
    """Hash the chat templates. The proxy finds them in the same places."""
    inline = config.get("chat_template")
    sources: dict[str, object] = {}
    if isinstance(inline, list):
        sources = {str(each.get("name")): each.get("template") for each in _list_objects(inline)}
    elif inline is not None:
        sources["default"] = inline
    file = directory / "chat_template.jinja"
    if file.is_file():
        sources["default"] = _read_bytes(file).decode(errors="replace")
    for extra in sorted(directory.glob("additional_chat_templates/*.jinja")):
        sources[extra.stem] = _read_bytes(extra).decode(errors="replace")
    return _hash_json(sources) if sources else NONE


def _read_bytes(path: Path) -> bytes:
    """Read a file; empty if unreadable. The proxy reports such a file."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
