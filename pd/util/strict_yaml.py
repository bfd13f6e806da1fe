"""Reads YAML files written by people: scalars stay texts, and no key occurs twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from pd.core.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

_MAX_FILE_BYTES = 1 << 20


class _Loader(yaml.BaseLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = [key for key in keys if keys.count(key) > 1 or "\0" in key]
        if twice:
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: {twice[0]!r} is there twice")
        return node


def read_yaml(path: Path) -> Any:
    """Read a file of at most 1 MiB into dicts, lists and texts. Raises UsageError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise UsageError(f"{path}: larger than {_MAX_FILE_BYTES} bytes")
        return yaml.load(content, _Loader)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    # yaml lets errors of Python escape for some malformed directives and escapes.
    except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())[:300]}") from None
