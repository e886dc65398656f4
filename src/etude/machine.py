"""What this machine has, found without importing torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True)
class Machine:
    """`cores` are those this process may use; `memory_bytes` is what the machine has;
    `cpu_flags` the vector extensions that matter here; `gpus` one line per device."""

    cpu: str
    cores: int
    memory_bytes: int
    cpu_flags: tuple[str, ...]
    gpus: tuple[str, ...]
    python: str
    system: str

    @property
    def fast_bf16(self) -> bool:
        """Whether bf16 products run faster than fp32 on this CPU."""
        return "avx512_bf16" in self.cpu_flags or "amx_bf16" in self.cpu_flags

    def __str__(self) -> str:
        memory = self.memory_bytes / 2**30
        return f"{self.cpu}, {self.cores} cores, {memory:.0f} GiB, {self.system}"


def cache_folder() -> Path:
    """Where models and prepared repositories are kept: `$ETUDE_CACHE`, else `~/.cache/etude`."""
    value = os.environ.get("ETUDE_CACHE")
    return Path(value) if value else Path.home() / ".cache" / "etude"


def state_folder() -> Path:
    """Where sessions, checkpoints and approvals are kept: `$ETUDE_STATE`, else `etude` in
    `$XDG_STATE_HOME` (`~/.local/state`)."""
    value = os.environ.get("ETUDE_STATE")
    if value:
        return Path(value)
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "etude"


def config_folder() -> Path:
    """Where a person's own settings are: `$ETUDE_CONFIG`, else `etude` in `$XDG_CONFIG_HOME`
    (`~/.config`)."""
    value = os.environ.get("ETUDE_CONFIG")
    if value:
        return Path(value)
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "etude"


def free_bytes(folder: Path) -> int:
    """Free space on the file system that holds `folder` or its nearest existing parent."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def machine() -> Machine:
    """Look at this machine."""
    info: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            info.setdefault(name.strip(), value.strip())
    flags = info.get("flags", "").split()
    return Machine(
        cpu=info.get("model name", platform.processor() or platform.machine()),
        cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cpu_flags=tuple(flag for flag in _FLAGS if flag in flags),
        gpus=_gpus(),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
    )


def _gpus() -> tuple[str, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        out = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=10, check=False
        )
    except subprocess.TimeoutExpired:
        return ("nvidia-smi does not answer",)
    return tuple(line.strip() for line in out.stdout.splitlines() if line.startswith("GPU"))
