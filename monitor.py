"""Status of an extraction run, read from its work directory. Imports no torch and starts in a blink.

    python monitor.py --work work                   a row a shard, the box, one ETA
    python monitor.py --work work --watch 2         the same, redrawn until Ctrl-C
    python monitor.py --work work --json            one object, for scripts
    python monitor.py --work work --markdown        writes work/STATUS.md
    python monitor.py --follow --num-shards 4       progress until the shards end, then their worst exit code

It reads plan/plan.json, progress_shard_N.json (the shard's own word, at least every 5 s while it lives) and
pids/shard_N.pid (the launcher's; without one, as under Slurm, a shard lives while its progress is fresh).
Pids are reused: one counts only while its process runs extract.py on this very work directory.

--json: sums over all shards (rates: of running ones); `eta_hours`, the slowest shard's, null if unknown;
`state`: done (every shard is), else running (any is LIVE), else failed (any is BROKEN), else stopped; `box`,
in bytes; `shards`: each progress file with pid, alive, age_s, condition (new starting running stale
unreadable done stopped failed refused gone) and message (words, empty when all is well).

Exit codes: 0; 2 without a work directory; with --follow the worst of the shards' (1, then 2, 3, 0; a vanished
process counts as 1), or 130 after Ctrl-C, which leaves the shards running.
"""
import argparse
import collections
import json
import math
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

STALE_S = 15        # a shard refreshes its progress at least every 5 s, whatever its state
GRACE_S = 10        # how long a shard that was just launched may have neither pid file nor progress
FOLLOW_LINE_S = 10  # between the summary lines of --follow where the output is no terminal
MAX_SHARDS = 4096
ASSUMED_RATE = 12_180  # tokens/s of Qwen3.6-27B, layers up to 61, on one H200 (tests/BENCH.md)
LIVE, BROKEN = ("starting", "running", "stale", "unreadable"), ("failed", "refused", "gone")
COUNTS = ("processed skipped total batch total_batches tokens uploaded pending_uploads failed_uploads "
          "staged_bytes waited_for_room_s").split()  # 0 when absent
MEASURES = "rate_per_sec tokens_per_sec eta_hours gpu_busy updated_at".split()  # None when unknown
START = "make extract MODEL=... DATA=... OUT=..."


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
    try:
        sys.stdout.flush()
        os.write(1, f"[{time.strftime('%H:%M:%S')}] {text}\n".encode(errors="replace"))  # leaves nothing behind
    except OSError:
        pass


def cgroup_room(groups=Path("/sys/fs/cgroup"), own=Path("/proc/self/cgroup")):
    """Bytes that the memory limits of the cgroups around this process leave; version 2, then version 1."""
    paths = {kind: path.strip("/") for _, kind, path in
             (line.split(":", 2) for line in own.read_text().splitlines())}
    for kind, limit, used, cache in (
            ("", "memory.max", "memory.current", "inactive_file"),
            ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")):
        inner = Path(paths.get(kind, "."))
        for group in (groups / kind / part for part in (inner, *inner.parents)):
            try:
                most, now, stat = ((group / name).read_text() for name in (limit, used, "memory.stat"))
                yield int(most) - int(now) + int(re.search(rf"^{cache} (\d+)", stat, re.M)[1])
            except (OSError, ValueError, TypeError):
                pass  # it has no limit, or this version is not in use


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
    yield (f"plan {plan.fingerprint}: {c['samples']:,} samples, {c['tokens']:,} tokens, "
           f"{c['supervised']:,} of them supervised, {c['turns_lost']:,} turns not located")
    if c["skipped"]:
        yield f"{c['skipped']:,} samples skipped {c['skipped_by_reason']}: {work / 'plan' / 'skipped.jsonl'}"
    yield f"layers {plan.layers}{' and the final state' * plan.final}: {plan.convention}"
    yield (f"{c['batches']:,} batches, {c['tokens'] / c['batches'] / plan.tokens:.1%} of {plan.tokens:,} tokens "
           f"full: {c['bytes'] / 1e9:,.2f} GB ({c['bytes'] / c['tokens']:,.0f} bytes a token) into {plan.out}")
    yield (f"{stage.capacity() / 1e9:,.2f} GB of room in {stage.dir.parent}, up to "
           f"{c['largest'] / 1e9:.3f} GB a batch")
    whence = "as warm-up measured" if measured else "assumed, Qwen3.6-27B on one H200; `make warmup` measures"
    yield (f"{c['tokens'] / rate / shards / 3600:,.2f} hours with {shards} shards, at {rate:,.0f} tokens/s "
           f"each ({whence})")


class Progress(threading.Thread):
    """progress_shard_N.json of a running shard, rewritten every 2 s and with every change of state."""

    def __init__(self, work, shard, num_shards):
        super().__init__(daemon=True)
        self.path, self.lock = work / f"progress_shard_{shard}.json", threading.RLock()
        self.events = collections.deque()  # (time, samples, tokens, busy seconds) of the last 60 s
        self.plan = self.uploads = self.began = self.shut = None
        self.left = 0  # tokens in batches without a marker
        self.now = dict.fromkeys(COUNTS, 0) | {
            "shard": shard, "num_shards": num_shards, "rate_per_sec": 0.0, "tokens_per_sec": 0.0,
            "gpu_busy": 0.0, "eta_hours": None, "state": "planning", "skipped_by_reason": {},
            "exit_code": None, "error": None}

    def run(self):
        while True:
            self.set()
            time.sleep(2)

    def set(self, **new):
        with self.lock:
            now, t = self.now, time.time()
            now.update(new)
            while self.events and not t - 60 <= self.events[0][0] <= t:  # gone by, or a clock was set back
                self.events.popleft()
            span = min(60.0, max(1.0, t - (self.began or t)))
            samples, tokens, busy = (sum(event[i] for event in self.events) / span for i in (1, 2, 3))
            now.update(rate_per_sec=round(samples, 3), tokens_per_sec=round(tokens, 1), updated_at=t,
                       gpu_busy=round(min(1, busy), 3),
                       eta_hours=round(self.left / tokens / 3600, 4) if tokens else None)
            if self.plan and not self.left:
                now["eta_hours"] = 0.0
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
        self.set(total=sum(len(plan.rows(b)) for b in mine) + share, skipped=share, total_batches=len(mine),
                 skipped_by_reason=plan.counts["skipped_by_reason"])

    def running(self):
        self.began = time.time()
        self.set(state="running")

    def marked(self, batch, earlier=False):
        """A batch has its marker; one of an earlier start counts for no rate."""
        samples, tokens = len(self.plan.rows(batch)), int(self.plan.batch_tokens[batch])
        with self.lock:
            self.left -= tokens
            for key, n in (("batch", 1), ("uploaded", 1), ("processed", samples), ("tokens", tokens)):
                self.now[key] += n
            if not earlier:
                self.events.append((time.time(), samples, tokens, 0))

    def computed(self, seconds):
        """The device was busy with a batch for that long."""
        with self.lock:
            self.events.append((time.time(), 0, 0, seconds))

    def wait_for_room(self, waiting):
        """The writer waits for room in staging, or no longer does. Returns whether that is news."""
        news = bool(self.shut) != waiting
        if news:
            with self.lock:
                self.shut = self.shut or time.time()
                self.set(state="waiting_for_room" if waiting else "running")
                self.shut = self.shut if waiting else None
        return news

    def line(self):
        """What a shard's log says now and then."""
        now = self.now
        eta = "?" if now["eta_hours"] is None else f"{now['eta_hours']:.2f} h"
        part = now["batch"] / max(1, now["total_batches"])
        return (f"batch {now['batch']}/{now['total_batches']} ({part:.0%}) | "
                f"{now['rate_per_sec']:,.1f} samples/s | {now['tokens_per_sec']:,.0f} tokens/s | eta {eta} | "
                f"{now['pending_uploads']} uploads pending, {now['failed_uploads']} failed")


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


def process_state(pid, work):
    """The state letter of a process that runs extract.py on this work directory ('T': SIGSTOP), else ''."""
    try:
        args = Path(f"/proc/{pid}/cmdline").read_text(errors="surrogateescape").split("\0")
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    theirs = "work"
    for arg, following in zip(args, args[1:]):
        theirs = following if arg == "--work" else arg[7:] if arg.startswith("--work=") else theirs
    try:
        theirs = os.path.realpath(os.path.join(f"/proc/{pid}/cwd", theirs))
    except OSError:  # another user's process: take it to stand where we do
        theirs = os.path.realpath(theirs)
    ours = any(os.path.basename(arg) == "extract.py" for arg in args) and theirs == os.path.realpath(work)
    return state if ours else ""  # (a zombie has no command line)


def read_shard(work, shard):
    """One shard's progress, cleaned of wrong types, with pid, alive, age_s, condition and message."""
    # The process first, its progress second: what a process that is gone has left is then its last word.
    pid = pid_of(work / "pids" / f"shard_{shard}.pid")
    process = process_state(pid, work) if pid else ""
    path = work / f"progress_shard_{shard}.json"
    progress = read_json(path)
    s = dict(progress or {}, shard=shard, pid=pid)
    s.update({key: number(s.get(key), 0) for key in COUNTS} | {key: number(s.get(key)) for key in MEASURES})
    state = s["state"] = None if progress is None else clean(s.get("state"))[:20] or "unknown"
    s["error"] = s.get("error") if isinstance(s.get("error"), str) else None
    code = s["exit_code"] = s["exit_code"] if type(s.get("exit_code")) is int else None
    # An update in the future means that the clock was set back: as good as fresh.
    age = s["age_s"] = None if s["updated_at"] is None else max(0.0, time.time() - s["updated_at"])
    fresh = age is not None and age <= STALE_S
    over = code is not None or state in ("done", "failed", "stopped")
    s["alive"] = bool(process) if pid else fresh and not over

    error = clean(s["error"]) or "no error recorded"
    if code == 2:
        found = "refused", f"refused: {error}"
    elif code not in (None, 0, 3) or (code is None and state == "failed"):
        found = "failed", f"failed: {error}"
    elif code == 3 or (code is None and state == "stopped"):
        found = "stopped", "stopped (resumable)"
    elif code == 0 or state == "done":
        found = "done", ""
    elif pid and not process:
        found = "gone", f"pid {pid} is gone"
    elif progress is None and os.path.exists(path):
        found = "unreadable", f"unreadable: {path} is not a JSON object"
    elif progress is None:
        found = ("starting", "starting") if process else ("new", "not started")
    elif fresh:
        found = "running", ""
    else:
        why = "" if pid else " (no pid file)"
        why = " (process is stopped: SIGSTOP)" if process in ("T", "t") else why
        found = "stale" if pid else "gone", ("stale" if age is None else f"stale {age:.0f} s") + why
    s["condition"], s["message"] = found
    return s


# ---- the run and the box

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


def totals(shards):
    running = [s for s in shards if s["condition"] == "running"]
    out = {key: sum(s[key] for s in shards) for key in COUNTS}
    out |= {key: sum(s[key] or 0 for s in running) for key in ("rate_per_sec", "tokens_per_sec")}
    # Shards are independent, so the run ends with its slowest; a dead, silent or new one leaves that unknown.
    etas = [s["eta_hours"] if s in running else None for s in shards if s["condition"] != "done"]
    return out | {"eta_hours": None if not shards or None in etas else max(etas, default=0.0)}


def snapshot(work, stage, num_shards=None):
    """Everything there is to show, as the object that --json prints."""
    shards = [read_shard(work, i) for i in range(num_shards or count_shards(work))]
    conditions = {s["condition"] for s in shards}
    state = ("done" if conditions == {"done"} else "running" if conditions & set(LIVE) else
             "failed" if conditions & set(BROKEN) else "stopped")
    fingerprint = clean((read_json(work / "plan" / "plan.json") or {}).get("fingerprint")) or None
    return {"work": str(work), "fingerprint": fingerprint, "num_shards": len(shards), "state": state,
            **totals(shards), "shards": shards, "box": read_box(stage)}


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


def read_box(stage):
    folder = os.path.abspath(stage)
    while not os.path.exists(folder):  # the first shard makes it
        folder = os.path.dirname(folder)
    cpu, memory = psutil.cpu_times_percent(interval=0.1), psutil.virtual_memory()
    used, left = room(folder)
    return {"gpus": read_gpus(), "cpu_count": psutil.cpu_count(), "cpu_user_percent": cpu.user,
            "cpu_system_percent": cpu.system, "memory_used": memory.total - memory.available,
            "memory_total": memory.total, "stage": stage, "stage_used": used, "stage_total": used + left,
            "stage_percent": round(100 * used / max(1, used + left), 1)}


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


def percent(s):
    """How much of what planning did not skip is marked."""
    return min(100, int(100 * s["processed"] / max(1, s["total"] - s["skipped"])))


def gigabytes(used, total):
    return "—" if used is None or total is None else f"{used / 1e9:,.1f}/{total / 1e9:,.1f} GB"


def doing(s):
    """What a shard does or what is wrong with it, short enough for a column."""
    state = s["state"] if s["condition"] == "running" else s["condition"]
    return re.split("[:(]", s["message"])[0].strip() or state.replace("_", " ")


def problem(work, s):
    """What is wrong with a shard, and where to read more."""
    log, tail = os.path.join(work, "logs", f"shard_{s['shard']}.log"), ""
    if s["condition"] == "gone" and os.access(log, os.R_OK):
        with open(log, "rb") as file:
            file.seek(max(0, os.path.getsize(log) - 4096))
            tail = clean("".join(file.read().decode(errors="replace").strip().splitlines()[-1:]))
    return s["message"] + (f"; its log ends: {tail}" if tail else "") + f" | log {log}"


COLUMNS = ["shard", "state", "samples", "%", "samples\n/s", "tokens\n/s", "ETA", "skipped",
           "uploads\nqueued/\nfailed", "waited\nfor room", "GPU\nbusy", "age"]


def rows(status):
    """The table: a list of strings for each shard and one for the total. Rates only of what is running."""
    def row(s, name, state, running):
        rate, tokens, busy = [s.get(key) if running else None for key in
                              ("rate_per_sec", "tokens_per_sec", "gpu_busy")]
        age = span(s["age_s"], parts=1) if "age_s" in s else ""
        return [name, state, f"{s['processed']:,}/{s['total']:,}", f"{percent(s)} %",
                "—" if rate is None else f"{rate:,.1f}", "—" if tokens is None else f"{tokens:,.0f}",
                span(s["eta_hours"] if running else None, 3600), f"{s['skipped']:,}",
                f"{s['pending_uploads']}/{s['failed_uploads']}", span(s["waited_for_room_s"], parts=1),
                "—" if busy is None else f"{100 * min(1, busy):.0f} %", age]
    out = [row(s, str(s["shard"]), doing(s), s["condition"] == "running") for s in status["shards"]]
    return out + [row(status, "all", status["state"], status["state"] == "running")]


def texts(status):
    """What stands around the table: a headline, the problems, the box."""
    box = status["box"]
    plan = f"plan {status['fingerprint'][:12]}" if status["fingerprint"] else "no plan yet"
    headline = (f"{status['work']} | {plan} | {status['state']} | "
                f"batches {status['batch']:,}/{status['total_batches']:,} | "
                f"{status['staged_bytes'] / 1e9:,.1f} GB staged | ETA {span(status['eta_hours'], 3600)}")
    problems = [f"shard {s['shard']}: {problem(status['work'], s)}" for s in status["shards"]
                if s["message"] not in ("", "starting", "not started")]
    return headline, problems if status["shards"] else [f"no shard has been started here: {START}"], [
        *(f"GPU {gpu['index']}   {gpu['name'] or 'unnamed'}   busy "
          f"{'—' if gpu['utilisation_percent'] is None else gpu['utilisation_percent']} %   "
          f"{gigabytes(gpu['memory_used'], gpu['memory_total'])}" for gpu in box["gpus"]),
        f"CPU     user {box['cpu_user_percent']:.0f} %   system {box['cpu_system_percent']:.0f} %   "
        f"of {box['cpu_count']} cores" + ("" if box["gpus"] else "   no GPU seen by NVML"),
        f"memory  {gigabytes(box['memory_used'], box['memory_total'])}",
        f"stage   {box['stage']}   {gigabytes(box['stage_used'], box['stage_total'])}   "
        f"{box['stage_percent']} % used, brake at 80 %"]


def terminal(status, width):
    """The status as things that rich prints: within 100 columns for shards of 228k samples, or within 80."""
    from rich import box
    from rich.table import Table
    from rich.text import Text
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    shown = [i for i, name in enumerate(COLUMNS) if width >= 100 or name[:3] not in ("ski", "wai", "GPU")]
    for name in (COLUMNS[i] for i in shown):
        left = name in ("shard", "state")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "state",
                         min_width=8 if name == "state" else None)
    *cells, total = rows(status)
    for s, row in zip(status["shards"], cells):  # as Text: a message may hold what rich takes for markup
        style = "green" if s["condition"] == "done" else "red" if s["message"] not in ("", "starting") else ""
        table.add_row(*(Text(row[i]) for i in shown), style=style, end_section=s is status["shards"][-1])
    table.add_row(*(Text(total[i]) for i in shown), style="bold")
    headline, problems, box_lines = texts(status)
    return [Text(headline, "bold"), table, *(Text(line, "red") for line in problems), *map(Text, box_lines)]


def markdown(status):
    """The same as a page: STATUS.md."""
    def line(cells):
        return "| " + " | ".join(cell.replace("\n", " ").replace("|", "\\|") for cell in cells) + " |"
    headline, problems, box_lines = texts(status)
    rule = ["---"] * 2 + ["---:"] * (len(COLUMNS) - 2)
    return "\n".join(["# Status", "", headline, "", time.strftime("Written %Y-%m-%d %H:%M:%S %z"), "",
                      *map(line, [COLUMNS, rule, *rows(status)]), "", *(f"- {text}" for text in problems), "",
                      *(f"- {text}" for text in box_lines), ""])


# ---- the commands

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
            show(console, snapshot(work, args.stage, count), live)
        else:
            for s in shards:
                if told.get(s["shard"]) != (s["state"], s["condition"]):
                    told[s["shard"]] = s["state"], s["condition"]
                    print(clock, f"shard {s['shard']}: {s['message'] or doing(s)}", flush=True)
            if over or now - last_line >= FOLLOW_LINE_S:
                last_line, t = now, totals(shards)
                failed = f", {t['failed_uploads']:,} failed" if t["failed_uploads"] else ""
                print(f"{clock} {count} shard{'s' * (count != 1)}",
                      f"{t['processed']:,}/{t['total']:,} samples ({percent(t)} %)",
                      f"{t['rate_per_sec']:,.1f} samples/s", f"{t['tokens_per_sec']:,.0f} tokens/s",
                      f"eta {span(t['eta_hours'], 3600)}",
                      f"uploads {t['pending_uploads']:,} pending{failed}", sep=" | ", flush=True)
        if over:
            break
        time.sleep(1.0 if console.is_terminal else 0.5)

    live.stop()
    if not shards:
        print(f"no shard has been started in {work}: {START}", file=sys.stderr)
        return 2
    names = {0: "done", 2: "refused", 3: "stopped"}
    for s, code in zip(shards, codes):
        why = f": {problem(work, s)}" if code else ""
        print(f"shard {s['shard']} exited {code} ({names.get(code, 'failed')}){why}")
    worst = min((code if code in names else 1 for code in codes), key=(1, 2, 3, 0).index)
    if worst:
        print("next: " + ("" if worst == 3 else "mend what the lines above name, then ") +
              "give the same command again; what is marked is kept, the rest is extracted")
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
    how.add_argument("--pids", action="store_true", help="print the pids of the shards that run, a line each")
    how.add_argument("--follow", action="store_true",
                     help="show progress until all shards have ended; exit with the worst of their codes")
    args = parser.parse_args()
    if args.num_shards is not None and not 1 <= args.num_shards <= MAX_SHARDS:
        parser.error(f"--num-shards {args.num_shards} is not between 1 and {MAX_SHARDS}: give the run's GPUS")
    if args.watch is not None and not 0.1 <= args.watch <= 86400:
        parser.error(f"--watch {args.watch} is not between 0.1 and 86400 seconds: try --watch 2")
    sys.stdout.reconfigure(errors="replace")  # an ASCII terminal gets ? for a dash, not a traceback

    work = Path(args.work)
    if args.pids:
        pids = (pid_of(f) for f in sorted(work.glob("pids/shard_*.pid")))
        print(*(pid for pid in pids if pid and process_state(pid, work)), sep="\n")
        return 0
    if not os.path.isdir(work):
        error = f"no work directory {args.work!r}: {START}   or name the run's own: make status WORK=DIR"
        if args.json:
            print(json.dumps({"error": error, "work": args.work}))
        print(error, file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(snapshot(work, args.stage, args.num_shards), allow_nan=False))
        return 0
    if args.markdown is not None:
        path = Path(args.markdown or work / "STATUS.md")
        page, temporary = markdown(snapshot(work, args.stage, args.num_shards)), Path(f"{path}.tmp")
        try:
            temporary.write_text(page, encoding="utf-8", errors="replace")
            os.replace(temporary, path)
        except OSError as error:
            print(f"cannot write {path}: {error.strerror}. Name another: --markdown FILE", file=sys.stderr)
            return 2
        print(f"wrote {path}")
        return 0
    from rich.console import Console
    from rich.live import Live
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    if not args.watch and not args.follow:
        show(console, snapshot(work, args.stage, args.num_shards))
        return 0
    try:
        with Live(console=console, auto_refresh=False, transient=not console.is_terminal) as live:
            if args.follow:
                return follow(args, work, console, live)
            while True:
                show(console, snapshot(work, args.stage, args.num_shards), live)
                time.sleep(args.watch)
    except KeyboardInterrupt:
        if args.follow:
            print("\nThe shards run on in the background. Look: make status   Stop them: make stop")
        return 130 if args.follow else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `python monitor.py | head` ends in silence
    sys.exit(main())
