"""Messages between a program and its engine process: lines of JSON on the engine's standard input
and output.

The first line in tells the engine what to load. It answers with one :class:`EngineStarted` or
:class:`EngineRefused`, and afterwards with one :class:`CacheFlushed` for every :class:`FlushCache`.
It ends after :class:`EndEngine`, and at the end of its input.
"""

from __future__ import annotations

from typing import Any

import msgspec


class StartEngine(msgspec.Struct, tag=True):
    """What to load.

    Attributes:
        config: a pickled :class:`pd.core.config.NodeConfig`.
        cpu_threads: number of threads on a CPU; None takes one for each core.
        log_level: name of a level of :mod:`logging`.
    """

    config: bytes
    cpu_threads: int | None
    log_level: str


class FlushCache(msgspec.Struct, tag=True):
    """Drop all cached prefixes that no request uses."""


class EndEngine(msgspec.Struct, tag=True):
    """End. Closing the input is not enough, because forks of the program hold it open, too."""


class EngineStarted(msgspec.Struct, tag=True):
    """The engine takes requests.

    Attributes:
        info: its description, as ``/server_info`` of a node gives it.
    """

    info: dict[str, Any]


class EngineRefused(msgspec.Struct, tag=True):
    """The engine cannot start.

    Attributes:
        kind: name of the error's class.
    """

    kind: str
    message: str


class CacheFlushed(msgspec.Struct, tag=True):
    """The cached prefixes are gone."""


Order = StartEngine | FlushCache | EndEngine
Report = EngineStarted | EngineRefused | CacheFlushed

order_decoder = msgspec.json.Decoder(Order)
report_decoder = msgspec.json.Decoder(Report)
