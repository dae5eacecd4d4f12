"""What whoever starts a server decides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """How a server serves its engine."""

    model_name: str
    """What clients call the model."""
    api_keys: tuple[str, ...] = ()
    """Any of these opens the API; none: it is open."""
    max_batch_size: int | None = None
    """Requests that are decoded together; None: as many as the engine has slots."""
    max_queue: int = 256
    """Requests that may wait, beyond those that the engine's slots take."""
    verify_window: int | None = None
    """Tokens that a pass verifies for requests that do not say."""
    reuse_prefixes: bool = True
    """Start prompts after what they share with earlier ones."""
    request_timeout: float | None = None
    """Seconds that a request may take, waiting included."""
    max_body_size: int | None = None
    """Bytes; None: what `request_limits` derives from the engine."""
    strict_fields: bool = False
    """Refuse requests with fields that nothing here reads."""
    allowed_origins: tuple[str, ...] = ()
    """Whose pages may call the API from a browser; "*" is all."""
    vllm_metrics: bool = False
    """Give metrics under vLLM's names too."""
