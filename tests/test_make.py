"""The harness through the front door: real make, real shards, a real S3 server.

python -m pytest -q tests/test_make.py
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from s3 import S3Server
from shards import until

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["TOKENS=1024", "MAX_LEN=300", "ARGS=--compute-dtype fp32 --dtype fp32"]


def make(*words, env=None, timeout=240):
    """make in the repository, with the Python that runs the tests."""
    return subprocess.run(
        ["make", "--no-print-directory", f"PY={sys.executable}", *map(str, words)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def inputs(place, tmp_path_factory):
    """The tiny model, 60 conversations, and a warm-up whose report every run of these tests starts from."""
    work = tmp_path_factory.mktemp("inputs") / "w"
    p = make("warmup", f"MODEL={place.model}", f"WORK={work}", *SMALL)
    assert p.returncode == 0, p.stdout + p.stderr
    return SimpleNamespace(model=place.model, chat=place.chat, warmup=work / "warmup.json", said=p.stdout)


def knobs_of(inputs, d):
    stage = Path(f"/dev/shm/test-make-{os.getpid()}-{d.name}")
    (d / "w").mkdir(exist_ok=True)
    shutil.copy(inputs.warmup, d / "w")
    knobs = {
        "MODEL": inputs.model,
        "DATA": inputs.chat,
        "OUT": d / "out",
        "WORK": d / "w",
        "STAGE": stage,
        "GPUS": 2,
    }
    return stage, [f"{k}={v}" for k, v in knobs.items()] + SMALL


@pytest.fixture
def run(inputs, tmp_path):
    """Knobs of a run of this test's own, into a local directory."""
    stage, knobs = knobs_of(inputs, tmp_path)
    yield knobs
    make("stop", f"WORK={tmp_path / 'w'}")
    shutil.rmtree(stage, ignore_errors=True)


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory):
    d = tmp_path_factory.mktemp("finished")
    stage, knobs = knobs_of(inputs, d)
    yield make("extract", *knobs), d
    shutil.rmtree(stage, ignore_errors=True)


def slow_run(inputs, d):
    """A run into S3, so slowly that it is still under way when a test looks."""
    stage, knobs = knobs_of(inputs, d)
    with S3Server(d / "s3") as server:
        server.make_bucket("b")
        knobs = [k for k in knobs if not k.startswith("OUT=")] + [
            "OUT=s3://b/run",
            "UPLOADS=1",
            "UPLOAD_MBPS=0.3",
        ]
        yield knobs, server.environ(), d / "w"
        make("stop", f"WORK={d / 'w'}")
    shutil.rmtree(stage, ignore_errors=True)


@pytest.fixture
def slow(inputs, tmp_path):
    yield from slow_run(inputs, tmp_path)


@pytest.fixture(scope="module")
def under_way(inputs, tmp_path_factory):
    """One such run for the tests that only look at it, or end it; they stand in this order."""
    for knobs, env, work in slow_run(inputs, tmp_path_factory.mktemp("under_way")):
        yield knobs, env, work, begin(knobs, env, work)


def begin(knobs, env, work):
    """make extract in the background, until both shards run and one batch is marked."""
    p = subprocess.Popen(
        ["make", "--no-print-directory", f"PY={sys.executable}", "extract", *knobs],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    until(lambda: list(work.glob("markers/.done_*")) and [s["exit_code"] for s in shards(work)] == [None] * 2, p)
    return p


def shards(work):
    return [json.loads(f.read_text()) for f in sorted(work.glob("progress_shard_*.json"))]


def test_make_alone_explains_targets_and_knobs():
    p = make()
    assert p.returncode == 0
    assert "extract" in p.stdout and "UPLOAD_MBPS" in p.stdout


@pytest.mark.parametrize("target", ["help", "extract", "status", "stop", "test"])
def test_a_mistyped_knob_is_refused_with_the_nearest_name(target):
    for slip, meant in (("GPU=4", "GPUS"), ("MODLE=x", "MODEL"), ("uploads=3", "UPLOADS")):
        p = make(target, slip)
        assert p.returncode == 2 and f"the nearest is {meant}." in p.stderr and slip.split("=")[0] in p.stderr


@pytest.mark.parametrize("value", ["WORK=it's", 'OUT=s3://b/"x"', "MODEL=-x", "DATA=`id`", "STAGE=a$b", "OUT=$(HOME)/x",
                                   "GPUS=1'"])
def test_a_value_that_a_shell_would_read_otherwise_is_refused(value):
    for target in ("help", "plan", "status"):
        p = make(target, value)
        assert p.returncode == 2 and f"{value}, from the command line, is refused" in p.stderr


@pytest.mark.parametrize("knob", ["WORK", "STAGE", "TO"])
def test_a_directory_without_a_name_is_refused(knob):
    for target in ("status", "extract"):
        p = make(target, f"{knob}=")
        assert p.returncode == 2 and f"{knob}= is empty" in p.stderr


def test_a_value_of_the_environment_that_a_shell_would_read_otherwise_is_refused():
    p = make("status", env={**os.environ, "WORK": "it's"})
    assert p.returncode == 2 and "WORK=it's, from the environment, is refused" in p.stderr


def test_values_with_spaces_and_flags_with_quotes_are_taken(tmp_path):
    p = make("help", f"WORK={tmp_path}/a, b (c)", "ARGS=--template-args '{\"a\": 1}'")
    assert p.returncode == 0 and "/a, b (c)" in p.stdout and """'{"a": 1}'""" in p.stdout


def test_variables_of_the_environment_and_of_other_programs_are_not_refused():
    other = ["WEB_TOKEN=0123456789abcdef", "CUDA_VISIBLE_DEVICES=", "AWS_PROFILE=x", "HF_HOME=/tmp", "HF_TOKEN=x",
             f"PATH={os.environ['PATH']}"]
    assert make("help", *other, env={**os.environ, "GPU": "4", "MODLE": "x"}).returncode == 0


def test_variables_of_local_mk_are_not_refused(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "local.mk").write_text("BUCKET = b\nOUT = s3://$(BUCKET)/run\n")
    p = subprocess.run(["make", "help"], cwd=tmp_path, capture_output=True, text=True)
    assert p.returncode == 0 and "s3://b/run" in p.stdout, p.stderr


def test_a_comment_after_a_value_of_local_mk_and_the_home_directory_are_read_as_meant(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "local.mk").write_text("WORK = ~/run one  # not the big one\nMODEL = m\nDATA = d\nOUT = o\n")
    p = subprocess.run(["make", "-n", "plan", "PY=python"], cwd=tmp_path, capture_output=True, text=True)
    assert f"--work '{Path.home()}/run one' " in p.stdout, p.stderr


def test_extract_names_each_exit_code(finished):
    p, _ = finished
    assert p.returncode == 0, p.stdout + p.stderr
    assert "shard 0 exited 0 (done)" in p.stdout and "shard 1 exited 0 (done)" in p.stdout


def test_extract_completes_the_output(finished):
    _, d = finished
    assert json.loads((d / "out/manifest.json").read_text())["complete"] is True


def test_status_of_a_finished_run(finished):
    _, d = finished
    p = make("status", f"WORK={d / 'w'}")
    assert p.returncode == 0 and p.stdout.count("done") >= 2


def test_a_second_extract_does_not_start_a_second_set(under_way):
    knobs, env, work, _ = under_way
    pids = [f.read_text() for f in sorted(work.glob("pids/*.pid"))]
    p = make("extract", *knobs, env=env)
    assert p.returncode == 2 and "under way" in p.stdout
    assert [f.read_text() for f in sorted(work.glob("pids/*.pid"))] == pids


def test_clean_shm_refuses_while_shards_run(under_way):
    knobs, env, _, _ = under_way
    p = make("clean-shm", *knobs, env=env)
    assert p.returncode == 2 and "make stop" in p.stdout


def test_interrupt_leaves_the_shards_running(under_way):
    _, _, work, p = under_way
    os.killpg(p.pid, signal.SIGINT)
    assert "make status" in p.communicate(timeout=60)[0]
    assert all(Path(f"/proc/{f.read_text().split()[0]}").exists() for f in work.glob("pids/shard_*.pid"))


def test_stop_ends_the_shards_resumably(under_way):
    _, env, work, _ = under_way
    assert make("stop", f"WORK={work}", env=env).returncode == 0
    assert {(s["state"], s["exit_code"]) for s in shards(work)} == {("stopped", 3)}


def test_restart_with_gpus_1_goes_on_with_a_run_begun_with_gpus_2(under_way):
    """What runs is stopped, markers are kept, the rest is done by one shard."""
    knobs, env, work, _ = under_way
    p = begin(knobs, env, work)
    before = {f.name: f.stat().st_mtime_ns for f in work.glob("markers/.done_*")}
    again = make("restart", *knobs, "GPUS=1", "UPLOAD_MBPS=0", env=env)
    assert "asking" in again.stdout and "(stopped)" in p.communicate(timeout=30)[0]
    assert again.returncode == 0, again.stdout + again.stderr
    after = {f.name: f.stat().st_mtime_ns for f in work.glob("markers/.done_*")}
    assert len(before) < len(after) and before.items() <= after.items()
    assert json.loads((work.parent / "s3/b/run/manifest.json").read_text())["complete"] is True


def test_one_killed_shard_is_named_and_the_other_finishes(slow):
    knobs, env, work = slow
    p = begin([*knobs, "UPLOAD_MBPS=1"], env, work)
    os.kill(int((work / "pids/shard_1.pid").read_text()), signal.SIGKILL)
    output = p.communicate(timeout=180)[0]
    assert p.returncode != 0
    assert "shard 0 exited 0 (done)" in output and "shard 1 exited 1" in output
    assert "Killed" not in output and "CUDA_VISIBLE_DEVICES" not in output


def test_stop_signals_nobody_else(tmp_path):
    other = subprocess.Popen(["sleep", "60"])
    (tmp_path / "pids").mkdir()
    (tmp_path / "pids/shard_0.pid").write_text(f"{other.pid}\n")
    p = make("stop", f"WORK={tmp_path}")
    assert "no shard" in p.stdout and other.poll() is None
    other.kill()


def test_stop_reaches_a_shard_that_sigstop_holds(tmp_path):
    (tmp_path / "extract.py").write_text("import time; time.sleep(60)")
    held = subprocess.Popen([sys.executable, "extract.py", "--work", "w"], cwd=tmp_path)
    (tmp_path / "w/pids").mkdir(parents=True)
    (tmp_path / "w/pids/shard_0.pid").write_text(f"{held.pid}\n")
    held.send_signal(signal.SIGSTOP)
    threading.Thread(target=held.wait, daemon=True).start()  # so that it does not stay a zombie
    p = make("stop", f"WORK={tmp_path / 'w'}")
    assert p.returncode == 0 and "stopped" in p.stdout, p.stdout
    held.kill()


def begun(run, work, stage):
    """make extract in the background, until the process of a pid file is there; that process is held."""
    p = subprocess.Popen(["make", "--no-print-directory", f"PY={sys.executable}", "extract", *run], cwd=ROOT,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    pid = int(until(lambda: (work / stage).exists() and (work / stage).read_text(), p))
    if stage != ".launch":
        os.kill(pid, signal.SIGSTOP)
    return p, pid


@pytest.fixture(scope="module", params=[".launch", "pids/.plan", "pids/.warmup"])
def stopped_early(inputs, tmp_path_factory, request):
    """A run that make stop found at its very beginning, while it planned, and while it warmed up."""
    d = tmp_path_factory.mktemp("early")
    stage, knobs = knobs_of(inputs, d)
    (d / "w/warmup.json").unlink()
    p, pid = begun(knobs, d / "w", request.param)
    again, looked = make("extract", *knobs), make("status", f"WORK={d / 'w'}")
    stop = make("stop", f"WORK={d / 'w'}")
    yield SimpleNamespace(work=d / "w", pid=pid, again=again, status=looked.stdout, stop=stop,
                          code=p.wait(60), said=p.stdout.read(), at=request.param)
    shutil.rmtree(stage, ignore_errors=True)


def test_stop_before_the_shards_ends_what_prepares_them(stopped_early):
    assert stopped_early.stop.returncode == 0 and "\nstopped; the same" in stopped_early.stop.stdout
    assert not Path(f"/proc/{stopped_early.pid}").exists()


def test_shards_do_not_start_after_a_stop_before_them(stopped_early):
    assert stopped_early.code == 2 and "stopped before a shard was started" in stopped_early.said
    assert not [*stopped_early.work.glob("*/shard_*")]


def test_a_second_extract_while_the_first_prepares_is_refused(stopped_early):
    assert stopped_early.again.returncode == 2
    assert "under way or being started: make status" in stopped_early.again.stdout


def test_status_says_what_happens_before_the_shards(stopped_early):
    word, words = {".launch": ("", ""),
                   "pids/.plan": ("planning", "Planning: the data is being tokenized"),
                   "pids/.warmup": ("warming up", "Warming up: kernels are compiled")}[stopped_early.at]
    assert f" | {word}" in stopped_early.status and f"\n{words}" in stopped_early.status
    assert "begin with" not in stopped_early.status


def test_stop_ends_nobody_elses_process_that_has_the_pid_of_a_launch(tmp_path):
    (tmp_path / "w/pids").mkdir(parents=True)
    other = subprocess.Popen(["sleep", "60"])
    (tmp_path / "w/.launch").write_text(f"{other.pid}\n")
    holder = subprocess.Popen(["flock", tmp_path / "w/.launch", "sleep", "3"])
    p = make("stop", f"WORK={tmp_path / 'w'}")
    assert p.returncode == 0 and other.poll() is None, p.stdout
    other.kill()
    holder.wait()


def test_a_shard_that_ends_at_once_keeps_no_other_from_starting(inputs, tmp_path):
    stage, knobs = knobs_of(inputs, tmp_path)
    (tmp_path / "w/logs/shard_0.log").unlink(missing_ok=True)
    (tmp_path / "w/logs/shard_0.log").mkdir(parents=True)  # bash cannot open it: no process at all
    p = make("extract", *knobs)
    assert p.returncode == 2 and "shard 1 exited" in p.stdout, p.stdout
    shutil.rmtree(stage, ignore_errors=True)


def test_stop_waits_for_shards_that_are_just_being_started_and_ends_them(tmp_path):
    (tmp_path / "extract.py").write_text("import time; time.sleep(60)")
    (tmp_path / "w/pids").mkdir(parents=True)
    start = (f"exec 9>>w/.launch; flock 9; touch w/locked; {sys.executable} extract.py --work w 9>&- & "
             "sleep 1.5; echo $! >w/pids/shard_0.pid; exec 9>&-; wait $!")
    shell = subprocess.Popen(["bash", "-c", start], cwd=tmp_path)
    until(lambda: (tmp_path / "w/locked").exists(), shell)
    p = make("stop", f"WORK={tmp_path / 'w'}")
    assert p.returncode == 0 and "asking" in p.stdout and shell.wait(10) == 143, p.stdout


def test_stop_ends_the_children_of_a_warm_up(tmp_path):
    (tmp_path / "warmup.py").write_text("import subprocess; subprocess.run(['sleep', '60'])")
    warmup = subprocess.Popen([sys.executable, "warmup.py", "--work", "w"], cwd=tmp_path)
    (tmp_path / "w/pids").mkdir(parents=True)
    (tmp_path / "w/pids/.warmup").write_text(f"{warmup.pid}\n")
    (child,) = until(lambda: psutil.Process(warmup.pid).children())
    threading.Thread(target=warmup.wait, daemon=True).start()  # so that it does not stay a zombie
    p = make("stop", f"WORK={tmp_path / 'w'}")
    assert p.returncode == 0 and (not child.is_running() or child.status() == "zombie"), p.stdout


@pytest.fixture
def before_slurm(tmp_path):
    """A work directory of an earlier run, and an sbatch first in PATH that leaves a file and refuses."""
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    (tmp_path / "w/pids").mkdir(parents=True)
    (tmp_path / "w/progress_shard_0.json").write_text("{}")
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


@pytest.mark.parametrize("left_out", ["MODEL", "DATA", "OUT"])
def test_slurm_without_model_data_or_out_is_refused_before_it_submits(before_slurm, tmp_path, left_out):
    knobs = [f"{name}=x" for name in ("MODEL", "DATA", "OUT") if name != left_out]
    p = make("slurm", f"WORK={tmp_path / 'w'}", "GPUS=1", *knobs, env=before_slurm)
    assert p.returncode == 2 and "MODEL=, DATA= and OUT= are needed" in p.stdout
    assert not (tmp_path / "asked").exists()


def test_an_accepted_submission_ends_the_progress_of_the_run_before(before_slurm, tmp_path):
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 7\n")
    p = make("slurm", f"WORK={tmp_path / 'w'}", "GPUS=1", "MODEL=x", "DATA=x", "OUT=x", env=before_slurm)
    assert p.returncode == 0 and "array 7 of 1 shard:" in p.stdout, p.stdout + p.stderr
    assert not (tmp_path / "w/progress_shard_0.json").exists()


def test_a_refused_submission_leaves_the_progress_of_the_run_before(before_slurm, tmp_path):
    p = make("slurm", f"WORK={tmp_path / 'w'}", "GPUS=1", "MODEL=x", "DATA=x", "OUT=x", env=before_slurm)
    assert p.returncode and (tmp_path / "asked").exists() and (tmp_path / "w/progress_shard_0.json").exists()


def test_clean_shm_names_what_was_not_uploaded_and_leaves_others_alone(tmp_path):
    work, stage = tmp_path / "w", tmp_path / "stage"
    for folder in (work / "plan", work / "markers", stage / "abc", stage / "other"):
        folder.mkdir(parents=True)
    (work / "plan/plan.json").write_text('{"fingerprint": "abc"}')
    (work / "markers/.done_000001").write_text("{}")
    for file in ("abc/batch_000001.safetensors", "abc/batch_000002.safetensors", "other/batch_000003.safetensors"):
        (stage / file).write_text("x")
    p = make("clean-shm", f"WORK={work}", f"STAGE={stage}")
    assert p.returncode == 0 and "batch_000002" in p.stdout and "batch_000001" not in p.stdout
    assert [f.name for f in stage.rglob("batch_*")] == ["batch_000003.safetensors"]


def test_reconcile_through_make_prints_the_difference(finished, inputs):
    _, d = finished
    _, knobs = knobs_of(inputs, d)
    (d / "w/markers/.done_000000").unlink()
    p = make("reconcile", *knobs)
    assert p.returncode == 0 and "1 markers added, 0 dropped" in p.stdout, p.stdout + p.stderr


def test_more_shards_than_devices_is_refused(run):
    p = make("extract", *run, env={**os.environ, "CUDA_VISIBLE_DEVICES": "GPU-aaaa"})
    assert p.returncode == 2 and "GPUS=1" in p.stdout


def test_bad_input_is_refused_before_anything_starts(run, tmp_path):
    p = make("extract", *run, f"DATA={tmp_path}/nowhere.jsonl")
    assert p.returncode == 2 and "nowhere.jsonl" in p.stdout and "Traceback" not in p.stdout + p.stderr
    assert not list(tmp_path.glob("w/progress_shard_*.json"))


def test_an_out_that_cannot_be_written_is_refused_before_tokenizing_and_warming_up(run, tmp_path):
    (tmp_path / "file").write_text("")
    p = make("extract", *run, f"OUT={tmp_path}/file/out")
    assert p.returncode == 2 and f"OUT {tmp_path}/file/out cannot be used" in p.stdout, p.stdout + p.stderr
    assert not (tmp_path / "w/plan/tokens.bin").exists() and not (tmp_path / "w/logs/warmup.log").exists()


def test_plan_writes_nothing_into_out(run, tmp_path):
    p = make("plan", *run)
    assert p.returncode == 0 and "GB of room" in p.stdout
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("tmp*"))


def test_the_plan_of_one_small_batch_is_in_the_singular_and_in_megabytes(run, inputs, tmp_path):
    (tmp_path / "one.jsonl").write_text('{"input_ids": [1, 2, 3, 4]}\n')
    p = make("plan", *run, f"DATA={tmp_path}/one.jsonl", "GPUS=1")
    for words in ("1 sample, 4 tokens", "] 1 batch, ", "with 1 shard,"):
        assert words in p.stdout
    assert re.search(r" full: ([\d,]+ bytes) .* of room in .*, up to \1 a batch", p.stdout, re.S), p.stdout


def test_the_plan_says_how_long_it_takes_in_a_unit_to_read(run):
    p = make("plan", *run)
    assert re.search(r"\] \d+ s with 2 shards, at [\d,]+ tokens/s each", p.stdout), p.stdout


def test_warmup_ends_in_one_json_object_and_keeps_it(inputs):
    report = json.loads(inputs.said.splitlines()[-1])
    assert report["checks"]["isolation"] <= 1e-4
    assert json.loads(inputs.warmup.read_text()) == report


def test_the_demos_port_in_use_is_refused(place, tmp_path):
    shutil.copytree(place.model, tmp_path / "demo/model")  # which the demo would make first
    with S3Server(tmp_path / "other") as server:
        p = make("demo", f"WORK={tmp_path / 'demo'}", f"PORT={server.port}")
    assert p.returncode == 2 and str(server.port) in p.stdout + p.stderr
