"""Asks a server for its model and context, and tries which fields of a request it accepts."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from pd.bench.load.endpoints import NativeGenerate, Options, find_endpoint
from pd.bench.load.workload import Turn
from pd.core.addresses import format_host
from pd.core.errors import SetupError, UsageError

if TYPE_CHECKING:
    from pd.bench.load.client import Fetch
    from pd.bench.load.endpoints import Sampling
    from pd.bench.load.target import EndpointAddress

# We leave these out one after another until the server accepts the rest.
_OPENAI_OPTIONS = ("running_usage", "token_ids", "ignore_eos", "usage")
_GENERATE_OPTIONS = ("incremental", "ignore_eos")
_TIMEOUT = 120.0
# No dataset draws this prompt, so it warms no cache.
_PROMPT = "ping"


class ServerProbe:
    """Asks a server before the load processes do.

    Attributes:
        base_url: URL before the paths of the API.
    """

    def __init__(self, target: EndpointAddress, path: str, fetch: Fetch) -> None:
        scheme = "https" if target.tls else "http"
        self.base_url = (
            f"{scheme}://{format_host(target.host)}:{target.port}{target.path.removesuffix(path)}"
        )
        self._path, self._fetch = path, fetch
        key = target.api_key
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def find_model(self, name: str | None) -> tuple[str | None, int | None]:
        """Return the name of the model, by default the first, and its context; None for what the
        server does not say. Raises SetupError if no server answers."""
        _, text = self._fetch(f"{self.base_url}/v1/models", headers=self._headers)
        try:
            models = json.loads(text)["data"]
            served = [model for model in models if name in (None, model["id"])]
            context = served[0].get("max_model_len")
            return str(served[0]["id"]), context if type(context) is int else None
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return name, None

    def find_options(self, sampling: Sampling, wanted: Options, *, tokens: bool) -> Options:
        """Try which of the wanted options the server accepts.

        Raises SetupError if it rejects the plainest request, or if it cannot be reached.
        """

        def reject(options: Options) -> str | None:
            prompt = [1, 2, 3] if tokens else _PROMPT
            return self._find_refusal(Turn(prompt, 3, 2), sampling, options)

        first = reject(wanted)
        if first is None:
            return wanted
        names = _GENERATE_OPTIONS if self._path == NativeGenerate.path else _OPENAI_OPTIONS
        options = wanted
        for name in names:
            options = dataclasses.replace(options, **{name: False})
            if reject(options) is None:
                break
        else:
            raise SetupError(f"{self.base_url}{self._path} refuses a plain request: {first}")
        # Restore options dropped without need.
        for name in names:
            if getattr(wanted, name) and not getattr(options, name):
                more = dataclasses.replace(options, **{name: True})
                if reject(more) is None:
                    options = more
        return options

    def check_schema(self, sampling: Sampling, options: Options, schema: dict[str, Any]) -> None:
        """Raise UsageError if the server rejects a JSON schema."""
        refusal = self._find_refusal(Turn(_PROMPT, 1, 8, schema=schema), sampling, options)
        if refusal is not None:
            raise UsageError(f"--dataset-name structured: the server refuses schemas: {refusal}")

    def _find_refusal(self, turn: Turn, sampling: Sampling, options: Options) -> str | None:
        """Send a request; return why the server rejects it (400 or 422), or None. Raises
        SetupError."""
        body = find_endpoint(self._path).make_body(turn.prompt, turn, sampling, options)
        status, text = self._fetch(
            self.base_url + self._path,
            headers=self._headers,
            body=json.dumps(body).encode(),
            timeout=_TIMEOUT,
        )
        refusal = f"HTTP status {status}: {text[:300]}"
        if status in (400, 422):
            return refusal
        if status >= 300:
            raise SetupError(f"{self.base_url}{self._path} answers a request with {refusal}")
        return None
