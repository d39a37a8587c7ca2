"""ServerConfig: everything a server is told beside its engine, frozen."""

from __future__ import annotations

from dataclasses import dataclass, field

from specinfer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Validated on construction.

    model_name: what requests call the model, and metrics label it.
    host, port: where HTTP is served; port 0 takes a free one. grpc_port: the same for gRPC, None for none.
    api_keys: one of them must come as a bearer token; none leaves the server open.
    cors_origins: origins whose pages may call the server from a browser.
    max_body_bytes: largest request body. read_timeout: seconds a client may take to send one, and
        before that the head of its request.
    request_timeout: seconds that a whole request may take.
    drain_timeout: seconds that running requests get to finish after SIGTERM.
    log_prompts: prompts may appear in the log.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 2**20
    read_timeout: float = 30.0
    request_timeout: float = 600.0
    drain_timeout: float = 60.0
    log_prompts: bool = False

    def __post_init__(self) -> None:
        for name in ("port", "grpc_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise ConfigError(f"{name} must be in [0, 65535], got {port}")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be a positive integer, got {self.max_body_bytes}")
        for name in ("read_timeout", "request_timeout", "drain_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be a positive number of seconds, got {getattr(self, name)}")
        if not all(key and key.isascii() and key.isprintable() for key in self.api_keys):
            raise ConfigError("an API key must be printable ASCII and not empty")

    def address(self, port: int) -> str:
        """The host with a port, as URLs and gRPC write it."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"
