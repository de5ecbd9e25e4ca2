"""Runs on a GPU are cases of their own in bench.four_bits. No run is made here.

Read next: bench/four_bits.py.
"""

from bench import common, four_bits, runs, tables
from nanogrpo.config import Config


def test_runs_on_different_devices_are_never_in_one_curve(tiny_base, tmp_path, monkeypatch):
    devices = []

    def run(side: str, cfg: Config, threads: int) -> dict:
        devices.append(cfg.device)
        held_out = {str(step): 0.5 for step in range(0, cfg.max_steps + 1, 2)}
        size = {"peak_bytes_above_libraries": 1 << 30}
        return {"held_out": held_out, "reward": [1.0, 1.5], "seconds": [1.0, 1.0], **size}

    monkeypatch.setattr(runs, "run", run)
    argv = ["--base", str(tiny_base), "--out", str(tmp_path), "--picture", str(tmp_path / "p.png")]
    argv += ["--seeds", "2", "--steps", "2", "--real-seeds", "0"]
    for device in ("cpu", "cuda", "cuda"):  # what has a record is not repeated
        four_bits.main([*argv, "--device", device])
    assert devices == ["cpu"] * 4 + ["cuda"] * 4
    records = common.read("four_bits", tmp_path)
    assert [r["device"] for r in records] == devices
    lines = tables.BENCHES["four_bits"].lines(records)
    assert [line[:2] for line in lines] == [
        (f"tiny{where}, {side}", "2 × 2 steps")
        for where in ("", " on a GPU")
        for side in four_bits.SIDES
    ]
    assert (tmp_path / "p.png").exists()
