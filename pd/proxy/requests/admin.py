"""Bodies of administrative requests."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pd.core.errors import InvalidRequestError
from pd.core.node_info import Role
from pd.proxy.requests.common import MAX_RID_CHARACTERS
from pd.proxy.requests.known_fields import FieldPlace
from pd.proxy.requests.request_model import RequestModel

# The names of a batch's prompts end with their numbers.
_MAX_PROMPT_RID_CHARACTERS = MAX_RID_CHARACTERS + 16


class AbortRequest(RequestModel):
    """Ends requests."""

    administrative = True
    place = FieldPlace(("/abort_request",))

    rid: Annotated[str, Field(max_length=_MAX_PROMPT_RID_CHARACTERS)] | None = Field(
        None, description="The request to end. Send exactly one of `rid` and `abort_all`."
    )
    abort_all: bool = Field(False, description="Ends all requests; for administrators.")

    @model_validator(mode="after")
    def _one_or_all(self) -> Self:
        if self.abort_all == bool(self.rid):
            raise InvalidRequestError('send either {"rid": "…"} or {"abort_all": true}')
        return self


class RoleRequest(RequestModel):
    """Sets the role of an elastic node."""

    administrative = True
    place = FieldPlace(("/workers/{instance_id}",))

    role: Literal[Role, "auto"] = Field(
        description="The role that the node prefers. With `auto` it keeps its role until the "
        "load needs another."
    )


class WorkerRequest(RequestModel):
    """Adds a node."""

    administrative = True
    place = FieldPlace(("/workers",))

    role: Role = Field(description="The node's role.")
    url: str = Field(description="The node's address as `http://host:port`, without a path.")
