"""Sampling parameters recommended by a checkpoint's ``generation_config.json``.

As in vLLM, ``do_sample`` is ignored, and a missing value means our default instead of that of
transformers. :mod:`pd.models.config_reader` reads the end-of-sequence ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pd.core.errors import InvalidRequestError, UsageError
from pd.core.sampling_params import SamplingDefaults
from pd.models.settings import read_json

if TYPE_CHECKING:
    from pathlib import Path

FILE = "generation_config.json"
_REMEDY = "mend it, or give --generation-config none to leave it out"


def read_sampling_defaults(directory: Path, generation_config: str) -> SamplingDefaults:
    """Read the defaults for requests to ``/v1/*``.

    Args:
        directory: directory of the checkpoint.
        generation_config: ``auto`` reads the file if it exists, ``none`` does not.

    Raises:
        UsageError: the file is unreadable or has an invalid value; the message names both.
    """
    path = directory / FILE
    if generation_config == "none" or not path.is_file():
        return SamplingDefaults()
    raw = read_json(path)
    given: dict[str, float] = {}
    for name in SamplingDefaults.__struct_fields__:
        value = raw.get(name)
        if value is None:
            continue
        kind, wanted = (int, "an integer") if name == "top_k" else (int | float, "a number")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UsageError(f"{path}: {name} must be {wanted}, not {value!r}; {_REMEDY}")
        given[name] = value if name == "top_k" else float(value)
    if given.get("top_k") == -1:  # another spelling of "all"
        given["top_k"] = 0
    defaults = msgspec.structs.replace(SamplingDefaults(), **given)
    try:
        defaults.validate()
    except InvalidRequestError as error:
        raise UsageError(f"{path}: {error.message}; {_REMEDY}") from None
    return defaults
