"""Programs of Etude's own environment that its tools run inside a guest, shown there read-only.

There is one ripgrep for every sandbox, not whatever a guest happens to have: a rollout and a
person's session must find the same lines.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from etude.sandbox.protocol import Image

PROGRAM_FOLDER = "/opt/etude/bin"
"""Where in a guest the programs stand."""
LIBRARY_FOLDER = "/opt/etude/lib"
"""Where in a guest the Python packages stand that checkers need."""
RIPGREP = f"{PROGRAM_FOLDER}/rg"
RUFF = f"{PROGRAM_FOLDER}/ruff"
_PROGRAMS = ("rg", "ruff")
_PACKAGES = ("yaml",)


@functools.cache
def tool_mounts() -> Mapping[Path, str]:
    """Host files that an image must show for the tools, with their places in the guest. What this
    environment lacks is left out; the tool that needs it says so when called."""
    found: dict[Path, str] = {}
    folder = sysconfig.get_path("scripts")
    for name in _PROGRAMS:
        place = shutil.which(name, path=folder) or shutil.which(name)
        if place is not None:
            found[Path(place).resolve()] = f"{PROGRAM_FOLDER}/{name}"
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            found[Path(spec.origin).resolve().parent] = f"{LIBRARY_FOLDER}/{name}"
    return found


def with_tools(image: Image) -> Image:
    """`image` with the programs of the tools."""
    return replace(image, readonly={**image.readonly, **tool_mounts()})
