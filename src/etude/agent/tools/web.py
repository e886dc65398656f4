"""Fetching one page for a model that may not reach the network itself.

What a URL says is the model's word: the host must be allowed, and what its name resolves to must
be a public address (or loopback, where the person named exactly `localhost`), which is then the
one connected to, so that a name cannot change its meaning between the check and the connection.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host name and port → addresses as text."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class FetchError(Exception):
    """The page was not fetched; the text says why. `refused`: because it is not allowed."""

    def __init__(self, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


@dataclass(frozen=True)
class Page:
    """What came. `cut`: there was more than the limit."""

    url: str
    status: int
    content_type: str
    charset: str
    body: bytes
    cut: bool


@dataclass(frozen=True)
class FetchSettings:
    """`hosts` may be fetched from: `docs.python.org`, `*.python.org` (every name below), `*`, and
    `localhost:8000` for a port that is not the scheme's own. `private` also allows addresses that
    are not public; without it, only `localhost` and addresses that `hosts` names exactly may be
    such."""

    hosts: tuple[str, ...]
    private: bool = False
    max_bytes: int = 1 << 20
    seconds: float = 20.0
    redirects: int = 5


async def resolve(host: str, port: int) -> Sequence[str]:
    """By the system's resolver. Raises FetchError for an unknown name."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise FetchError(f"the name {host} cannot be resolved") from error
    return [str(entry[4][0]) for entry in found]


async def fetch(
    url: str,
    settings: FetchSettings,
    *,
    resolver: Resolve = resolve,
    tls: ssl.SSLContext | None = None,
) -> Page:
    """GET a page, following redirects, each checked as the first address was. No cookies, no
    proxies, nothing of the host's configuration. Raises FetchError."""
    try:
        async with (
            asyncio.timeout(settings.seconds),
            httpx.AsyncClient(
                trust_env=False, verify=tls or True, timeout=settings.seconds
            ) as client,
        ):
            for _ in range(settings.redirects + 1):
                answer = await _hop(client, url, settings, resolver)
                if isinstance(answer, Page):
                    return answer
                url = answer
    except TimeoutError as error:
        raise FetchError(f"no answer within {settings.seconds:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise FetchError(f"the connection failed: {error or type(error).__name__}") from error
    raise FetchError(f"more than {settings.redirects} redirects")


async def _hop(
    client: httpx.AsyncClient, url: str, settings: FetchSettings, resolver: Resolve
) -> Page | str:
    """One request: the page, or the address that it redirects to."""
    target = checked(url, settings)
    port = target.port or _DEFAULT_PORTS[target.scheme]
    addresses = await resolver(target.host, port)
    for address in addresses:
        _check_address(target, address, settings)
    if not addresses:
        raise FetchError(f"the name {target.host} cannot be resolved")
    request = client.build_request(
        "GET",
        target.copy_with(host=addresses[0]),
        headers={"Host": target.netloc.decode(), "Accept-Encoding": "identity"},
        extensions={"sni_hostname": target.host},
    )
    request.headers["User-Agent"] = "etude"
    response = await client.send(request, stream=True)
    try:
        if response.has_redirect_location:
            return str(target.join(response.headers["location"]))
        body, cut = await _body(response, settings.max_bytes)
    finally:
        await response.aclose()
        client.cookies.clear()
    content_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    charset = response.charset_encoding or "utf-8"
    return Page(str(target), response.status_code, content_type, charset, body, cut)


def checked(url: str, settings: FetchSettings) -> httpx.URL:
    """The address, parsed, when it may be fetched as far as its text tells. Raises FetchError."""
    try:
        target = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise FetchError(f"{url!r} is no address: {error}") from error
    if target.scheme not in _DEFAULT_PORTS or not target.host:
        raise FetchError(f"{url!r} is no http or https address")
    if target.userinfo:
        raise FetchError("an address with a name and password is not fetched", refused=True)
    if not allowed(target.host, target.port, settings.hosts):
        known = ", ".join(settings.hosts) or "none"
        where = target.netloc.decode()
        raise FetchError(f"{where} is not allowed; allowed hosts: {known}", refused=True)
    if _is_local_name(target.host):
        _check_address(target, "127.0.0.1", settings)
    elif _literal(target.host) is not None:
        _check_address(target, target.host, settings)
    return target


def _check_address(target: httpx.URL, address: str, settings: FetchSettings) -> None:
    """Raises FetchError for an address that is not public, unless the person named exactly it. A
    name other than `localhost` does not do: what it resolves to is another's word."""
    if settings.private or public(address):
        return
    if named(target.host, target.port, settings.hosts):
        parsed = _literal(address)
        if _is_local_name(target.host) and parsed is not None and parsed.is_loopback:
            return
        if parsed is not None and parsed == _literal(target.host):
            return
    raise FetchError(f"{target.host} is {address}, which is no public address", refused=True)


def _is_local_name(host: str) -> bool:
    return host.lower().rstrip(".") == "localhost"


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def allowed(host: str, port: int | None, hosts: Sequence[str]) -> bool:
    """Whether a host (with a port that is not the scheme's own) is one of `hosts`."""
    host = host.lower().rstrip(".")
    for entry in hosts:
        name, _, number = entry.lower().partition(":")
        if (int(number) if number else None) != port:
            continue
        if name in ("*", host) or (name.startswith("*.") and host.endswith(name[1:])):
            return True
    return False


def named(host: str, port: int | None, hosts: Sequence[str]) -> bool:
    """Whether one of `hosts` without a `*` is this host."""
    return allowed(host, port, [entry for entry in hosts if "*" not in entry])


def public(address: str) -> bool:
    """Whether an address is one of the public network, also where it wraps another."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour
        if parsed.teredo is not None:
            return False
        if parsed in _NAT64:
            inner = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        if inner is not None:
            return public(str(inner))
    return parsed.is_global and not parsed.is_multicast


async def _body(response: httpx.Response, limit: int) -> tuple[bytes, bool]:
    """At most `limit` bytes, unpacked, and whether there were more. We asked for no packing, and
    unpack what came packed all the same with the limit kept: a small file can unpack to a huge
    one."""
    packing = response.headers.get("content-encoding", "identity").strip().lower()
    raw = bytearray()
    async for chunk in response.aiter_raw():
        raw += chunk
        if len(raw) > limit:
            break
    cut = len(raw) > limit
    if packing == "identity":
        return bytes(raw[:limit]), cut
    if packing not in ("gzip", "deflate"):
        raise FetchError(f"the answer is packed by {packing}, which is not known here")
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        body = unpacker.decompress(bytes(raw[:limit]), limit)
    except zlib.error as error:
        raise FetchError("the answer cannot be unpacked") from error
    return body, cut or bool(unpacker.unconsumed_tail)
