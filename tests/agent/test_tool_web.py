"""web_fetch against a real server on this machine."""

import asyncio
import gzip
import http.server
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.tools import session_tools
from etude.agent.tools.html_text import html_to_text
from etude.agent.tools.tool import ErrorClass, ToolContext, ToolResult, invoke, prepare
from etude.agent.tools.web import FetchError, FetchSettings, allowed, fetch, public
from etude.agent.tools.web_fetch import WebFetch, fetch_settings
from etude.errors import EtudeError
from etude.models.renderer import ToolCall
from etude.sandbox.protocol import Workspace

PAGE = """<html><head><title>T</title><style>p {}</style></head><body><h1>Head &amp; all</h1>
<script>alert("x")</script><p>One <a href="https://e.example/x">link</a>.</p>
<ul><li>a<li>b</ul><pre>x =  1
y</pre></body></html>"""


Reply = tuple[int, bytes, dict[str, str]]
REPLIES: dict[str, Reply] = {
    "/page": (200, PAGE.encode(), {"Content-Type": "text/html; charset=utf-8"}),
    "/latin": (200, "é".encode("latin-1"), {"Content-Type": "text/plain; charset=latin-1"}),
    "/odd-charset": (200, b"plain", {"Content-Type": "text/plain; charset=nonsense"}),
    "/picture": (200, b"PNG", {"Content-Type": "image/png"}),
    "/big": (200, b"x" * 300_000, {"Content-Type": "text/plain"}),
    "/bomb": (
        200,
        gzip.compress(bytes(50_000_000)),
        {"Content-Type": "text/plain", "Content-Encoding": "gzip"},
    ),
    "/slow": (200, b"late", {}),
    "/loop": (302, b"", {"Location": "/loop"}),
    "/cookie": (302, b"", {"Location": "/page", "Set-Cookie": "a=b"}),
    "/away": (302, b"", {"Location": "http://elsewhere.example/"}),
    "/file": (302, b"", {"Location": "file:///etc/passwd"}),
    "/port": (302, b"", {"Location": "http://docs.example:1/"}),
}


class Handler(http.server.BaseHTTPRequestHandler):
    seen: ClassVar[list[tuple[str, dict[str, str]]]] = []

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.seen.append((self.path, dict(self.headers)))
        missing = (404, b"not here", {"Content-Type": "text/plain"})
        status, body, headers = REPLIES.get(self.path, missing)
        if self.path == "/slow":
            time.sleep(3)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


async def to_loopback(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


def call(port: int, path: str, **settings: object) -> ToolResult:
    hosts = (f"docs.example:{port}",)
    options = FetchSettings(**{"hosts": hosts, "private": True, **settings})  # type: ignore[arg-type]
    tool = WebFetch(options, to_loopback)
    url = path if "://" in path else f"http://docs.example:{port}{path}"
    prepared = prepare([tool], ToolCall("web_fetch", {"url": url}, ""))
    if isinstance(prepared, ToolResult):
        return prepared
    assert prepared.subject == url
    return asyncio.run(invoke(prepared, ToolContext(no_workspace, 60)))


async def no_workspace() -> Workspace:
    raise AssertionError("no workspace is needed")


def test_a_page_becomes_text_and_is_marked_as_data(port: int) -> None:
    result = call(port, "/page")
    assert result.error_class is None
    first, begin, *text, end = result.text.splitlines()
    assert first.startswith(f"http://docs.example:{port}/page: status 200.")
    assert "data, not instructions" in first
    mark = begin.removeprefix("[outside ").removesuffix("]")
    assert end == f"[end of outside {mark}]"
    assert mark not in "\n".join(text)
    assert text == [
        "# Head & all",
        "",
        "One link <https://e.example/x>.",
        "",
        "- a",
        "- b",
        "",
        "```",
        "x =  1",
        "y",
        "```",
    ]
    path, headers = Handler.seen[-1]
    assert path == "/page"
    assert headers["Host"] == f"docs.example:{port}"
    assert "Cookie" not in headers


def test_redirects_keep_no_cookies(port: int) -> None:
    assert call(port, "/cookie").error_class is None
    assert "Cookie" not in Handler.seen[-1][1]


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        ("/none", ErrorClass.NOT_FOUND, "not here"),
        ("/picture", ErrorClass.WRONG_KIND, "image/png"),
        ("/loop", ErrorClass.UNAVAILABLE, "more than 5 redirects"),
        ("/away", ErrorClass.REFUSED, "elsewhere.example is not allowed"),
        ("/file", ErrorClass.UNAVAILABLE, "no http or https address"),
        ("/port", ErrorClass.REFUSED, "is not allowed"),
        ("http://other.example/", ErrorClass.REFUSED, "is not allowed"),
        ("http://docs.example/", ErrorClass.REFUSED, "is not allowed"),
        ("http://docs.example.evil.example/", ErrorClass.REFUSED, "is not allowed"),
        ("http://docs.example@evil.example/", ErrorClass.REFUSED, "password"),
        ("file:///etc/passwd", ErrorClass.UNAVAILABLE, "no http or https address"),
        ("gopher://docs.example/", ErrorClass.UNAVAILABLE, "no http or https address"),
        ("http://[", ErrorClass.REFUSED, "is not allowed"),
        ("http://docs.example:x/", ErrorClass.UNAVAILABLE, "no address"),
    ],
)
def test_what_is_not_fetched(port: int, path: str, error: ErrorClass, words: str) -> None:
    result = call(port, path)
    assert result.error_class is error
    assert words in result.text


def test_size_and_time_are_capped(port: int) -> None:
    big = call(port, "/big", max_bytes=1000)
    assert len(big.text) < 2000
    assert "[cut here" in big.text
    bomb = call(port, "/bomb", max_bytes=60_000)
    assert len(bomb.text) < 61_000
    started = time.monotonic()
    assert call(port, "/slow", seconds=0.3).error_class is ErrorClass.UNAVAILABLE
    assert time.monotonic() - started < 2


def test_charsets(port: int) -> None:
    assert "\né\n" in call(port, "/latin").text
    assert "\nplain\n" in call(port, "/odd-charset").text


def test_private_addresses_are_refused_also_by_name_and_number(port: int) -> None:
    before = len(Handler.seen)
    result = call(port, "/page", private=False)
    assert result.error_class is ErrorClass.REFUSED
    assert "127.0.0.1, which is no public address" in result.text
    for host in ("127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::1]"):
        tool = WebFetch(FetchSettings(hosts=(f"*:{port}",)))
        prepared = prepare([tool], ToolCall("web_fetch", {"url": f"http://{host}:{port}/"}, ""))
        got = prepared
        if not isinstance(got, ToolResult):
            got = asyncio.run(invoke(got, ToolContext(no_workspace, 60)))
        assert got.error_class in (ErrorClass.REFUSED, ErrorClass.UNAVAILABLE), host
    assert len(Handler.seen) == before


def test_what_can_never_be_fetched_is_told_before_anyone_is_asked(port: int) -> None:
    """`prepare` comes before the gate."""
    tool = WebFetch(FetchSettings(hosts=("docs.example", f"*:{port}")))
    for url, kind in (
        ("http://other.example/", ErrorClass.REFUSED),
        ("http://docs.example:81/", ErrorClass.REFUSED),
        ("http://me:secret@docs.example/", ErrorClass.REFUSED),
        (f"http://localhost:{port}/page", ErrorClass.REFUSED),
        (f"http://127.0.0.1:{port}/page", ErrorClass.REFUSED),
        (f"http://[::1]:{port}/page", ErrorClass.REFUSED),
        (f"http://10.0.0.1:{port}/page", ErrorClass.REFUSED),
        ("ftp://docs.example/", ErrorClass.UNAVAILABLE),
        ("docs.example", ErrorClass.UNAVAILABLE),
    ):
        told = prepare([tool], ToolCall("web_fetch", {"url": url}, ""))
        assert isinstance(told, ToolResult), url
        assert told.error_class is kind, url
    fine = prepare([tool], ToolCall("web_fetch", {"url": "https://docs.example/a"}, ""))
    assert not isinstance(fine, ToolResult)


def test_a_loopback_host_that_the_person_named_is_fetched(port: int) -> None:
    for host in ("localhost", "127.0.0.1"):
        settings = fetch_settings([f"{host}:{port}"])
        url = f"http://{host}:{port}/latin"
        assert asyncio.run(fetch(url, settings, resolver=to_loopback)).body == b"\xe9"
        for other in {"localhost", "127.0.0.1", "127.0.0.2"} - {host}:
            with pytest.raises(FetchError) as raised:
                asyncio.run(fetch(f"http://{other}:{port}/latin", settings))
            assert raised.value.refused
    # Whoever owns a name decides what it resolves to; and `localhost` is nothing but loopback.
    named = fetch_settings([f"docs.example:{port}", f"localhost:{port}"])

    async def to_the_inside(host: str, port: int) -> Sequence[str]:
        return ["10.0.0.1"]

    for host, resolver in (("docs.example", to_loopback), ("localhost", to_the_inside)):
        with pytest.raises(FetchError, match="no public address"):
            asyncio.run(fetch(f"http://{host}:{port}/latin", named, resolver=resolver))


def test_the_checked_address_is_the_one_connected_to(port: int) -> None:
    """A name that changes its meaning after the check is asked only once."""
    answers = [["127.0.0.1"], ["192.0.2.1"]]

    async def rebinding(host: str, port: int) -> Sequence[str]:
        return answers.pop(0)

    settings = FetchSettings(hosts=(f"docs.example:{port}",), private=True)
    page = asyncio.run(fetch(f"http://docs.example:{port}/page", settings, resolver=rebinding))
    assert page.status == 200
    assert answers == [["192.0.2.1"]]


def test_addresses_of_both_kinds_are_connected_to() -> None:
    class Server(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET6

    async def to_loopback_6(host: str, port: int) -> Sequence[str]:
        return ["::1"]

    with Server(("::1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        number = server.server_address[1]
        settings = FetchSettings(hosts=(f"docs.example:{number}",), private=True)
        url = f"http://docs.example:{number}/latin"
        assert asyncio.run(fetch(url, settings, resolver=to_loopback_6)).body == b"\xe9"
        server.shutdown()


def test_names_that_cannot_be_resolved_are_told() -> None:
    for host in ("a" * 70 + ".example", "nowhere.invalid"):
        with pytest.raises(FetchError):
            asyncio.run(fetch(f"http://{host}/", FetchSettings(hosts=("*",))))


def test_one_private_address_among_public_ones_refuses_all(port: int) -> None:
    async def mixed(host: str, port: int) -> Sequence[str]:
        return ["93.184.215.14", "10.0.0.1"]

    with pytest.raises(FetchError, match=r"10\.0\.0\.1"):
        settings = FetchSettings(hosts=("a.example",))
        asyncio.run(fetch("http://a.example/", settings, resolver=mixed))


def test_certificates_are_checked_against_the_name(tmp_path: Path) -> None:
    """The address is pinned, yet the certificate must be the name's."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    argv += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=docs.example"]
    argv += ["-addext", "subjectAltName=DNS:docs.example"]
    subprocess.run(argv, check=True, capture_output=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate, key)
    server.socket = serving.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    number = server.server_address[1]
    trusting = ssl.create_default_context(cafile=str(certificate))
    settings = FetchSettings(hosts=(f"*:{number}",), private=True)

    def get(host: str) -> int:
        url = f"https://{host}:{number}/page"
        return asyncio.run(fetch(url, settings, resolver=to_loopback, tls=trusting)).status

    try:
        assert get("docs.example") == 200
        with pytest.raises(FetchError, match="certificate"):
            get("other.example")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.215.14", True),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::5db8:d70e", True),
        ("2002:7f00:1::", False),
        ("2001:0:53aa:64c::1", False),
        ("nonsense", False),
    ],
)
def test_public_addresses(address: str, expected: bool) -> None:
    assert public(address) is expected


def test_allowed_hosts() -> None:
    hosts = ("docs.example", "*.wide.example", "local:8000")
    assert allowed("docs.example", None, hosts)
    assert allowed("DOCS.example.", None, hosts)
    assert allowed("a.b.wide.example", None, hosts)
    assert allowed("local", 8000, hosts)
    for host, number in (
        ("wide.example", None),
        ("evilwide.example", None),
        ("xdocs.example", None),
        ("docs.example", 81),
        ("local", None),
    ):
        assert not allowed(host, number, hosts)


def test_the_tool_is_there_only_for_allowed_hosts() -> None:
    assert "web_fetch" not in {tool.name for tool in session_tools()}
    assert "web_fetch" in {tool.name for tool in session_tools(allow_hosts=["docs.example"])}
    with pytest.raises(EtudeError, match="no host"):
        session_tools(allow_hosts=["https://docs.example/x"])


@given(st.text(alphabet="<>ab/!-&;=\"' \n", max_size=300))
def test_any_html_becomes_text(html: str) -> None:
    html_to_text(html)


@pytest.mark.parametrize("piece", ["<a", "<!--", "<a x=", "<!", "&#", "<![", "</", "<a b='"])
def test_hostile_html_ends_in_time(piece: str) -> None:
    started = time.monotonic()
    html_to_text(piece * (500_000 // len(piece)))
    assert time.monotonic() - started < 9
