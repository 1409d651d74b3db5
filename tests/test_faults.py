"""Faults made for real: S3 servers that refuse, go silent, die, change their mind; full disks; bad numbers.

    python -m pytest tests/test_faults.py

All scenarios run at the same time, since most of them wait. After each the same command goes on to the bytes
of an undisturbed run. tests/drill.py (`make drill`) is the long one.
"""
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import monitor
import tiny
from export import NOTE, OutputError, open_output
from link import Link
from s3 import S3Server
from shards import code, objects, times, until

ROOT = Path(__file__).resolve().parent.parent
ACCESS, SECRET = "AKIADISTINCTIVE0KEY", "distinctive/secret+of+these/tests"
WIDE = ["--tokens", 16384, "--layers", "0,1,2,3,4,5,6,7"]  # one batch of 22 MB: a multipart upload


def children(process):
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        return []


def command_line(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture(scope="module")
def plain(new, place):
    """{data: batches of an undisturbed run}"""
    asked = {"few": (place.few, ()), "chat": (place.chat, ()), "wide": (place.chat, WIDE),
             "narrow": (place.chat, ["--tokens", 300])}
    runs = {name: new(data, args=args) for name, (data, args) in asked.items()}
    for name, process in {name: run.start() for name, run in runs.items()}.items():
        assert code(process) == 0, runs[name].log()
    return {name: objects(run.out) for name, run in runs.items()}


# ---- S3 trouble

@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with S3Server(tmp_path_factory.mktemp("s3") / "data", access_key=ACCESS, secret_key=SECRET) as server:
        server.make_bucket("bucket")
        yield server


class Trouble:
    """Scenarios, each a method that starts a shard into S3 over a link of its own and does something to it
    while it uploads. They leave what the tests look at in the Run that they return."""

    def __init__(self, new, place, s3, tmpfs):
        self.new, self.place, self.s3, self.tmpfs = new, place, s3, tmpfs

    def into(self, name, server=None, bucket="bucket", data=None, **how):
        server = server or self.s3
        link = Link(server.port)
        run = self.new(data or self.place.few, out=f"s3://{bucket}/{name}",
                       env=server.environ() | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{link.port}"}, **how)
        run.link, run.files = link, server.directory / bucket / name
        run.put = f"PUT /{bucket}/{name}/batches".encode()
        return run

    def refused(self):
        """Connections are refused for 30 s from the first upload on."""
        run = self.into("refused")

        def cut():
            run.link.refuse()
            threading.Timer(30, run.link.open).start()
        run.link.on(run.put, cut)
        run.code = run.run()
        return run

    def wrong_key(self):
        """The key is no longer valid when the first upload begins; later it is again."""
        with S3Server(self.s3.directory, access_key=ACCESS, secret_key="another-secret") as other:
            run = self.into("wrong_key")
            run.link.on(run.put, lambda: setattr(run.link, "upstream", other.port))
            run.first_code = run.run()
            run.first, run.first_log, run.left = run.progress(), run.log(), len(run.staged())
        run.link.upstream = self.s3.port
        run.code = run.run()
        return run

    def no_bucket(self):
        """The bucket is gone when the first upload begins; later it is there again."""
        self.s3.make_bucket("fleeting")
        run, away = self.into("run", bucket="fleeting", args=["--uploads", 1]), self.s3.directory.parent / "away"

        def vanish():
            os.rename(self.s3.directory / "fleeting", away)
            time.sleep(2)  # the server looks at its directories every second
        run.link.on(run.put, vanish)
        run.first_code = run.run()
        run.first, run.first_log, run.left = run.progress(), run.log(), len(run.staged())
        shutil.rmtree(self.s3.directory / "fleeting", ignore_errors=True)
        os.rename(away, self.s3.directory / "fleeting")
        time.sleep(2)  # the server looks at its directories every second
        run.code = run.run()
        return run

    def killed_server(self):
        """The server is killed at the second part of a multipart upload, and started again."""
        folder = self.s3.directory.parent / "killed"
        with S3Server(folder, access_key=ACCESS, secret_key=SECRET) as server:
            server.make_bucket("bucket")
            run = self.into("wide", server, data=self.place.chat, args=WIDE)

            run.link.on(b"partNumber=2", server.process.kill)
            process = run.start()
            until(lambda: server.process.poll() is not None, process)
            time.sleep(3)
            server.start()
            run.code = code(process)
        return run

    def silent(self):
        """From the first upload on the server answers nothing, until an upload has been ended for it."""
        run = self.into("silent")
        run.link.on(run.put, lambda: setattr(run.link, "silent", True), keep=True)
        process = run.start("--upload-min-mbps", "1000")
        until(lambda: "ended after" in run.log(), process)
        run.link.silent = False
        run.code = code(process)
        return run

    def stopped(self):
        """TERM while the server is silent; then TERM twice; then a server that answers."""
        run = self.into("stopped")
        for times in (1, 2):
            run.link.on(run.put, lambda: setattr(run.link, "silent", True), keep=True)
            process = run.start()
            until(lambda: run.link.silent, process)
            uploads = [p for p in children(process) if "batch_" in command_line(p)]
            for _ in range(times):
                began = time.monotonic()
                os.kill(process.pid, signal.SIGTERM)
                time.sleep(1)
            run.codes = [*getattr(run, "codes", []), code(process, 60)]
            run.seconds = [*getattr(run, "seconds", []), round(time.monotonic() - began, 1)]
            _, left = psutil.wait_procs(uploads, timeout=3)  # an ended one may lie about until process 1 looks at it
            run.left = [*getattr(run, "left", []), *(p for p in left if p.status() != psutil.STATUS_ZOMBIE)]
            run.link.silent = False
        run.states = run.progress()["state"], run.progress()["exit_code"]
        run.code = run.run()
        return run

    def vanished(self):
        """While one file is being uploaded, the next one disappears from staging."""
        run = self.into("vanished", args=["--uploads", "1"])
        run.link.on(run.put, lambda: setattr(run.link, "silent", True), keep=True)
        process = run.start()
        until(lambda: run.link.silent and len(run.staged()) == 3, process)
        run.gone = run.staged()[1]
        run.gone.unlink()
        run.link.silent = False
        run.first_code, run.first_log, run.first = code(process), run.log(), run.progress()
        run.code = run.run()
        return run

    def full_work(self):
        """WORK's disk, which holds the log, too, is full while markers and progress are written."""
        run = self.into("full_work")
        run.work = self.tmpfs("4m")
        run.log_file = lambda shard=0: run.work / "shard.log"
        filler = run.work / "filler"
        run.link.on(run.put, lambda: fill(filler), keep=True)
        run.first_code = run.run()
        run.first, run.first_markers = run.progress(), run.markers()
        filler.unlink()
        run.code = run.run()
        return run

    def full_stage(self):
        """Somebody else takes whatever room there is in staging, and gives it back."""
        run = self.into("full_stage", data=self.place.chat, stage=self.tmpfs("6m"))
        filler = run.stage / "filler"
        with open(run.log_file(), "ab") as log:  # under its own name, by which status knows it
            process = subprocess.Popen([sys.executable, ROOT / "extract.py", *map(str, run.flags())], env=run.env,
                                       stdout=log, stderr=log)
        until(run.staged)
        run.states = set()

        def noticed():
            fill(filler)
            run.states.add(run.progress().get("state"))
            return "waiting_for_room" in run.states and not run.staged()
        until(noticed)
        run.status = subprocess.run([sys.executable, ROOT / "monitor.py", "--work", run.work, "--num-shards", "1"],
                                    capture_output=True, text=True).stdout
        run.status_json = monitor.read_run(run.work, str(run.stage), 1)
        filler.unlink()
        run.code = process.wait(400)
        return run


def fill(path):
    """Writes a file until its filesystem is full."""
    with open(path, "ab", buffering=0) as f:
        try:
            while f.write(bytes(4096)):
                pass
        except OSError:
            pass


@pytest.fixture(scope="module")
def trouble(new, shards, place, s3, tmpfs, plain):
    """{scenario: its Run}, and under `seen` every command line that a process below them had."""
    made, stop, seen = Trouble(new, place, s3, tmpfs), threading.Event(), []
    names = [name for name in vars(Trouble) if not name.startswith("_") and name != "into"]

    def watch():
        while not stop.wait(0.1):
            below = {process.pid for process in list(shards.processes)}
            for process in psutil.process_iter(["ppid"]):  # in the order of their pids: parents come first
                if process.info["ppid"] in below:
                    below.add(process.pid)
                    seen.append(command_line(process))
    thread = threading.Thread(target=watch)
    thread.start()

    def one(name):
        began = time.monotonic()
        try:
            return getattr(made, name)()
        finally:
            print(f"{name}: {time.monotonic() - began:.0f} s")
    try:
        with ThreadPoolExecutor(len(names)) as pool:
            runs = dict(zip(names, pool.map(one, names)))
    finally:
        stop.set()
        thread.join()
    for run in runs.values():
        run.link.close()
    runs["seen"] = seen
    return runs


SCENARIOS = {"refused": "few", "wrong_key": "few", "no_bucket": "few", "killed_server": "wide", "silent": "few",
             "stopped": "few", "vanished": "few", "full_work": "few", "full_stage": "chat"}


@pytest.mark.parametrize("name", SCENARIOS)
def test_after_the_fault_the_run_ends_with_0(trouble, name):
    assert trouble[name].code == 0, trouble[name].log()


@pytest.mark.parametrize("name", SCENARIOS)
def test_after_the_fault_the_objects_are_those_of_an_undisturbed_run(trouble, plain, name):
    assert objects(trouble[name].files) == plain[SCENARIOS[name]]


@pytest.mark.parametrize("name", SCENARIOS)
def test_after_the_fault_no_traceback_was_needed(trouble, name):
    assert "Traceback" not in trouble[name].log_file().read_text()


def test_a_refused_connection_is_in_the_log_and_tried_again(trouble):
    assert "Could not connect" in trouble["refused"].log()


@pytest.mark.parametrize("name, words", [("wrong_key", "SignatureDoesNotMatch"), ("no_bucket", "NoSuchBucket")])
def test_what_cannot_heal_ends_the_shard_early_with_the_server_s_words(trouble, name, words):
    run = trouble[name]
    assert run.first_code == 1 and words in run.first["error"] and " of 5 failed" not in run.first_log


@pytest.mark.parametrize("name", ["wrong_key", "no_bucket"])
def test_what_could_not_be_uploaded_stays_in_staging(trouble, name):
    assert trouble[name].left and "0 staged" not in trouble[name].log()


def test_an_upload_to_a_silent_server_is_ended_and_tried_again(trouble):
    assert "upload 1 of 5 failed: aws s3 cp: ended after 60 s" in trouble["silent"].log()


def test_a_shard_stopped_at_a_silent_server_exits_with_3(trouble):
    assert trouble["stopped"].codes == [3, 3]


def test_a_second_request_to_stop_says_stopped(trouble):
    assert trouble["stopped"].states == ("stopped", 3)


def test_no_upload_outlives_a_shard_that_was_stopped(trouble):
    assert trouble["stopped"].left == []


def test_a_file_that_left_staging_ends_the_shard_and_is_named(trouble):
    run = trouble["vanished"]
    assert run.first_code == 1 and str(run.gone) in run.first["error"]


def test_a_full_work_directory_ends_the_shard_with_1(trouble):
    assert trouble["full_work"].first_code == 1


def test_a_full_work_directory_leaves_whole_progress_and_markers(trouble):
    run = trouble["full_work"]
    assert run.first["state"] and all(marker["bytes"] for marker in run.first_markers.values())


def test_a_full_stage_is_waited_for_and_said(trouble):
    run = trouble["full_stage"]
    assert "waiting_for_room" in run.states and run.progress()["waited_for_room_s"] > 0


def test_the_wait_for_room_is_in_the_status(trouble):
    run = trouble["full_stage"]
    assert "waiting for room" in run.status and run.status_json["waited_for_room_s"] > 0


def test_uploads_were_seen_while_looking_for_credentials(trouble):
    assert any("s3 cp" in line for line in trouble["seen"])


def test_credentials_are_in_no_command_line(trouble):
    assert not [line for line in trouble["seen"] if ACCESS in line or SECRET in line]


@pytest.mark.parametrize("name", SCENARIOS)
def test_credentials_are_in_no_log_and_no_file_whatever_happens(trouble, name):
    run = trouble[name]
    for file in [*run.work.rglob("*"), *run.folder.rglob("*"), *run.stage.rglob("*")]:
        if file.is_file():
            text = file.read_bytes()
            assert ACCESS.encode() not in text and SECRET.encode() not in text, file


# ---- OUT says what is done

def copy(run, out):
    """`out` as a new directory of the run's own, and no memory of it in WORK."""
    run.out = shutil.copytree(out, run.folder / "copied")
    return run


@pytest.fixture(scope="module")
def whole(new, place):
    run = new(place.chat)
    assert run.run() == 0, run.log()
    return run


@pytest.fixture(scope="module")
def mended(new, whole, place):
    """An object deleted, one cut, one marker deleted; then reconcile, then the run again."""
    run = copy(new(place.chat), whole.out)
    shutil.copytree(whole.work, run.work)
    plan = json.loads((run.work / "plan/plan.json").read_text())  # as if the run had always been there
    (run.work / "plan/plan.json").write_text(json.dumps(plan | {"out": str(run.out)}))
    (run.out / "batches/batch_000003.safetensors").unlink()
    os.truncate(run.out / "batches/batch_000005.safetensors", 1000)
    (run.work / "markers/.done_000007").unlink()
    run.reconcile_code, run.reconcile_log = run.run("--reconcile"), run.log()
    run.after, run.manifest = run.markers(), json.loads((run.out / "manifest.json").read_text())
    run.code = run.run()
    return run


def test_reconcile_exits_with_0_and_says_the_difference(mended):
    assert mended.reconcile_code == 0
    assert "9 of 11 batches are whole; 1 markers added, 2 dropped" in mended.reconcile_log


def test_reconcile_names_each_object_that_is_not_as_planned(mended):
    assert "batch_000003.safetensors is not there" in mended.reconcile_log
    assert "batch_000005.safetensors has 1,000 bytes" in mended.reconcile_log


def test_reconcile_leaves_markers_of_whole_objects_alone(mended, whole):
    assert sorted(mended.after) == [0, 1, 2, 4, 6, 7, 8, 9, 10]
    same = set(mended.after) - {7}
    assert {b: mended.after[b] for b in same} == {b: whole.markers()[b] for b in same}


def test_a_marker_from_a_listing_knows_all_but_the_crc(mended, whole):
    assert mended.after[7] == whole.markers()[7] | {"crc32": None}


def test_an_output_that_lacks_objects_is_not_complete(mended):
    assert mended.manifest["complete"] is False


def test_after_reconcile_the_run_makes_what_is_missing(mended, plain):
    assert mended.code == 0 and "2 are to be computed" in mended.log(), mended.log()
    assert objects(mended.out) == plain["chat"]
    assert json.loads((mended.out / "manifest.json").read_text())["complete"] is True


@pytest.mark.parametrize("args", [[], ["--reconcile"], ["--resume-from-output"]], ids=["again", "reconcile", "resume"])
def test_an_index_that_out_has_lost_is_written_again(new, whole, place, args):
    run = copy(new(place.chat), whole.out)
    index = (run.out / "index.parquet").read_bytes()
    (run.out / "index.parquet").unlink()
    if not args:
        shutil.copytree(whole.work, run.work)
        plan = json.loads((run.work / "plan/plan.json").read_text())
        (run.work / "plan/plan.json").write_text(json.dumps(plan | {"out": str(run.out)}))
    assert run.run(*args) == 0 and (run.out / "index.parquet").read_bytes() == index, run.log()


def test_an_index_without_a_manifest_is_not_taken_for_this_run_s(new, whole, place):
    run = new(place.few)
    run.out.mkdir()
    (run.out / "index.parquet").write_bytes((whole.out / "index.parquet").read_bytes())
    assert run.run() == 0, run.log()
    assert (run.out / "index.parquet").read_bytes() == (run.work / "plan/index.parquet").read_bytes()


def test_a_finished_run_keeps_the_record_of_what_computed_it(new, whole, place):
    run = copy(new(place.chat), whole.out)
    manifest = json.loads((run.out / "manifest.json").read_text())
    (run.out / "manifest.json").write_text(json.dumps(manifest | {"gpu": "another", "versions": {"torch": "1"}}))
    before = (run.out / "manifest.json").read_bytes()
    assert run.run("--resume-from-output") == 0 and "manifest.json says complete" in run.log(), run.log()
    assert (run.out / "manifest.json").read_bytes() == before


@pytest.fixture(scope="module")
def moved(new, whole, place):
    """Two shards start at once on a fresh machine with a half-filled OUT and an empty WORK."""
    run = copy(new(place.chat), whole.out)
    for batch in (1, 4, 5, 8, 10):
        (run.out / f"batches/batch_{batch:06d}.safetensors").unlink()
    run.before = times(run.out)
    run.codes = [code(p) for p in [run.start("--resume-from-output", shard=i, of=2) for i in (0, 1)]]
    return run


def test_a_run_moves_to_another_machine_with_its_command_alone(moved, plain):
    assert moved.codes == [0, 0] and objects(moved.out) == plain["chat"], moved.log(0) + moved.log(1)


def test_a_moved_run_computes_only_what_out_lacks(moved):
    now = times(moved.out)
    assert {name: now[name] for name in moved.before} == moved.before


def test_a_moved_run_is_complete(moved):
    assert json.loads((moved.out / "manifest.json").read_text())["complete"] is True
    assert sorted(moved.markers()) == list(range(11))


def test_machines_without_a_shared_disk_complete_one_output(new, place, plain):
    run = new(place.few)
    for shard in (0, 1):
        work = run.folder / f"work{shard}"
        assert run.run("--resume-from-output", shard=shard, of=2, work=work) == 0, run.log(shard)
    assert objects(run.out) == plain["few"]
    assert json.loads((run.out / "manifest.json").read_text())["complete"] is True


@pytest.fixture(scope="module")
def migrated(new, place, s3):
    """A machine with two shards dies in the middle; another one, with WORK and staging of its own, goes on as one."""
    where = {"out": "s3://bucket/migrated", "env": s3.environ()}
    first, run = (new(place.chat, args=args, **where) for args in (["--upload-mbps", "0.6"], []))
    processes = [first.start(shard=i, of=2) for i in (0, 1)]
    until(lambda: len(first.markers()) > 1 and first.staged(), processes[0])
    for process in [process for p in processes for process in (*children(p), p)]:
        process.kill()
    run.files = s3.directory / "bucket/migrated"
    run.before = times(run.files)
    run.code = run.run("--resume-from-output")
    return run


def test_a_run_begun_on_a_machine_that_died_ends_on_another_as_if_undisturbed(migrated, plain):
    assert migrated.code == 0 and objects(migrated.files) == plain["chat"], migrated.log()
    assert json.loads((migrated.files / "manifest.json").read_text())["complete"] is True


def test_the_other_machine_computes_only_what_is_not_in_out(migrated):
    assert 1 < len(migrated.before) < 11 and f"{len(migrated.before)} were done, 0 staged" in migrated.log()
    now = times(migrated.files)
    assert migrated.before.items() <= now.items()


def test_staged_files_of_batches_done_elsewhere_are_removed(new, whole, place):
    run = copy(new(place.chat), whole.out)
    fingerprint = json.loads((whole.out / "manifest.json").read_text())["fingerprint"]
    (run.stage / fingerprint).mkdir()
    for name in ("batch_000001.safetensors", "batch_000001.json", "batch_000003.tmp"):
        (run.stage / fingerprint / name).write_text("of a task that now runs on another node")
    (run.stage / fingerprint / "batch_000001.safetensors.bak").write_text("somebody's")
    for batch in (2, 7):
        (run.out / f"batches/batch_{batch:06d}.safetensors").unlink()
    assert run.run("--reconcile") == 0 and run.run(shard=0, of=2) == 0, run.log()
    assert [f.name for f in run.stage.glob("*/batch_*")] == ["batch_000001.safetensors.bak"]


FAKE = """#!/bin/sh
echo "$*" >>{folder}/args
exec {aws} "$@"
"""


def test_a_finished_run_in_s3_is_known_by_three_listings_alone(new, place, s3, whole):
    run = new(place.chat, out="s3://bucket/finished", env=s3.environ())
    shutil.copytree(whole.out, s3.directory / "bucket/finished")
    (run.folder / "aws").write_text(FAKE.format(folder=run.folder, aws=Path(sys.executable).parent / "aws"))
    (run.folder / "aws").chmod(0o755)
    assert run.run("--resume-from-output", PATH=f"{run.folder}:{os.environ['PATH']}") == 0, run.log()
    calls = [line.split()[:2] for line in (run.folder / "args").read_text().splitlines()]
    batches = [line for line in (run.folder / "args").read_text().splitlines() if "batch_" in line]
    assert calls.count(["s3api", "list-objects-v2"]) == 3 and not batches


DEAF = """#!/bin/sh
[ "$1" = configure ] || echo "$*" >>{folder}/args
if [ "$1" != configure ] && [ $(wc -l <{folder}/args) -le 2 ]; then echo no answer >&2; exit 255; fi
exec {aws} "$@"
"""


def test_a_start_while_s3_is_away_tries_again(new, place, s3):
    run = new(place.few, out="s3://bucket/away", env=s3.environ())
    (run.folder / "aws").write_text(DEAF.format(folder=run.folder, aws=Path(sys.executable).parent / "aws"))
    (run.folder / "aws").chmod(0o755)
    assert run.run(PATH=f"{run.folder}:{os.environ['PATH']}") == 0, run.log()
    assert "try 2 of 3 failed: aws s3api get-object: exit code 255: no answer" in run.log()


def test_a_listing_of_14_000_objects_is_whole(s3, monkeypatch):
    folder = s3.directory / "bucket/many/batches"
    folder.mkdir(parents=True)
    for batch in range(14_000):
        (folder / f"batch_{batch:06d}.safetensors").write_bytes(b"x" * (batch % 5))
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    found = open_output("s3://bucket/many").sizes("batches/")
    assert found == {f"batches/batch_{batch:06d}.safetensors": batch % 5 for batch in range(14_000)}


def test_reconcile_is_refused_while_a_shard_runs(new, place, s3):
    run = new(place.few, out="s3://bucket/under_way", env=s3.environ(), args=["--upload-mbps", "0.1"])
    process = run.start()
    until(lambda: run.progress().get("state") in ("running", "draining"), process)
    markers = run.markers()
    assert run.run("--reconcile", shard=0) == 2 and "make stop" in run.log_file().read_text()
    assert process.exitcode is None and markers.items() <= run.markers().items()
    process.kill()


def test_shards_of_two_counts_do_not_run_side_by_side(new, place, s3):
    run = new(place.few, out="s3://bucket/two_counts", env=s3.environ(), args=["--upload-mbps", "0.1"])
    process = run.start(shard=0, of=1)
    until(lambda: run.progress().get("state") in ("running", "draining"), process)
    assert run.run(shard=1, of=2) == 2 and "another WORK or --num-shards runs" in run.log(1)
    process.kill()


def test_markers_without_a_plan_are_refused_until_they_are_reconciled(new, whole, place, plain):
    run = copy(new(place.chat), whole.out)
    shutil.copytree(whole.work, run.work)
    (run.work / "plan/plan.json").unlink()
    (run.out / "batches/batch_000002.safetensors").unlink()
    assert run.run() == 2 and "make reconcile" in run.log() and "Traceback" not in run.log()
    assert run.run("--reconcile") == 0 and sorted(run.markers()) == [0, 1, 3, 4, 5, 6, 7, 8, 9, 10]
    assert run.run() == 0 and objects(run.out) == plain["chat"]


@pytest.mark.parametrize("name", ["tokens.bin", "samples.npy", "loss_mask.bin"])
def test_a_damaged_plan_with_markers_is_refused_by_name(new, whole, place, name):
    run = new(place.chat, out=whole.out)
    shutil.copytree(whole.work, run.work)
    os.truncate(run.work / "plan" / name, 100)
    assert run.run() == 2 and "make reconcile" in run.log() and "Traceback" not in run.log(), run.log()


def test_a_damaged_plan_without_markers_is_made_again(new, place, plain):
    run = new(place.few)
    assert run.run("--plan-only") == 0
    os.truncate(run.work / "plan/tokens.bin", 100)
    assert run.run() == 0 and objects(run.out) == plain["few"], run.log()


# ---- disk and memory

def test_eight_shards_race_for_a_small_staging_area(new, place, plain, tmpfs):
    run = new(place.chat, stage=tmpfs("7m"), args=["--tokens", 300])
    codes = [code(p) for p in [run.start(shard=shard, of=8) for shard in range(8)]]
    assert codes == [0] * 8 and objects(run.out) == plain["narrow"], run.log(codes.index(max(codes)))


def test_staging_that_cannot_be_written_to_is_refused(new, place, tmpfs):
    folder = tmpfs("4m")
    run = new(place.few, stage=folder)
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    assert run.run() == 2 and f"--stage {folder} cannot be written to" in run.log(), run.log()
    assert "Traceback" not in run.log()


@pytest.mark.parametrize("version", [2, 1])
def test_room_is_what_the_tightest_cgroup_around_leaves(tmp_path, version):
    limit, used, cache, kind = {
        2: ("memory.max", "memory.current", "inactive_file", "0:"),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "4:memory")}[version]
    top = tmp_path / ("memory" if version == 1 else "")
    for group, most in ((top / "pod", "5000"), (top / "pod/box", "max" if version == 2 else str(2**60))):
        group.mkdir(parents=True)
        (group / limit).write_text(most + "\n")
        (group / used).write_text("3000\n")
        (group / "memory.stat").write_text(f"anon 1\n{cache} 200\nother 7\n")
    (tmp_path / "own").write_text(f"9:cpu:/\n{kind}:/pod/box\n")
    assert min(monitor.cgroup_room(tmp_path, tmp_path / "own")) == 5000 - 3000 + 200


def test_a_cgroup_s_limit_below_the_filesystem_s_size_is_the_room(tmp_path):
    folder = Path(f"/sys/fs/cgroup/memory/test-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(200 << 20))
    except OSError:
        pytest.skip("no cgroup can be made here")
    try:
        ask = "import monitor; print(monitor.room('/dev/shm')[1])"
        command = f'echo $$ >{folder}/cgroup.procs; exec {sys.executable} -c "{ask}"'
        out = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True)
        assert 0 < int(out.stdout) < 200 << 20, out.stderr
    finally:
        folder.rmdir()


# ---- bad numbers

@pytest.fixture(scope="module")
def poisoned(place, tmp_path_factory):
    """{value: (a model whose embedding of one token holds it, data whose sample 2 is made of that token)}"""
    folder, made = tmp_path_factory.mktemp("poisoned"), {}
    for name, value in (("nan", float("nan")), ("inf", float("inf")), ("zero", 0.0)):
        model = shutil.copytree(place.model, folder / name)
        token = poison(model, value)
        lines = [{"id": "../../up", "input_ids": [token if row == 2 else 7 + row] * 9} for row in range(4)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        made[name] = model, folder / f"{name}.jsonl"
    return made


def poison(model, value):
    """Sets the embedding of a token that the start checks do not meet; returns the token."""
    rng = np.random.default_rng(0)
    met = np.concatenate([rng.integers(0, tiny.VOCAB, n) for n in (37, 5, 150)])
    token = min(set(range(100, 600)) - {*met.tolist(), *(met + 1).tolist()})
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if "embed_tokens" in name:
                tensors[name][token] = value
                save_file(tensors, file, {"format": "pt"})
    return token


@pytest.mark.parametrize("name", ["nan", "inf", "zero"])
def test_bad_states_stop_the_shard_and_name_batch_and_sample(new, poisoned, name):
    model, data = poisoned[name]
    run = new(data, model=model)
    assert run.run() == 1 and "batch 0: states of sample 2" in run.progress()["error"], run.log()
    assert run.markers() == {} and not (run.out / "batches").exists()


def test_a_first_request_to_stop_after_a_failure_does_not_hide_it(new, poisoned, s3, tmp_path):
    """A batch waits for a slow S3 while the next one turns out to be bad."""
    model, data = poisoned["nan"]
    token = json.loads(data.read_text().splitlines()[2])["input_ids"][0]
    lines = [{"input_ids": [token if row == 1 else 7 + row] * 290} for row in range(4)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = new(tmp_path / "long.jsonl", out="s3://bucket/late", env=s3.environ(),
              args=["--tokens", 300, "--upload-mbps", 0.02])
    run.model = model
    process = run.start()
    until(lambda: run.progress().get("state") == "draining", process)
    assert run.progress()["pending_uploads"]
    os.kill(process.pid, signal.SIGTERM)
    assert code(process) == 1 and "batch 1: states of sample 1" in run.progress()["error"], run.log()


@pytest.fixture(scope="module")
def passed_over(new, poisoned):
    """The same with --skip-bad; then once more on a fresh machine."""
    model, data = poisoned["nan"]
    run = new(data, model=model)
    run.code, run.first = run.run("--skip-bad"), run.markers()
    run.counted = [run.progress()]
    run.manifest = json.loads((run.out / "manifest.json").read_text())
    shutil.rmtree(run.work)
    run.next_code = run.run("--resume-from-output", "--skip-bad")
    run.counted.append(run.progress())
    return run


def test_a_bad_sample_can_be_passed_over_and_is_recorded(passed_over):
    assert passed_over.code == 0, passed_over.log()
    assert passed_over.first[0]["excluded"] == passed_over.manifest["excluded"] == {"2": "bad numbers"}


def test_a_sample_passed_over_is_counted_by_this_start_and_the_next(passed_over):
    assert [p["excluded"] for p in passed_over.counted] == [1, 1]


def test_a_sample_passed_over_is_zeros_without_a_mask(passed_over):
    with safe_open(passed_over.out / "batches/batch_000000.safetensors", "np") as f:
        bad = f.get_tensor("loss_mask") == 0
        assert bad.sum() == 9 and not f.get_tensor("hidden_states")[bad].any()
        assert (f.get_tensor("hidden_states")[~bad] != 0).any(1).all()


def test_a_marker_made_from_out_knows_what_was_passed_over(passed_over):
    assert passed_over.next_code == 0 and "0 are to be computed" in passed_over.log()
    assert passed_over.markers()[0]["excluded"] == {"2": "bad numbers"}
    assert json.loads((passed_over.out / "manifest.json").read_text())["excluded"] == {"2": "bad numbers"}


def test_verify_knows_what_was_passed_over_before_a_run_is_complete(passed_over, tmp_path):
    shutil.copytree(passed_over.out, tmp_path / "out")
    (tmp_path / "out/manifest.json").write_text(json.dumps(passed_over.manifest | {"complete": False, "excluded": {}}))
    judged = subprocess.run([sys.executable, ROOT / "tests/oracle.py", "--out", tmp_path / "out", "--model",
                             passed_over.model, "--samples", "all"], capture_output=True, text=True)
    assert judged.returncode == 0, judged.stdout


# ---- batches of which nobody knows the run

@pytest.mark.parametrize("args", [[], ["--plan-only"], ["--resume-from-output"]])
def test_batches_without_a_manifest_are_refused_and_left_alone(new, place, args):
    run = new(place.few)
    theirs = run.out / "batches/batch_000000.safetensors"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("precious")
    assert run.run(*args) == 2 and "no manifest.json that says of which run" in run.log()
    assert theirs.read_text() == "precious" and [f.name for f in run.out.iterdir()] == ["batches"]


def test_batches_in_s3_without_a_manifest_are_refused(new, place, s3):
    theirs = s3.directory / "bucket/nobodys/batches/batch_000000.safetensors"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("precious")
    run = new(place.few, out="s3://bucket/nobodys", env=s3.environ())
    assert run.run("--resume-from-output") == 2 and "no manifest.json that says of which run" in run.log()


# ---- nothing of the data is a name or a command

def test_names_and_texts_of_the_data_are_never_run(new, place, tmp_path):
    folder = tmp_path / "$(touch pwned)"
    folder.mkdir()
    words = ["$(touch pwned)", "`touch pwned`", "; touch pwned;", "../../../pwned", "{{ cycler.__init__ }}"]
    lines = [{"id": word, "messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word}]}
             for word in words]
    (folder / "`touch pwned`;.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = new(folder)
    assert run.run() == 0, run.log()
    assert not [f for f in [*run.folder.rglob("*"), *tmp_path.rglob("*"), ROOT / "pwned"]
                if f.name == "pwned" and f.exists()]
    assert {f.name for f in (run.out / "batches").iterdir()} == {"batch_000000.safetensors"}


# ---- notes of what was excluded are of the attempt that uploaded the batch

def test_a_note_of_an_earlier_attempt_is_not_believed_after_another(new, place, tmp_path):
    run = new(place.few)
    note = run.out / NOTE.format(0)
    note.parent.mkdir(parents=True)
    note.write_text('{"0":"too large for GPU memory"}')  # and killed before its object
    assert run.run() == 0, run.log()
    assert json.loads(note.read_text()) == {}
    assert run.run("--resume-from-output", work=tmp_path / "elsewhere") == 0, run.log()
    assert json.loads((run.out / "manifest.json").read_text())["excluded"] == {}


def test_a_listing_leaves_the_note_of_an_upload_under_way(new, place, tmp_path):
    run = new(place.few)
    assert run.run() == 0, run.log()
    note, batch = run.out / NOTE.format(1), run.out / "batches/batch_000001.safetensors"
    note.parent.mkdir(exist_ok=True)
    note.write_text('{"5":"bad numbers"}')
    batch.unlink()
    assert run.run("--reconcile") == 0, run.log()
    assert json.loads(note.read_text()) == {"5": "bad numbers"}


def test_a_temporary_file_that_goes_during_a_listing_is_passed_over(tmp_path):
    (tmp_path / "batches").mkdir()
    for name in ("batch_000000.safetensors", "batch_000001.safetensors.77.tmp"):
        (tmp_path / "batches" / name).write_bytes(b"1234")
    assert open_output(str(tmp_path)).sizes("batches/") == {"batches/batch_000000.safetensors": 4}


@pytest.mark.parametrize("point", [1, 2])
def test_what_a_kill_leaves_at_the_top_of_out_is_removed_by_the_next_start(new, place, point):
    run = new(place.few)
    assert run.run(EXTRACT_FAULT=f"uploading:{point}") == -signal.SIGKILL  # while it writes index, then manifest
    assert [f.name.split(".")[0] for f in run.out.glob("*.tmp")] == [["index"], ["manifest"]][point - 1]
    assert run.run() == 0, run.log()
    assert {f.name for f in run.out.iterdir()} == {"batches", "index.parquet", "manifest.json"}


def test_temporary_files_in_out_of_somebody_else_or_in_use_stay(new, place):
    run, gone = new(place.few), subprocess.Popen(["true"])
    gone.wait()
    run.out.mkdir()
    others = {"notes.1.tmp", f"notes.{gone.pid}.tmp", "index.parquet.tmp", f"manifest.json.{os.getpid()}.tmp",
              f".manifest.json.{gone.pid}.tmp", f"my-index.parquet.{gone.pid}.tmp", f"index.parquet.{gone.pid}x.tmp",
              f"head.safetensors.{gone.pid}.tmp"}
    for name in others | {f"index.parquet.{gone.pid}.tmp"}:
        (run.out / name).write_text("x")
    with open(run.out / f"head.safetensors.{gone.pid}.tmp") as f:  # as a process of another machine would
        fcntl.flock(f, fcntl.LOCK_EX)
        assert run.run() == 0, run.log()
    assert {f.name for f in run.out.glob("*.tmp")} | {f.name for f in run.out.glob(".*.tmp")} == others


def test_a_stop_ends_a_copy_into_a_slow_directory(tmp_path):
    abort = threading.Event()
    abort.set()
    (tmp_path / "file").write_bytes(b"1" * 100)
    with pytest.raises(OutputError, match="stopped"):
        open_output(str(tmp_path / "out"), abort=abort).put(tmp_path / "file", "batches/x", 100, 60)
    assert not list((tmp_path / "out/batches").iterdir())
