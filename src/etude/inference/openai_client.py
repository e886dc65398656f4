"""One request to a chat service that speaks OpenAI's protocol, and its streamed answer.

A request is tried again only while nothing of an answer has come. Afterwards its words are on the
screen and paid for, and a second try would sample other words: they could only be mixed up.
"""

from __future__ import annotations

import asyncio
import email.utils
import html
import json
import os
import random
import re
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from etude.errors import EtudeError
from etude.inference.openai_client_settings import ChatServiceSettings
from etude.inference.openai_stream import (
    EventLines,
    Malformed,
    OnPiece,
    Refused,
    Reply,
    ReplyBuilder,
    encodable,
)

_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
"""Answers that may be another one a moment later."""
_FIRST_WAIT = 0.5
_DRAIN_SECONDS = 0.1
_ERROR_BYTES = 64 << 10
_MESSAGE_CHARS = 300


class _Failure(Exception):
    """A try that failed. `again` says whether a further one may help, `wait` how many seconds the
    service wants to be left alone (None: it does not say)."""

    def __init__(self, sentence: str, *, again: bool, wait: float | None = None) -> None:
        super().__init__(sentence)
        self.again = again
        self.wait = wait


class ChatClient:
    """Speaks to one service. Raises EtudeError at once when the key is not set."""

    def __init__(self, settings: ChatServiceSettings) -> None:
        self.settings = settings
        self._host = urlsplit(settings.base_url).netloc
        self._key = ""
        if settings.api_key_variable is not None:
            self._key = os.environ.get(settings.api_key_variable, "").strip()
            if not self._key:
                raise EtudeError(
                    f"The API key for {self._host} is missing; set the environment variable"
                    f" {settings.api_key_variable}."
                )
            if not self._key.isascii() or not self._key.isprintable():
                raise EtudeError(
                    f"The API key in {settings.api_key_variable} holds characters that no key has."
                )
        self._http: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def complete(self, body: Mapping[str, Any], on_piece: OnPiece | None = None) -> Reply:
        """Send `body` and read the answer, `on_piece` being told of it as it comes. When this is
        cancelled the connection is closed before it returns. Raises EtudeError when no answer can
        be had; the caller keeps the deadline of the whole."""
        data = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        tries = self.settings.retries + 1
        for number in range(1, tries + 1):
            builder = ReplyBuilder(on_piece)
            try:
                return await self._try(data, builder)
            except _Failure as failure:
                tried = f" ({number} tries)" if number > 1 else ""
                if builder.began or not failure.again or number == tries:
                    sentence = f"{str(failure).rstrip('.')}{tried}."
                    raise EtudeError(self._safe(sentence)) from failure
                await self._wait(failure, number)
        raise AssertionError("the last try returns or raises")

    async def close(self) -> None:
        """Close idle connections. Idempotent."""
        http, self._http = self._http, None
        if http is not None and self._loop is asyncio.get_running_loop():
            await http.aclose()

    async def _wait(self, failure: _Failure, number: int) -> None:
        wait = failure.wait
        if wait is None:
            wait = min(_FIRST_WAIT * 2 ** (number - 1), self.settings.longest_wait)
            wait *= random.uniform(0.5, 1.0)
        elif wait > self.settings.longest_wait:
            sentence = f"{failure}; it asks to be left alone for {wait:.0f} s"
            raise EtudeError(self._safe(f"{sentence}.")) from failure
        await asyncio.sleep(wait)

    def _connections(self) -> httpx.AsyncClient:
        """The open connections; they belong to one event loop."""
        loop = asyncio.get_running_loop()
        if self._http is None or self._loop is not loop:
            settings = self.settings
            headers = {"Accept": "text/event-stream", "User-Agent": "etude", **settings.headers}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            timeout = httpx.Timeout(settings.silence_timeout, connect=settings.connect_timeout)
            # Redirects are not followed: the key goes to the address that was set, nowhere else.
            self._http = httpx.AsyncClient(headers=headers, timeout=timeout)
            self._loop = loop
        return self._http

    async def _try(self, data: bytes, builder: ReplyBuilder) -> Reply:
        url = f"{self.settings.base_url}/chat/completions"
        headers = {"Content-Type": "application/json"}
        try:
            async with self._connections().stream(
                "POST", url, content=data, headers=headers
            ) as response:
                if response.status_code != 200:
                    raise await self._refusal(response)
                await self._read(response, builder)
            return builder.reply()
        except Refused as refused:
            raise self._told(refused) from refused
        except Malformed as malformed:
            raise _Failure(f"{self._host} gave no sound answer: {malformed}", again=True) from (
                malformed
            )
        except httpx.ConnectTimeout as error:
            seconds = self.settings.connect_timeout
            raise _Failure(
                f"{self._host} cannot be reached within {seconds:g} s", again=True
            ) from error
        except httpx.TimeoutException as error:
            seconds = self.settings.silence_timeout
            raise _Failure(f"{self._host} sent nothing for {seconds:g} s", again=False) from error
        except httpx.ConnectError as error:
            certificate = _certificate_fault(error)
            reason = f"its certificate is not trusted ({certificate})" if certificate else error
            raise _Failure(
                f"{self._host} cannot be reached: {reason}", again=not certificate
            ) from error
        except httpx.TransportError as error:
            what = "in the middle of the answer" if builder.began else "before an answer came"
            raise _Failure(
                f"the connection to {self._host} broke {what}: {str(error) or 'closed'}", again=True
            ) from error
        except httpx.HTTPError as error:
            raise _Failure(f"{self._host} gave no sound answer: {error}", again=False) from error

    async def _read(self, response: httpx.Response, builder: ReplyBuilder) -> None:
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/json":  # A service that does not stream.
            body = await _capped(response, 64 << 20)
            builder.event(body.decode("utf-8", "replace"))
            builder.done = True
            return
        if kind not in ("text/event-stream", ""):
            page = _page_title(await _capped(response, _ERROR_BYTES))
            raise _Failure(
                f"{self._host} answers with {page or kind} instead of a stream; check the base URL"
                f" {self.settings.base_url}",
                again=False,
            )
        lines = EventLines()
        async with aclosing(_bytes(response)) as stream:
            async for data in stream:
                for event in lines.feed(data):
                    builder.event(event)
                if builder.done:
                    await _drain(stream)
                    return
        for event in lines.end():
            builder.event(event)

    async def _refusal(self, response: httpx.Response) -> _Failure:
        """What an answer other than 200 means."""
        status = response.status_code
        body = self._without_key(await _capped(response, _ERROR_BYTES))
        if 300 <= status < 400:
            place = response.headers.get("location", "elsewhere")
            return _Failure(
                f"{self._host} sends to {place}; set that as the base URL if it is right",
                again=False,
            )
        message, codes = _error_message(body)
        advice = self._advice(status, message)
        sentence = f"{self._host} refused the request (HTTP {status}){advice}"
        again = status in _PASSING and "insufficient_quota" not in codes
        return _Failure(sentence, again=again, wait=_retry_after(response.headers))

    def _told(self, refused: Refused) -> _Failure:
        """An error that came as an event of the stream."""
        message, codes = _error_message(
            self._without_key(json.dumps({"error": refused.error}).encode())
        )
        numbers = {int(code) for code in codes if code.isdigit()}
        again = bool(numbers & _PASSING) or "server_error" in codes or "overloaded_error" in codes
        return _Failure(f"{self._host} broke off with an error: {message}", again=again)

    def _advice(self, status: int, message: str) -> str:
        told = f": {message}" if message else ""
        variable = self.settings.api_key_variable
        if status in (401, 403):
            key = f"the key in {variable}" if variable else "whether it needs an API key"
            return f"{told}; check {key}"
        if status in (404, 405):
            return f"{told}; check the base URL {self.settings.base_url} and the model's name"
        return told

    def _safe(self, sentence: str) -> str:
        """One line that can be shown: no control characters."""
        line = " ".join("".join(c if c.isprintable() else " " for c in sentence).split())
        return encodable(line)

    def _without_key(self, data: bytes) -> bytes:
        return data.replace(self._key.encode(), b"[key]") if self._key else data


def _certificate_fault(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return cause.verify_message
        cause = cause.__cause__ or cause.__context__
    return ""


def _bytes(response: httpx.Response) -> AsyncGenerator[bytes]:
    """The body as it comes; a generator, so that it can be closed half read."""
    return cast(AsyncGenerator[bytes], response.aiter_bytes())


async def _drain(stream: AsyncGenerator[bytes]) -> None:
    """Read the few bytes after the last event, so that the connection can be used again. A
    service that keeps it open instead is not waited for: then it is closed."""
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for _ in stream:
                pass
    except (TimeoutError, httpx.HTTPError):
        return


async def _capped(response: httpx.Response, limit: int) -> bytes:
    """At most about `limit` bytes of a body; the rest is left unread."""
    parts: list[bytes] = []
    size = 0
    async with aclosing(_bytes(response)) as stream:
        async for data in stream:
            parts.append(data)
            size += len(data)
            if size >= limit:
                break
    return b"".join(parts)[:limit]


def _error_message(body: bytes) -> tuple[str, frozenset[str]]:
    """(what an error body says, its codes and types)."""
    text = body.decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        title = _page_title(body)
        return (title or _short(text)), frozenset()
    found = cast(Mapping[str, Any], value) if isinstance(value, dict) else {}
    error = found.get("error", found)
    if isinstance(error, str):
        return _short(error), frozenset()
    detail = cast(Mapping[str, Any], error) if isinstance(error, dict) else {}
    message = detail.get("message") or detail.get("detail") or detail.get("msg") or text
    codes = frozenset(str(detail[name]) for name in ("code", "type") if detail.get(name))
    return _short(message if isinstance(message, str) else json.dumps(message)), codes


def _short(text: str) -> str:
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= _MESSAGE_CHARS else f"{line[:_MESSAGE_CHARS]}..."


def _page_title(body: bytes) -> str:
    """`the web page 'Title'` when this is one, else ''."""
    text = body.decode("utf-8", "replace")
    if not re.match(r"\s*(<!doctype html|<html|<head)", text, re.IGNORECASE):
        return ""
    title = re.search(r"<title[^>]{0,200}>([^<]{0,300})", text, re.IGNORECASE)
    name = _short(html.unescape(title.group(1))) if title else ""
    return f"the web page {name!r}" if name else "a web page"


def _retry_after(headers: httpx.Headers) -> float | None:
    """Seconds that the service asks to wait: a number or a date. Non-positive ones are 0."""
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,9}(\.\d+)?", value):
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
