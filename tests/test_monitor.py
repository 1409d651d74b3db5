"""monitor.py through its front door, on work directories made by hand.

    python -m pytest tests/test_monitor.py
"""
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest

import monitor

MONITOR = Path(__file__).resolve().parent.parent / "monitor.py"
DUMMY = "import time; print('up', flush=True); time.sleep(300)"


class Run:
    """A work directory with shards in it: real processes, progress files made up."""
    def __init__(self, folder):
        self.folder, self.work, self.processes = folder, folder / "work", []
        for name in ("pids", "plan", "logs"):
            (self.work / name).mkdir(parents=True)
        (folder / "extract.py").write_text(DUMMY)

    def progress(self, shard, num_shards=1, **values):
        data = dict(shard=shard, num_shards=num_shards, processed=1000, skipped=10, total=2010, batch=5,
                    rate_per_sec=145.0, eta_hours=3.2, total_batches=10, tokens=4000, tokens_per_sec=61000.0,
                    state="running", uploaded=5, pending_uploads=3, failed_uploads=0, staged_bytes=10**9,
                    waited_for_room_s=7.0, gpu_busy=0.97, updated_at=time.time(), exit_code=None, error=None)
        temporary = self.work / "progress.tmp"
        temporary.write_text(json.dumps(data | values))
        os.replace(temporary, self.work / f"progress_shard_{shard}.json")

    def pid(self, shard, pid):
        (self.work / "pids" / f"shard_{shard}.pid").write_text(f"{pid}\n")

    def process(self, shard, script="extract.py", work=("--work", "work")):
        child = subprocess.Popen([sys.executable, script, *work], cwd=self.folder, stdout=subprocess.PIPE)
        self.processes.append(child)
        child.stdout.readline()  # it runs, so its command line is its own
        self.pid(shard, child.pid)
        return child

    def dead_pid(self, shard):
        child = subprocess.Popen(["true"])
        child.wait()
        self.pid(shard, child.pid)
        return child.pid

    def monitor(self, *args, work=None):
        return subprocess.run([sys.executable, MONITOR, "--work", work or self.work, *args], text=True,
                              capture_output=True, timeout=60)

    def background(self, *args):
        # With SIGINT's default, which a test run that is itself in the background would hand down ignored.
        return subprocess.Popen([sys.executable, MONITOR, "--work", self.work, *args], text=True,
                                stdout=subprocess.PIPE,
                                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))

    def table(self, *args):
        return self.monitor(*args).stdout

    def json(self, *args):
        return json.loads(self.monitor("--json", *args).stdout, parse_constant=pytest.fail)


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path)
    yield made
    for child in made.processes:
        child.kill()
        child.wait()


def only(status):
    (shard,) = status["shards"]
    return shard


# ---- a shard's condition, in words

def test_a_live_shard_is_running(run):
    run.progress(0), run.process(0)
    shard = only(run.json())
    assert (shard["alive"], shard["condition"], shard["message"]) == (True, "running", "")


def test_a_dead_process_is_gone(run):
    run.progress(0)
    pid = run.dead_pid(0)
    assert f"pid {pid} is gone" in run.table()


def test_a_zombie_is_gone(run):
    run.progress(0)
    child = run.process(0)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended and nobody has reaped it
    assert f"pid {child.pid} is gone" in run.table()


def test_a_silent_shard_is_stale(run):
    run.progress(0, updated_at=time.time() - 42), run.process(0)
    assert re.search(r"stale 4\d s \|", run.table())


def test_a_stopped_process_is_named(run):
    run.progress(0, updated_at=time.time() - 42)
    run.process(0).send_signal(signal.SIGSTOP)
    assert re.search(r"stale 4\d s \(process is stopped: SIGSTOP\)", run.table())


def test_a_failure_shows_the_first_line_of_its_error(run):
    run.progress(0, state="failed", exit_code=1, error="[bold]out of memory[/nothing]\nTraceback: long")
    assert "failed: [bold]out of memory[/nothing] | log" in run.table()


def test_a_failure_names_its_log(run):
    run.progress(0, state="failed", exit_code=1, error="boom")
    assert str(run.work / "logs" / "shard_0.log") in run.table()


def test_a_long_error_is_one_line_of_the_pipe(run):
    run.progress(0, state="failed", exit_code=1, error="word " * 50)
    assert "word " * 49 + "word" in run.table()


def test_exit_code_2_is_refused(run):
    run.progress(0, state="failed", exit_code=2, error="MAX_LEN 9 is above TOKENS 8")
    assert "refused: MAX_LEN 9 is above TOKENS 8" in run.table()


def test_a_stopped_shard_is_resumable(run):
    run.progress(0, state="stopped", exit_code=3, error="with 5 of 10 batches done; the same command goes on")
    assert "shard 0: stopped: with 5 of 10 batches done; the same command goes on | log" in run.table()


def test_a_shard_without_progress_is_starting(run):
    run.process(0)
    assert only(run.json())["message"] == "starting"


def test_a_shard_without_pid_and_progress_is_not_started(run):
    assert only(run.json("--num-shards", "1"))["message"] == "not started"


def test_a_done_shard_needs_no_process(run):
    run.progress(0, state="done", exit_code=0), run.dead_pid(0)
    assert only(run.json())["message"] == ""


def test_a_vanished_shard_shows_the_end_of_its_log(run):
    run.progress(0), run.dead_pid(0)
    (run.work / "logs" / "shard_0.log").write_text("begun\nNo module named torch\n\n")
    assert "its log ends: No module named torch" in run.table()


# ---- whose process it is

def test_a_script_of_another_name_is_not_ours(run):
    (run.folder / "other.py").write_text(DUMMY)
    run.progress(0), run.process(0, script="other.py")
    assert only(run.json())["condition"] == "gone"


def test_another_work_directory_is_not_ours(run):
    run.progress(0), run.process(0, work=("--work", "elsewhere"))
    assert only(run.json())["condition"] == "gone"


@pytest.mark.parametrize("work", [(), ("--work=./work",), ("--work", "../{}/work")], ids=str)
def test_the_same_work_directory_written_otherwise_is_ours(run, work):
    run.progress(0), run.process(0, work=[part.format(run.folder.name) for part in work])
    assert only(run.json())["condition"] == "running"


def test_without_a_pid_file_a_fresh_shard_is_live(run):
    run.progress(0)
    assert only(run.json())["alive"] is True


def test_without_a_pid_file_a_silent_shard_is_not(run):
    run.progress(0, updated_at=time.time() - 42)
    assert only(run.json())["alive"] is False


# ---- files as they should not be

@pytest.mark.parametrize("text", ["", '{"shard": 0, "proc', "[1, 2]", "null", "\0\xff", "[" * 100_000],
                         ids=["empty", "half", "list", "null", "bytes", "deep"])
def test_garbage_for_progress_is_said(run, text):
    run.process(0)
    (run.work / "progress_shard_0.json").write_text(text, encoding="latin-1")
    assert "progress_shard_0.json is not a JSON object" in run.table()


def test_a_pid_of_another_host_proves_nothing(run):
    run.dead_pid(0)
    run.progress(0, host="node7")
    s = run.json()["shards"][0]
    assert (s["condition"], s["pid"], s["alive"]) == ("running", None, True)


@pytest.fixture
def queue(run, monkeypatch):
    """queue(lines): what `squeue` says of an array of three shards."""
    (run.work / "slurm.json").write_text('{"plan": 1, "array": 2, "shards": 3}')
    monkeypatch.setenv("PATH", f"{run.folder}:{os.environ['PATH']}")

    def says(*lines):
        text = "\n".join(lines)
        (run.folder / "squeue").write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        (run.folder / "squeue").chmod(0o755)
    return says


def at(seconds):
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))


def test_shards_that_slurm_queues_are_pending(run, queue):
    queue("1|RUNNING|None|node1|" + at(-5), *(f"2_{i}|PENDING|Dependency||N/A" for i in range(3)))
    found = run.json()
    assert [s["condition"] for s in found["shards"]] == ["pending"] * 3 and found["state"] == "running"
    assert "the plan's RUNNING on node1: 1; PENDING (Dependency): 3" in run.table()


def test_a_requeued_shard_is_starting_until_its_progress_is_of_this_start(run, queue):
    queue(*(f"2_{i}|RUNNING|None|node{i}|" + at(-5) for i in range(3)))
    run.progress(0, 3, host="a", updated_at=time.time() - 60)
    run.progress(1, 3, host="b", state="stopped", exit_code=3, updated_at=time.time() - 60)
    run.progress(2, 3, host="c")
    assert [s["condition"] for s in run.json()["shards"]] == ["starting", "starting", "running"]


def test_a_shard_that_ended_in_this_start_is_what_it_says_whatever_slurm_says(run, queue):
    queue("2_0|RUNNING|None|node1|" + at(-60))
    run.progress(0, 3, state="failed", exit_code=1, error="no more", host="a")
    assert run.json()["shards"][0]["condition"] == "failed"


def test_a_slurm_that_cannot_be_asked_hides_nothing(run, queue):
    queue("slurm_load_jobs error: Unable to contact slurm controller")
    run.progress(0, 3, host="a")
    found = run.monitor("--json")
    assert found.returncode == 0 and json.loads(found.stdout)["shards"][0]["condition"] == "running", found.stderr


def test_a_run_that_is_done_says_how_far_apart_its_shards_ended(run):
    for shard, ago in ((0, 100), (1, 58)):
        run.progress(shard, 2, state="done", exit_code=0, updated_at=time.time() - ago)
    assert "shards ended within 42 s of each other" in run.json()["summary"]


def test_garbage_for_a_pid_is_no_pid(run):
    run.progress(0), run.pid(0, "99\n\xffx" + "9" * 5000)
    assert only(run.json())["pid"] is None


def test_wrong_types_become_unknown(run):
    wrong = dict(processed="many", total=None, eta_hours=[], rate_per_sec={}, updated_at="now", error=5,
                 exit_code="1", tokens_per_sec=True, gpu_busy="x", staged_bytes=-1)
    run.progress(0, **wrong)
    right = dict(processed=0, total=0, staged_bytes=0)
    assert {key: only(run.json())[key] for key in wrong} == dict.fromkeys(wrong) | right


def test_wrong_types_leave_a_table(run):
    run.progress(0, processed="many", total=None, eta_hours=[], updated_at="now", state=7, gpu_busy="x")
    run.process(0)
    assert re.search(r"^0 +stale +0/0 +0 % ", run.table(), re.M)


def test_nan_and_infinity_do_not_reach_the_json(run):
    run.progress(0, eta_hours=float("nan"), rate_per_sec=float("inf"), more=[float("-inf")]), run.process(0)
    assert only(run.json())["more"] == [None]  # Run.json fails on NaN and Infinity


def test_a_negative_eta_is_unknown(run):
    run.progress(0, eta_hours=-2.0), run.process(0)
    assert run.json()["eta_hours"] is None


def test_a_zero_rate_is_shown(run):
    run.progress(0, rate_per_sec=0, tokens_per_sec=0, eta_hours=None, processed=0, total=0), run.process(0)
    assert re.search(r"^0 +running +0/0 +0 % +0.0 +0 +— ", run.table(), re.M)


def test_an_update_in_the_future_has_age_0(run):
    run.progress(0, updated_at=time.time() + 3600), run.process(0)
    assert (only(run.json())["age_s"], only(run.json())["message"]) == (0, "")


def test_a_missing_work_directory_exits_2(run):
    gone = run.monitor(work=run.folder / "nowhere")
    assert gone.returncode == 2 and "nowhere" in gone.stderr and "make extract" in gone.stderr


def test_a_missing_work_directory_is_an_error_in_json(run):
    gone = run.monitor("--json", work=run.folder / "nowhere")
    assert gone.returncode == 2 and "nowhere" in json.loads(gone.stdout)["error"]


def test_an_empty_work_directory_names_the_next_step(run):
    assert "make extract" in run.table()


def test_a_missing_staging_directory_shows_its_filesystem(run):
    assert run.json("--stage", str(run.folder / "not" / "yet"))["box"]["stage_total"] > 0


# ---- the run as a whole

def test_shards_past_num_shards_are_ignored(run):
    for shard in range(4):
        run.progress(shard, num_shards=4, updated_at=time.time() - 1000)
    for shard in range(2):
        run.progress(shard, num_shards=2)
    assert len(run.json()["shards"]) == 2


def test_num_shards_can_be_given(run):
    run.progress(0, num_shards=1)
    assert len(run.json("--num-shards", "3")["shards"]) == 3


def test_the_eta_is_the_slowest_shards(run):
    run.progress(0, 2, eta_hours=1.5), run.process(0), run.progress(1, 2, eta_hours=4.0), run.process(1)
    assert run.json()["eta_hours"] == 4.0


def test_a_done_shard_does_not_hide_the_eta(run):
    run.progress(0, 2, eta_hours=1.5), run.process(0)
    run.progress(1, 2, state="done", exit_code=0, eta_hours=None)
    assert run.json()["eta_hours"] == 1.5


def test_a_dead_shard_makes_the_eta_unknown(run):
    run.progress(0, 2), run.process(0), run.progress(1, 2), run.dead_pid(1)
    assert run.json()["eta_hours"] is None


def test_a_dead_shards_rate_is_not_counted(run):
    run.progress(0, 2), run.process(0), run.progress(1, 2), run.dead_pid(1)
    assert run.json()["tokens_per_sec"] == 61000.0


@pytest.mark.parametrize("codes, state", [((0, 0), "done"), ((0, 3), "stopped"), ((1, 3), "failed"),
                                          ((2, 0), "failed"), ((0, None), "running")])
def test_the_runs_state(run, codes, state):
    for shard, code in enumerate(codes):
        words = {None: "running", 0: "done", 3: "stopped"}.get(code, "failed")
        run.progress(shard, 2, exit_code=code, state=words)
    assert run.json()["state"] == state


@pytest.mark.parametrize("plan", [None, '{"fingerprint": "abc", "counts": {"batches": 240}}'])
def test_a_run_that_nobody_started_is_not_called_stopped(run, plan):
    if plan:
        (run.work / "plan/plan.json").write_text(plan)
    found = run.json()
    assert (found["state"], found["worry"]) == ("stopped", "none")
    assert found["summary"].startswith("Not started: ")
    assert re.search(r"^all +not started ", run.table(), re.M)


def test_of_shards_that_are_all_held_none_is_called_running(run):
    for shard in range(2):
        run.progress(shard, 2, updated_at=time.time() - 42), run.process(shard).send_signal(signal.SIGSTOP)
    assert " | not running | " in run.table() and run.json()["state"] == "running"


def finished(run, shards, markers):
    """Of 10 batches each; with so many markers of them."""
    for shard in shards:
        run.progress(shard, 4, state="done", exit_code=0)
    (run.work / "markers").mkdir()
    for batch in range(markers):
        (run.work / "markers" / f".done_{batch:06d}").write_text("{}")


def test_a_finished_run_that_lost_a_marker_is_not_complete(run):
    finished(run, range(4), 39)
    found = run.json()
    assert (found["summary"], found["worry"]) == (
        "Not complete: 1 of 40 batches has no marker: make extract goes on", "some")


def test_markers_of_other_machines_are_not_missed(run):
    finished(run, [0], 10)
    (run.work / "plan/plan.json").write_text('{"counts": {"samples": 8000, "skipped": 40, "batches": 40}}')
    assert run.json("--num-shards", "1")["summary"].startswith("Done: ")
    assert "Not complete" not in run.json()["summary"]


def test_the_sentence_counts_stopped_shards_while_others_run(run):
    run.progress(0, 2), run.process(0), run.progress(1, 2, state="stopped", exit_code=3)
    assert run.json()["summary"].startswith("1 of 2 shards running, 1 stopped, ")


def test_after_a_failure_the_sentence_does_not_promise_that_a_restart_is_enough(run):
    run.progress(0, state="failed", exit_code=1, error="boom")
    assert run.json()["summary"] == "Not running: 1 failed; mend the cause, then the same make extract goes on"


def test_the_fingerprint_comes_from_the_plan(run):
    (run.work / "plan" / "plan.json").write_text('{"fingerprint": "abc123"}')
    assert run.json()["fingerprint"] == "abc123"


def test_a_piped_table_has_a_row_a_shard_and_a_total(run):
    for shard in range(8):
        run.progress(shard, 8, processed=228_000, total=228_457)
    rows = [line.split() for line in run.table().splitlines()]
    assert [row[0] for row in rows if "3/0" in row or "24/0" in row] == [*map(str, range(8)), "all"]


def test_a_row_is_not_cut_off_in_a_pipe(run):
    run.progress(0, state="waiting_for_room", processed=228_000, total=228_457)
    (row,) = [line.split() for line in run.table().splitlines() if line.startswith("0 ")]
    cells = "0 waiting for room 228,000/228,447 99 % 145.0 61,000 3 h 12 min 10 3/0 7 s 97 %"
    assert row[:-3] == cells.split()  # the last three are when it was seen: 0 s ago


def test_a_column_says_when_each_shard_was_seen_last(run):
    run.progress(0, updated_at=time.time() - 3600, state="stopped", exit_code=3)
    table = run.table()
    assert re.search(r"\blast *\n.* seen *\n", table) and re.search(r"^0 .* 1 h ago *$", table, re.M)


@pytest.mark.parametrize("columns", [80, 100])
def test_a_row_is_whole_on_a_terminal(run, columns):
    run.progress(0, processed=228_000, total=228_457)
    terminal, its_end = pty.openpty()
    termios.tcsetwinsize(its_end, (40, columns))
    subprocess.run([sys.executable, MONITOR, "--work", run.work], stdout=its_end,
                   env=os.environ | {"TERM": "xterm"})
    (row,) = [line for line in os.read(terminal, 65536).decode().splitlines() if line.startswith("0 ")]
    assert re.match(r"0 +running +228,000/228,447 99 % +145.0 61,000 3 h 12 min .*3/0 .*\d s ago", row)


def test_what_planning_skipped_is_not_waited_for(run):
    run.progress(0, state="done", exit_code=0, processed=40, skipped=1, total=41)
    assert re.search(r"^0 +done +40/40 100 % .* 1 +3/0", run.table(), re.M)


def test_what_was_excluded_is_not_there(run):
    run.progress(0, state="done", exit_code=0, processed=41, skipped=0, excluded=1, total=41)
    assert "| 1 excluded |" in run.table() and "Done: 40 samples" in run.json()["summary"]


def test_a_shard_that_never_planned_counts_with_what_the_plan_gives_it(run):
    run.progress(0, 2, state="done", exit_code=0, processed=20, skipped=0, total=20), run.dead_pid(1)
    (run.work / "plan" / "plan.json").write_text('{"counts": {"samples": 40, "skipped": 2, "batches": 20}}')
    assert re.search(r"^all +failed +20/40 +50 % .* 2 ", run.table(), re.M)


def test_one_is_singular(run):
    run.progress(0, state="done", exit_code=0, processed=1, skipped=0, total=1, batch=1)
    assert "Done: 1 sample in 1 batch, all in OUT" in run.json()["summary"]


def test_what_is_small_is_shown_in_megabytes(run):
    run.progress(0, staged_bytes=5_300_000)
    assert " | 5.3 MB staged | " in run.table() and run.json()["staged_bytes"] == 5_300_000


def test_a_done_shard_that_had_nothing_to_do_is_whole(run):
    run.progress(0, state="done", exit_code=0, processed=0, skipped=0, total=0, batch=0, total_batches=0)
    assert re.search(r"^0 +done +0/0 +100 % ", run.table(), re.M)


def test_markdown_writes_status_md(run):
    run.progress(0)
    wrote = run.monitor("--markdown").stdout
    assert str(run.work / "STATUS.md") in wrote and "| 0 | running |" in (run.work / "STATUS.md").read_text()


def test_markdown_takes_a_path(run):
    run.monitor("--markdown", str(run.folder / "page.md"))
    assert (run.folder / "page.md").exists()


def test_watch_prints_until_interrupted(run):
    run.progress(0)
    child = run.background("--watch", "0.1")
    while "plan" not in child.stdout.readline():
        pass
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=30) and child.returncode == 0


def test_a_gpu_that_will_not_tell_is_a_dash(run):
    (run.folder / "pynvml.py").write_text("""
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(i): return f"handle {i}"
def nvmlDeviceGetName(gpu): return "H200"
def nvmlDeviceGetUtilizationRates(gpu): raise NVMLError
def nvmlDeviceGetMemoryInfo(gpu): return type("M", (), dict(used=57_000_000_000, total=144_000_000_000))
""")
    run.progress(0)
    table = subprocess.run([sys.executable, MONITOR, "--work", run.work], text=True, capture_output=True,
                           env=os.environ | {"PYTHONPATH": str(run.folder)}).stdout
    assert "GPU 1   H200   busy — %   57.0/144.0 GB" in table


def test_torch_is_not_imported(run):
    imported = subprocess.run([sys.executable, "-X", "importtime", MONITOR, "--work", run.work], text=True,
                              capture_output=True).stderr
    assert not re.search(r"\b(torch|numpy|transformers|extract|nicegui|matplotlib|prometheus_client)\b", imported)


# ---- --follow

@pytest.mark.parametrize("codes, worst", [((0, 0), 0), ((0, 3), 3), ((3, 2), 2), ((3, 2, 1), 1), ((0, 7), 1)])
def test_follow_returns_the_worst_code(run, codes, worst):
    for shard, code in enumerate(codes):
        run.progress(shard, len(codes), exit_code=code, state="done" if code == 0 else "failed")
    assert run.monitor("--follow", "--num-shards", str(len(codes))).returncode == worst


def test_follow_waits_for_a_live_shard(run):
    run.progress(0), run.process(0)
    follow = run.background("--follow", "--num-shards", "1")
    assert follow.stdout.readline().endswith(" shard 0: running\n")
    run.progress(0, exit_code=3, state="stopped")
    assert follow.communicate(timeout=30) and follow.returncode == 3


def test_follow_says_how_each_shard_ended(run):
    run.progress(0, 2, exit_code=0, state="done"), run.progress(1, 2, exit_code=3, state="stopped")
    lines = run.table("--follow", "--num-shards", "2").splitlines()
    stopped = f"shard 1 exited 3 (stopped): the same command goes on | log {run.work / 'logs' / 'shard_1.log'}"
    assert {"shard 0 exited 0 (done)", stopped} <= {*lines}


@pytest.mark.parametrize("code, word", [(1, "failed"), (2, "refused"), (3, "stopped")])
def test_follow_says_once_how_a_shard_ended(run, code, word):
    run.progress(0, exit_code=code, state="failed", error="no such file")
    assert f"\nshard 0 exited {code} ({word}): no such file | log" in run.table("--follow")


def test_the_last_line_of_follow_has_no_rates(run):
    run.progress(0, exit_code=3, state="stopped", error="asked to")
    last = [line for line in run.table("--follow").splitlines() if " samples (" in line][-1]
    assert last.endswith("1,000/2,000 samples (50 %), 10 skipped | uploads 3 pending")


def test_follow_prints_changes_of_state(run):
    run.progress(0, state="draining"), run.process(0)
    follow = run.background("--follow")
    first = follow.stdout.readline()
    run.progress(0, exit_code=0, state="done")
    changes = re.findall(r"^\[.{8}\] shard 0: (.*)", first + follow.communicate(timeout=30)[0], re.M)
    assert changes == ["draining", "done"]


def test_follow_prints_a_summary(run):
    run.progress(0, exit_code=0, state="done")
    line = r"\] 1 shard \| 1,000/2,000 samples \(50 %\), 10 skipped \| uploads 3 pending"
    assert re.search(line, run.table("--follow"))


def test_follow_prints_rates_while_shards_run(run):
    run.progress(0), run.process(0), run.progress(1, 2, exit_code=3, state="stopped")
    follow = run.background("--follow", "--num-shards", "2")
    while " samples (" not in (line := follow.stdout.readline()):
        pass
    run.processes[0].kill()
    follow.communicate(timeout=30)
    assert " | 145.0 samples/s | 61,000 tokens/s | eta — | uploads 6 pending\n" in line


def test_follow_names_what_was_left_out(run):
    run.progress(0, exit_code=0, state="done", processed=41, skipped=1, excluded=1, total=42)
    assert "| 40/40 samples (100 %), 1 skipped, 1 excluded |" in run.table("--follow")


def test_all_but_one_sample_is_not_100_percent(run):
    run.progress(0, exit_code=3, state="stopped", processed=913_785, skipped=0, total=913_786)
    assert "913,785/913,786 samples (99 %)" in run.table("--follow")


def test_a_vanished_process_counts_as_1(run):
    run.progress(0, 2, exit_code=2, state="failed"), run.progress(1, 2), run.dead_pid(1)
    assert run.monitor("--follow", "--num-shards", "2").returncode == 1


def test_a_process_killed_while_followed_counts_as_1(run):
    run.progress(0)
    shard, follow = run.process(0), run.background("--follow", "--num-shards", "1")
    follow.stdout.readline()
    shard.kill()
    assert follow.communicate(timeout=30) and follow.returncode == 1


def test_a_shard_that_never_appears_counts_as_1(run):
    assert run.monitor("--follow", "--num-shards", "1").returncode == 1


def test_follow_waits_for_a_shard_that_is_launched_late(run):
    follow = run.background("--follow", "--num-shards", "1")
    follow.stdout.readline()  # it has looked once and seen nothing
    run.process(0)
    follow.stdout.readline()  # "starting"
    run.progress(0, exit_code=3, state="stopped")
    assert follow.wait(30) == 3


def test_an_exit_code_counts_while_the_process_still_lives(run):
    run.progress(0, exit_code=0, state="done"), run.process(0)
    assert run.monitor("--follow").returncode == 0


@pytest.fixture
def four(run):
    """Of four shards one is done, one killed, one failed, one held by SIGSTOP."""
    for shard in range(4):
        run.progress(shard, 4), run.process(shard)
    follow = run.background("--follow", "--num-shards", "4")
    follow.stdout.readline()
    run.processes[1].kill()
    run.progress(2, 4, state="failed", exit_code=1, error="boom")
    run.processes[3].send_signal(signal.SIGSTOP)
    run.progress(3, 4, updated_at=time.time() - 42)
    run.progress(0, 4, state="done", exit_code=0)
    run.said, run.code = follow.communicate(timeout=60)[0], follow.returncode
    return run


def test_follow_ends_when_nobody_is_left_who_moves(four):
    assert four.code == 1 and four.processes[3].poll() is None


def test_follow_names_each_shard_that_did_not_finish(four):
    assert "shard 0 exited 0 (done)" in four.said
    assert re.search(r"shard 1 exited 1 \(failed\): pid \d+ is gone", four.said)
    assert "shard 2 exited 1 (failed): boom" in four.said
    assert re.search(r"shard 3 exited 1 \(failed\): stale \d+ s \(process is stopped: SIGSTOP\)", four.said)


def test_ctrl_c_leaves_the_shards_running(run):
    run.progress(0)
    shard = run.process(0)
    follow = run.background("--follow")
    follow.stdout.readline()
    follow.send_signal(signal.SIGINT)
    words = follow.communicate(timeout=30)[0]
    assert "make stop" in words and follow.returncode == 130 and shard.poll() is None


def test_cpu_use_is_that_of_all_cores():
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count())]
    try:
        time.sleep(1)
        assert 60 < sum(monitor.cpu_percent()) <= 100.2
    finally:
        for process in busy:
            process.kill()
            process.wait()


# ---- rates as a shard counts them

class Plan:
    """As much of a plan as Progress asks: ten batches of 5 samples, 100 tokens and 1,000 bytes."""

    counts = {"skipped": 0, "skipped_by_reason": {}}
    batch_tokens = np.full(10, 100)

    def rows(self, batch):
        return range(5)

    def layout(self, batch):
        return {}, [], 1000


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves: clock[0] is the time."""
    now = [1_000_000.0]
    monkeypatch.setattr(monitor.time, "time", lambda: now[0])
    return now


def test_what_earlier_starts_left_is_uploaded_at_its_own_rate(tmp_path, clock):
    shard = monitor.Progress(tmp_path, 0, 1, tmp_path)
    shard.planned(Plan(), range(10), None)
    for batch in range(3):
        clock[0] += 10
        shard.marked(batch, 0)
    shard.set()
    assert shard.now["rate_per_sec"] == 0.5 and shard.now["upload_bytes_per_sec"] == 100


def test_what_was_uploaded_while_a_model_was_loaded_is_not_in_the_rate_of_computing(tmp_path, clock):
    shard = monitor.Progress(tmp_path, 0, 1, tmp_path)
    shard.planned(Plan(), range(10), None)
    for batch in range(5):
        shard.marked(batch, 0)
    clock[0] += 20
    shard.running()
    clock[0] += 10
    shard.marked(5, 0)
    shard.set()
    assert shard.now["rate_per_sec"] == 0.5
