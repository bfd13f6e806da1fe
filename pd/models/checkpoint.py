"""Finds the directory of a checkpoint and hashes its weights."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pd.core.errors import UsageError
from pd.models.settings import get_mapping, read_json

if TYPE_CHECKING:
    from hashlib import _Hash

INDEX = "model.safetensors.index.json"
# Files up to this size in bytes are hashed whole.
_HASHED_WHOLE = 64 << 20


def find_checkpoint(path: str | Path) -> Path:
    """Find the model directory: ``path`` itself, or an ``owner/name`` in the Hugging Face cache.

    Raises:
        UsageError: neither exists; the message says how to fix it.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise UsageError(f"{directory} has no config.json: pass a Hugging Face model directory")
        return directory
    # A user without a home directory has no cache, unless a variable names one.
    with contextlib.suppress(RuntimeError):
        home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
        cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
        cached = cache / f"models--{str(path).replace('/', '--')}"
        revision = cached / "refs" / "main"
        if revision.is_file():
            snapshot = cached / "snapshots" / revision.read_text().strip()
            if (snapshot / "config.json").is_file():
                return snapshot
    raise UsageError(
        f"model {str(path)!r} is neither a directory nor in the Hugging Face cache: "
        "download it first and pass its directory"
    )


def hash_weights(path: str | Path) -> str:
    """Hash the weights of a checkpoint to 16 hex digits, no matter where the directory is.

    Small files are hashed whole. For larger ones we hash the size, the header and a sample, so a
    fine-tuned model differs from its base without reading all of it.
    """
    digest = hashlib.sha256()
    for file in _list_weight_files(find_checkpoint(path)):
        if file.exists():  # a link may lead nowhere; what the model needs has been read
            _hash_file(file, digest)
    return digest.hexdigest()[:16]


def _list_weight_files(directory: Path) -> list[Path]:
    """List the files named by the index, like the loader. Without an index, list everything named
    like the only file."""
    index = directory / INDEX
    if not index.exists():
        return sorted(directory.glob("model*.safetensors"))
    names = get_mapping(read_json(index), "weight_map").values()
    return [directory / name for name in sorted(set(map(str, names)))]


def _hash_file(file: Path, digest: _Hash, spots: int = 64, width: int = 4096) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name} {size}".encode())
    with file.open("rb") as stream:
        if size <= _HASHED_WHOLE:
            digest.update(stream.read())
            return
        header = int.from_bytes(stream.read(8), "little")
        digest.update(stream.read(min(header, size)))
        for spot in range(spots):
            stream.seek(8 + header + (size - 8 - header) * spot // spots)
            digest.update(stream.read(width))
