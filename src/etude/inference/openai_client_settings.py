"""Settings of a chat service that speaks OpenAI's protocol; imports no HTTP library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

Omissible = Literal["temperature", "seed", "max_tokens", "stream_options"]


class ChatServiceSettings(BaseModel):
    """Where a remote model answers, and how patient to be. Times in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str
    """Up to and including `/v1`; a trailing `/chat/completions` is taken off."""
    model: str = Field(min_length=1)
    api_key_variable: str | None = None
    """Environment variable that holds the key. The key itself is in no setting, log or message."""
    headers: Mapping[str, str] = Field(default_factory=dict)
    """Further headers of every request."""
    context_length: int | None = Field(default=None, ge=1)
    """Tokens of prompt and answer together; None takes it from the price table."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the service calls the longest answer; some newer models only know the second."""
    omit: frozenset[Omissible] = frozenset()
    """Fields that this service or model refuses."""
    body: Mapping[str, Any] = Field(default_factory=dict)
    """Further fields of every request, for instance `reasoning_effort`."""
    send_thinking: bool = False
    """Whether earlier thinking goes back to the model as `reasoning_content`: some models want it
    between their calls, other services refuse it."""
    connect_timeout: float = Field(default=10, gt=0)
    silence_timeout: float = Field(default=300, gt=0)
    """How long the service may send nothing at all, before its first word and between two."""
    retries: int = Field(default=4, ge=0, le=20)
    """Further tries when the service is busy, failing or unreachable."""
    longest_wait: float = Field(default=60, ge=0)
    """Before one further try; a service that asks for more is an error at once."""

    @field_validator("base_url")
    @classmethod
    def _usable(cls, url: str) -> str:
        url = url.strip().rstrip("/").removesuffix("/chat/completions")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be an http or https address, such as http://localhost:8000/v1")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("must hold no name, password, query or fragment")
        return url

    @field_validator("headers")
    @classmethod
    def _sendable(cls, headers: Mapping[str, str]) -> Mapping[str, str]:
        for name, value in headers.items():
            if not re.fullmatch(r"[A-Za-z0-9-]+", name) or not (
                value.isascii() and value.isprintable()
            ):
                raise ValueError(f"{name!r} is no header that can be sent")
        return headers

    @field_validator("body")
    @classmethod
    def _no_own_field(cls, body: Mapping[str, Any]) -> Mapping[str, Any]:
        own = {"model", "messages", "tools", "stream", "n"} & body.keys()
        if own:
            raise ValueError(f"must not hold {', '.join(sorted(own))}")
        return body
