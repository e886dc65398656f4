"""`etude doctor`: what this machine has, found by trying."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import closing
from dataclasses import dataclass

from etude.cli.screen import console
from etude.machine import cache_folder, free_bytes, machine
from etude.models.pull import registered
from etude.sandbox.registry import BACKENDS

_NEEDED_BYTES = 8 << 30


@dataclass(frozen=True)
class Check:
    """One finding. `needed` ones make the command fail; `mend` says what to do."""

    name: str
    ok: bool
    found: str
    mend: str = ""
    needed: bool = False


def examine() -> list[Check]:
    """Look at everything. Sandboxes are judged by running a guest in each."""
    here = machine()
    flags = ", ".join(here.cpu_flags) or "none of AVX2, AVX-512, AMX"
    speed = "bf16 is fast here" if here.fast_bf16 else "no fast bf16: fp32 will be used"
    checks = [
        Check("machine", True, f"{here}, Python {here.python}"),
        Check("vector units", True, f"{flags}; {speed}"),
        Check(
            "GPU",
            bool(here.gpus),
            "; ".join(here.gpus) or "none",
            "not used yet: everything runs on the CPU" if here.gpus else "not needed",
        ),
        Check(
            "memory",
            here.memory_bytes >= 10 << 30,
            f"{here.memory_bytes / 2**30:.0f} GiB",
            "" if here.memory_bytes >= 10 << 30 else "the demo needs about 9 GiB",
        ),
    ]
    free = free_bytes(cache_folder())
    enough = free >= _NEEDED_BYTES
    mend = "" if enough else f"free some space, or set ETUDE_CACHE (now {cache_folder()})"
    checks.append(Check("disk", enough, f"{free / 2**30:.0f} GiB free", mend, needed=True))
    git = shutil.which("git")
    checks.append(
        Check("git", git is not None, git or "not found", "" if git else "apt-get install git")
    )
    for name, backend in BACKENDS.items():
        with closing(backend()) as sandbox:
            trouble = asyncio.run(sandbox.probe())
        found = "a guest ran" if trouble is None else "cannot be used"
        checks.append(Check(f"sandbox {name}", trouble is None, found, trouble or "", needed=True))
    for name, folder in registered().items():
        mend = "" if folder else f"etude model pull {name}"
        checks.append(Check(f"model {name}", folder is not None, str(folder or "not pulled"), mend))
    return checks


def show(checks: list[Check]) -> None:
    """Print the findings for a person."""
    for check in checks:
        mark = "ok" if check.ok else ("!!" if check.needed else "--")
        console.print(f"{mark}  {check.name:<22} {check.found}", markup=False, soft_wrap=True)
        if check.mend:
            console.print(f"    {'':<22} {check.mend}", markup=False, soft_wrap=True)
