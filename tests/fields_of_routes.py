"""Fields that FastAPI derives from the types of answers, for tests that start many proxies.

Each proxy makes an application, and FastAPI asks pydantic for the schema of every type of an answer
for every route again: most of what the start of a proxy costs. The types are the same, so here one
field of each does for all proxies of a process, and of those that are forked from it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING
from unittest.mock import Mock

import fastapi.routing

if TYPE_CHECKING:
    from pytest import MonkeyPatch


def make_once(patch: MonkeyPatch | None = None) -> None:
    """Make each field once from now on, with ``patch`` until it is undone."""
    made = functools.cache(fastapi.routing.create_model_field)
    if patch is None:
        fastapi.routing.create_model_field = made
    else:
        patch.setattr(fastapi.routing, "create_model_field", made)


def make_now() -> None:
    """Make the fields of all routes of a proxy, for processes that will be forked from this one."""
    from pd.proxy.api.admin_api import AdminAPI
    from pd.proxy.api.batches_api import BatchesAPI
    from pd.proxy.api.compat_api import CompatAPI
    from pd.proxy.api.files_api import FilesAPI
    from pd.proxy.api.responses_api import ResponsesAPI
    from pd.proxy.app import make_app

    make_once()
    # Only the annotations of their handlers are read.
    admin, compat = object.__new__(AdminAPI), object.__new__(CompatAPI)
    responses, files = object.__new__(ResponsesAPI), object.__new__(FilesAPI)
    batches = object.__new__(BatchesAPI)
    make_app(Mock(), Mock(), admin, compat, responses, files, batches, Mock(), Mock())
