"""Programs of Etude's own environment that its tools run inside a guest, shown there read-only.

There is one ripgrep for every sandbox, not whatever a guest happens to have: a rollout and a
person's session must find the same lines.
"""

from __future__ import annotations

import functools
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from etude.sandbox.protocol import Image

PROGRAM_FOLDER = "/opt/etude/bin"
"""Where in a guest the programs stand."""
RIPGREP = f"{PROGRAM_FOLDER}/rg"
RUFF = f"{PROGRAM_FOLDER}/ruff"
_NAMES = ("rg", "ruff")


@functools.cache
def tool_mounts() -> Mapping[Path, str]:
    """Host files that an image must show for the tools, with their places in the guest. A program
    that this environment lacks is left out; its tool says so when called."""
    folder = Path(sysconfig.get_path("scripts"))
    found = {name: shutil.which(name, path=str(folder)) or shutil.which(name) for name in _NAMES}
    return {
        Path(place).resolve(): f"{PROGRAM_FOLDER}/{name}"
        for name, place in found.items()
        if place is not None
    }


def with_tools(image: Image) -> Image:
    """`image` with the programs of the tools."""
    return replace(image, readonly={**image.readonly, **tool_mounts()})
