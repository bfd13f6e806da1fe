"""Bodies of OpenAI's ``/v1/batches``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from pd.batch.requests import ENDPOINTS
from pd.proxy.requests.fields import Bounds, Integer, describe_value, make_problem
from pd.proxy.requests.known_fields import BATCHES, FieldPlace
from pd.proxy.requests.request_model import RequestModel
from pd.proxy.requests.responses import Metadata
from pd.proxy.storage.files import FILE_SECONDS, MIN_FILE_SECONDS


def _check_endpoint(value: str) -> str:
    if value not in ENDPOINTS:
        raise make_problem(f"must be one of {', '.join(ENDPOINTS)}, not {describe_value(value)}")
    return value


class OutputLifetime(RequestModel):
    """How long the files with a batch's results exist."""

    place = FieldPlace((BATCHES,), "output_expires_after")

    anchor: Literal["created_at"] = Field(description="Begin of the lifetime.")
    seconds: Annotated[Integer, Bounds(MIN_FILE_SECONDS, FILE_SECONDS)] = Field(
        description="Lifetime in seconds."
    )


class BatchCreation(RequestModel):
    """Asks for a batch."""

    administrative = True
    place = FieldPlace((BATCHES,))

    input_file_id: str = Field(
        description="An uploaded file with a request in each line.", max_length=64
    )
    endpoint: Annotated[str, AfterValidator(_check_endpoint)] = Field(
        description="The `url` of all its lines.", json_schema_extra={"enum": list(ENDPOINTS)}
    )
    completion_window: Literal["24h"] = Field(
        description="Requests that have no answer by then expire."
    )
    metadata: Metadata | None = Field(None, description="Labels, which the batch repeats.")
    output_expires_after: OutputLifetime | None = Field(
        None, description="Lifetime of the files with results; 30 days without it."
    )
