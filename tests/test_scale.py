"""More than one machine and long runs: the simulation in small, and the README's manifest for Kubernetes.

    python -m pytest tests/test_scale.py
"""
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import extract
import simulate

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def small():
    """2,000 samples, whose S3 takes a twentieth of what its GPUs make."""
    command = [sys.executable, ROOT / "tests/simulate.py", "--samples", "2000", "--tokens", "4096", "--bandwidth", "0.1",
               "--stage-gb", "6", "--speedup", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_simulated_batch_has_its_marker_and_its_key(small):
    assert small["batches"] == small["markers"] == small["keys"] == small["markers_from_listing"]
    assert small["batches"] >= small["tokens"] / 4096 > 0.98 * small["batches"]


def test_a_run_that_s3_holds_back_waits_at_the_brake_and_takes_what_s3_takes(small):
    assert small["waited_percent"] > 0 and small["stage_percent"] <= 100
    assert small["hours"] >= 0.95 * small["hours_s3_alone"] > 2 * small["hours_gpus_alone"]


@pytest.mark.parametrize("other, balanced", [(4, False), (2, False), (3, True), (5, True)])
def test_a_number_of_shards_without_a_common_factor_balances_what_slow_ones_left(other, balanced):
    left = simulate.left_over(1000, [1, 2 / 3, 1, 2 / 3], other)
    assert sum(left) == 166 and (max(left) - min(left) <= 3) == balanced


def test_the_manifest_for_kubernetes_gives_each_pod_its_shard(monkeypatch):
    text = (ROOT / "README.md").read_text().split("```yaml\n")[1].split("```")[0]
    job = yaml.safe_load(text)["spec"]
    command = job["template"]["spec"]["containers"][0]["command"]
    for index in (0, job["completions"] - 1):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        o = extract.parse_options(command[2:], extract.Options, "")
        extract.own_shard(o)
        assert (o.shard, o.num_shards, o.resume_from_output, o.shards_here) == (index, job["completions"], True, 1)


def test_staging_must_hold_two_batches_of_the_shards_that_share_it(new, place):
    run = new(place.few, args=["--tokens", 16384])
    assert run.run(shard=9998, of=9999) == 2 and "--shards-here" in run.log(9998), run.log(9998)
    assert run.run("--shards-here", 4, shard=9998, of=9999) == 0, run.log(9998)
