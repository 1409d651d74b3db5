"""A run of 914,000 samples on one machine without a GPU: what a long run costs besides its GPUs.

    python tests/simulate.py                     (make simulate)   minutes; --samples 20000 takes half a minute

Real: the data (pre-tokenized rows, lengths log-normal around 450 tokens), the plan, batch numbers and counts, staging,
brake, upload queue, markers, progress, status, listings through a real S3 server. Scaled: a token's states have 16
bytes instead of 51,200, so staging and bandwidths shrink by as much as files do, and time runs --speedup times as
fast. Fake: the forward waits as long as a GPU would take, and the object store takes files at its
bandwidth and keeps their sizes, not their bytes. The last line is one JSON object; hours and GB in the table are those of
the real run.
"""
import argparse
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import export
import extract
import monitor
import tiny
import warmup
from s3 import S3Server

REAL_BYTES = 5 * 5120 * 2  # of a token: five layers of the 27B in bf16
HIDDEN = 8                 # here one layer of 8
SHARDS, UPLOADS = 4, 2


# ---- inputs

def make_data(path, samples):
    """`samples` rows of token ids and masks: lengths log-normal, mean about 450, from 16 to 4,096."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(math.log(450) - 0.9 ** 2 / 2, 0.9, samples)).clip(16, 4096).astype(np.int32)
    schema = pa.schema({"input_ids": pa.list_(pa.uint16()), "loss_mask": pa.list_(pa.uint8())})
    with pq.ParquetWriter(path, schema) as out:
        for part in np.array_split(lengths, max(1, samples // 10_000)):
            bounds = np.concatenate([[0], np.cumsum(part)]).astype(np.int32)
            ids = rng.integers(0, 16, bounds[-1]).astype(np.uint16)
            mask = (np.arange(bounds[-1]) - np.repeat(bounds[:-1], part) >= np.repeat(part, part) // 2).astype(np.uint8)
            columns = [pa.ListArray.from_arrays(bounds, pa.array(x)) for x in (ids, mask)]
            out.write_table(pa.table(dict(zip(schema.names, columns)), schema))


def make_model(path):
    """What the plan reads of a model: config and the weights' headers, with a hidden size of 8."""
    tiny.make_model(path)
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["hidden_size"] = HIDDEN
    (path / "config.json").write_text(json.dumps(config))


# ---- a shard whose GPU and object store are clocks

class Store(export.Local):
    """An object store that takes `bandwidth` bytes per second from all shards together, and keeps sizes alone.

    busy_until: a number that the shards share."""

    def __init__(self, out, bandwidth, busy_until):
        super().__init__(out)
        self.bandwidth, self.busy_until = bandwidth, busy_until

    def put(self, path, key, size, deadline):
        if not key.startswith("batches/"):
            return super().put(path, key, size, deadline)
        with self.busy_until.get_lock():
            self.busy_until.value = until = max(self.busy_until.value, time.monotonic()) + size / self.bandwidth
        time.sleep(max(0, until - time.monotonic()))
        (self.root / key).parent.mkdir(parents=True, exist_ok=True)
        with open(self.root / f"{key}.tmp", "wb") as f:
            f.truncate(size)
        os.replace(self.root / f"{key}.tmp", self.root / key)


class Clock:
    """An extract.Extractor that computes nothing, at so many tokens per second; all shards begin together."""

    def __init__(self, o, plan, decoder):
        self.device, self.rate = torch.device("cpu"), Clock.rate
        Clock.together.wait(120)

    def batch(self, ids, slot):
        began, n = time.time(), sum(map(len, ids))
        slot.device["range"][:n] = torch.tensor([0.0, 1.0])
        time.sleep(max(0, n / self.rate - (time.time() - began)))
        slot.seconds = time.time() - began
        return []


class Sooner:
    """An event for which a shard waits as much less as time runs faster."""

    def __init__(self, event, speedup):
        self.event, self.speedup, self.is_set = event, speedup, event.is_set

    def wait(self, seconds):
        return self.event.wait(max(0.002, seconds / self.speedup))


def shard(flags, log, together, busy_until, rate, bandwidth, room, speedup):
    """One process: extract.py's main with those two, and staging of `room` bytes."""
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    Clock.rate, Clock.together = rate, together
    extract.Extractor, extract.load_decoder, extract.warmup.prepare = Clock, lambda *_: None, lambda _: {}
    extract.open_output = lambda out, *_: Store(out, bandwidth, busy_until)
    write = extract.write_batch
    extract.write_batch = lambda *args: write(*args[:5], Sooner(args[5], speedup), *args[6:])

    def of_staging(path):
        used = sum(map(warmup.size_of, Path(path).glob("*/batch_*")))
        return used, room - used
    extract.monitor.room = of_staging
    sys.exit(extract.main(flags))


# ---- measuring

def timed(action):
    began = time.perf_counter()
    result = action()
    return result, time.perf_counter() - began


def watched(command, log):
    """Runs a command -> (exit code, seconds, most bytes of memory of it and its children, shared pages once)."""
    began, most = time.perf_counter(), 0
    with open(log, "ab") as out:
        process = psutil.Popen(command, stdout=out, stderr=out)
        while process.poll() is None:
            try:
                family = [process, *process.children(recursive=True)]
                most = max(most, sum(p.memory_full_info().pss for p in family))
            except psutil.Error:
                pass
            time.sleep(0.5)
    return process.returncode, time.perf_counter() - began, most


def usage(folder):
    """(bytes on disk, files) below a folder."""
    stats = [f.stat() for f in Path(folder).rglob("*")]
    return sum(s.st_blocks * 512 for s in stats), len(stats)


def extraction(flags, folder, a, scale, plan):
    """The shards, to their end. Returns what was seen of them."""
    rate, bandwidth = a.rate * a.speedup, a.bandwidth * 1e9 / scale * a.speedup
    context, stage = multiprocessing.get_context("forkserver"), folder / "stage"
    os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    context.set_forkserver_preload(["simulate"])
    room, together, busy_until = a.stage_gb * 1e9 / scale, context.Barrier(SHARDS), context.Value("d", 0)
    processes = [context.Process(target=shard, args=(
        [*flags, "--shard", str(i)], folder / f"shard_{i}.log", together, busy_until, rate, bandwidth, room,
        a.speedup)) for i in range(SHARDS)]
    began = time.monotonic()
    for process in processes:
        process.start()
    most, first = 0, None
    while any(p.is_alive() for p in processes):
        used = sum(map(warmup.size_of, stage.glob("*/batch_*")))
        most = max(most, used)
        first = first or (time.monotonic() if used else None)
        if any(p.exitcode for p in processes):  # the others would run for nothing
            [p.terminate() for p in processes]
        time.sleep(0.02)
    seconds, codes = time.monotonic() - (first or began), [p.exitcode for p in processes]
    if any(codes):
        sys.exit(f"shards ended with {codes}: {folder}/shard_*.log")
    progress = [monitor.read_json(folder / f"work/progress_shard_{i}.json") for i in range(SHARDS)]
    ends = [p["updated_at"] for p in progress]
    batch_s = plan.tokens / min(rate, bandwidth / SHARDS / (plan.counts["bytes"] / plan.counts["tokens"]))
    return SimpleNamespace(
        hours=seconds * a.speedup / 3600, most=most / room, spread=(max(ends) - min(ends)) * a.speedup,
        spread_batches=(max(ends) - min(ends)) / batch_s,
        waited=sum(p["waited_for_room_s"] for p in progress) / SHARDS / seconds, batches=sum(p["batch"] for p in progress))


def left_over(batches, done, other):
    """Batches left for each of `other` shards, when of each of len(done) shards that share was done."""
    n, left = len(done), np.zeros(other, int)
    for i, share in enumerate(done):
        mine = range(i, batches, n)
        for batch in mine[round(share * len(mine)):]:
            left[batch % other] += 1
    return left.tolist()


def simulate(a, folder):
    say, kept = lambda text: print(text, file=sys.stderr, flush=True), {}
    data, model, work, out = (folder / name for name in ("data.parquet", "model", "work", "s3/b/run"))
    make_model(model)
    _, seconds = timed(lambda: make_data(data, a.samples))
    say(f"{a.samples:,} rows, {data.stat().st_size / 1e6:,.0f} MB, made in {seconds:.0f} s; planning")
    flags = [str(x) for x in (
        "--model", model, "--data", data, "--out", out, "--work", work, "--stage", folder / "stage",
        "--num-shards", SHARDS, "--layers", "0", "--tokens", a.tokens, "--uploads", UPLOADS)]
    code, seconds, memory = watched([sys.executable, ROOT / "extract.py", *flags, "--plan-only"], folder / "plan.log")
    if code:
        sys.exit(f"planning ended with {code}: {(folder / 'plan.log').read_text()[-2000:]}")
    plan = extract.Plan(work / "plan")
    c = plan.counts
    scale = REAL_BYTES / (c["bytes"] / c["tokens"])  # of bytes, and so of staging and bandwidths
    kept |= {"samples": c["samples"], "tokens": c["tokens"], "batches": c["batches"],
             "full_percent": 100 * c["tokens"] / c["batches"] / plan.tokens, "terabytes": c["tokens"] * REAL_BYTES / 1e12,
             "plan_s": seconds, "plan_memory_gb": memory / 1e9}
    kept["plan_disk_gb"], kept["plan_load_s"] = usage(work / "plan")[0] / 1e9, timed(lambda: extract.Plan(work / "plan"))[1]
    say(f"planned in {seconds:.0f} s: {c['batches']:,} batches; extracting, {a.speedup:.0f} times as fast as a GPU")

    seen = extraction(flags, folder, a, scale, plan)
    kept |= {"hours": seen.hours, "hours_gpus_alone": c["tokens"] / a.rate / SHARDS / 3600,
             "hours_s3_alone": kept["terabytes"] * 1e3 / a.bandwidth / 3600,
             "stage_percent": 100 * seen.most, "waited_percent": 100 * seen.waited,
             "spread_s": seen.spread, "spread_batches": seen.spread_batches, "markers": seen.batches}

    say("looking at markers, listings and status")
    kept["marker_ms"] = 1e3 * timed(lambda: [extract.mark(work, plan, b, 0, {}) for b in range(200)])[1] / 200
    kept["markers_read_s"] = timed(lambda: extract.marked(work))[1]
    local = export.Local(str(out))
    kept["listing_local_s"] = timed(lambda: local.sizes("batches/"))[1]
    shutil.copytree(work / "plan", folder / "fresh/plan")
    (folder / "fresh/markers").mkdir()
    _, kept["markers_from_listing_s"] = timed(lambda: extract.reconcile(plan, folder / "fresh", local, range(c["batches"])))
    for f in (out / "batches").iterdir():  # that server would read all bytes to list a key
        os.truncate(f, 0)
    with S3Server(folder / "s3") as server:
        os.environ |= server.env
        found, kept["listing_s3_s"] = timed(lambda: export.open_output("s3://b/run").sizes("batches/"))
    kept["keys"], kept["markers_from_listing"] = len(found), len(extract.marked(folder / "fresh"))
    again = watched([sys.executable, ROOT / "extract.py", *flags, "--shard", "0"], folder / "again.log")
    kept["restart_s"], kept["shard_memory_gb"] = again[1], again[2] / 1e9
    kept["work_gb"], kept["work_files"] = usage(work)[0] / 1e9, usage(work)[1]
    shown = monitor.read_json(work / "progress_shard_0.json")
    for i in range(32):
        (work / f"progress_shard_{i}.json").write_text(json.dumps(
            shown | {"shard": i, "num_shards": 32, "updated_at": time.time(), "state": "running", "exit_code": None}))
    status = [sys.executable, ROOT / "monitor.py", "--work", work, "--stage", folder]
    kept["status_s"] = min(timed(lambda: subprocess.run(status, capture_output=True, check=True))[1] for _ in range(3))

    # two of four nodes at 2/3 of the speed: what they leave when the others are done, by the number of shards
    kept["left_of_4"] = left_over(c["batches"], [1, 1, 2 / 3, 2 / 3], 4)
    kept["left_as_3"] = left_over(c["batches"], [1, 1, 2 / 3, 2 / 3], 3)
    return kept


TABLE = """
the plan         {samples:,} samples, {tokens:,} tokens, {batches:,} batches, {full_percent:.1f} % full: {terabytes:.1f} TB
  made in        {plan_s:.0f} s, {plan_memory_gb:.2f} GB of memory at most, {plan_disk_gb:.2f} GB on disk; opened in {plan_load_s:.2f} s
the run          {hours:.2f} h; the GPUs alone would take {hours_gpus_alone:.2f} h, S3 alone {hours_s3_alone:.2f} h
  staging        {stage_percent:.0f} % full at most; shards waited for room {waited_percent:.0f} % of the time
  the end        shards ended within {spread_s:.0f} s of each other, {spread_batches:.1f} batches
markers          {markers:,}; {marker_ms:.2f} ms to write one, {markers_read_s:.3f} s to find all
listing          {keys:,} keys: {listing_s3_s:.1f} s from S3, {listing_local_s:.2f} s locally; {markers_from_listing:,} markers from it in {markers_from_listing_s:.1f} s
a start          {restart_s:.1f} s where all is done, {shard_memory_gb:.2f} GB of memory
status           {status_s:.2f} s with 32 shards and {markers:,} markers
work directory   {work_gb:.2f} GB, {work_files:,} files
another N        two of four nodes at 2/3 of the speed leave {left_of_4} batches of 4 shards, {left_as_3} of 3
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=914_000, help="rows of data (default 914,000)")
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens of a batch (default 32,768)")
    parser.add_argument("--rate", type=float, default=12_405, help="tokens/s of a GPU (default 12,405)")
    parser.add_argument("--bandwidth", type=float, default=1.25, help="GB/s of S3 for all shards (default 1.25)")
    parser.add_argument("--stage-gb", type=float, default=128, help="GB of staging (default 128)")
    parser.add_argument("--speedup", type=float, default=60, help="how much faster time runs (default 60)")
    parser.add_argument("--dir", type=Path, help="where to do it (default: a temporary directory)")
    a = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="simulate-", dir=a.dir))
    try:
        kept = simulate(a, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(TABLE.format(**kept))
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in kept.items()}))


if __name__ == "__main__":
    main()
