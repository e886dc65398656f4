"""Trajectories survive storage token for token; a store survives being killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.records import (
    Event,
    EventKind,
    Outcome,
    PolicyVersion,
    Segment,
    StopReason,
    Trajectory,
    Turn,
    Usage,
    Verdict,
)
from etude.store import RolloutKey, RunStore, decode_trajectory, encode_trajectory

GOLDEN = Path(__file__).parents[1] / "golden"


def segment(rng: np.random.Generator, prompt: int, spans: list[tuple[int, bool]]) -> Segment:
    count = sum(n for n, _ in spans)
    mask = np.concatenate([np.full(n, sampled) for n, sampled in spans] or [np.zeros(0, bool)])
    logprobs = np.where(mask, -rng.random(count), np.nan).astype(np.float32)
    versions = np.where(mask, PolicyVersion(1, 7).encode(), -1).astype(np.int64)
    turns, at = [], 0
    for n, sampled in spans:
        if sampled and n:
            turns.append(Turn(at, at + n))
        at += n
    return Segment(
        prompt_ids=rng.integers(0, 49152, prompt).astype(np.int32),
        completion_ids=rng.integers(0, 49152, count).astype(np.int32),
        mask=mask.astype(bool),
        logprobs=logprobs,
        policy_versions=versions,
        turns=tuple(turns),
        temperature=0.7,
        experts=rng.integers(0, 8, (prompt + count, 2, 2)).astype(np.uint16) if count % 2 else None,
    )


def trajectory(seed: int = 0) -> Trajectory:
    rng = np.random.default_rng(seed)
    return Trajectory(
        session_id="s1",
        task_id="toolz.expression.0001",
        segments=(
            segment(rng, 5, [(3, True), (2, False), (4, True)]),
            segment(rng, 2, [(3, True), (2, False)]),
        ),
        events=(
            Event(EventKind.USER, -1, {"text": 'a "quoted" line\n\u00e9\U0001f600'}),
            Event(EventKind.STOP, 2, {"reason": "finished", "detail": ""}),
        ),
        usage=Usage(1, 2, 3, 4, 5, 6, 7, 8, 0.5),
        outcome=Outcome(
            StopReason.FINISHED,
            "",
            {"a.py": "x = 1\r\n", "b.py": None},
            True,
            Verdict(1.0, "all pass", {"t::x": "passed"}, ("flag",), 0.25),
            1.1,
        ),
    )


def assert_same(a: Trajectory, b: Trajectory) -> None:
    assert (a.session_id, a.task_id, a.events, a.usage, a.outcome) == (
        b.session_id,
        b.task_id,
        b.events,
        b.usage,
        b.outcome,
    )
    assert len(a.segments) == len(b.segments)
    for x, y in zip(a.segments, b.segments, strict=True):
        assert x.turns == y.turns and x.temperature == y.temperature
        for name in ("prompt_ids", "completion_ids", "mask", "logprobs", "policy_versions"):
            left, right = getattr(x, name), getattr(y, name)
            assert left.dtype == right.dtype and left.tobytes() == right.tobytes(), name
        assert (x.experts is None) == (y.experts is None)
        if x.experts is not None and y.experts is not None:
            assert x.experts.shape == y.experts.shape and (x.experts == y.experts).all()


@given(st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_round_trip(seed: int) -> None:
    one = trajectory(seed)
    assert_same(one, decode_trajectory(encode_trajectory(one)))


def test_golden_file_is_still_read() -> None:
    """The stored format is a contract: a file written by the first release loads for ever."""
    assert_same(trajectory(), decode_trajectory((GOLDEN / "trajectory-1.zst").read_bytes()))


def test_any_flipped_byte_is_noticed() -> None:
    data = encode_trajectory(trajectory())
    for at in range(0, len(data), 7):
        broken = bytearray(data)
        broken[at] ^= 0x10
        with pytest.raises(ValueError):
            decode_trajectory(bytes(broken))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", np.zeros(9, np.float32)),
        ("policy_versions", np.zeros(9, np.int64)),
        ("mask", np.ones(8, bool)),
        ("turns", (Turn(0, 9),)),
    ],
)
def test_segment_refuses_what_does_not_agree(field: str, value: object) -> None:
    good = trajectory().segments[0]
    values = {
        name: getattr(good, name)
        for name in (
            "prompt_ids",
            "completion_ids",
            "mask",
            "logprobs",
            "policy_versions",
            "turns",
        )
    }
    Segment(**values)
    with pytest.raises(ValueError, match="segment"):
        Segment(**{**values, field: value})


@given(st.integers(0, 2**30), st.integers(0, 2**32 - 1))
def test_policy_versions_order_and_decode(lineage: int, n: int) -> None:
    version = PolicyVersion(lineage, n)
    assert PolicyVersion.decode(version.encode()) == version
    assert PolicyVersion(lineage + 1, 0).encode() > version.encode()


def test_store_keeps_a_rollout_once(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    key = RolloutKey("practice", 3, "t", 1)
    store.put_rollout(key, trajectory())
    with pytest.raises(KeyError):
        store.put_rollout(key, trajectory())
    store.close()
    again = RunStore(tmp_path)
    assert_same(again.rollout(key), trajectory())
    (row,) = again.rollouts("practice")
    assert row.key == key and row.score == 1.0 and row.reward == 1.1 and row.sampled == 10
    assert again.rollouts("practice", 2) == []


def test_state_and_metrics(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    assert store.get("a") is None
    store.put("a", [1, {"b": 2}])
    for step in range(4):
        store.put_metrics("p", step, {"loss": step / 2, "step": 99})
    store.put_metrics("p", 1, {"loss": 7.0})
    store.drop_metrics("p", 3)
    store.close()
    again = RunStore(tmp_path)
    assert again.get("a") == [1, {"b": 2}]
    assert [(row["step"], row["loss"]) for row in again.metrics("p")] == [(0, 0), (1, 7), (2, 1)]


def test_sigkill_loses_no_stored_rollout(tmp_path: Path) -> None:
    """A writer is killed in mid-stream; every rollout that it reported as stored is there."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path\n"
        "from test_store import trajectory\n"
        "from etude.store import RunStore, RolloutKey\n"
        "store = RunStore(Path(sys.argv[1]))\n"
        "for i in range(100000):\n"
        "    store.put_rollout(RolloutKey('p', 0, 't', i), trajectory(i)); print(i, flush=True)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    told = [int(child.stdout.readline()) for _ in range(20)]
    os.kill(child.pid, signal.SIGKILL)
    told += [int(line) for line in child.stdout if line.endswith("\n")]
    child.wait(10)
    store = RunStore(tmp_path)
    rows = store.rollouts("p")
    assert {row.key.sample for row in rows} >= set(told)
    for row in rows:
        assert_same(store.rollout(row.key), trajectory(row.key.sample))
