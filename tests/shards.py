"""Shards of extract.py as real processes that start in a blink: forked from one that has imported everything.

    shards = Shards()
    process = shards.start(["--model", ...], log, {"EXTRACT_FAULT": "marked:2"})
    process.kill(), process.join(), process.exitcode

A shard ends with the process that started it.
"""
import ctypes
import multiprocessing
import os
import signal
import sys
from pathlib import Path

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
