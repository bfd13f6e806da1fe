"""Configuration of a proxy.

The command line reads the defaults, so we import other modules of the proxy only to check values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pd.core.config import (
    ELASTIC,
    MAX_STREAM_INTERVAL,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
)
from pd.core.errors import UsageError
from pd.proxy.http.api_keys import ApiKey
from pd.proxy.nodes.discovery.flag import parse_sources

if TYPE_CHECKING:
    from pd.proxy.http.certificate import ServerCertificate
    from pd.proxy.routing.prediction import Predictor

# Largest number of processes of one proxy; more than the cores of any host.
MAX_PROCESSES = 256
# An hour.
MAX_OBJECTIVE_MS = 3.6e6

ON_OFF = ("on", "off")
MAX_FAILOVERS = 1000
MAX_BATCH_CONCURRENCY = 1024
# Room for a response with the longest request; and a petabyte.
MIN_STORAGE_MB, MAX_STORAGE_MB = 32, 1 << 30


@dataclass(kw_only=True)
class ProxyConfig:
    """Settings of one proxy. The names are those of the flags.

    Attributes:
        prefill, decode, unified: HTTP URLs of the nodes.
        discover: where further nodes are listed, see :mod:`pd.proxy.nodes.discovery.flag`.
        port: 0 picks a free one.
        tokenizer: directory of the tokenizer's files; None takes the tokenizer of the nodes.
        request_timeout, drain_timeout: in seconds.
        served_model_name: further names of the first model. Answers show the first of them.
        stream_interval: minimum tokens per event, for requests without their own choice.
        workers: number of serving processes.
        tls_cert, tls_key: files in PEM format. With both, the port speaks only HTTPS.
        failover: ``on`` or ``off``: whether requests fail over when nodes fail.
        max_failovers: limit on the failovers of a request.
        failover_wait: seconds that a request waits for an available node.
        trace_requests: file with a row for every served prompt.
        storage_dir: directory for stored responses and files; None for a temporary one.
        storage_mb: limit on the stored responses of each key in MiB.
        files_mb: limit on the files of each key in MiB.
        batch_concurrency: requests of batches under way at a time.
    """

    prefill: list[str] = field(default_factory=list)
    decode: list[str] = field(default_factory=list)
    unified: list[str] = field(default_factory=list)
    discover: list[str] = field(default_factory=list)
    host: str = "127.0.0.1"
    port: int = 8000
    tokenizer: str | None = None
    split_special_tokens: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    policy: str = "cache_aware"
    elastic: str = "auto"
    slo_ttft_ms: float | None = None
    slo_itl_ms: float | None = None
    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)
    api_keys: list[ApiKey] = field(default_factory=list, repr=False)
    cors_origins: list[str] = field(default_factory=list)
    max_queue: int = 4096
    request_timeout: float | None = None
    served_model_name: list[str] = field(default_factory=list)
    cluster_key: bytes | None = field(default=None, repr=False)
    drain_timeout: float = 30.0
    stream_interval: int = 1
    workers: int = 1
    tls_cert: str | None = None
    tls_key: str | None = None
    failover: str = "on"
    max_failovers: int = 2
    failover_wait: float = 60.0
    trace_requests: str | None = None
    storage_dir: str | None = None
    storage_mb: int = 256
    files_mb: int = 1024
    batch_concurrency: int = 32

    @property
    def itl(self) -> float:
        """Objective for the seconds between tokens; 0 leaves it to the nodes."""
        return (self.slo_itl_ms or 0.0) / 1e3

    def make_certificate(self) -> ServerCertificate | None:
        """Return the certificate for HTTPS, or None for HTTP."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        from pd.proxy.http.certificate import ServerCertificate

        return ServerCertificate(self.tls_cert, self.tls_key)

    def make_predictor(self) -> Predictor | None:
        """Return the predictor for elastic nodes, or None if roles and the policy decide."""
        if self.elastic == "off" or self.policy != "cache_aware":
            return None
        from pd.proxy.routing.prediction import Predictor

        return Predictor(None if self.slo_ttft_ms is None else self.slo_ttft_ms / 1e3)

    @property
    def all_keys(self) -> list[ApiKey]:
        """All accepted keys."""
        keys = list(self.api_keys)
        if self.api_key is not None:
            keys.append(ApiKey(self.api_key, "inference", "--api-key"))
        if self.admin_api_key is not None:
            keys.append(ApiKey(self.admin_api_key, "admin", "--admin-api-key"))
        return keys

    @property
    def key_required(self) -> bool:
        """Whether clients need a key to generate."""
        return self.api_key is not None or bool(self.api_keys)

    def validate(self) -> None:
        """Raise UsageError for a value that cannot work."""
        from pd.proxy.http.access import check_api_keys, check_cors_origins
        from pd.proxy.http.certificate import check_certificate
        from pd.proxy.nodes.pool import MAX_WORKERS
        from pd.proxy.routing.policies import make_policy

        make_policy(self.policy)
        for flag, value, known in (
            ("--tool-call-parser", self.tool_call_parser, TOOL_CALL_PARSERS),
            ("--reasoning-parser", self.reasoning_parser, REASONING_PARSERS),
            ("--failover", self.failover, ON_OFF),
        ):
            if value not in known:
                raise UsageError(f"{flag} must be one of {', '.join(known)}, not {value!r}")
        if not 0 <= self.max_failovers <= MAX_FAILOVERS:
            raise UsageError(
                f"--max-failovers must be between 0 and {MAX_FAILOVERS}, not {self.max_failovers}"
            )
        if not 0 <= self.failover_wait < math.inf:
            raise UsageError(f"--failover-wait must be seconds, not {self.failover_wait}")
        if self.elastic not in ELASTIC:
            raise UsageError(f"--elastic must be auto or off, not {self.elastic!r}")
        for flag, objective in (
            ("--slo-ttft-ms", self.slo_ttft_ms),
            ("--slo-itl-ms", self.slo_itl_ms),
        ):
            if objective is not None and not 0 < objective <= MAX_OBJECTIVE_MS:
                raise UsageError(
                    f"{flag} must be above 0 and at most {MAX_OBJECTIVE_MS:g}, not {objective}"
                )
        if self.max_queue < 1:
            raise UsageError(f"--max-queue must be at least 1, not {self.max_queue}")
        if self.request_timeout is not None and self.request_timeout <= 0:
            raise UsageError(f"--request-timeout must be above 0, not {self.request_timeout}")
        if not 1 <= self.workers <= MAX_PROCESSES:
            raise UsageError(
                f"--workers must be from 1 to {MAX_PROCESSES} (the host's cores at most make "
                f"sense), not {self.workers}"
            )
        if not 1 <= self.stream_interval <= MAX_STREAM_INTERVAL:
            raise UsageError(
                f"--stream-interval must be from 1 to {MAX_STREAM_INTERVAL} tokens, not "
                f"{self.stream_interval}"
            )
        if self.drain_timeout < 0:
            raise UsageError(f"--drain-timeout must be at least 0, not {self.drain_timeout}")
        if not MIN_STORAGE_MB <= self.storage_mb <= MAX_STORAGE_MB:
            raise UsageError(
                f"--storage-mb must be from {MIN_STORAGE_MB} to {MAX_STORAGE_MB}, not "
                f"{self.storage_mb}"
            )
        if not 1 <= self.files_mb <= MAX_STORAGE_MB:
            raise UsageError(f"--files-mb must be from 1 to {MAX_STORAGE_MB}, not {self.files_mb}")
        if not 1 <= self.batch_concurrency <= MAX_BATCH_CONCURRENCY:
            raise UsageError(
                f"--batch-concurrency must be from 1 to {MAX_BATCH_CONCURRENCY}, not "
                f"{self.batch_concurrency}"
            )
        check_api_keys(self.all_keys)
        check_cors_origins(self.cors_origins)
        check_certificate(self.tls_cert, self.tls_key)
        urls = [*self.prefill, *self.decode, *self.unified]
        if len(urls) > MAX_WORKERS:
            raise UsageError(f"{len(urls)} nodes are given; a proxy takes at most {MAX_WORKERS}")
        parse_sources(self.discover, has_key=self.cluster_key is not None)
        if self.tokenizer is not None and not Path(self.tokenizer).is_dir():
            raise UsageError(f"--tokenizer: there is no directory {self.tokenizer}")
