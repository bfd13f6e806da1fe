"""Ollama's endpoints about models and the server. Models come and go with their nodes."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

from starlette.responses import PlainTextResponse, Response

from pd.core.errors import InvalidRequestError, UnavailableError
from pd.proxy.api.answer_schemas import Version
from pd.proxy.api.ollama_api import LATEST, find_model, format_time
from pd.proxy.http.json_responses import json_response
from pd.proxy.http.typed_routes import ClientRequest
from pd.proxy.requests.ollama import OllamaShowRequest

if TYPE_CHECKING:
    from pd.proxy.api.prompts import ModelView
    from pd.proxy.api.service import Service
    from pd.proxy.nodes.node_handle import ServerInfo
    from pd.proxy.routing.routing import Router
    from pd.proxy.text.tokenizer import TextModel

# The release of Ollama with these paths and fields. Clients refuse servers that are too old.
API_VERSION = "0.13.0"
_CENTURY_SECONDS = 100 * 365 * 86400
_QUANTIZATIONS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_OF_NODES = "the nodes have their models when they start (--model)"
_NO_EMBEDDINGS = "this server only generates; ask another one for embeddings"
# The refused paths, and why.
REFUSED = {
    ("POST", "/api/pull"): _OF_NODES,
    ("POST", "/api/push"): _OF_NODES,
    ("POST", "/api/create"): _OF_NODES,
    ("POST", "/api/copy"): "start the proxy with --served-model-name for more names",
    ("DELETE", "/api/delete"): "stop the model's nodes instead",
    ("POST", "/api/embed"): _NO_EMBEDDINGS,
    ("POST", "/api/embeddings"): _NO_EMBEDDINGS,
}


class OllamaModelsAPI:
    """``/``, ``/api/version``, ``/api/tags``, ``/api/ps``, ``/api/show`` and the refused paths."""

    def __init__(self, service: Service, router: Router) -> None:
        self._service = service
        self._router = router
        self._started = time.time()

    async def greet(self, request: ClientRequest) -> Response:
        """A text that Ollama's clients look for."""
        return PlainTextResponse("Ollama is running")

    async def get_version(self, request: ClientRequest) -> Response:
        """The release of Ollama whose API this is. `GET /version` has the proxy's own."""
        return json_response(Version(version=API_VERSION))

    async def list_models(self, request: ClientRequest) -> Response:
        """All served models."""
        return json_response({"models": [await self._make_entry(name) for name in self._names]})

    async def list_running(self, request: ClientRequest) -> Response:
        """All served models, which nodes never unload."""
        entries = []
        for name in self._names:
            view = await self._service.find_model(name)
            more = {
                "expires_at": format_time(time.time() + _CENTURY_SECONDS),
                "size_vram": 0,
                "context_length": view.limits.context_length,
            }
            entries.append(await self._make_entry(name) | more)
        return json_response({"models": entries})

    async def show_model(self, request: ClientRequest, body: OllamaShowRequest) -> Response:
        """Facts about a model: its context, its template, and whether it calls tools and thinks."""
        view = await find_model(self._service, body.given_name)
        info = self._find_info(view)
        details = _describe(info)
        family = details["family"]
        defaults = view.limits.sampling_defaults.as_arguments()
        facts = {
            "modelfile": f"FROM {view.shown}\n",
            "parameters": "\n".join(f"{name} {value}" for name, value in defaults.items()),
            "template": "",
            "details": details,
            "model_info": {
                "general.architecture": family,
                "general.basename": view.shown,
                f"{family}.context_length": view.limits.context_length,
                f"{family}.vocab_size": view.limits.vocab_size,
            },
            "capabilities": ["completion"],
            "modified_at": format_time(self._started),
        }
        return json_response(facts | ({} if view.text is None else _describe_text(view.text)))

    async def refuse(self, request: ClientRequest) -> Response:
        """Not supported."""
        path = request.url.path.rstrip("/")
        raise InvalidRequestError(f"{path} is not supported; {REFUSED[request.method, path]}")

    @property
    def _names(self) -> list[str]:
        return self._service.list_models()

    async def _make_entry(self, name: str) -> dict[str, Any]:
        """Describe a model. The proxy does not know the size of its files."""
        view = await self._service.find_model(name)
        info = self._find_info(view)
        tagged = name if ":" in name.rpartition("/")[2] else name + LATEST
        return {
            "name": tagged,
            "model": tagged,
            "modified_at": format_time(self._started),
            "size": 0,
            "digest": hashlib.sha256((info.model_id or info.model).encode()).hexdigest(),
            "details": _describe(info),
        }

    def _find_info(self, view: ModelView) -> ServerInfo:
        infos = self._router.list_pools(view.name)
        if not infos:
            raise UnavailableError("the last node of the model has left; try again later")
        return infos[0]


def _describe(info: ServerInfo) -> dict[str, Any]:
    family = info.identity.get("architecture", "unknown")
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": _QUANTIZATIONS.get(info.dtype, info.dtype),
    }


def _describe_text(text: TextModel) -> dict[str, Any]:
    """Describe a model's chat template, if it has one."""
    if "default" not in text.templates:
        return {}
    template = text.find_template()
    tools = text.find_template(with_tools=True)
    capabilities = ["completion"]
    if text.shows_tools(tools) and text.find_tool_family(tools) is not None:
        capabilities.append("tools")
    if text.find_reasoning_tags(template) is not None:
        capabilities.append("thinking")
    return {"template": template.source, "capabilities": capabilities}
