"""Loads a model directory's tokenizer from whatever files it has.

If the directory has only a sentencepiece model (``tokenizer.model``) and no ``tokenizer.json``,
transformers converts it in a process of its own, because transformers imports torch and the proxy
must not. The result is the same kind of tokenizer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from pd.core.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"
# transformers takes about three seconds, mostly for importing torch.
_CONVERSION_SECONDS = 120.0
_NEEDED = ("sentencepiece", "google.protobuf", "transformers")


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load a tokenizer. Blocks for seconds if transformers has to convert it.

    Raises UsageError with a remedy if the directory has no readable one.
    """
    path = directory / FILE
    try:
        if not directory.is_dir():
            raise UsageError(f"there is no directory {directory} on this host")
        if not path.is_file() and not (directory / SENTENCEPIECE_FILE).is_file():
            raise UsageError(
                f"{directory} has no tokenizer, neither {FILE} nor {SENTENCEPIECE_FILE}; name a "
                "model directory that has one"
            )
        if path.is_file():
            return Tokenizer.from_file(str(path))
        return Tokenizer.from_str(_convert_sentencepiece(directory))
    except UsageError:
        raise
    except (
        Exception
    ) as error:  # missing rights, or an error of tokenizers, which raises nothing more specific
        raise UsageError(f"cannot read the tokenizer in {directory}: {error}") from error


def _convert_sentencepiece(directory: Path) -> str:
    """Make the contents of a ``tokenizer.json``."""
    # Download nothing, and print only the reason of a failure.
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(directory)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=env,
            timeout=_CONVERSION_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"transformers took more than {_CONVERSION_SECONDS:g} s"
    else:
        if done.returncode == 0:
            return done.stdout
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    raise UsageError(
        f"{directory} has no {FILE}, and its {SENTENCEPIECE_FILE} cannot be used: {reason}"
    )


def _convert_in_child() -> None:
    """Print the converted tokenizer. Runs in a process of its own."""
    directory = sys.argv[1]
    try:
        for name in _NEEDED:
            __import__(name)
    except ImportError as error:
        sys.exit(f"it needs {error.name}; pip install 'pd-serve[hf]'")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        text: str = tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # wrong files, or a class without a backend
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SystemExit(f"transformers cannot read it: {reason}") from error
    sys.stdout.buffer.write(text.encode())


if __name__ == "__main__":
    _convert_in_child()
