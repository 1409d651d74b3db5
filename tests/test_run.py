"""extract.py's shards as real processes, a real S3 server on loopback, the real aws; killed, misled.

    python -m pytest tests/test_run.py

Runs are expensive: each is a fixture that many tests look at. tests/oracle.py judges the numbers.
"""
import json
import os
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

import oracle
from s3 import S3Server
from shards import code, objects, times, until

ROOT = Path(__file__).resolve().parent.parent
AWS = Path(sys.executable).parent / "aws"
NAME = "batch_{:06d}.safetensors"
ALL = [NAME.format(batch) for batch in range(11)]
KEYS = """shard num_shards processed skipped total rate_per_sec eta_hours batch total_batches tokens state
tokens_per_sec uploaded pending_uploads failed_uploads staged_bytes waited_for_room_s gpu_busy updated_at
exit_code error""".split()


def kill(process):
    """SIGKILL, which no program can answer."""
    process.kill()
    process.join()


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("s3")
    with S3Server(folder / "data", access_key="AKIALOOPBACK", secret_key="s3cret+loopback/only") as server:
        server.make_bucket("bucket")
        yield server


@pytest.fixture(scope="module")
def judge(place):
    """judge(folder, data) -> what the oracle finds in all samples of an output."""
    model, tokenizer = oracle.load_model(place.model), AutoTokenizer.from_pretrained(place.model)
    return lambda folder, data: oracle.check(folder, model, data=data, tokenizer=tokenizer)


# ---- undisturbed: two shards into S3

@pytest.fixture(scope="module")
def whole(new, place, s3):
    run = new(place.chat, out="s3://bucket/whole", env=s3.environ())
    run.files = s3.directory / "bucket/whole"
    processes = [run.start(shard=shard, of=2) for shard in (0, 1)]
    run.codes = [code(process) for process in processes]
    return run


@pytest.fixture(scope="module")
def manifest(whole):
    return json.loads((whole.files / "manifest.json").read_text())


def test_both_shards_exit_with_0(whole):
    assert whole.codes == [0, 0], whole.log(0) + whole.log(1)


def test_every_sample_is_as_the_plain_model_has_it(whole, judge, place):
    found = judge(whole.files, place.chat)
    assert found["ok"] and found["samples"] == 60 and found["largest"] <= 1e-4, found


def test_the_manifest_says_complete(whole, manifest):
    assert manifest["complete"] is True


def test_the_manifest_s_counts_are_those_of_the_files(whole, manifest):
    sizes = [f.stat().st_size for f in (whole.files / "batches").iterdir()]
    index = pq.read_table(whole.files / "index.parquet").to_pylist()
    assert manifest["counts"] == manifest["counts"] | {
        "samples": 60, "skipped": 0, "batches": len(sizes), "bytes": sum(sizes), "largest": max(sizes),
        "tokens": sum(r["length"] for r in index), "supervised": sum(r["supervised"] for r in index)}


def test_the_manifest_says_what_a_reader_needs(manifest):
    assert manifest["layers"] == [1, 2, 3, 4, 5] and "0-based" in manifest["convention"]
    assert manifest["dtype"] == "fp32" and manifest["hidden_size"] == 64 and manifest["final"] is False
    assert {"fingerprint", "tokenizer", "chat_template", "model", "versions", "gpu"} <= manifest.keys()


def test_the_index_has_a_row_a_sample(whole, place):
    index = pq.read_table(whole.files / "index.parquet").to_pylist()
    lines = [json.loads(x) for x in place.chat.read_text().splitlines()]
    assert {r["row"]: r["id"] for r in index} == {i: x.get("id", str(i)) for i, x in enumerate(lines)}


def test_every_batch_has_its_marker(whole):
    assert sorted(whole.markers()) == list(range(11)) and sorted(objects(whole.files)) == ALL


def test_markers_say_key_size_and_crc_of_the_object(whole):
    for batch, marker in whole.markers().items():
        data = (whole.files / marker["key"]).read_bytes()
        assert (marker["batch"], marker["bytes"], marker["crc32"]) == (batch, len(data), zlib.crc32(data))


def test_markers_say_samples_and_tokens(whole):
    index = pq.read_table(whole.files / "index.parquet").to_pylist()
    for batch, marker in whole.markers().items():
        lengths = [r["length"] for r in index if r["batch"] == batch]
        assert (marker["samples"], marker["tokens"]) == (len(lengths), sum(lengths))


@pytest.mark.parametrize("shard", [0, 1])
def test_progress_has_every_key(whole, shard):
    assert set(KEYS) <= whole.progress(shard).keys()


@pytest.mark.parametrize("shard", [0, 1])
def test_progress_says_done(whole, shard):
    batches = len(range(shard, 11, 2))
    assert whole.progress(shard) == whole.progress(shard) | {
        "shard": shard, "num_shards": 2, "state": "done", "exit_code": 0, "error": None, "batch": batches,
        "total_batches": batches, "uploaded": batches, "pending_uploads": 0, "failed_uploads": 0,
        "staged_bytes": 0, "eta_hours": 0.0}


def test_the_shards_progress_adds_up(whole):
    both = whole.progress(0), whole.progress(1)
    assert sum(p["processed"] for p in both) == sum(p["total"] for p in both) == 60
    assert sum(p["tokens"] for p in both) == sum(m["tokens"] for m in whole.markers().values())


def test_staging_is_empty_afterwards(whole):
    assert list(whole.stage.iterdir()) == []


def test_nothing_but_the_output_is_in_the_bucket(whole):
    names = {f.name for f in whole.files.iterdir()}
    assert names == {"manifest.json", "index.parquet", "batches"}


def test_credentials_are_nowhere_in_work_or_logs(whole, s3):
    for file in [*whole.work.rglob("*"), *whole.folder.glob("*.log")]:
        if file.is_file():
            data = file.read_bytes()
            assert s3.secret_key.encode() not in data and s3.access_key.encode() not in data, file


def test_the_private_aws_configuration_is_private(whole):
    for file in (whole.work / "aws").iterdir():
        assert file.stat().st_mode & 0o077 == 0, file


@pytest.fixture(scope="module")
def again(whole):
    """(exit code, times of the files before, and after) of the same command once more."""
    before = times(whole.files)
    return whole.run(shard=0, of=2), before, times(whole.files)


def test_starting_again_exits_with_0(again):
    assert again[0] == 0


def test_starting_again_touches_no_batch(again):
    assert again[1] == again[2]


def test_starting_again_loads_no_model(again, whole):
    assert "0 are to be computed" in whole.log(0) and "start checks" not in whole.log(0)


def test_starting_again_leaves_the_manifest_complete(again, whole, manifest):
    assert json.loads((whole.files / "manifest.json").read_text()) == manifest


# ---- other ways to store and to split

@pytest.fixture(scope="module")
def variants(new, place, tmp_path_factory):
    """{name: (run, its data)} into local directories."""
    spoiled = tmp_path_factory.mktemp("spoiled") / "few.jsonl"
    lines = place.few.read_bytes().splitlines(True)
    spoiled.write_bytes(b"".join([*lines[:5], b"broken\n", *lines[5:], b'{"messages": []}\n']))
    rows = [json.loads(line) for line in lines]
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: [row.get(name) for row in rows] for name in names})
    pq.write_table(table, spoiled.with_name("few.parquet"), row_group_size=5)
    asked = {"bf16": (place.chat, "--dtype", "bf16"), "table": (spoiled.with_name("few.parquet"),),
             "fp8": (place.few, "--dtype", "fp8", "--final"),
             "split": (spoiled, "--final", "--forward-tokens", "300", "--layers", "7,2"),
             "alone": (place.few, "--samples-per-forward", "1")}
    made = {name: (new(data), data, args) for name, (data, *args) in asked.items()}
    started = {name: run.start(*args) for name, (run, _, args) in made.items()}
    for name, process in started.items():
        assert code(process) == 0, made[name][0].log()
    return {name: (run, data) for name, (run, data, _) in made.items()}


@pytest.mark.parametrize("name, largest", [
    ("bf16", 4e-3), ("fp8", 0.1), ("split", 1e-4), ("alone", 1e-4), ("table", 1e-4)])
def test_a_variant_is_as_the_plain_model_has_it(variants, judge, place, name, largest):
    run, data = variants[name]
    found = judge(run.out, place.few if name == "table" else data)
    assert found["ok"] and found["largest"] <= largest, found
    assert found["samples"] == (60 if name == "bf16" else 16)


def test_the_final_state_beside_fp8_is_bf16(variants, judge):
    run, data = variants["fp8"]
    assert judge(run.out, data)["layers"]["final"]["largest"] <= 4e-3


def test_skipped_samples_are_counted_and_keep_their_rows(variants):
    run, _ = variants["split"]
    p, rows = run.progress(), pq.read_table(run.out / "index.parquet")["row"].to_pylist()
    assert (p["processed"], p["skipped"], p["total"]) == (16, 2, 18)
    assert sorted(rows) == [i for i in range(18) if i not in (5, 17)]


def test_the_order_of_layers_is_that_asked_for(variants):
    run, _ = variants["split"]
    assert json.loads((run.out / "manifest.json").read_text())["layers"] == [7, 2]


# ---- killed between two batches, then continued with another number of shards

@pytest.fixture(scope="module")
def resumed(new, place, whole):
    """Two shards are killed; a torn and an altered whole file lie in staging; one shard goes on."""
    run = new(place.chat)
    processes = [run.start(shard=shard, of=2) for shard in (0, 1)]
    for shard, process in enumerate(processes):
        until(lambda: any(batch % 2 == shard for batch in run.markers()), process)
        kill(process)
    run.early, run.before, stage = run.markers(), times(run.out), run.stage / run.fingerprint()
    staged = {int(f.stem[6:]) for f in run.staged()}
    open_batches = [batch for batch in range(11) if batch not in {*run.early, *staged}]
    run.planted, run.torn = open_batches[-1], open_batches[-2]
    data = bytearray(objects(whole.files)[NAME.format(run.planted)])
    data[-1] ^= 1  # so that it can be told from one that was computed again
    (stage / NAME.format(run.planted)).write_bytes(data)
    (stage / f"batch_{run.torn:06d}.tmp").write_bytes(data[:1000])
    run.altered, run.staged_before = bytes(data), {*staged, run.planted}
    run.code = run.run()
    return run


def test_a_killed_run_goes_on_with_another_number_of_shards(resumed):
    assert resumed.code == 0, resumed.log()


def test_a_resumed_run_has_the_bytes_of_an_undisturbed_one(resumed, whole):
    assert objects(resumed.out) == objects(whole.files) | {NAME.format(resumed.planted): resumed.altered}


def test_a_resumed_run_leaves_finished_batches_alone(resumed):
    now = times(resumed.out)
    done = [Path(marker["key"]).name for marker in resumed.early.values()]
    assert done and {name: now[name] for name in done} == {name: resumed.before[name] for name in done}


def test_a_resumed_run_counts_every_batch_once(resumed):
    p = resumed.progress()
    assert (p["processed"], p["batch"], p["total_batches"], p["uploaded"]) == (60, 11, 11, 11)


def test_a_whole_staged_file_is_uploaded_and_not_computed_again(resumed):
    todo = 11 - len(resumed.early) - len(resumed.staged_before)
    assert f"{len(resumed.staged_before)} staged, {todo} are to be computed" in resumed.log()
    assert objects(resumed.out)[NAME.format(resumed.planted)] == resumed.altered


def test_a_whole_staged_file_gets_the_crc_of_its_bytes(resumed):
    assert resumed.markers()[resumed.planted]["crc32"] == zlib.crc32(resumed.altered)


def test_a_torn_file_is_not_uploaded(resumed, whole):
    torn = NAME.format(resumed.torn)
    assert objects(resumed.out)[torn] == objects(whole.files)[torn]


def test_nothing_is_left_in_staging_after_a_resumed_run(resumed):
    assert list(resumed.stage.iterdir()) == []


def test_a_resumed_run_is_complete(resumed):
    assert json.loads((resumed.out / "manifest.json").read_text())["complete"] is True


# ---- stopped on request, with a second shard of the same number beside

@pytest.fixture(scope="module")
def stopped(new, place):
    run = new(place.chat)
    first = run.start()
    until(lambda: run.progress().get("state") == "running", first)
    os.kill(first.pid, signal.SIGSTOP)  # so that it does not end before the second has started
    markers = run.markers()
    run.second_code = run.run()
    run.second_log, run.beside = run.log(), run.progress()
    run.pid_file, run.first_pid = (run.work / "pids/shard_0.pid").read_text(), first.pid
    os.kill(first.pid, signal.SIGCONT)
    run.went_on = until(lambda: len(run.markers()) > len(markers), first)
    os.kill(first.pid, signal.SIGTERM)
    run.code, run.after, run.early = code(first, 60), run.progress(), run.markers()
    run.final_code = run.run()
    return run


def test_a_second_shard_of_the_same_number_exits_with_2(stopped):
    assert stopped.second_code == 2 and "Traceback" not in stopped.second_log


def test_a_second_shard_of_the_same_number_says_why(stopped):
    assert "shard 0" in stopped.second_log and "under way" in stopped.second_log


def test_the_first_shard_goes_on_beside_a_refused_second(stopped):
    assert stopped.went_on


def test_a_refused_second_shard_leaves_the_first_one_s_progress_and_pid(stopped):
    assert stopped.beside["state"] == "running" and stopped.beside["exit_code"] is None
    assert int(stopped.pid_file) == stopped.first_pid


def test_a_shard_asked_to_stop_exits_with_3(stopped):
    assert stopped.code == 3 and 0 < len(stopped.early) < 11


def test_a_stopped_shard_says_so(stopped):
    assert (stopped.after["state"], stopped.after["exit_code"]) == ("stopped", 3)


def test_a_stopped_shard_goes_on(stopped, whole):
    assert stopped.final_code == 0 and objects(stopped.out) == objects(whole.files)


@pytest.fixture(scope="module")
def stopped_early(new, place):
    run = new(place.chat)
    process = run.start()
    until(lambda: run.progress().get("state") == "planning", process)
    os.kill(process.pid, signal.SIGTERM)
    run.code = code(process, 60)
    return run


def test_a_shard_stopped_before_its_first_batch_exits_with_3(stopped_early):
    assert stopped_early.code == 3 and "Traceback" not in stopped_early.log(), stopped_early.log()


def test_a_shard_stopped_before_its_first_batch_says_so(stopped_early):
    assert (stopped_early.progress()["state"], stopped_early.progress()["exit_code"]) == ("stopped", 3)


# ---- stopped, then killed in the middle of an upload

def uploading(process):
    """The `aws s3 cp` processes of a shard that carry a batch."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if {"s3", "cp"} <= {*child.cmdline()} and any("batch_" in arg for arg in child.cmdline()):
                found.append(child)
        except psutil.Error:
            pass  # it has just ended
    return found


@pytest.fixture(scope="module")
def slow(new, place, s3):
    """Uploads of 0.2 MB/s: stopped on request during the first, killed during the first, then let run."""
    run, limit = new(place.few, out="s3://bucket/slow", env=s3.environ()), ("--upload-mbps", "0.2")
    run.files = s3.directory / "bucket/slow"
    first = run.start("--uploads", "1", *limit)
    until(lambda: len(run.staged()) == 3 and uploading(first), first)
    children = uploading(first)
    os.kill(first.pid, signal.SIGTERM)
    run.stop_code = code(first, 60)
    _, run.left_running = psutil.wait_procs(children, timeout=2)
    second = run.start("--uploads", "1", *limit)
    orphans = until(lambda: uploading(second), second)
    kill(second)
    run.unmarked = {f.name: f.read_bytes() for f in run.staged() if int(f.stem[6:]) not in run.markers()}
    run.code = run.run()
    psutil.wait_procs(orphans, timeout=60)  # a killed shard's uploads go on; they must do no harm
    return run


def test_a_shard_stopped_in_an_upload_exits_with_3(slow):
    assert slow.stop_code == 3


def test_a_shard_stopped_in_an_upload_takes_its_uploads_along(slow):
    assert slow.left_running == []


def test_a_run_killed_in_an_upload_goes_on(slow):
    assert slow.code == 0, slow.log()


def test_a_run_killed_in_an_upload_has_its_files_in_staging(slow):
    assert slow.unmarked


def test_a_run_killed_in_an_upload_computes_nothing_again(slow):
    assert "0 are to be computed" in slow.log()


def test_a_run_killed_in_an_upload_uploads_the_staged_bytes(slow):
    uploaded = {f.name: f.read_bytes() for f in (slow.files / "batches").iterdir()}
    assert len(uploaded) == 3 and {name: uploaded[name] for name in slow.unmarked} == slow.unmarked


def test_a_run_killed_in_an_upload_ends_up_right(slow, judge, place):
    found = judge(slow.files, place.few)
    assert found["ok"] and found["samples"] == 16 and found["largest"] <= 1e-4, found


# ---- refusals

@pytest.fixture(scope="module")
def cases(new, place, s3, whole, tmp_path_factory):
    """{name: (run, arguments, words that its message must have)}"""
    folder, env = tmp_path_factory.mktemp("cases"), s3.environ()
    (folder / "empty.jsonl").write_text("")
    broken = folder / "broken.jsonl"
    broken.write_text("broken\nbroken\n")
    (folder / "bare").mkdir()
    torn = folder / "torn.parquet"
    pq.write_table(pa.table({"input_ids": [[1, 2]] * 1000}), torn)
    torn.write_bytes(torn.read_bytes()[:-100])
    (folder / "splits").mkdir()
    (folder / "splits/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (folder / "both").mkdir()
    shutil.copy(place.few, folder / "both/a.jsonl")
    shutil.copy(torn, folder / "both/b.parquet")
    strange = shutil.copytree(place.model, folder / "strange")
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps(config | {"model_type": "unheard_of"}))
    cut, part = (shutil.copytree(place.model, folder / name) for name in ("cut", "part"))
    weights = sorted(file.name for file in cut.glob("*.safetensors"))[-1]
    os.truncate(cut / weights, (cut / weights).stat().st_size - 1)
    (part / weights).unlink()
    silent = shutil.copytree(place.model, folder / "silent", ignore=shutil.ignore_patterns("*token*"))

    def begun():
        """A run with the plan and the markers of the undisturbed one."""
        run = new(place.chat, env=env, out=whole.out)
        shutil.copytree(whole.work / "plan", run.work / "plan")
        shutil.copytree(whole.work / "markers", run.work / "markers")
        return run
    used = new(place.chat)
    (used.folder / "out").mkdir()
    shutil.copy(whole.files / "manifest.json", used.folder / "out/manifest.json")
    elsewhere = begun()
    elsewhere.out = elsewhere.folder / "elsewhere"
    other = begun()
    other.out = other.folder / "elsewhere"
    wrong = env | {"AWS_SECRET_ACCESS_KEY": "wrong"}
    nobody = {k: v for k, v in env.items() if "KEY" not in k}
    gpu = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    return {
        "missing model": (new(place.chat), ["--model", "no/such/model"], ["--model no/such/model"]),
        "model without files": (new(place.chat), ["--model", folder / "bare"], [str(folder / "bare"), "config.json"]),
        "unknown kind of model": (new(place.chat), ["--model", strange], [str(strange)]),
        "torn weights": (new(place.chat), ["--model", cut], [str(cut / weights), "torn"]),
        "weights of the index": (new(place.chat), ["--model", part], [str(part), weights, "not there"]),
        "model without tokenizer": (new(place.chat), ["--model", silent], [str(silent), "tokenizer"]),
        "missing data": (new("no/such.jsonl"), [], ["--data no/such.jsonl", "no such file"]),
        "empty data": (new(folder / "empty.jsonl"), [], [str(folder / "empty.jsonl")]),
        "torn Parquet": (new(torn), [], [str(torn), "cannot be read"]),
        "several splits": (new(folder / "splits"), [], [f"{folder}/splits/train", f"{folder}/splits/test"]),
        "two kinds of data": (new(folder / "both"), [], [str(folder / "both"), ".jsonl", ".parquet"]),
        "all skipped": (new(broken), [], [str(broken), "'unreadable': 2"]),
        "max-len above tokens": (new(place.chat), ["--max-len", "2000"], ["--max-len 2000", "--tokens 1024"]),
        "flag out of range": (new(place.chat), ["--uploads", "99"], ["--uploads 99", "1 to 16"]),
        "unknown layers": (new(place.chat), ["--layers", "1,64"], ["--layers 1,64", "0 to 7"]),
        "OUT cannot be written": (new(place.chat, out="/proc/nowhere"), [], ["/proc/nowhere"]),
        "OUT through a file": (new(place.chat, out=f"{place.few}/out"), [], [f"{place.few}/out", "Not a directory"]),
        "missing bucket": (new(place.chat, out="s3://no-such/run", env=env), [], ["s3://no-such/run", "NoSuchBucket"]),
        "wrong secret": (new(place.chat, out="s3://bucket/x", env=wrong), [], ["s3://bucket/x", "Signature"]),
        "no credentials": (new(place.chat, out="s3://bucket/x", env=nobody), [], ["s3://bucket/x", "credentials"]),
        "OUT of another run": (used, ["--layers", "2,3"], [str(used.out), "[1, 2, 3, 4, 5], now [2, 3]"]),
        "WORK of another run": (other, ["--dtype", "bf16"], [str(other.work), "dtype was fp32, now bf16"]),
        "markers of another OUT": (elsewhere, [], [str(elsewhere.out), whole.out]),
        "no GPU": (new(place.chat, env=gpu), [], ["CUDA_VISIBLE_DEVICES=0"]),
    }


NAMES = """missing model, model without files, unknown kind of model, torn weights,
weights of the index, model without tokenizer, missing data,
empty data, torn Parquet, several splits,
two kinds of data, all skipped, max-len above tokens, flag out of range, unknown layers, OUT cannot be written,
OUT through a file, missing bucket, wrong secret, no credentials, OUT of another run, WORK of another run, markers of another OUT,
no GPU"""
NAMES = [name.strip() for name in NAMES.split(",")]


@pytest.fixture(scope="module")
def refused(cases):
    """{name: (exit code, run, words)}"""
    started = {name: run.start(*args) for name, (run, args, _) in cases.items()}
    return {name: (code(started[name]), run, words) for name, (run, _, words) in cases.items()}


def test_every_case_is_looked_at(cases):
    assert list(cases) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_refusal_exits_with_2_before_the_model_is_loaded(refused, name):
    code, run, _ = refused[name]
    assert code == 2 and "Loading weights" not in run.log() and "start checks" not in run.log(), run.log()


@pytest.mark.parametrize("name", NAMES)
def test_a_refusal_is_one_message_with_the_value(refused, name):
    _, run, words = refused[name]
    messages = [line for line in run.log().splitlines() if "refused:" in line]
    assert len(messages) == 1 and all(word in messages[0] for word in words), run.log()


@pytest.mark.parametrize("name", NAMES)
def test_a_refusal_shows_no_traceback(refused, name):
    assert "Traceback" not in refused[name][1].log()


@pytest.mark.parametrize("name", NAMES)
def test_a_refusal_is_in_the_progress_file(refused, name):
    _, run, words = refused[name]
    p = run.progress()
    assert (p["state"], p["exit_code"]) == ("failed", 2) and all(word in p["error"] for word in words)


@pytest.mark.parametrize("name", ["torn weights", "weights of the index"])
def test_a_model_that_is_not_whole_leaves_out_untouched(refused, name):
    assert not refused[name][1].out.exists()


@pytest.mark.parametrize("name", ["OUT cannot be written", "OUT through a file", "missing bucket", "wrong secret"])
def test_what_cannot_heal_is_tried_once(refused, name):
    assert " of 3 failed" not in refused[name][1].log()


@pytest.mark.parametrize("name", ["OUT cannot be written", "OUT through a file", "missing bucket"])
def test_an_out_that_takes_nothing_is_refused_before_tokenizing(refused, name):
    assert not list((refused[name][1].work / "plan").glob("*.bin"))


def test_refusals_leave_the_undisturbed_output_alone(refused, whole):
    assert sorted(objects(whole.files)) == ALL


def test_staging_too_small_for_two_batches_is_refused(new, place, tmpfs):
    run = new(place.chat, stage=tmpfs("2m"))
    assert run.run() == 2
    assert f"--stage {run.stage}" in run.progress()["error"] and "Loading weights" not in run.log()


def test_a_work_directory_that_is_a_file_is_refused(new, place):
    run = new(place.chat)
    run.work.write_text("")
    assert run.run() == 2 and f"--work {run.work}" in run.log() and "Traceback" not in run.log()


# ---- an aws that fails, lies and talks

FAKE = """#!/bin/sh
here={folder} real={aws}
echo "$*" >>$here/args
case "$*" in "s3 cp "*/batch_*) ;; *) exec $real "$@" ;; esac
touch $here/running.$$
echo "$(nice) $(ls $here | grep -c running)" >>$here/calls
{body}
code=$?
rm $here/running.$$
exit $code
"""
BODIES = {
    # every upload writes a megabyte to its standard error, and the first two fail
    "flaky": """head -c 1000000 /dev/zero | tr '\\0' x >&2
[ $(wc -l <$here/calls) -gt 2 ] && $real "$@" """,
    # every upload fails
    "broken": "echo the line is cut >&2; false",
    # every upload ends with 0, but the first batch's leaves nothing and the second's a cut object
    "liar": """case "$*" in
*batch_000000*) true ;;
*batch_000001*) head -c 1000 "$3" >$here/cut; $real s3 cp $here/cut "$4" ;;
*) $real "$@" ;;
esac"""}


@pytest.fixture(scope="module")
def misled(new, place, s3):
    """{name of a body: run of three batches with such an aws first on PATH}. It notes the arguments of all
    calls in `args`, and for each upload of a batch its niceness and how many run in `calls`."""
    made = {}
    for name, body in BODIES.items():
        made[name] = run = new(place.few, out=f"s3://bucket/{name}", env=s3.environ())
        run.fake, run.files = run.folder / "fake", s3.directory / "bucket" / name
        run.fake.mkdir()
        (run.fake / "aws").write_text(FAKE.format(folder=run.fake, aws=AWS, body=body))
        (run.fake / "aws").chmod(0o755)
        run.process = run.start("--upload-attempts", 5 if name == "flaky" else 1, PATH=f"{run.fake}:{run.env['PATH']}")
    for run in made.values():
        run.code = code(run.process)
        run.uploads = [line.split() for line in (run.fake / "calls").read_text().splitlines()]
    return made


@pytest.fixture(scope="module")
def flaky(misled):
    return misled["flaky"]


def test_uploads_that_fail_twice_are_tried_again(flaky):
    assert flaky.code == 0 and len(flaky.uploads) == 5, flaky.log()


def test_retried_uploads_leave_right_objects(flaky):
    assert len(flaky.markers()) == 3
    for marker in flaky.markers().values():
        assert zlib.crc32((flaky.files / marker["key"]).read_bytes()) == marker["crc32"]


def test_uploads_that_talk_a_lot_fill_no_log(flaky):
    assert flaky.log_file(0).stat().st_size < 100_000


def test_uploads_that_succeeded_in_the_end_count_as_no_failure(flaky):
    assert (flaky.progress()["failed_uploads"], flaky.progress()["uploaded"]) == (0, 3)


def test_never_more_uploads_run_than_allowed(flaky):
    assert max(int(running) for _, running in flaky.uploads) == 2


def test_uploads_are_as_nice_as_can_be(flaky):
    assert {nice for nice, _ in flaky.uploads} == {"19"}


def test_credentials_are_in_no_argument(flaky, s3):
    text = (flaky.fake / "args").read_text()
    assert "s3 cp" in text and s3.secret_key not in text and s3.access_key not in text


@pytest.fixture(scope="module")
def broken(misled):
    """Then the same command with the real aws."""
    run = misled["broken"]
    run.first_log, run.first, run.first_markers = run.log(), run.progress(), run.markers()
    run.left = {f.name: f.read_bytes() for f in run.staged()}
    run.next_code = run.run("--upload-attempts", "1")
    return run


def test_a_run_whose_uploads_fail_exits_with_1(broken):
    assert broken.code == 1, broken.first_log


def test_a_run_whose_uploads_fail_says_why(broken):
    assert broken.first["state"] == "failed" and "the line is cut" in broken.first["error"]
    assert "Traceback" not in broken.first_log


def test_a_run_whose_uploads_fail_counts_them(broken):
    assert (broken.first["failed_uploads"], broken.first["uploaded"]) == (3, 0)


def test_a_run_whose_uploads_fail_has_no_marker(broken):
    assert broken.first_markers == {}


def test_a_run_whose_uploads_fail_keeps_its_files(broken):
    assert len(broken.left) == 3


def test_the_next_start_uploads_without_computing(broken):
    assert broken.next_code == 0 and "3 staged, 0 are to be computed" in broken.log(), broken.log()


def test_the_next_start_uploads_the_staged_bytes(broken):
    assert {f.name: f.read_bytes() for f in (broken.files / "batches").iterdir()} == broken.left


def test_exit_code_0_alone_makes_no_marker(misled):
    assert sorted(misled["liar"].markers()) == [2]


def test_a_run_with_objects_that_are_not_there_exits_with_1(misled):
    liar = misled["liar"]
    assert liar.code == 1 and liar.progress()["failed_uploads"] == 2, liar.log()


def test_files_whose_objects_are_not_there_stay_in_staging(misled):
    names = [f.name for f in misled["liar"].staged()]
    assert names == ["batch_000000.safetensors", "batch_000001.safetensors"]


# ---- staging that fills up

@pytest.fixture
def full(new, place, s3, tmpfs):
    """Staging holds two of three batches, and uploads are slower than the computation."""
    run = new(place.few, out="s3://bucket/full", env=s3.environ(), stage=tmpfs("3m"))
    run.files, run.states = s3.directory / "bucket/full", set()
    process = run.start()
    until(lambda: run.states.add(run.progress().get("state")) or process.exitcode is not None)
    run.code = process.exitcode
    return run


def test_full_staging_is_waited_for(full, judge, place):
    assert full.code == 0 and judge(full.files, place.few)["ok"], full.log()
    assert full.progress()["waited_for_room_s"] > 0 and "waiting_for_room" in full.states


def test_an_exclusion_left_by_a_killed_start_is_not_that_of_a_batch_computed_again(new, place):
    run = new(place.few)
    assert run.run("--plan-only") == 0, run.log()
    staged = run.stage / run.fingerprint()
    staged.mkdir()
    (staged / "batch_000000.json").write_text('{"0":"bad numbers"}')
    assert run.run() == 0, run.log()
    assert run.markers()[0]["excluded"] == {}


# ---- the size of a forward, as warm-up finds it

@pytest.fixture(scope="module")
def automatic(new, place):
    run = new(place.few)
    run.early, run.words = run.run("--forward-tokens", "auto"), run.log()
    warmed = subprocess.run([sys.executable, ROOT / "warmup.py", *map(str, run.flags("--forward-tokens", "auto"))],
                            text=True, capture_output=True)
    run.report = json.loads(warmed.stdout.splitlines()[-1])
    run.code = run.run("--forward-tokens", "auto")
    return run


def test_auto_before_any_warm_up_is_refused_and_says_what_to_run(automatic):
    assert automatic.early == 2 and "make warmup" in automatic.words, automatic.words


def test_auto_takes_the_smallest_size_within_one_percent_of_the_largest(automatic):
    rates = {int(size): rate for size, rate in automatic.report["forward_tokens_per_sec"].items()}
    assert sorted(rates) == [512, 1024]
    assert automatic.report["found_forward_tokens"] == (512 if rates[512] >= 0.99 * rates[1024] else 1024)


def test_auto_after_a_warm_up_runs_and_leaves_the_fingerprint_as_it_is(automatic):
    assert automatic.code == 0, automatic.log()
    made = json.loads((automatic.out / "manifest.json").read_text())
    assert made["complete"] and "forward_tokens" not in made
