"""A model directory's tokenizer, from whatever files it has.

``tokenizer.json`` is read as it is. A directory that has only a sentencepiece model
(``tokenizer.model``) is read by transformers, in a process of its own: transformers imports torch,
which the proxy is to do without. Both give the same kind of tokenizer.
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
# transformers takes about three seconds, most of it for importing torch.
_CONVERSION_SECONDS = 120.0
_NEEDED = ("sentencepiece", "google.protobuf", "transformers")


def load_tokenizer(directory: Path) -> Tokenizer:
    """Raises UsageError, saying what to do, if the directory holds none that can be read.

    Blocks for seconds where transformers is needed.
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
        return Tokenizer.from_str(_converted(directory))
    except UsageError:
        raise
    except Exception as error:  # no rights, or what tokenizers raises, nothing more specific
        raise UsageError(f"cannot read the tokenizer in {directory}: {error}") from error


def _converted(directory: Path) -> str:
    """The contents that ``tokenizer.json`` would have."""
    # Nothing is downloaded, and standard error says only why it failed.
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


def _main() -> None:
    """The other process: the converted tokenizer on standard output."""
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
    except Exception as error:  # whatever is wrong with the files, or a class without a backend
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SystemExit(f"transformers cannot read it: {reason}") from error
    sys.stdout.buffer.write(text.encode())


if __name__ == "__main__":
    _main()
