"""The offline model as a backend of the language."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pd.offline.connection import connect_local
from pd.offline.native_service import make_backend
from pd.offline.settings import read_settings

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType


class Engine:
    """Runs programs of :mod:`pd.lang` on a model in this program, without a port.

    Pass it as ``backend``, or to ``set_default_backend``. Use it in a ``with`` statement or call
    :meth:`close`.

    Attributes:
        endpoint: the backend, see :func:`pd.lang.backend.resolve_backend`.
    """

    def __init__(self, model: str | Path, **arguments: Any) -> None:
        """Load a model. The arguments are those of :class:`pd.offline.LLM`.

        Raises UsageError or SetupError.
        """
        self._connection = connect_local(read_settings("Engine", model, arguments))
        try:
            self.endpoint = make_backend(self._connection)
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """End requests under way, and the engine."""
        self._connection.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
