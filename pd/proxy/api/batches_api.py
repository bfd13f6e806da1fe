"""``/v1/batches``, OpenAI's Batch API."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

from starlette.responses import Response

from pd.proxy.api.files_api import parse_number
from pd.proxy.http.json_responses import json_response
from pd.proxy.http.typed_routes import ClientRequest
from pd.proxy.requests.batches import BatchCreation
from pd.proxy.storage.batches import WINDOW_SECONDS, StoredBatch
from pd.proxy.storage.files import FILE_SECONDS, make_file_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.proxy.api.answer_schemas import BatchList, BatchObject
    from pd.proxy.storage.batches import BatchStatus, BatchStore

_DEFAULT_LISTED, _MAX_LISTED = 20, 100


class BatchesAPI:
    def __init__(self, store: BatchStore, wake: Callable[[], None]) -> None:
        """``wake``: makes the runner of batches look at them, if it is in this process."""
        self._store = store
        self._wake = wake

    async def create_batch(self, request: ClientRequest, body: BatchCreation) -> Response:
        """Begins a batch. Each line of its file is sent to the endpoint, at a low priority."""
        now, lifetime = time.time(), body.output_expires_after
        batch = StoredBatch(
            name=f"batch_{uuid.uuid4().hex}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            created=now,
            expires=now + WINDOW_SECONDS,
            output_name=make_file_name(),
            error_name=make_file_name(),
            metadata=body.metadata,
            output_seconds=FILE_SECONDS if lifetime is None else lifetime.seconds,
        )
        await self._store.add_batch(request.caller.owner, batch)
        self._wake()
        return json_response(_describe_batch(batch))

    async def list_batches(self, request: ClientRequest) -> Response:
        """Lists the batches of the client's key, the newest first."""
        query = request.query_params
        limit = parse_number("limit", query.get("limit", str(_DEFAULT_LISTED)), 1, _MAX_LISTED)
        batches = await self._store.list_batches(
            request.caller.owner, query.get("after"), limit + 1
        )
        shown = [_describe_batch(batch) for batch in batches[:limit]]
        answer: BatchList = {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(batches) > limit,
        }
        return json_response(answer)

    async def get_batch(self, request: ClientRequest, batch_id: str) -> Response:
        """Describes a batch."""
        return json_response(
            _describe_batch(await self._store.get_batch(request.caller.owner, batch_id))
        )

    async def cancel_batch(self, request: ClientRequest, batch_id: str) -> Response:
        """Cancels a batch. Its files have the results so far."""
        batch = await self._store.cancel_batch(request.caller.owner, batch_id)
        self._wake()
        return json_response(_describe_batch(batch))


def _describe_batch(batch: StoredBatch) -> BatchObject:
    def get_time(status: BatchStatus) -> int | None:
        return int(batch.times[status]) if status in batch.times else None

    return {
        "id": batch.name,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {
            "object": "list",
            "data": [
                {
                    "code": problem.code,
                    "message": problem.message,
                    "line": problem.line,
                    "param": problem.param,
                }
                for problem in batch.problems
            ],
        }
        if batch.problems
        else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": batch.output_name if batch.has_output else None,
        "error_file_id": batch.error_name if batch.has_errors else None,
        "created_at": int(batch.created),
        "in_progress_at": get_time("in_progress"),
        "expires_at": int(batch.expires),
        "finalizing_at": get_time("finalizing"),
        "completed_at": get_time("completed"),
        "failed_at": get_time("failed"),
        "expired_at": get_time("expired"),
        "cancelling_at": get_time("cancelling"),
        "cancelled_at": get_time("cancelled"),
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "metadata": batch.metadata,
    }
