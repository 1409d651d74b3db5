"""Status of an extraction run, read from its work directory. Imports no torch and starts in a blink.

    python monitor.py --work work                   a row a shard, the box, one ETA
    python monitor.py --work work --watch 2         the same, redrawn until Ctrl-C
    python monitor.py --work work --json            one object, for scripts
    python monitor.py --work work --markdown        writes work/STATUS.md
    python monitor.py --follow --num-shards 4       progress until the shards end, then their worst exit code
    python monitor.py --work work --web             a page with curves, and /metrics for Prometheus
    python monitor.py --work work --plot run.png    the curves as a picture
    python monitor.py --work work --snapshot        keeps status, scripts, versions, curves in snapshots/TIME

It reads plan/plan.json, progress_shard_N.json (the shard's own word, at least every 5 s while it lives) and
pids/shard_N.pid (without one, or of another host, a shard lives while its progress is fresh). Pids are
reused: one counts only while its process runs extract.py on this very work directory. Where there is a
slurm.json, of `make slurm`, Slurm is asked, too. The curves come from metrics.jsonl, to which one of the
shards adds a line every 5 s, watched or not; it stays below 2,000.

--json: sums over all shards (rates: of running ones); `eta_hours`, the slowest shard's, null if unknown;
`state`: done (every shard is), else running (any is LIVE), else failed (any is BROKEN), else stopped; `box`,
in bytes; `excluded`: of the processed samples those that --skip-bad or a lack of memory left as zeros;
`shards`: each progress file with pid, alive, age_s, condition (new pending starting running stale
unreadable done stopped failed refused gone) and message (words, empty when all is well); `summary`, a
sentence; `bottleneck` (gpu host upload planning, null while unclear) and the `time_spent` that names it: the
share of the shards' last 10 minutes in the forward pass, copying and writing, waiting for room in staging,
getting ready.

Exit codes: 0; 2 without a work directory; with --follow the worst of the shards' (1, then 2, 3, 0; a vanished
process counts as 1), or 130 after Ctrl-C, which leaves the shards running.
"""
import argparse
import collections
import contextlib
import datetime
import fcntl
import functools
import itertools
import json
import math
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import psutil

STALE_S = 15        # a shard refreshes its progress at least every 5 s, whatever its state
GRACE_S = 10        # how long a shard that was just launched may have neither pid file nor progress
FOLLOW_LINE_S = 10  # between the summary lines of --follow where the output is no terminal
MAX_SHARDS = 4096
RECORD_S, MAX_POINTS = 5, 2000  # metrics.jsonl: a point so often, so many kept
WINDOW_S = 600       # the time over which a bottleneck is named
ASSUMED_RATE = 12_600  # tokens/s of Qwen3.6-27B, layers up to 61, on one H200 (tests/BENCH.md)
LIVE, BROKEN = ("pending", "starting", "running", "stale", "unreadable"), ("failed", "refused", "gone")
ENDS = {0: "done", 2: "refused", 3: "stopped"}  # what exit codes mean; every other one: failed
BEFORE = {  # what runs before shards do: the beginning of the summary is the state in words
    "plan": "Planning: the data is being tokenized",
    "warmup": "Warming up: kernels are compiled and proved before the shards start",
    "launch": "Starting: no shard runs yet"}
CALM = ("", "starting", "pending")  # messages that say nothing bad
ILL = {"failed": "failed", "refused": "was refused", "gone": "is gone", "stale": "is silent",
       "unreadable": "cannot be read"}
COUNTS = ("processed skipped excluded total batch total_batches tokens uploaded pending_uploads "
          "failed_uploads staged_bytes waited_for_room_s uploaded_bytes").split()  # 0 when absent
RATES = "rate_per_sec tokens_per_sec upload_bytes_per_sec gpu_busy host_busy".split()  # over the last 60 s
MEASURES = [*RATES, "eta_hours", "updated_at"]  # None when unknown
START = "make extract MODEL=... DATA=... OUT=..."
COLOURS = "#3b82f6 #f59e0b #10b981 #ef4444 #8b5cf6 #06b6d4 #ec4899 #84cc16".split()
SHARD_METRICS = {  # Prometheus' name: key of a shard
    "processed_samples_total": "processed", "processed_tokens_total": "tokens",
    "uploaded_batches_total": "batch", "uploaded_bytes_total": "uploaded_bytes",
    "waited_for_room_seconds_total": "waited_for_room_s", "planned_samples": "total",
    "planned_batches": "total_batches", "pending_uploads": "pending_uploads", "staged_bytes": "staged_bytes",
    "failed_uploads": "failed_uploads", "excluded_samples": "excluded", "progress_age_seconds": "age_s",
    "samples_per_second": "rate_per_sec", "tokens_per_second": "tokens_per_sec", "eta_seconds": "eta_hours",
    "upload_bytes_per_second": "upload_bytes_per_sec", "forward_busy_ratio": "gpu_busy",
    "host_busy_ratio": "host_busy"}


# ---- the shard's side: what extract.py writes and status reads

def write_atomic(path, data):
    """str or bytes -> path: whole, or not at all."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        tmp.write_bytes(data if isinstance(data, bytes) else data.encode())
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


def say(text):
    """A line for the log; a full disk under it ends no run."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        os.write(1, f"[{time.strftime('%H:%M:%S')}] {text}\n".encode(errors="replace"))


def cgroup_room(groups=Path("/sys/fs/cgroup"), own=Path("/proc/self/cgroup")):
    """Bytes that the memory limits of the cgroups around this process leave; version 2, then version 1."""
    paths = {kind: path.strip("/") for _, kind, path in
             (line.split(":", 2) for line in own.read_text().splitlines())}
    for kind, limit, used, cache in (
            ("", "memory.max", "memory.current", "inactive_file"),
            ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")):
        inner = Path(paths.get(kind, "."))
        for group in (groups / kind / part for part in (inner, *inner.parents)):
            with contextlib.suppress(OSError, ValueError, TypeError):  # no limit, or not this version
                most, now, stat = ((group / name).read_text() for name in (limit, used, "memory.stat"))
                yield int(most) - int(now) + int(re.search(rf"^{cache} (\d+)", stat, re.M)[1])


def room(path):
    """(bytes used, bytes left) where path lies: the least that filesystem, free memory and cgroup leave."""
    fs, path = os.statvfs(path), Path(path).resolve()
    left = [fs.f_bavail * fs.f_frsize]
    mounts = [p for p in psutil.disk_partitions(all=True) if path.is_relative_to(p.mountpoint)]
    if mounts and max(mounts, key=lambda p: len(p.mountpoint)).fstype in ("tmpfs", "ramfs"):
        left.append(psutil.virtual_memory().available)
        left += cgroup_room()
    return (fs.f_blocks - fs.f_bfree) * fs.f_frsize, max(0, min(left))


def estimate(plan, work, stage, shards):
    """What a run will cost: lines for the log, from an extract.Plan and its extract.Stage."""
    c, measured = plan.counts, (read_json(work / "warmup.json") or {}).get("tokens_per_sec")
    rate = measured or ASSUMED_RATE
    yield (f"plan {plan.fingerprint}: {counted(c['samples'], 'sample')}, {counted(c['tokens'], 'token')}, "
           f"{c['supervised']:,} of them supervised, {counted(c['turns_lost'], 'turn')} not located")
    if c["skipped"]:
        yield (f"{counted(c['skipped'], 'sample')} skipped {c['skipped_by_reason']}: "
               f"{work / 'plan' / 'skipped.jsonl'}")
    yield f"layers {plan.layers}{' and the final state' if plan.final else ''}: {plan.convention}"
    yield (f"{counted(c['batches'], 'batch')}, {c['tokens'] / c['batches'] / plan.tokens:.1%} of "
           f"{plan.tokens:,} tokens full: {gb(c['bytes'], 2)} "
           f"({c['bytes'] / c['tokens']:,.0f} bytes a token) into {plan.out}")
    yield (f"{gb(stage.capacity(), 2)} of room in {stage.dir.parent}, up to "
           f"{gb(c['largest'], 3)} a batch")
    whence = "as warm-up measured" if measured else "assumed, Qwen3.6-27B on one H200; `make warmup` measures"
    yield (f"{span(max(1, c['tokens'] / rate / shards))} with {counted(shards, 'shard')}, "
           f"at {rate:,.0f} tokens/s each ({whence})")


class Progress(threading.Thread):
    """progress_shard_N.json of a running shard, rewritten every 2 s and with every change of state."""

    def __init__(self, work, shard, num_shards, stage):
        super().__init__(daemon=True)
        self.path, self.lock = work / f"progress_shard_{shard}.json", threading.RLock()
        self.events = collections.deque()  # (time, samples, tokens, bytes, GPU's and host's seconds), 60 s
        self.plan = self.uploads = self.began = self.shut = None
        self.left = self.host_since = 0  # tokens in batches without a marker; when the host got its batch
        self.now = dict.fromkeys(COUNTS, 0) | {
            "shard": shard, "num_shards": num_shards, "eta_hours": None, "state": "planning",
            "skipped_by_reason": {}, "exit_code": None, "error": None, "host": os.uname().nodename}
        self.recorder = threading.Thread(target=record, args=(work, stage, num_shards), daemon=True)

    def run(self):
        self.recorder.start()
        while True:
            self.set()
            time.sleep(2)

    def set(self, **new):
        with self.lock:
            now, t = self.now, time.time()
            now.update(new)
            while self.events and not t - 60 <= self.events[0][0] <= t:  # gone by, or a clock was set back
                self.events.popleft()
            seconds = min(60.0, max(1.0, t - (self.began or t)))
            rates = [sum(event[i] for event in self.events) / seconds for i in range(1, 6)]
            rates[3:] = min(1, rates[3]), min(1, rates[4])
            now.update({key: round(rate, 3) for key, rate in zip(RATES, rates)}, updated_at=t, eta_hours=None)
            if self.plan and not self.left:
                now["eta_hours"] = 0.0
            elif rates[1]:
                now["eta_hours"] = round(self.left / rates[1] / 3600, 4)
            if self.shut:
                now["waited_for_room_s"], self.shut = round(now["waited_for_room_s"] + t - self.shut, 2), t
            if self.uploads:
                now.update(pending_uploads=self.uploads.pending, failed_uploads=self.uploads.failed,
                           staged_bytes=self.uploads.staged)
            try:
                write_atomic(self.path, json.dumps(now, indent=1))
            except OSError as e:  # a full disk must not end the run; the next one is 2 s away
                say(f"{self.path} was not written: {e}")

    def planned(self, plan, mine, uploads):
        """The batches of this shard are known: plan is extract.Plan, mine their numbers."""
        share = len(range(self.now["shard"], plan.counts["skipped"], self.now["num_shards"]))
        self.plan, self.uploads, self.left = plan, uploads, int(plan.batch_tokens[list(mine)].sum())
        self.began = time.time()  # of rates: what earlier starts left is uploaded from here on
        self.set(total=sum(len(plan.rows(b)) for b in mine) + share, skipped=share, total_batches=len(mine),
                 skipped_by_reason=plan.counts["skipped_by_reason"])

    def running(self):
        with self.lock:  # and what is computed from here on
            self.began = time.time()
            self.events.clear()
        self.set(state="running")

    def marked(self, batch, excluded, earlier=False):
        """A batch has its marker, so many samples excluded; one of an earlier start counts for no rate."""
        samples, tokens = len(self.plan.rows(batch)), int(self.plan.batch_tokens[batch])
        size = 0 if earlier else self.plan.layout(batch)[2]
        with self.lock:
            self.left -= tokens
            for key, n in (("batch", 1), ("uploaded", 1), ("processed", samples), ("tokens", tokens),
                           ("excluded", excluded), ("uploaded_bytes", size)):
                self.now[key] += n
            if not earlier:
                self.events.append((time.time(), samples, tokens, size, 0, 0))

    def computed(self, slot):
        """A batch's states are on the host, in an extract.Slot: what the device took for it is known."""
        busy, copy = slot.seconds, 0
        if slot.copied:
            busy, copy = slot.began.elapsed_time(slot.ended) / 1e3, slot.ended.elapsed_time(slot.copied) / 1e3
        with self.lock:
            self.events.append((time.time(), 0, 0, 0, busy, 0))
            self.host_since = time.time() - copy - self.now["waited_for_room_s"]

    def wrote(self):
        """That batch is in staging: copying, checking and writing took until now, less the wait for room."""
        with self.lock:
            seconds = time.time() - self.now["waited_for_room_s"] - self.host_since
            self.events.append((time.time(), 0, 0, 0, 0, max(0, seconds)))

    def wait_for_room(self, waiting):
        """The writer waits for room in staging, or no longer does. Returns whether that is news."""
        if bool(self.shut) == waiting:
            return False
        with self.lock:
            if waiting:
                self.shut = time.time()
                self.set(state="waiting_for_room")
            else:
                self.set(state="running")  # counts the wait up to now
                self.shut = None
        return True

    def line(self):
        """What a shard's log says now and then."""
        now = self.now
        part = 100 * now["batch"] // max(1, now["total_batches"])
        return (f"batch {now['batch']}/{now['total_batches']} ({part} %) | "
                f"{now['rate_per_sec']:,.1f} samples/s | {now['tokens_per_sec']:,.0f} tokens/s | "
                f"eta {span(now['eta_hours'], 3600)} | "
                f"{counted(now['pending_uploads'], 'upload')} pending, {now['failed_uploads']} failed")


# ---- one shard: each of its files may be missing, half-written, old or edited by hand

def read_json(path):
    """The JSON object in a file, Infinity and NaN as None; None if there is no such thing."""
    try:
        data = json.loads(path.read_bytes(), parse_constant=lambda name: None,
                          parse_float=lambda text: float(text) if math.isfinite(float(text)) else None)
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def number(value, default=None):
    """value if it is a finite number >= 0 of believable size, else default."""
    return value if type(value) in (int, float) and 0 <= value < 1e18 else default


def end_of(path, size):
    """The last bytes of a file, none where it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read()
    except OSError:
        return b""


def clean(text):
    """The first line with anything on it, printable and of bounded length; '' for what is not text."""
    lines = text.strip().splitlines() if isinstance(text, str) else []
    return "".join(c if c.isprintable() else "?" for c in lines[0].strip()[:300]) if lines else ""


def pid_of(file):
    """The pid in a pid file, None where there is none."""
    try:
        return max(0, int(file.read_text()[:20])) or None
    except (OSError, ValueError):
        return None


def process_state(pid, work, word="extract.py"):
    """psutil's word for the state of a process that runs extract.py (or has another `word` on its command
    line) on this work directory, '' for any other, for a zombie, and without a pid."""
    if not pid:
        return ""
    try:
        process = psutil.Process(pid)
        args, state = process.cmdline(), process.status()
    except psutil.Error:
        return ""
    theirs = "work"
    for arg, following in zip(args, [*args[1:], ""]):
        if arg == "--work":
            theirs = following
        elif arg.startswith("--work="):
            theirs = arg.removeprefix("--work=")
    try:
        theirs = os.path.join(process.cwd(), theirs)
    except psutil.Error:  # another user's process: take it to stand where we do
        pass
    ours = any(os.path.basename(arg) == word for arg in args)
    return state if ours and os.path.realpath(theirs) == os.path.realpath(work) else ""


def preparing(work):
    """{plan, warmup, launch: pid} of what runs before the shards do: a planner, a warm-up, and the make that
    holds WORK/.launch until it has started them all (None while it does just that)."""
    found = {}
    for name, word in (("plan", "--plan-only"), ("warmup", "warmup.py")):
        pid = pid_of(work / "pids" / f".{name}")
        if process_state(pid, work, word):
            found[name] = pid
    try:
        with open(work / ".launch") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        found["launch"] = None
        pid = pid_of(work / ".launch")
        with contextlib.suppress(psutil.Error):  # another machine's make has a pid that is anybody's here
            if pid and "/.launch" in " ".join(psutil.Process(pid).cmdline()):  # bash has the recipe there
                found["launch"] = pid
    except OSError:
        pass  # nobody has started one
    return found


def preparing_pids(work):
    """Those processes, make first, and what they have started: a planner ends its own."""
    found = preparing(work)
    pids = [found.get(name) for name in ("launch", "warmup", "plan")]
    for pid, deep in ((pids[0], False), (pids[1], True)):
        with contextlib.suppress(psutil.Error):
            pids += [child.pid for child in psutil.Process(pid).children(deep)] if pid else []
    return [*dict.fromkeys(filter(None, pids))]


def read_shard(work, shard):
    """One shard's progress, cleaned of wrong types, with pid, alive, age_s, condition and message."""
    # The process first, its progress second: what a process that is gone has left is then its last word.
    pid = pid_of(work / "pids" / f"shard_{shard}.pid")
    process = process_state(pid, work)
    path = work / f"progress_shard_{shard}.json"
    progress = read_json(path)
    if (progress or {}).get("host", os.uname().nodename) != os.uname().nodename:  # its pid says nothing here
        pid = process = None
    s = dict(progress or {}, shard=shard, pid=pid)
    s.update({key: number(s.get(key), 0) for key in COUNTS} | {key: number(s.get(key)) for key in MEASURES})
    state = s["state"] = None if progress is None else clean(s.get("state"))[:20] or "unknown"
    s["error"] = s.get("error") if isinstance(s.get("error"), str) else None
    code = s["exit_code"] = s["exit_code"] if type(s.get("exit_code")) is int else None
    # An update in the future means that the clock was set back: as good as fresh.
    age = s["age_s"] = None if s["updated_at"] is None else max(0.0, time.time() - s["updated_at"])
    fresh = age is not None and age <= STALE_S
    end = ENDS.get(code, "failed") if code is not None else state
    over = end in (*ENDS.values(), "failed")
    s["alive"] = bool(process) if pid else fresh and not over

    if end == "done":
        found = "done", ""
    elif over:
        unsaid = "the same command goes on" if end == "stopped" else "no error recorded"
        found = end, f"{end}: {clean(s['error']) or unsaid}"
    elif pid and not process:
        found = "gone", f"pid {pid} is gone: it ended without a word (killed? out of memory?)"
    elif progress is None and os.path.exists(path):
        found = "unreadable", f"unreadable: {path} is not a JSON object"
    elif progress is None and process:
        found = "starting", "starting"
    elif progress is None:
        found = "new", "not started"
    elif fresh:
        found = "running", ""
    else:
        silent = "stale" if age is None else f"stale {age:.0f} s"
        if not pid:
            found = "gone", f"{silent} (no pid file)"
        elif process in ("stopped", "tracing-stop"):
            found = "stale", f"{silent} (process is stopped: SIGSTOP)"
        else:
            found = "stale", silent
    s["condition"], s["message"] = found
    return s


# ---- the run and the box

@functools.lru_cache(1)
def slurm_jobs(work, _):
    """{shard, -1 for the plan: {state, reason, node, since (Unix seconds)}} of what Slurm's queue has of a
    run by `make slurm`. The second argument changes with time, so that it is asked every 10 s at most."""
    made, jobs = read_json(work / "slurm.json"), {}
    if made:
        command = ["squeue", "-hrj", f"{made.get('plan')},{made.get('array')}", "-o%i|%T|%r|%N|%S"]
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
            said = subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.splitlines()
            for name, state, reason, node, at in (line.split("|") for line in said):
                since = datetime.datetime.fromisoformat(at).timestamp() if at != "N/A" else 0
                jobs[int(name.partition("_")[2] or -1)] = dict(
                    state=state, reason=reason, node=node, since=since)
    return jobs


def with_slurm(s, job):
    """Adds Slurm's word on a shard: what it queues has no process, and an old progress."""
    s["slurm"] = job
    if job and not s["alive"] and (job["state"] != "RUNNING" or (s["updated_at"] or 0) < job["since"]):
        s["condition"] = s["message"] = "starting" if job["state"] == "RUNNING" else "pending"
    return s


def queue_in_words(jobs):
    """How many tasks are in which state, and where: PENDING (Dependency): 3; '' for none."""
    tasks = collections.Counter()
    for shard, job in jobs.items():
        whose = "the plan's " if shard < 0 else ""
        where = f"on {job['node']}" if job["node"] else f"({job['reason']})"
        tasks[f"{whose}{job['state']} {where}"] += 1
    return "; ".join(f"{what}: {n}" for what, n in tasks.items())


def count_shards(work):
    """--num-shards as the most recently updated progress file has it, else by the file names; 0 for none."""
    newest, highest = (-1, 0), 0
    for path in [*work.glob("progress_shard_*.json"), *work.glob("pids/shard_*.pid")]:
        if match := re.search(r"_(\d{1,5})\.", path.name):
            highest = max(highest, int(match[1]) + 1)
        data = read_json(path) or {}
        if 1 <= (n := number(data.get("num_shards"), 0)) <= MAX_SHARDS:
            newest = max(newest, (min(number(data.get("updated_at"), 0), time.time()), int(n)))
    return newest[1] or highest


def read_plan(work):
    """plan.json with its `counts`; {} for either where there is none."""
    plan = read_json(work / "plan" / "plan.json") or {}
    return plan | {"counts": plan["counts"] if isinstance(plan.get("counts"), dict) else {}}


def totals(shards, counts):
    """Sums over the shards; what shards that have not begun are to do is in the plan's counts."""
    running = [s for s in shards if s["condition"] == "running"]
    out = {key: sum(s[key] for s in shards) for key in COUNTS}
    out |= {key: sum(s[key] or 0 for s in running) for key in RATES[:3]}
    samples, skipped, batches = (number(counts.get(key), 0) for key in ("samples", "skipped", "batches"))
    for key, planned in (("total", samples + skipped), ("skipped", skipped), ("total_batches", batches)):
        out[key] = max(out[key], planned)
    # Shards are independent, so the run ends with its slowest; a dead, silent or new one leaves that unknown.
    etas = [s["eta_hours"] if s in running else None for s in shards if s["condition"] != "done"]
    return out | {"eta_hours": None if not shards or None in etas else max(etas, default=0.0)}


def read_run(work, stage, num_shards=None, jobs=None):
    """The state of every shard, of all together and of the box, as --json prints it."""
    planned = number((read_json(work / "slurm.json") or {}).get("shards"), 0)
    count, jobs = num_shards or max(count_shards(work), int(min(planned, MAX_SHARDS))), jobs or {}
    shards = [with_slurm(read_shard(work, i), jobs.get(i)) for i in range(count)]
    queue = queue_in_words(jobs) or f"nothing of this run is queued; logs: {work}/logs"
    conditions = {s["condition"] for s in shards}
    state = ("done" if conditions == {"done"} else "running" if conditions & set(LIVE) else
             "failed" if conditions & set(BROKEN) else "stopped")
    plan = read_plan(work)
    reasons = plan["counts"].get("skipped_by_reason")
    reasons = reasons.items() if isinstance(reasons, dict) else ()
    return {"work": str(work), "fingerprint": clean(plan.get("fingerprint")) or None, "state": state,
            "out": clean(plan.get("out")) or None, "num_shards": len(shards),
            "skipped_by_reason": {clean(why): n for why, n in reasons if number(n)},
            **totals(shards, plan["counts"]), "shards": shards, "box": read_box(stage),
            "slurm": queue if planned else None}


def read_gpus():
    """Nothing without NVIDIA GPUs or nvidia-ml-py; None for what a board or a MIG slice will not tell."""
    try:
        import pynvml
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except Exception:
        return []

    def ask(question, gpu, field=None):
        try:
            answer = getattr(pynvml, "nvmlDeviceGet" + question)(gpu)
        except pynvml.NVMLError:
            return None
        return getattr(answer, field) if field else answer
    return [{"index": i, "name": ask("Name", gpu), "utilisation_percent": ask("UtilizationRates", gpu, "gpu"),
             "memory_used": ask("MemoryInfo", gpu, "used"), "memory_total": ask("MemoryInfo", gpu, "total")}
            for i in range(count) if (gpu := ask("HandleByIndex", i))]


def cpu_percent(seconds=0.1):
    """(user, system) of all cores. psutil's own is too low where it sees less than a second of CPU."""
    before = psutil.cpu_times()
    time.sleep(seconds)
    spent = {name: b - a for name, a, b in zip(before._fields, before, psutil.cpu_times())
             if not name.startswith("guest")}  # which user holds
    total = max(1e-9, sum(spent.values()))
    user = spent["user"] + spent.get("nice", 0)  # uploads are nice
    return round(100 * user / total, 1), round(100 * spent["system"] / total, 1)


def read_box(stage):
    folder = os.path.abspath(stage)
    while not os.path.exists(folder):  # the first shard makes it
        folder = os.path.dirname(folder)
    (user, system), memory = cpu_percent(), psutil.virtual_memory()
    used, left = room(folder)
    return {"gpus": read_gpus(), "cpu_count": psutil.cpu_count(), "cpu_user_percent": user,
            "cpu_system_percent": system, "memory_used": memory.total - memory.available,
            "memory_total": memory.total, "stage": stage, "stage_used": used, "stage_total": used + left,
            "stage_percent": round(100 * used / max(1, used + left), 1)}


# ---- the run's history and what holds it back

def record(work, stage, num_shards):
    """A line of metrics.jsonl every 5 s, by whichever shard has the lock; the next one takes over from it."""
    path, lines = work / "metrics.jsonl", MAX_POINTS
    with open(work / ".metrics.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        while True:
            try:
                if lines >= MAX_POINTS:  # at the start, too: what a killed writer left torn goes
                    points = thinned(history(work))
                    write_atomic(path, "".join(json.dumps(p) + "\n" for p in points))
                    lines = len(points)
                with open(path, "a") as file:
                    file.write(json.dumps(point(read_run(work, stage, num_shards))) + "\n")
                lines += 1
            except OSError as e:
                say(f"{path} was not written: {e}")
            time.sleep(RECORD_S)


def point(status):
    """A line of metrics.jsonl. Lists have an entry a shard or a GPU; null is unknown, or a shard that is not
    running."""
    box, shards = status["box"], [s if s["condition"] == "running" else {} for s in status["shards"]]
    return {"t": round(time.time(), 1), **{key: status[key] for key in (*COUNTS, *RATES[:3], "eta_hours")},
            "shards": {key: [s.get(key) for s in shards] for key in ("state", "waited_for_room_s", *RATES)},
            "gpus": {key: [g[key] for g in box["gpus"]] for key in ("utilisation_percent", "memory_used")},
            **{key: value for key, value in box.items() if type(value) in (int, float)}}


def history(work, last_bytes=1 << 30):
    """The points of metrics.jsonl by time, without torn lines and what is newer than the last one (a clock
    was set back)."""
    points = [p for p in map(point_of, end_of(work / "metrics.jsonl", last_bytes).splitlines()) if p]
    return sorted((p for p in points if p["t"] <= points[-1]["t"]), key=lambda p: p["t"])


def point_of(line):
    """A line of metrics.jsonl, None if it is none; `at` guards what is in it. Faster than read_json."""
    try:
        point = json.loads(line)
        return point if isinstance(point, dict) and number(point.get("t")) else None
    except (ValueError, RecursionError):
        return None


def thinned(points):
    """At most MAX_POINTS less a third: every second point may go, and goes first where they are dense."""
    if len(points) < MAX_POINTS:
        return points
    odd = sorted(range(1, len(points) - 1, 2), key=lambda i: points[i + 1]["t"] - points[i - 1]["t"])
    gone = set(odd[:len(points) - 2 * MAX_POINTS // 3])
    return [p for i, p in enumerate(points) if i not in gone]


def at(point, *keys):
    """The number under keys and list positions of a point, None where there is none."""
    for key in keys:
        try:
            point = point[key]
        except (KeyError, IndexError, TypeError):
            return None
    return number(point)


def time_spent(points, longest=60):
    """({gpu, host, upload, planning}: share of the running shards' time, 0 to 1; the seconds looked at)"""
    spent, seconds = dict.fromkeys(("gpu", "host", "upload", "planning"), 0), 0
    for a, b in zip(points, points[1:]):
        dt, states = b["t"] - a["t"], b["shards"].get("state") if isinstance(b.get("shards"), dict) else None
        for i, state in enumerate(states if isinstance(states, list) and 0 < dt <= longest else []):
            if not isinstance(state, str):  # that shard was not running
                continue
            seconds += dt
            was, now = (at(p, "shards", "waited_for_room_s", i) for p in (a, b))
            waited = 0 if None in (was, now) else min(dt, max(0, now - was))
            spent["upload"] += dt if state == "draining" else waited
            spent["planning"] += dt * (state in ("planning", "loading", "warming"))
            for name in ("gpu", "host"):
                spent[name] += dt * min(1, at(b, "shards", f"{name}_busy", i) or 0) * (state != "draining")
    return {name: round(part / max(seconds, 1e-9), 3) for name, part in spent.items()}, seconds


def ended_within(shards):
    """How far apart shards ended, in words: equal batches on equal GPUs should keep that to a batch."""
    ends = [s["updated_at"] for s in shards if s["updated_at"]]
    return f"; shards ended within {span(max(ends) - min(ends))} of each other" if len(ends) > 1 else ""


def bottleneck(spent, covered, output, model):
    """(the name of what holds the run back or None, a clause that says it) from `time_spent` of the points of
    the last `covered` seconds; output and model: what OUT and the forward pass are called."""
    over = f"of the last {round(covered / 60)} minutes" if covered > 90 else f"of the last {covered:.0f} s"
    share = {name: f"{100 * part:.0f} %" for name, part in spent.items()}
    if spent["planning"] >= 0.5:
        return "planning", f"getting ready: planning, loading and warming up took {share['planning']} {over}"
    if spent["upload"] >= 0.1:  # whoever waits for the next stage is not the slowest
        return "upload", f"{output} is the bottleneck: extraction waited {share['upload']} {over}"
    if max(spent["gpu"], spent["host"]) < 0.5:
        return None, (f"nothing is busy half of the time ({model} {share['gpu']}, copying and writing "
                      f"{share['host']}): look at CPU system time and the logs")
    if spent["gpu"] >= spent["host"]:
        return "gpu", f"{model} is the bottleneck: it was busy {share['gpu']} {over}"
    return "host", f"copying and writing on the host is the bottleneck: it took {share['host']} {over}"


def sentence(status, output, wrong, cause):
    """The summary: how many shards run, which are in trouble (`wrong`), and, while any runs, the `cause` of
    its speed; or how the run ended."""
    each, total = collections.Counter(s["condition"] for s in status["shards"]), status["num_shards"]
    command = "make slurm" if status["slurm"] else "make extract"
    if status["state"] != "running":
        for name in preparing(Path(status["work"])):
            return BEFORE[name]
    if not total:
        return "Not started: no shard has been started here"
    if status["state"] == "done" and (n := unmarked(status)):
        return (f"Not complete: {n:,} of {counted(status['total_batches'], 'batch')} "
                f"{'has' if n == 1 else 'have'} no marker: {command} goes on")
    if status["state"] == "done":
        named = " (manifest.json names those)" if status["excluded"] else ""
        return (f"Done: {counted(there(status)[0], 'sample')} in {counted(status['batch'], 'batch')}, "
                f"all in {output}; "
                f"{', '.join(left_out(status)) or '0 skipped'}{named}{ended_within(status['shards'])}")
    if status["state"] in ("stopped", "failed"):
        ends = ", ".join(f"{n} {condition}" for condition, n in each.items())
        mend = "mend the cause, then " if wrong else ""
        return f"Not running: {ends}; {mend}the same {command} goes on"
    parts = [f"{each['running']} of {counted(total, 'shard')} running"]
    if each["pending"]:
        parts.append(f"{each['pending']} pending in Slurm")
    if each["stopped"]:
        parts.append(f"{each['stopped']} stopped")
    parts += wrong[:3]
    if len(wrong) > 3:
        parts.append(f"{len(wrong) - 3} more in trouble")
    if not each["running"]:
        return ", ".join(parts)
    return f"{', '.join(parts)}{';' if wrong else ','} {cause}"


def unmarked(status):
    """How many of the batches that its shards say are done have no marker: `make reconcile` may have dropped
    some since. 0 where there is no directory of markers."""
    try:
        with os.scandir(Path(status["work"], "markers")) as files:
            marked = sum(file.name.startswith(".done_") for file in files)
    except OSError:
        return 0
    return max(0, sum(s["total_batches"] for s in status["shards"]) - marked)


def in_words(status):
    """`state` for people, who also want to know what happens before shards run, and that none moves."""
    head = status["summary"].partition(":")[0]
    if head in ("Not started", "Not complete", *(text.partition(":")[0] for text in BEFORE.values())):
        return head.lower()
    moves = any(s["condition"] in ("running", "starting", "pending") for s in status["shards"])
    return "not running" if status["state"] == "running" and not moves else status["state"]


def judged(status, points):
    """Adds `time_spent`, `bottleneck`, `summary` and `worry` (none some much), from the last 10 minutes."""
    newest = points[-1]["t"] if points else 0
    fresh = abs(time.time() - newest) < 60
    points = [p for p in points if fresh and p["t"] >= newest - WINDOW_S]
    spent, seconds = time_spent(points)
    output = "S3" if (status["out"] or "").startswith("s3://") else "OUT"
    running = [s for s in status["shards"] if s["condition"] == "running"]
    wrong = [f"shard {s['shard']} {ILL[s['condition']]}" for s in status["shards"] if s["condition"] in ILL]
    if running and not wrong and all(s["state"] == "draining" for s in running):
        left = status["pending_uploads"]
        name, cause = "upload", (f"all is computed, {counted(left, 'upload')} to {output} "
                                 f"{'is' if left == 1 else 'are'} left")
    elif seconds < 20:
        name, cause = None, "too early to name a bottleneck"
    else:
        model = "the GPU" if status["box"]["gpus"] else "the forward pass (no GPU)"
        name, cause = bottleneck(spent, points[-1]["t"] - points[0]["t"], output, model)
    name = name if running else None
    status = status | {"time_spent": spent, "bottleneck": name,
                       "summary": sentence(status, output, wrong, cause)}
    halted = in_words(status) in ("stopped", "not complete") or status["state"] == "running" and any(
        s["condition"] == "stopped" for s in status["shards"])
    return status | {"worry": "much" if wrong else "some" if halted or name == "upload" else "none"}


def look(args, last_bytes=1 << 20):
    """A status with its judgement, and the history it comes from."""
    points = history(Path(args.work), last_bytes)
    jobs = slurm_jobs(Path(args.work), time.monotonic() // 10)
    return judged(read_run(Path(args.work), args.stage, args.num_shards, jobs), points), points


# ---- words and figures for people

def span(value, unit_s=1, parts=2):
    """3 h 12 min, or 3 h for parts=1; a dash when it is unknown."""
    if value is None:
        return "—"
    s = min(round(value * unit_s), 999 * 86400)
    units = [(s // 86400, "d"), (s // 3600 % 24, "h"), (s // 60 % 60, "min"), (s % 60, "s")]
    while len(units) > 1 and not units[0][0]:
        del units[0]
    return " ".join(f"{n} {unit}" for n, unit in units[:parts])


def counted(n, noun):
    """1 batch, 2 batches, 1,000 samples"""
    ending = "" if n == 1 else "es" if noun.endswith("ch") else "s"
    return f"{n:,} {noun}{ending}"


def gb(n, digits=1):
    """Bytes: 1,678.0 GB, below a tenth of one 93.5 MB, below a tenth of that 5,144 bytes."""
    if n < 1e5:
        return counted(n, "byte")
    return f"{n / 1e9:,.{digits}f} GB" if n >= 1e8 else f"{n / 1e6:,.1f} MB"


def there(s):
    """(samples that are in OUT, those that will be): without what planning skipped and what was excluded."""
    return max(0, s["processed"] - s["excluded"]), max(0, s["total"] - s["skipped"] - s["excluded"])


def percent(s):
    """100 only when all are there, as they are for a shard that had nothing to do and is done."""
    done, wanted = there(s)
    return 100 if not wanted and s.get("condition") == "done" else min(100, int(100 * done / max(1, wanted)))


def left_out(s):
    """What is not among those samples, in words."""
    return [f"{s[key]:,} {key}" for key in ("skipped", "excluded") if s[key]]


def known(value, form=""):
    """A number in this format; a dash when it is unknown."""
    return "—" if value is None else format(value, form)


def gigabytes(used, total):
    return "—" if used is None or total is None else f"{used / 1e9:,.1f}/{total / 1e9:,.1f} GB"


def doing(s):
    """What a shard does or what is wrong with it, short enough for a column."""
    state = s["state"] if s["condition"] == "running" else s["condition"]
    return re.split("[:(]", s["message"])[0].strip() or state.replace("_", " ")


def tail(path, size=4096):
    """The lines at the end of a log that hold anything, each printable and of bounded length."""
    return [*filter(None, map(clean, end_of(path, size).decode(errors="replace").splitlines()))]


def problem(work, s):
    """What is wrong with a shard, and where to read more."""
    log = os.path.join(work, "logs", f"shard_{s['shard']}.log")
    last = tail(log)[-1:] if s["condition"] == "gone" else []
    return "".join([s["message"], *(f"; its log ends: {line}" for line in last), f" | log {log}"])


COLUMNS = ["shard", "state", "samples", "%", "samples\n/s", "tokens\n/s", "ETA", "skipped",
           "uploads\nqueued/\nfailed", "waited\nfor room", "GPU\nbusy", "last\nseen"]
WIDE = ["skipped", "waited\nfor room", "GPU\nbusy"]  # columns for 100 characters and more


def rows(status):
    """The table: a list of strings for each shard and one for the total. Rates only of what is running."""
    def row(s, name, state, running):
        rate, tokens, eta, busy = [s.get(key) if running else None for key in
                                   ("rate_per_sec", "tokens_per_sec", "eta_hours", "gpu_busy")]
        seen = "" if s.get("age_s") is None else f"{span(s['age_s'], parts=1)} ago"
        return [name, state, "{:,}/{:,}".format(*there(s)), f"{percent(s)} %", known(rate, ",.1f"),
                known(tokens, ",.0f"), span(eta, 3600), f"{s['skipped']:,}",
                f"{s['pending_uploads']}/{s['failed_uploads']}", span(s["waited_for_room_s"], parts=1),
                "—" if busy is None else f"{100 * min(1, busy):.0f} %", seen]
    out = [row(s, str(s["shard"]), doing(s), s["condition"] == "running") for s in status["shards"]]
    return out + [row(status, "all", in_words(status), status["state"] == "running")]


def texts(status):
    """What stands around the table: a headline, the problems, the box."""
    box = status["box"]
    plan = f"plan {status['fingerprint'][:12]}" if status["fingerprint"] else "no plan yet"
    headline = " | ".join([
        status["work"], plan, in_words(status), f"batches {status['batch']:,}/{status['total_batches']:,}",
        *left_out(status), f"{gb(status['staged_bytes'])} staged",
        f"ETA {span(status['eta_hours'], 3600)}"])
    problems = [f"shard {s['shard']}: {problem(status['work'], s)}" for s in status["shards"]
                if s["message"] not in (*CALM, "not started")]
    if in_words(status) == "not started":
        problems.append(f"begin with {START}")
    lines = [f"Slurm   {status['slurm']}"] if status["slurm"] else []
    for gpu in box["gpus"]:
        lines.append(f"GPU {gpu['index']}   {gpu['name'] or 'unnamed'}   "
                     f"busy {known(gpu['utilisation_percent'])} %   "
                     f"{gigabytes(gpu['memory_used'], gpu['memory_total'])}")
    lines += [f"CPU     user {box['cpu_user_percent']:.0f} %   system {box['cpu_system_percent']:.0f} %   "
              f"of {box['cpu_count']} cores" + ("" if box["gpus"] else "   no GPU seen by NVML"),
              f"memory  {gigabytes(box['memory_used'], box['memory_total'])}",
              f"stage   {box['stage']}   {gigabytes(box['stage_used'], box['stage_total'])}   "
              f"{box['stage_percent']} % used, brake at 80 %"]
    return [headline, status["summary"]], problems, lines


def terminal(status, width):
    """The status as things that rich prints: within 100 columns for shards of 228k samples, or within 80."""
    from rich import box
    from rich.table import Table
    from rich.text import Text
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    shown = [i for i, name in enumerate(COLUMNS) if width >= 100 or name not in WIDE]
    for name in (COLUMNS[i] for i in shown):
        table.add_column(name, justify="left" if name in ("shard", "state") else "right",
                         no_wrap=name != "state", min_width=8 if name == "state" else None)
    *cells, total = rows(status)
    for s, row in zip(status["shards"], cells):  # as Text: a message may hold what rich takes for markup
        style = "green" if s["condition"] == "done" else "red" if s["message"] not in CALM else ""
        table.add_row(*(Text(row[i]) for i in shown), style=style, end_section=s is status["shards"][-1])
    table.add_row(*(Text(total[i]) for i in shown), style="bold")
    (headline, summary), problems, box_lines = texts(status)
    return [Text(headline, "bold"), Text(summary), table, *(Text(line, "red") for line in problems),
            *map(Text, box_lines)]


def markdown(status):
    """The same as a page: STATUS.md."""
    def line(cells):
        return "| " + " | ".join(cell.replace("\n", " ").replace("|", "\\|") for cell in cells) + " |"
    (headline, summary), problems, box_lines = texts(status)
    rule = ["---"] * 2 + ["---:"] * (len(COLUMNS) - 2)
    written = time.strftime("Written %Y-%m-%d %H:%M:%S %z")
    return "\n".join(["# Status", "", summary, "", headline, "", written, "",
                      *map(line, [COLUMNS, rule, *rows(status)]), "", *(f"- {text}" for text in problems), "",
                      *(f"- {text}" for text in box_lines), ""])


# ---- curves, the page, metrics

def curves(points):
    """[(title, limit or None, [(name, [(Unix seconds, value or None), ...]), ...])], 240 points at most,
    None where nothing was recorded for a while."""
    width = max(1, (points[-1]["t"] - points[0]["t"]) / 240) if points else 1
    points, pause = [*{p["t"] // width: p for p in points}.values()], max(3 * width, 30)
    late = [a["t"] + 1 for a, b in zip(points, points[1:]) if b["t"] - a["t"] > pause]
    points = sorted([*points, *({"t": t} for t in late)], key=lambda p: p["t"])
    spent = [{"t": b["t"], **(time_spent([a, b], pause)[0] if b.get("shards") else {})}
             for a, b in zip(points, points[1:])]

    def line(name, scale, *keys, points=points):
        values = [(p["t"], at(p, *keys)) for p in points]
        return name, [(t, None if v is None else round(v * scale, 2)) for t, v in values]

    def each(name, scale, group, key):
        lists = (p[group].get(key) for p in points if isinstance(p.get(group), dict))
        count = max((len(v) for v in lists if isinstance(v, list)), default=0)
        return [line(f"{name} {i}", scale, group, key, i) for i in range(count)]
    charts = [
        ("Tokens/s", None, each("shard", 1, "shards", "tokens_per_sec")),
        ("Where the shards' time goes, %", None, [
            line(name, 100, key, points=spent) for name, key in
            (("forward", "gpu"), ("copy and write", "host"), ("waiting for uploads", "upload"))]),
        ("Staging filled, %", 80, [line("filled", 1, "stage_percent")]),
        ("Uploads, MB/s", None, [line("uploaded", 1e-6, "upload_bytes_per_sec")]),
        ("Upload queue, batches", None, [line(name, 1, key) for name, key in (
            ("queued", "pending_uploads"), ("failed", "failed_uploads"))]),
        ("CPU, %", None, [line(name, 1, f"cpu_{name}_percent") for name in ("user", "system")]),
        ("GPU use, %", None, each("GPU", 1, "gpus", "utilisation_percent")),
        ("GPU memory, GB", None, each("GPU", 1e-9, "gpus", "memory_used"))]
    return [c for c in charts if any(v is not None for _, values in c[2] for _, v in values)]


def plot(points, path):
    """The curves as a picture, its kind by the ending of its name."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(16, 9), layout="constrained")
    for axis, chart in itertools.zip_longest(figure.subplots(3, 3).flat, curves(points)):
        if not chart:
            axis.set_axis_off()
            continue
        title, limit, lines = chart
        for (name, values), colour in zip(lines, itertools.cycle(COLOURS)):
            times = [datetime.datetime.fromtimestamp(t) for t, _ in values]
            heights = [math.nan if v is None else v for _, v in values]
            axis.plot(times, heights, label=name, color=colour, linewidth=1.2)
        if limit:
            axis.axhline(limit, color="crimson", ls="--", lw=1, label=f"brake {limit}")
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8)
        if 1 < len(lines) + bool(limit) <= 9:
            axis.legend(fontsize=7, loc="best")
    figure.autofmt_xdate()
    figure.savefig(path, dpi=90)


def exposition(status):
    """(text, content type) for Prometheus. What is unknown is left out, and so are rates of dead shards."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    box, shards, families = status["box"], status["shards"], []

    def add(name, text, label, values):
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        families.append(kind(f"extract_{name}", text, labels=[label] if label else []))
        for which, value in values:
            if number(value) is not None:
                families[-1].add_metric([str(which)] if label else [], value)

    for name, key in SHARD_METRICS.items():
        add(name, f"{key} of progress_shard_N.json, in base units", "shard", [
            (s["shard"], (s[key] or 0) * 3600 if key == "eta_hours" else s[key]) for s in shards
            if key in (*COUNTS, "age_s") or s["condition"] == "running" and s[key] is not None])
    add("shard_up", "1 while the shard runs and says so", "shard",
        [(s["shard"], int(s["condition"] == "running")) for s in shards])
    for key in ("stage_used", "stage_total", "memory_used", "memory_total"):
        add(f"{key.replace('total', 'size')}_bytes", f"{key} of the box", "", [("", box[key])])
    add("cpu_ratio", "CPU time of the box, of all cores together", "mode",
        [(mode, box[f"cpu_{mode}_percent"] / 100) for mode in ("user", "system")])
    add("time_spent_ratio", "share of the shards' last 10 minutes", "stage", status["time_spent"].items())
    add("skipped_samples", "samples that planning skipped", "reason", status["skipped_by_reason"].items())
    for name, key, unit in (("utilisation_ratio", "utilisation_percent", 0.01),
                            ("memory_used_bytes", "memory_used", 1),
                            ("memory_size_bytes", "memory_total", 1)):
        add(f"gpu_{name}", f"{key} of NVML, in base units", "gpu",
            [(gpu["index"], gpu[key] * unit) for gpu in box["gpus"] if gpu[key] is not None])
    return generate_latest(types.SimpleNamespace(collect=lambda: families)), CONTENT_TYPE_LATEST


class Guard:
    """Lets through, of every request and websocket, what brings the token; without a token, what asks for
    loopback by name (a page of another site whose name leads here does not)."""

    def __init__(self, app, token, cookie):
        self.app, self.token, self.cookie = app, token, cookie

    async def __call__(self, scope, receive, send):
        from starlette.requests import HTTPConnection
        from starlette.responses import PlainTextResponse, RedirectResponse
        from starlette.websockets import WebSocketClose
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        asked = HTTPConnection(scope)
        if self.token:
            given = [asked.query_params.get("token", ""), asked.cookies.get(self.cookie, ""),
                     asked.headers.get("authorization", "").removeprefix("Bearer ")]
            allowed = any(secrets.compare_digest(g.encode(), self.token.encode()) for g in given)
            refusal = PlainTextResponse("open /?token=TOKEN, or send Authorization: Bearer TOKEN\n", 401)
        else:
            host = re.sub(r":\d*$", "", asked.headers.get("host", ""))
            allowed = host in ("127.0.0.1", "localhost", "[::1]")
            refusal = PlainTextResponse("open it as http://127.0.0.1:PORT (ssh -L leads there), or start it "
                                        "with WEB_TOKEN= (--token)\n", 403)
        answer = self.app
        if not allowed:
            answer = WebSocketClose(1008) if scope["type"] == "websocket" else refusal
        elif self.token and given[0] and scope["path"] == "/":  # it does not stay in the address bar
            answer = RedirectResponse("/", 303)
            answer.set_cookie(self.cookie, self.token, 30 * 86400, httponly=True, samesite="strict")
        await answer(scope, receive, send)


CSS = """
body { --card: #fff; --text: #16191f; --soft: #667080; --edge: #e3e6eb; --bad: #d13438; --good: #1a9c5b;
  --some: #c77700; background: #f5f6f8; color: var(--text); font-variant-numeric: tabular-nums; }
body.body--dark { --card: #16191f; --text: #e8eaee; --soft: #8b94a3; --edge: #272c35; --bad: #ff6b6e;
  --good: #3ecf8e; --some: #ffb224; background: #0d0f13; }
.nicegui-content { padding: 0; display: block; } main { max-width: 1320px; margin: auto; padding: 16px; }
header { display: flex; align-items: center; gap: 12px; color: var(--soft); font-size: 13px; }
header .place { flex: 1; min-width: 0; overflow-wrap: anywhere; } .mono, .problems { white-space: pre-wrap; }
.summary { font-size: clamp(19px, 2.6vw, 27px); line-height: 1.3; font-weight: 600; margin: 14px 0 10px;
  padding-left: 14px; border-left: 5px solid var(--good); text-wrap: pretty; }
.summary.some { border-color: var(--some); } .summary.much { border-color: var(--bad); }
.problems { color: var(--bad); } .problems, .mono { overflow-wrap: anywhere; font-size: 12.5px; }
.tiles > div, .shards, .charts > div, .foot > div { background: var(--card); border: 1px solid var(--edge);
  border-radius: 10px; padding: 12px 14px; min-width: 0; } .caption { color: var(--soft); font-size: 12px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(104px, 1fr)); gap: 10px;
  margin: 14px 0; } .figure { font-size: clamp(16px, 1.7vw, 21px); font-weight: 600; white-space: nowrap; }
.shard { display: grid; gap: 10px; padding: 8px 0; border-top: 1px solid var(--edge); align-items: center;
  grid-template-columns: 42px 1.5fr 2fr .7fr repeat(8, 1fr); font-size: 13.5px; text-align: right; }
.shard.all { font-weight: 600; } .shard > :nth-child(-n+2) { text-align: left; overflow-wrap: anywhere; }
.shard:not(.names) > :nth-child(2)::before { content: "● "; color: var(--good); }
.shard.waits > :nth-child(2)::before { color: var(--some); }
.shard.bad > :nth-child(2)::before { color: var(--bad); }
.shard:not(.names) > :nth-child(4) { padding: 1px 6px; border-radius: 5px; background: linear-gradient(90deg,
  rgba(26, 156, 91, .35) var(--part), rgba(128, 128, 128, .15) 0); }
.names { border: 0; color: var(--soft); font-size: 12px; } .nicegui-echart { height: 190px; width: 100%; }
.charts { display: flex; flex-wrap: wrap; gap: 10px; margin: 10px 0; } .charts > div { flex: 1 1 340px; }
.charts > :first-child { flex-basis: 690px; } .mono { font-family: ui-monospace, Menlo, Consolas, monospace; }
.foot { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 2fr); gap: 10px; }
.log .mono { max-height: 300px; overflow: auto; display: flex; flex-direction: column-reverse;
  white-space: pre; }
@media (max-width: 900px) {
  main { padding: 4px; } .names { display: none; } .log .mono { white-space: pre-wrap; }
  .foot { grid-template-columns: minmax(0, 1fr); } .shard > * { text-align: left; }
  .shard { grid-template-columns: 4fr 4fr 5fr; gap: 6px 10px; font-size: 13px; }
  .shard > ::after { content: attr(data-name); display: block; color: var(--soft); font: 400 11px Roboto; } }
"""


def chart_options(limit, lines):
    """A chart of the page for ECharts, in greys that can be read on white and on black."""
    grey, faint, red = {"color": "#8b94a3", "fontSize": 11}, {"color": "#8b94a338"}, {"color": "#e5484d"}
    many, hidden = len(lines) > 1, {"show": False}
    axis = {"axisLabel": grey | {"hideOverlap": True}, "axisTick": hidden, "axisLine": {"lineStyle": faint}}
    series = [{"type": "line", "name": name, "data": [(round(t * 1000), v) for t, v in values],
               "showSymbol": False, "lineStyle": {"width": 1.6},
               "areaStyle": None if many else {"opacity": 0.12}}
              for name, values in lines]
    if limit:
        label = red | {"formatter": f"brake {limit} %", "position": "insideStartTop"}
        series[0]["markLine"] = {"silent": True, "symbol": "none", "data": [{"yAxis": limit}],
                                 "lineStyle": red, "label": label}
    return {"animation": False, "color": COLOURS, "series": series, "tooltip": {"trigger": "axis"},
            "grid": {"left": 4, "right": 12, "top": 30 if many else 12, "bottom": 2, "containLabel": True},
            "legend": {"show": many, "type": "scroll", "top": 0, "left": 0, "itemWidth": 12, "itemHeight": 4,
                       "icon": "roundRect", "textStyle": grey},
            "xAxis": axis | {"type": "time", "splitLine": hidden},
            "yAxis": axis | {"min": 0, "max": 100 if limit else None, "splitLine": {"lineStyle": faint}}}


def web(args):
    """Serves the page and /metrics until Ctrl-C."""
    loopback = args.host == "localhost" or args.host.startswith("127.")
    try:
        if args.token and len(args.token) < 16:
            raise OSError("the token has fewer than 16 characters: take one of `openssl rand -hex 16`")
        if not loopback and not args.token:
            raise OSError("others can reach that: WEB_TOKEN= (--token) is needed, as of "
                          "`openssl rand -hex 16`")
        socket.create_server((args.host, args.port)).close()
    except (OSError, OverflowError) as e:
        print(f"no page on --host {args.host} --port {args.port} (WEB_HOST= WEB_PORT=): {e}", file=sys.stderr)
        return 2
    where, token = "127.0.0.1" if loopback else args.host, f"?token={args.token}" if args.token else ""
    print(f"http://{where}:{args.port}/{token}   Ctrl-C ends the page, not the run; from elsewhere: "
          f"ssh -L {args.port}:127.0.0.1:{args.port} BOX", flush=True)
    from nicegui import app, run, ui
    from starlette.responses import Response
    seen = [None, []]  # the status and its curves, the same for everybody who looks

    def refresh():
        status, points = look(args, 1 << 30)
        seen[:] = status, curves(points)
    refresh()

    @app.get("/metrics")
    def metrics():
        text, kind = exposition(seen[0])
        return Response(text, headers={"Content-Type": kind})

    @ui.page("/")
    def page():
        def div(kind=""):
            return ui.element("div").classes(kind)

        def box(name, kind=""):
            ui.label(name).classes("caption")
            return ui.label().classes(kind)
        cells, drawn = [], {}
        names = [name.replace("\n", " ").replace("/ ", "/").replace(" /", "/") for name in COLUMNS]
        ui.add_css(CSS)
        with ui.element("main"):
            with ui.element("header"):
                ui.label("Hidden states")
                place = ui.label().classes("place")
                ui.button(icon="contrast").props("flat round dense aria-label='light or dark'").on(
                    "click", js_handler="() => Quasar.Dark.toggle()")
            summary, problems = ui.label(), ui.label().classes("problems")
            with div("tiles"):
                tiles = {}
                for name in ("ETA", "done", "tokens/s", "samples/s", "uploaded", "staging filled"):
                    with div():
                        tiles[name] = box(name, "figure")
            table, charts = div("shards"), div("charts")
            with div("foot"):
                with div():
                    machine, skipped = box("box", "mono"), box("skipped by planning", "mono")
                with div("log"):
                    chosen = ui.select([0], value=0, label="end of the log of shard",
                                       on_change=lambda: update()).props("dense options-dense")
                    log = ui.label().classes("mono")

        def update():
            status, drawings = seen
            state, shown = status["state"], rows(status)
            (place.text, words), bad, lines = texts(status)
            summary.text, problems.text = words, "\n".join(bad)
            summary.classes(replace=f"summary {status['worry']}")
            eta = status["eta_hours"] if state in ("running", "done") else None
            speed = status["upload_bytes_per_sec"] / 1e6
            figures = (span(eta, 3600), f"{percent(status)} %", f"{status['tokens_per_sec']:,.0f}",
                       f"{status['rate_per_sec']:,.1f}",
                       f"{speed:,.1f} MB/s" if speed < 100 else f"{speed:,.0f} MB/s",
                       f"{status['box']['stage_percent']:.0f} %")
            for tile, text in zip(tiles.values(), figures):
                tile.text = text
            if len(cells) != len(shown):
                cells.clear()
                table.clear()
                with table:
                    with div("shard names"):
                        for name in names:
                            ui.label(name)
                    for row in shown:
                        with div() as line:
                            cells.append((line, [ui.label().props(f"data-name='{name}'") for name in names]))
                chosen.set_options([*range(max(1, status["num_shards"]))])
            for s, row, (line, labels) in zip([*status["shards"], status], shown, cells):
                kind = "shard"
                if s is status:
                    kind = "shard all"
                elif s["message"] not in CALM:
                    kind = "shard bad"
                elif s["state"] == "waiting_for_room":
                    kind = "shard waits"
                line.classes(replace=kind).style(f"--part: {percent(s)}%")
                for label, text in zip(labels, row):
                    label.text = text
            for title, limit, curve in drawings:
                options = chart_options(limit, curve)
                if title not in drawn:
                    with charts, div():
                        ui.label(title).classes("caption")
                        drawn[title] = ui.echart(options)
                elif drawn[title].options != options:
                    drawn[title].options.update(options)
            machine.text = "\n".join(lines)
            reasons, file = status["skipped_by_reason"].items(), f"shard_{chosen.value}.log"
            skipped.text = "\n".join(f"{n:,} {why}" for why, n in reasons) or "none"
            log.text = "\n".join(tail(Path(args.work, "logs", file))[-30:]) or "nothing yet"
        update()
        ui.timer(2, update)

    app.timer(2, lambda: run.io_bound(refresh))
    app.add_middleware(Guard, token=args.token, cookie=f"token_{args.port}")
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a browser that goes away
    try:
        ui.run(host=args.host, port=args.port, title="Hidden states", favicon="📈", dark=None, show=False,
               reload=False, show_welcome_message=False)
    except KeyboardInterrupt:  # the server has ended in order, and passes it on
        pass
    return 0


# ---- the commands

def without_secrets(text):
    """A text without the credentials of this environment and what else is plainly one."""
    file = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()
    known = [v for k, v in os.environ.items() if re.search("SECRET|_TOKEN|PASSWORD|ACCESS_KEY|API_KEY", k)]
    known += [line.partition("=")[2].strip() for line in tail(file, 1 << 20)]
    for value in filter(lambda value: len(value) >= 8, known):
        text = text.replace(value, "***")
    text = re.sub(r"\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bhf_\w{20,}", "***", text)
    names = r"(?i)((token|secret|password|access_key|api_key)[\"']?\s*[=:]\s*[\"']?)"
    return re.sub(names + r"[\w/+=-]{16,}", r"\1***", text)


def keep(args):
    """Keeps what the run looks like now, for after the next change: snapshots/TIME of the work directory."""
    from importlib import metadata
    work, home = Path(args.work), Path(__file__).resolve().parent
    folder = work / "snapshots" / time.strftime("%Y%m%d-%H%M%S")
    status, points = look(args, 1 << 30)
    packages = sorted({f"{d.metadata['Name']}=={d.version}" for d in metadata.distributions()}, key=str.lower)
    kept = {"STATUS.md": markdown(status), "status.json": json.dumps(status, indent=1),
            "knobs.txt": args.snapshot,
            "versions.txt": "\n".join([f"Python {sys.version}", " ".join(os.uname()), *packages])}
    for file in [*home.glob("*.py"), home / "Makefile", home / "requirements.txt", work / "plan/plan.json",
                 work / "warmup.json", work / "metrics.jsonl", *work.glob("progress_shard_*.json")]:
        if file.is_file():
            kept[file.name] = file.read_text(errors="replace")
    kept |= {log.name: "\n".join(tail(log, 1 << 16)) for log in work.glob("logs/*.log")}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in kept.items():
        text = text if text.endswith("\n") else text + "\n"
        (folder / name).write_text(without_secrets(text), errors="replace")
    if points:
        plot(points, folder / "run.png")
    print(f"kept in {folder}: status, scripts, versions, knobs, ends of logs{', curves' if points else ''}")


def show(console, status, live=None):
    """Prints a status; on a terminal that has a live display, draws it over the one before."""
    if live and console.is_terminal:
        from rich.console import Group
        return live.update(Group(*terminal(status, console.width)), refresh=True)
    for part in terminal(status, console.width):
        console.print(part, soft_wrap=hasattr(part, "plain"))  # text lines whole, so that grep finds them


def exit_code(s, seen_alive, waited_s):
    """The code of a shard that has ended, 1 for one that vanished, None while it runs or may yet appear."""
    if s["exit_code"] is not None or s["alive"]:
        return s["exit_code"]
    known = seen_alive or (s["pid"] and s["state"])  # otherwise its launcher may still be at work
    return 1 if known or waited_s > GRACE_S else None


def log_line(shards, counts, over):
    """All shards together, as --follow prints them now and then; without rates once the run is over."""
    t = totals(shards, counts)
    samples = "{:,}/{:,} samples ({} %)".format(*there(t), percent(t))
    parts = [counted(len(shards), "shard"), ", ".join([samples, *left_out(t)])]
    if not over:
        parts += [f"{t['rate_per_sec']:,.1f} samples/s", f"{t['tokens_per_sec']:,.0f} tokens/s",
                  f"eta {span(t['eta_hours'], 3600)}"]
    uploads = f"uploads {t['pending_uploads']:,} pending"
    if t["failed_uploads"]:
        uploads += f", {t['failed_uploads']:,} failed"
    return " | ".join([*parts, uploads])


def follow(args, work, console, live):
    """Shows progress until every shard has ended, then how each did; returns the worst of their codes."""
    begun = last_line = time.monotonic()
    told, seen_alive = {}, set()
    while True:
        now, clock = time.monotonic(), time.strftime("[%H:%M:%S]")
        count = args.num_shards or count_shards(work)
        shards = [read_shard(work, i) for i in range(count)]
        seen_alive |= {s["shard"] for s in shards if s["alive"]}
        codes = [exit_code(s, s["shard"] in seen_alive, now - begun) for s in shards]
        held = [s["condition"] == "stale" and "SIGSTOP" in s["message"] for s in shards]
        if any(held) and all(code is not None or still for code, still in zip(codes, held)):
            codes = [1 if code is None else code for code in codes]  # nobody is left who would move
        over = None not in codes if shards else now - begun > GRACE_S
        if console.is_terminal:
            show(console, look(args)[0], live)
        else:
            for s in shards:
                if told.get(s["shard"]) != (s["state"], s["condition"]):
                    told[s["shard"]] = s["state"], s["condition"]
                    print(clock, f"shard {s['shard']}: {s['message'] or doing(s)}", flush=True)
            if over or now - last_line >= FOLLOW_LINE_S:
                last_line = now
                print(clock, log_line(shards, read_plan(work)["counts"], over), flush=True)
        if over:
            break
        time.sleep(1.0 if console.is_terminal else 0.5)

    live.stop()
    if not shards:
        print(f"no shard has been started in {work}: {START}", file=sys.stderr)
        return 2
    for s, code in zip(shards, codes):
        name = ENDS.get(code, "failed")
        why = ": " + problem(work, s).removeprefix(f"{name}: ") if code else ""
        print(f"shard {s['shard']} exited {code} ({name}){why}")
    if not any(codes):
        print(f"all are done{ended_within(shards)}")
    worst = min((code if code in ENDS else 1 for code in codes), key=(1, 2, 3, 0).index)
    if worst:
        print("next: " + ("" if worst == 3 else "mend what the lines above name, then ") +
              "give the same command again; the batches in OUT are kept, the rest is extracted")
    return worst


def main():
    parser = argparse.ArgumentParser(description="Status of an extraction run, read from its work directory.")
    parser.add_argument("--work", default="work", metavar="DIR", help="the run's directory (default: work)")
    parser.add_argument("--stage", default="/dev/shm", metavar="DIR",
                        help="staging directory, whose filesystem is shown (default: /dev/shm)")
    parser.add_argument("--num-shards", type=int, metavar="N", help="shards of the run; files of others are "
                        "ignored (default: what the newest progress file says)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print one JSON object (default: a table)")
    how.add_argument("--markdown", nargs="?", const="", metavar="FILE",
                     help="write the table to FILE (default: STATUS.md in the work directory)")
    how.add_argument("--watch", nargs="?", const=2.0, type=float, metavar="SECONDS",
                     help="redraw every so many seconds until Ctrl-C (default: 2)")
    how.add_argument("--pids", nargs="?", const="shards", choices=["shards", "preparing"],
                     help="print the pids of the shards that run, a line each; or of what prepares them: "
                     "make extract until it has started them, planner, warm-up (default: shards)")
    how.add_argument("--follow", action="store_true",
                     help="show progress until all shards have ended; exit with the worst of their codes")
    how.add_argument("--plot", metavar="FILE", help="draw the run's curves: run.png, .svg, .pdf")
    how.add_argument("--snapshot", nargs="?", const="", metavar="KNOBS", help="keep scripts, versions, "
                     "status, ends of logs, curves and this text in snapshots/TIME of the work directory")
    how.add_argument("--web", action="store_true", help="serve a page of it all, and /metrics for Prometheus")
    parser.add_argument("--host", default="127.0.0.1", help="address of the page, which needs a token "
                        "unless it is loopback (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8080, help="port of the page (default: 8080)")
    parser.add_argument("--token", default=os.environ.get("WEB_TOKEN", ""), help="what the page and /metrics "
                        "ask for, at least 16 characters (default: the variable WEB_TOKEN)")
    args = parser.parse_args()
    if args.num_shards is not None and not 1 <= args.num_shards <= MAX_SHARDS:
        parser.error(f"--num-shards {args.num_shards} is not between 1 and {MAX_SHARDS}: give the run's GPUS")
    if args.watch is not None and not 0.1 <= args.watch <= 86400:
        parser.error(f"--watch {args.watch} is not between 0.1 and 86400 seconds: try --watch 2")
    if args.web:
        return web(args)
    sys.stdout.reconfigure(errors="replace")  # an ASCII terminal gets ? for a dash, not a traceback

    work = Path(args.work)
    if args.pids:
        pids = (pid_of(f) for f in sorted(work.glob("pids/shard_*.pid")))
        shards = (pid for pid in pids if process_state(pid, work))
        print(*(shards if args.pids == "shards" else preparing_pids(work)), sep="\n")
        return 0
    if not os.path.isdir(work):
        error = f"no work directory {args.work!r}: {START}   or name the run's own: make status WORK=DIR"
        if args.json:
            print(json.dumps({"error": error, "work": args.work}))
        parser.exit(2, f"{error}\n")
    if args.plot:
        points = history(work)
        if not points:
            parser.exit(2, f"no history yet: {work / 'metrics.jsonl'} is written while shards run\n")
        try:
            plot(points, args.plot)
        except (OSError, ValueError) as e:  # ValueError: an ending that matplotlib does not know
            parser.exit(2, f"cannot write {args.plot}: {e}\n")
        print(f"wrote {args.plot}: {counted(len(points), 'point')}")
        return 0
    if args.snapshot is not None:
        try:
            keep(args)
        except (OSError, ValueError) as e:
            parser.exit(2, f"cannot write {work / 'snapshots'}: {e}\n")
        return 0
    if args.json:
        print(json.dumps(look(args)[0], allow_nan=False))
        return 0
    if args.markdown is not None:
        path = Path(args.markdown or work / "STATUS.md")
        try:
            write_atomic(path, markdown(look(args)[0]).encode(errors="replace"))
        except OSError as error:
            parser.exit(2, f"cannot write {path}: {error.strerror}. Name another: --markdown FILE\n")
        print(f"wrote {path}")
        return 0
    from rich.console import Console
    from rich.live import Live
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    if not args.watch and not args.follow:
        show(console, look(args)[0])
        return 0
    try:
        with Live(console=console, auto_refresh=False, transient=not console.is_terminal) as live:
            if args.follow:
                return follow(args, work, console, live)
            while True:
                show(console, look(args)[0], live)
                time.sleep(args.watch)
    except KeyboardInterrupt:
        if args.follow:
            print("\nThe shards run on in the background. Look: make status   Stop them: make stop")
        return 130 if args.follow else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `python monitor.py | head` ends in silence
    try:
        sys.exit(main())
    except ModuleNotFoundError as e:
        sys.exit(f"{e.name} is not installed: make setup, or pip install -r requirements.txt")
