"""Bodies of administrative requests."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pd.core.errors import InvalidRequestError
from pd.core.node_info import Role
from pd.proxy.request_model import RequestModel
from pd.proxy.requests.common import MAX_RID_CHARACTERS

# Prompts of a batch have an id that ends with their number.
_MAX_PROMPT_RID_CHARACTERS = MAX_RID_CHARACTERS + 16


class AbortRequest(RequestModel):
    """A request to end others."""

    administrative = True

    rid: Annotated[str, Field(max_length=_MAX_PROMPT_RID_CHARACTERS)] | None = Field(
        None, description="The request that is ended. Exactly one of `rid` and `abort_all`."
    )
    abort_all: bool = Field(False, description="Ends all requests; for administrators.")

    @model_validator(mode="after")
    def _one_or_all(self) -> Self:
        if self.abort_all == bool(self.rid):
            raise InvalidRequestError('either {"rid": "…"} or {"abort_all": true} is needed')
        return self


class RoleRequest(RequestModel):
    """A role for a node that can have each."""

    administrative = True

    role: Literal[Role, "auto"] = Field(
        description="What the node does where nothing speaks against it. With `auto` it stays what "
        "it is until the load calls for another role."
    )


class WorkerRequest(RequestModel):
    """A node that joins."""

    administrative = True

    role: Role = Field(description="What the node does.")
    url: str = Field(description="`http://host:port` and nothing more.")
