"""Random histories of a workspace against a plain dictionary of files."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.sandbox.bubblewrap import BubblewrapSandbox
from etude.sandbox.layers import layer_bytes
from etude.sandbox.protocol import Image
from etude.sandbox.workspace import BubblewrapWorkspace

PATHS = ("a.txt", "n", "d", "d/x", "d/y", "d/e", "d/e/z", "n/w", "n/d/x")
START = {"a.txt": b"alpha\n", "d/x": b"ex\n", "d/e/z": b"zed\n"}


@dataclass
class Model:
    """The slow, plain truth: files by path, and the folders that exist."""

    files: dict[str, bytes] = field(default_factory=lambda: dict(START))
    folders: set[str] = field(default_factory=lambda: {"d", "d/e"})

    def copy(self) -> Model:
        return Model(dict(self.files), set(self.folders))

    def write(self, path: str, data: bytes) -> type[OSError] | None:
        parts = path.split("/")
        above = ["/".join(parts[:count]) for count in range(1, len(parts))]
        for folder in above:
            if folder in self.files:
                return NotADirectoryError
            self.folders.add(folder)
        if path in self.folders:
            return IsADirectoryError
        self.files[path] = data
        return None

    def delete(self, path: str) -> None:
        gone = [name for name in (*self.files, *self.folders) if f"{name}/".startswith(f"{path}/")]
        for name in gone:
            self.files.pop(name, None)
            self.folders.discard(name)

    def names(self, folder: str) -> list[str]:
        inside = [f"{name}/" for name in self.folders] + list(self.files)
        cut = len(folder) + 1 if folder else 0
        return sorted(
            name[cut:]
            for name in inside
            if name.startswith(f"{folder}/" if folder else "")
            and "/" not in name[cut:].rstrip("/")
            and name[cut:]
        )

    def diff(self) -> dict[str, bytes | None]:
        paths = {*START, *self.files}
        return {p: self.files.get(p) for p in paths if START.get(p) != self.files.get(p)}


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from(PATHS), st.sampled_from((b"", b"ex\n", b"1"))),
        st.tuples(st.just("delete"), st.sampled_from(PATHS), st.just(b"")),
        st.tuples(st.just("move"), st.sampled_from(PATHS), st.just(b"")),
        st.tuples(
            st.sampled_from(("fork", "snapshot", "restore", "touch")), st.just(""), st.just(b"")
        ),
    ),
    max_size=9,
)


class History:
    """A workspace and its model, kept in step."""

    def __init__(self, workspace: BubblewrapWorkspace) -> None:
        self.workspace = workspace
        self.model = Model()
        self.kept: list[tuple[str, Model]] = []
        self.others: list[tuple[BubblewrapWorkspace, Model]] = []

    async def shell(self, script: str) -> None:
        result = await self.workspace.exec(["sh", "-c", script], timeout=60)
        assert result.exit_code == 0, result.stderr

    async def write(self, path: str, data: bytes) -> None:
        expected = self.model.write(path, data)
        if expected is None:
            await self.workspace.write(path, data)
        else:
            with pytest.raises(expected):
                await self.workspace.write(path, data)

    async def move(self) -> None:
        if "d" in self.model.folders and "m" not in self.model.folders:
            self.rename("d", "m")
            await self.shell("mv d m")

    async def apply(self, name: str, path: str, data: bytes) -> None:
        match name:
            case "write":
                await self.write(path, data)
            case "delete":
                self.model.delete(path)
                await self.shell(f"rm -rf '{path}'")
            case "move":
                await self.move()
            case "touch":
                await self.shell("find . -type f -exec chmod 600 {} + -exec touch {} +")
            case "fork":
                self.others.append((self.workspace, self.model.copy()))
                self.workspace = await self.workspace.fork()
                self.kept = []
            case "snapshot":
                self.kept.append((await self.workspace.snapshot(), self.model.copy()))
            case _:
                if self.kept:
                    snapshot, model = self.kept[len(self.kept) // 2]
                    self.model = model.copy()
                    await self.workspace.restore(snapshot)

    def rename(self, old: str, new: str) -> None:
        def moved(name: str) -> str:
            return new + name[len(old) :] if f"{name}/".startswith(f"{old}/") else name

        self.model.files = {moved(name): data for name, data in self.model.files.items()}
        self.model.folders = {moved(name) for name in self.model.folders}


async def check(workspace: BubblewrapWorkspace, model: Model) -> None:
    diff = await workspace.diff()
    assert dict(diff.files) == model.diff()
    assert diff.special == ()
    for folder in ("", *sorted(model.folders)):
        assert await workspace.list(folder or ".") == model.names(folder)
    for path, data in model.files.items():
        assert await workspace.read(path) == data


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(operations=OPERATIONS)
def test_histories_equal_the_model(
    sandbox: BubblewrapSandbox, image: Image, operations: list[tuple[str, str, bytes]]
) -> None:
    async def main() -> None:
        history = History(await sandbox.create(image))
        for operation in operations:
            await history.apply(*operation)
        await check(history.workspace, history.model)
        for workspace, model in history.others:
            await check(workspace, model)
        for workspace in (history.workspace, *(other for other, _ in history.others)):
            await workspace.close()

    asyncio.run(main())
    assert _bytes(image.root) == START


def _bytes(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_a_layer_is_measured_without_following_links(tmp_path: Path) -> None:
    layer, outside = tmp_path / "layer", tmp_path / "outside"
    (layer / "a" / "b").mkdir(parents=True)
    outside.mkdir()
    (outside / "large").write_bytes(bytes(4 << 20))
    (layer / "a" / "f").write_bytes(bytes(100_000))
    (layer / "a" / "b" / "out").symlink_to(outside)
    (layer / "up").symlink_to("../outside/large")
    shut = layer / "shut"
    shut.mkdir()
    (shut / "g").write_bytes(bytes(50_000))
    paths = [path.lstat() for path in layer.rglob("*")]
    shut.chmod(0)
    assert layer_bytes(layer) == sum(info.st_blocks * 512 + 1024 for info in paths)
    assert shut.stat().st_mode & 0o777 == 0
    shut.chmod(0o700)
