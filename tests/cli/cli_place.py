"""A project, a scripted model, and a person's folders that belong to one test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pty_screen import PtyScreen

Turn = Mapping[str, Any]


class Place:
    """`project` is what is worked on; sessions, approvals and settings stay below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.project = root / "project"
        self.project.mkdir()
        (self.project / "a.py").write_text("hello = 1\n")
        self.config = root / "config"
        self.env = {
            "ETUDE_STATE": str(root / "state"),
            "ETUDE_CONFIG": str(self.config),
            "ETUDE_MODEL": "",
        }

    def script(self, *turns: Turn, seconds_per_token: float = 0.0, name: str = "s") -> str:
        """The model that says these turns."""
        path = self.root / f"{name}.json"
        path.write_text(json.dumps({"turns": turns, "seconds_per_token": seconds_per_token}))
        return f"script:{path}"

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-c", "from etude.cli.app import main; main()", *words]

    def terminal(self, *words: str, columns: int = 80, rows: int = 24) -> PtyScreen:
        """`etude` in a terminal."""
        return PtyScreen(
            self.argv(*words), columns=columns, rows=rows, cwd=self.project, env=self.env
        )

    def popen(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.argv(*words),
            cwd=self.project,
            env={**os.environ, **self.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """`etude` without a terminal."""
        return subprocess.run(
            self.argv(*words),
            cwd=self.project,
            env={**os.environ, **self.env},
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def sessions(self) -> list[Path]:
        return sorted((self.root / "state" / "sessions").glob("*.jsonl"))


def running(words: Sequence[str]) -> list[int]:
    """Processes whose command line holds all of these words."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                line = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if all(word in line for word in words):
                found.append(int(folder.name))
    return found
