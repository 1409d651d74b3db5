"""Shards of extract.py as real processes that start in a blink: forked from one that has imported everything.

    shards = Shards()
    process = shards.start(["--model", ...], log, {"EXTRACT_FAULT": "marked:2"})
    process.kill(), process.join(), process.exitcode

A shard ends with the process that started it. Run keeps the directories of one run together, and until() waits.
"""
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from monitor import read_json

ROOT = Path(__file__).resolve().parent.parent


def shard(flags, log, env, cgroup):
    """What such a process does: its own environment and log, then extract.py's main."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no shard outlives the fork server
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(env)
    if cgroup:
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    import extract
    sys.exit(extract.main(flags))


class Shards:
    """Starts shards; `env` is the whole environment of one, os.environ by default."""

    def __init__(self):
        self.context, self.processes = multiprocessing.get_context("forkserver"), []
        os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
        self.context.set_forkserver_preload(["extract", "shards", "transformers.models.qwen3_5.modeling_qwen3_5"])

    def start(self, flags, log, env=None, cgroup=None, **more):
        env = dict(env or os.environ) | more
        process = self.context.Process(target=shard, args=([str(x) for x in flags], str(log), env, cgroup))
        process.start()
        self.processes.append(process)
        return process

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()


def code(process, seconds=400):
    """Exit code of a shard; fails when it does not end."""
    process.join(seconds)
    assert process.exitcode is not None, f"it still runs after {seconds} s"
    return process.exitcode


def until(condition, process=None, seconds=300):
    """The first true value of condition(); fails after `seconds`, which bound a failure and not a speed, or when
    `process`, a shard or a Popen, ends before. The more a question costs, the less often it is asked."""
    end = time.monotonic() + seconds
    while (asked := time.monotonic()) < end:
        ended = process and (process.poll() if hasattr(process, "poll") else process.exitcode)
        if value := condition():  # what was waited for may have come just before the end
            return value
        said = getattr(process, "stdout", None) if ended is not None else None
        assert ended is None, f"the process ended with {ended}: {said and said.read()}"
        time.sleep(max(0.01, 2 * (time.monotonic() - asked)))
    raise AssertionError(f"nothing after {seconds} s")


class Run:
    """The directories of one run, whose shards are started as often as a test likes."""

    def __init__(self, shards, folder, model, data, stage, out=None, env=None, args=()):
        self.shards, self.folder, self.stage, self.args = shards, folder, stage, args
        self.work, self.out = folder / "work", out or folder / "out"
        self.env, self.model, self.data, self.begun = env, model, data, {}

    def log_file(self, shard=0):
        return self.folder / f"shard_{shard}.log"

    def flags(self, *args, shard=0, of=1, work=None):
        return ["--model", self.model, "--data", self.data, "--out", self.out, "--work", work or self.work,
                "--stage", self.stage, "--shard", shard, "--num-shards", of, "--tokens", 1024, "--max-len", 300,
                "--compute-dtype", "fp32", "--dtype", "fp32", *self.args, *args]

    def start(self, *args, shard=0, of=1, work=None, **more):
        log = self.log_file(shard)
        self.begun[shard] = log.stat().st_size if log.exists() else 0
        return self.shards.start(self.flags(*args, shard=shard, of=of, work=work), log, self.env, **more)

    def run(self, *args, **how):
        return code(self.start(*args, **how))

    def log(self, shard=0):
        """What the latest start of a shard said."""
        log = self.log_file(shard)
        return log.read_bytes()[self.begun.get(shard, 0):].decode() if log.exists() else ""

    def progress(self, shard=0):
        return read_json(self.work / f"progress_shard_{shard}.json") or {}

    def markers(self):
        """{batch: its marker}"""
        return {int(f.name[6:]): json.loads(f.read_text()) for f in (self.work / "markers").glob(".done_*")}

    def staged(self):
        return sorted(self.stage.glob("*/batch_*.safetensors"))

    def fingerprint(self):
        return json.loads((self.work / "plan/plan.json").read_text())["fingerprint"]


def objects(folder):
    """{name: bytes} of an output's batches."""
    return {f.name: f.read_bytes() for f in (Path(folder) / "batches").iterdir()}


def times(folder):
    """{name: when it was written} of an output's batches, without what a server has half received."""
    return {f.name: f.stat().st_mtime_ns for f in (Path(folder) / "batches").glob("batch_*")}
