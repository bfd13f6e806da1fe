"""Imported by the server of ``forked_children.py`` alone, before it forks any process: everything
that a process of a proxy imports until it has answered requests."""

from __future__ import annotations

import functools
import gc
import importlib
import ssl

import certifi
import fields_of_routes
from forked_commands import SERVER_MODULES

# What a process runs is sent to it as a function of forked_children.py, which imports pytest.
for name in ("pd.proxy.workers.child", "forked_children", *SERVER_MODULES):
    importlib.import_module(name)
# As in tests/conftest.py.
ssl.create_default_context = functools.cache(ssl.create_default_context)
ssl.create_default_context(cafile=certifi.where())
fields_of_routes.make_now()
# Forked processes need not look through these modules for garbage.
gc.collect()
gc.freeze()
