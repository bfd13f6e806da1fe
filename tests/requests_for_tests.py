"""Requests without a node."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import numpy as np

from pd.core.messages import Generate
from pd.core.sampling_params import SamplingParams
from pd.scheduling.request import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

PROXY = b"a-proxy"


def make_generate(tokens: Sequence[int], **fields: Any) -> Generate:
    """Make a message as a proxy sends it, with sampling parameters from ``params=dict(...)``."""
    params = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True} | fields.pop("params", {})
    fields = {"to": "", "sender": PROXY.decode(), "rid": "rid"} | fields
    fields.setdefault("room", secrets.token_bytes(16))
    fields.setdefault("token_ids", np.asarray(tokens, dtype="<i4").tobytes())
    return Generate(params=SamplingParams(**params), **fields)


def make_request(tokens: Sequence[int], **fields: Any) -> Request:
    """Make a request as a node holds it after :func:`make_generate`."""
    return Request.from_message(make_generate(tokens, **fields), PROXY)
