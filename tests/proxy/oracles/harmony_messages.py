"""Parses answers of gpt-oss with OpenAI's own package, in an environment of its own.

    python harmony_oracle.py <texts.json >messages.json

Reads a JSON list of texts, each after ``<|start|>assistant``. Writes for each text the list of its
messages as ``[channel, recipient, content]``; the last one may be cut off. A text that the package
refuses has its messages so far.

The package would download its vocabulary, but LiteLLM's wheel has the same file.
"""

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

# Name of o200k_base.tiktoken in tiktoken's cache.
_VOCABULARY = "litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"


def read_messages(encoding: Any, text: str) -> list[list[Any]]:
    from openai_harmony import HarmonyError, Role, StreamableParser

    parser = StreamableParser(encoding, role=Role.ASSISTANT)
    for token in encoding.encode(text, allowed_special="all"):
        try:
            parser.process(token)
        except HarmonyError:
            break
    messages = [
        [each.channel, each.recipient, "".join(part.text for part in each.content)]
        for each in parser.messages
    ]
    if parser.state.name == "CONTENT":
        messages.append([parser.current_channel, parser.current_recipient, parser.current_content])
    return messages


def main() -> None:
    litellm = importlib.util.find_spec("litellm")
    assert litellm is not None
    assert litellm.origin is not None
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(
            Path(litellm.origin).parent / _VOCABULARY, Path(directory) / "o200k_base.tiktoken"
        )
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = directory
        from openai_harmony import HarmonyEncodingName, load_harmony_encoding

        encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
        json.dump([read_messages(encoding, text) for text in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
