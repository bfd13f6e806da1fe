"""Asks a server for its model and context, and tries which fields of a request it takes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pd.bench.load.endpoints import NativeGenerate, Options, endpoint
from pd.bench.load.workload import Turn
from pd.core.errors import SetupError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.bench.load.client import Fetch
    from pd.bench.load.endpoints import Sampling
    from pd.bench.load.target import EndpointAddress

# Left out one after the other, until the server takes the rest.
_OPENAI_OPTIONS = ("running_usage", "token_ids", "ignore_eos", "usage")
_GENERATE_OPTIONS = ("incremental", "ignore_eos")
_TIMEOUT = 120.0
# A prompt that no dataset draws, so that it does not warm a cache.
_PROMPT = "ping"


class ServerProbe:
    """Asks a server before the load processes do.

    Attributes:
        base_url: what stands before the paths of the API.
    """

    def __init__(self, target: EndpointAddress, path: str, fetch: Fetch) -> None:
        scheme = "https" if target.tls else "http"
        host = f"[{target.host}]" if ":" in target.host else target.host
        self.base_url = f"{scheme}://{host}:{target.port}{target.path.removesuffix(path)}"
        self._path, self._fetch = path, fetch
        key = target.api_key
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def model(self, name: str | None) -> tuple[str | None, int | None]:
        """Name of the model, by default the first, and its context; None for what the server does
        not say. Raises SetupError if no server answers."""
        _, text = self._fetch(f"{self.base_url}/v1/models", headers=self._headers)
        try:
            models = json.loads(text)["data"]
            served = [model for model in models if name in (None, model["id"])]
            context = served[0].get("max_model_len")
            return str(served[0]["id"]), context if type(context) is int else None
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return name, None

    def options(self, sampling: Sampling, wanted: Options, *, tokens: bool) -> Options:
        """Try which of the wanted options the server takes.

        Raises SetupError if it refuses the plainest request, or cannot be reached.
        """
        names = _GENERATE_OPTIONS if self._path == NativeGenerate.path else _OPENAI_OPTIONS
        first = self._refusal(sampling, wanted, tokens=tokens)
        options = wanted
        for name in names if first is not None else ():
            options = options.without(name)
            if self._refusal(sampling, options, tokens=tokens) is None:
                return self._restored(sampling, wanted, options, names, tokens=tokens)
        if first is not None:
            raise SetupError(f"{self.base_url}{self._path} refuses a plain request: {first}")
        return options

    def _restored(
        self,
        sampling: Sampling,
        wanted: Options,
        taken: Options,
        names: Sequence[str],
        *,
        tokens: bool,
    ) -> Options:
        """Options with all that was left out without need."""
        for name in names:
            if getattr(wanted, name) and not getattr(taken, name):
                more = Options(**{**vars(taken), name: True})
                if self._refusal(sampling, more, tokens=tokens) is None:
                    taken = more
        return taken

    def check_schema(self, sampling: Sampling, options: Options, schema: dict[str, Any]) -> None:
        """Raise UsageError if the server refuses a JSON schema."""
        turn = Turn(_PROMPT, 1, 8, schema=schema)
        refusal = self._post(endpoint(self._path).body(_PROMPT, turn, sampling, options))
        if refusal is not None:
            raise UsageError(f"--dataset-name structured: the server refuses schemas: {refusal}")

    def _refusal(self, sampling: Sampling, options: Options, *, tokens: bool) -> str | None:
        prompt = [1, 2, 3] if tokens else _PROMPT
        turn = Turn(prompt, 3, 2)
        return self._post(endpoint(self._path).body(prompt, turn, sampling, options))

    def _post(self, body: dict[str, Any]) -> str | None:
        """Why a request is refused (400 or 422); None if it is not. Raises SetupError."""
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
