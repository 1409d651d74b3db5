"""The page, the history behind it, metrics, pictures and snapshots; the page in a real headless Chromium.

    python -m pytest tests/test_web.py

Screenshots go to tests/artifacts (untracked). Without Debian's chromium the browser tests are skipped.
"""
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
from prometheus_client.parser import text_string_to_metric_families

from s3 import S3Server
from shards import until
from test_monitor import MONITOR, Run, run  # noqa: F401 (run is a fixture)

ROOT = Path(__file__).resolve().parent.parent
ARTIFACTS = ROOT / "tests" / "artifacts"
CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no chromium: apt-get install chromium")
TOKEN = "0123456789abcdef-token"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Page:
    """`monitor.py --web` on a free port, until the with block ends."""

    def __init__(self, work, *args):
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}/"
        self.command = [sys.executable, MONITOR, "--work", work, "--web", "--port", str(self.port), *args]

    def __enter__(self):
        environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}  # it would act on it
        self.process = subprocess.Popen(  # with Ctrl-C as a terminal has it, whatever started the tests
            self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        until(self.answers, self.process)
        return self

    def answers(self):
        try:
            return self.get("/metrics")[0]
        except OSError:
            return None

    def get(self, path, **headers):
        """(status, headers, body) of one request; no redirect is followed."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read().decode(errors="replace")
        finally:
            connection.close()

    def __exit__(self, *error):
        self.process.send_signal(signal.SIGINT)
        self.said = self.process.communicate(timeout=30)[0]


@pytest.fixture(scope="module")
def live(place, staging, tmp_path_factory):
    """A two-shard run into S3, slow enough to be looked at; shard 0, started first, writes the history.
    metrics.jsonl was there before it, longer than it may be, and torn at its end."""
    folder, stage = tmp_path_factory.mktemp("live"), staging()
    work = folder / "work"
    (work / "logs").mkdir(parents=True)
    tiny.make_chat(folder / "chat.jsonl", 300)
    old = [json.dumps({"t": time.time() - 60 + i / 100, "old": i}) for i in range(3000)]
    (work / "metrics.jsonl").write_text("\n".join([*old, '{"t": 17']))
    processes = []
    with S3Server(folder / "s3") as server:
        server.make_bucket("b")
        for shard in range(2):
            command = [sys.executable, ROOT / "extract.py", "--model", place.model, "--data", folder / "chat.jsonl", "--out",
                       "s3://b/run", "--work", work, "--stage", stage, "--tokens", 1024, "--max-len", 300,
                       "--shard", shard, "--num-shards", 2, "--compute-dtype", "fp32", "--dtype", "fp32",
                       "--uploads", 1, "--upload-mbps", 0.15]
            with open(work / "logs" / f"shard_{shard}.log", "ab") as log:
                processes.append(subprocess.Popen(
                    [*map(str, command)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder,
                    env=server.environ()))
            until(lambda: (work / f"progress_shard_{shard}.json").exists())
        yield None, work, processes
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def served(live):
    _, work, _ = live
    with Page(work) as page:
        yield page


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright
    ARTIFACTS.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(chromium, served):
    """Opens the page of the live run in a window of a size; `asked` has every address it asked for."""
    tabs = []

    def open_tab(width=1280, height=900, scheme="light", address=None):
        tabs.append(chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme))
        tabs[-1].asked = []
        tabs[-1].on("request", lambda request: tabs[-1].asked.append(request.url))
        tabs[-1].on("websocket", lambda socket: tabs[-1].asked.append(socket.url))
        tabs[-1].goto(address or served.address)
        tabs[-1].wait_for_selector(".shard.all")
        return tabs[-1]
    yield open_tab
    for opened in tabs:
        opened.close()


def points(work):
    return [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]


# ---- the page of a live run; these stand in this order, the last ones end it

def test_history_is_cut_to_its_bound(live):
    _, work, _ = live
    until(lambda: len((work / "metrics.jsonl").read_text().splitlines()) < 3000)
    assert len(points(work)) < 2000


def test_a_thinned_history_keeps_its_beginning(live):
    _, work, _ = live
    assert points(work)[0]["old"] == 0


@needs_chromium
def test_the_page_follows_the_run_without_a_reload(live, tab):
    page = tab()
    page.evaluate("window.mark = 1")
    before = page.inner_text(".shard.all")
    until(lambda: page.inner_text(".shard.all > :nth-child(3)") != before.split("\n")[2])
    assert page.evaluate("window.mark") == 1


@needs_chromium
def test_every_address_is_the_pages_own(served, tab):
    page = tab()
    page.wait_for_selector("canvas")
    assert {re.sub(r"^(http|ws)://([^/]+)/.*", r"\2", url) for url in page.asked
            if not url.startswith("data:")} == {f"127.0.0.1:{served.port}"}


@needs_chromium
def test_there_is_a_curve_for_each_measure(live, tab):
    _, work, _ = live
    until(lambda: sum("shards" in p for p in points(work)) >= 3)
    page = tab()
    until(lambda: page.locator(".charts canvas").count() >= 6)
    names = "Tokens/s|Where the shards' time goes, %|Staging filled, %|Uploads, MB/s|Upload queue, batches|CPU, %"
    assert page.locator(".charts .caption").all_inner_texts() == names.split("|")


@needs_chromium
def test_nothing_scrolls_sideways_on_a_phone(tab):
    page = tab(390, 844)
    page.wait_for_selector("canvas")
    page.screenshot(path=ARTIFACTS / "phone.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 390


@needs_chromium
def test_dark_and_light_follow_the_system(tab):
    seen = {}
    for scheme in ("light", "dark"):
        page = tab(scheme=scheme)
        page.wait_for_selector("canvas")
        page.screenshot(path=ARTIFACTS / f"{scheme}.png", full_page=True)
        seen[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert seen == {"light": "rgb(245, 246, 248)", "dark": "rgb(13, 15, 19)"}


@needs_chromium
def test_the_button_changes_light_to_dark(tab):
    page = tab(scheme="light")
    page.get_by_label("light or dark").click()
    until(lambda: page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 15, 19)")


@needs_chromium
def test_markup_in_a_log_stays_text(live, tab):
    _, work, _ = live
    line = "<img src=x onerror=\"document.title='taken'\"><b>bold</b>"
    with open(work / "logs" / "shard_0.log", "a") as log:
        log.write(line + "\n")
    page = tab()
    until(lambda: line in page.inner_text(".log .mono"))
    assert page.locator("img, b").count() == 0


def test_metrics_count_what_the_progress_files_count(live, served):
    _, work, _ = live

    def counted():
        families = text_string_to_metric_families(served.get("/metrics")[2])
        return {(s.name, s.labels.get("shard")): s.value for f in families for s in f.samples}

    def same():
        file, metric = json.loads((work / "progress_shard_1.json").read_text()), counted()
        pairs = {"uploaded_batches_total": "batch", "planned_batches": "total_batches", "planned_samples": "total",
                 "processed_samples_total": "processed", "processed_tokens_total": "tokens",
                 "uploaded_bytes_total": "uploaded_bytes", "pending_uploads": "pending_uploads"}
        return 0 < file["batch"] < file["total_batches"] and all(
            metric[f"extract_{name}", "1"] == file[key] for name, key in pairs.items())
    until(same)


def test_uploaded_bytes_are_those_of_the_objects(live):
    _, work, _ = live

    def same():
        progress = json.loads((work / "progress_shard_1.json").read_text())
        markers = [json.loads(marker.read_text()) for marker in work.glob("markers/.done_*")]
        return progress["uploaded_bytes"] == sum(m["bytes"] for m in markers if m["batch"] % 2 == 1) > 0
    until(same)


@needs_chromium
def test_a_killed_shard_is_named_within_15_s(live, tab):
    _, _, processes = live
    page = tab()
    processes[0].kill()
    page.get_by_text(f"pid {processes[0].pid} is gone").first.wait_for(timeout=15_000)
    page.screenshot(path=ARTIFACTS / "killed.png", full_page=True)
    assert "1 of 2 shards running, shard 0 is gone" in page.inner_text(".summary")


def test_another_shard_goes_on_with_the_history(live):
    _, work, processes = live
    processes[0].kill()

    def taken_over():
        states = points(work)[-1]["shards"]["state"]
        return states[0] is None and states[1]
    until(taken_over)


@needs_chromium
def test_a_page_opened_late_shows_the_run_from_its_start(live, run, tab):
    _, work, _ = live
    shutil.copytree(work, run.work, dirs_exist_ok=True)
    with Page(run.work) as late:
        page = tab(address=late.address)
        page.wait_for_selector("canvas")
        first = next(p["t"] for p in points(work) if "shards" in p)
        options = page.evaluate("""() => [...document.querySelectorAll('.nicegui-echart')].map(
            e => getElement(e.id.slice(1)).chart.getOption().series[0].data)[0]""")
    assert min(t for t, value in options if value is not None) <= 1000 * first + 1000


# ---- what holds a run back, from points made by hand

def history(run, seconds=600, waited=0.0, state="running", gpu=0.0, host=0.0, shards=1, ago=0, **more):
    """A point every 5 s up to now; `waited`: share of the time that the writers waited for room."""
    lines = []
    for t in range(0, seconds + 1, 5):
        each = dict(state=state, gpu_busy=gpu, host_busy=host, waited_for_room_s=waited * t, tokens_per_sec=9.0)
        lines.append(json.dumps({"t": time.time() - seconds + t - ago, "stage_percent": 50.0, **more,
                                 "shards": {key: [value] * shards for key, value in each.items()}}))
    (run.work / "metrics.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("measured, name", [
    (dict(gpu=0.97, host=0.2), "gpu"), (dict(gpu=0.5, host=0.95), "host"), (dict(gpu=0.55, waited=0.41), "upload"),
    (dict(gpu=0.97, waited=0.02), "gpu"), (dict(state="warming"), "planning"), (dict(gpu=0.2, host=0.1), None)])
def test_the_bottleneck_is_named(run, measured, name):
    run.progress(0), run.process(0), history(run, **measured)
    assert run.json()["bottleneck"] == name


def test_the_sentence_says_how_the_run_is(run):
    (run.work / "plan" / "plan.json").write_text('{"out": "s3://bucket/run1"}')
    for shard in range(3):
        run.progress(shard, 4), run.process(shard)
    run.progress(3, 4), run.dead_pid(3)
    history(run, gpu=0.55, waited=0.41, shards=4)
    assert ("\n3 of 4 shards running, shard 3 is gone; S3 is the bottleneck: extraction waited 41 % "
            "of the last 10 minutes\n") in run.table()


def test_a_restarted_shards_counter_is_not_a_wait(run):
    run.progress(0), run.process(0), history(run, gpu=0.9, waited=1.0)
    line = json.loads((run.work / "metrics.jsonl").read_text().splitlines()[-1])
    lines = [json.dumps(line | {"t": line["t"] - 20 + 5 * i, "shards": line["shards"] | {
        "waited_for_room_s": [wait]}}) for i, wait in enumerate((9000, 9000, 0, 0))]
    (run.work / "metrics.jsonl").write_text("\n".join(lines))
    assert run.json()["time_spent"]["upload"] == 0


def test_old_points_name_no_bottleneck(run):
    run.progress(0), run.process(0), history(run, gpu=0.97, ago=3600)
    assert run.json()["bottleneck"] is None and "too early" in run.json()["summary"]


def test_only_uploads_are_left(run):
    run.progress(0, state="draining"), run.process(0), history(run, gpu=0.97)
    assert "all is computed, 3 uploads" in run.json()["summary"]


def test_tokenizing_before_the_first_shard_is_said(run):
    child = run.process(0, work=("--work", "work", "--plan-only"))
    (run.work / "pids" / "shard_0.pid").rename(run.work / "pids" / ".plan")
    assert child.poll() is None and "being tokenized" in run.json()["summary"]


def test_tokenizing_before_another_start_is_said_though_old_shards_stopped(run):
    run.process(1, work=("--work", "work", "--plan-only"))
    (run.work / "pids" / "shard_1.pid").rename(run.work / "pids" / ".plan")
    run.progress(0, state="stopped", exit_code=3)
    assert re.search(r"^all +planning ", run.table(), re.M) and run.json()["worry"] == "none"


def test_a_reconcile_of_a_finished_run_is_no_planning(run):
    run.process(1, work=("--work", "work", "--reconcile"))
    (run.work / "pids" / "shard_1.pid").rename(run.work / "pids" / ".plan")
    run.progress(0, state="done", exit_code=0)
    assert run.json()["summary"].startswith("Done: ")


# ---- a broken world

@pytest.mark.parametrize("text", [
    "\0\xff\n[1]\n5\nnull\n", '{"t": "now"}\n{"t": -5}\n{}\n', '{"t": 1e300}\n{"t": NaN}\n',
    '{"t": 1, "shards": 5, "gpus": [1]}\n{"t": 2, "shards": {"state": 7, "gpu_busy": {}}, "gpus": {"memory_used": 3}}',
    '{"t": 5, "shards": {"state": ["running"], "gpu_busy": ["x"]}}\n{"t": 6, "shards": {"state": ["running"]}}',
    '{"t": 1, "sta'], ids=["bytes", "times", "sizes", "types", "lists", "half"])
def test_a_broken_history_breaks_nothing(run, text):
    run.progress(0), run.process(0)
    (run.work / "metrics.jsonl").write_text(text, encoding="latin-1")
    shown, drawn = run.monitor(), run.monitor("--plot", str(run.folder / "run.png"))
    assert (shown.returncode, shown.stderr) == (0, "") and "Traceback" not in drawn.stderr


@pytest.mark.parametrize("plan", ["[]", '{"counts": [1], "out": 5, "fingerprint": {}}', '{"counts": {"skipped_by_reason": 3}}',
                                  '{"counts": {"skipped_by_reason": {"a": "b", "c": -1}}}'])
def test_a_broken_plan_breaks_nothing(run, plan):
    (run.work / "plan" / "plan.json").write_text(plan)
    run.progress(0), run.process(0)
    assert run.json()["skipped_by_reason"] == {}


def test_a_clock_set_back_hides_only_what_is_in_the_future(run):
    history(run, gpu=0.97, ago=-3600)
    ahead = (run.work / "metrics.jsonl").read_text()
    history(run, gpu=0.97)
    behind = (run.work / "metrics.jsonl").read_text()
    (run.work / "metrics.jsonl").write_text(ahead + behind)
    run.progress(0), run.process(0)
    assert run.json()["bottleneck"] == "gpu"


def test_a_run_finished_long_ago_is_done(run):
    run.progress(0, state="done", exit_code=0, updated_at=time.time() - 7 * 86400, eta_hours=0.0)
    history(run, ago=7 * 86400)
    status = run.json()
    assert (status["state"], status["eta_hours"], status["worry"]) == ("done", 0.0, "none")


def test_skipped_samples_are_counted_by_reason(run):
    (run.work / "plan" / "plan.json").write_text('{"counts": {"skipped_by_reason": {"too_short": 4}}}')
    assert run.json()["skipped_by_reason"] == {"too_short": 4}


@needs_chromium
def test_a_page_without_a_work_directory_says_how_to_begin(run, tab):
    with Page(run.folder / "nowhere") as nowhere:
        page = tab(address=nowhere.address)
        assert "make extract" in page.inner_text(".problems")


# ---- who may look

@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    with Page(tmp_path_factory.mktemp("guarded"), "--token", TOKEN) as page:
        yield page


@pytest.mark.parametrize("path", ["/", "/metrics", "/?token=", "/?token=wrong", "/_nicegui_ws/socket.io/"])
def test_without_the_token_nothing_is_shown(guarded, path):
    assert guarded.get(path)[0] == 401


def test_a_websocket_without_the_token_is_refused(guarded):
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13",
               "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
    path = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
    assert guarded.get(path, **upgrade)[0] == 403


def test_the_token_in_the_address_becomes_a_cookie(guarded):
    status, headers, _ = guarded.get(f"/?token={TOKEN}")
    cookie = headers["Set-Cookie"]
    assert (status, headers["Location"]) == (303, "/") and "HttpOnly" in cookie
    assert guarded.get("/", Cookie=cookie.split(";")[0])[0] == 200


def test_a_scraper_brings_the_token_in_a_header(guarded):
    assert guarded.get("/metrics", Authorization=f"Bearer {TOKEN}")[0] == 200


def test_a_foreign_name_for_loopback_is_refused(served):
    assert served.get("/metrics", Host="elsewhere.example")[0] == 403


@pytest.mark.parametrize("args, words", [(["--host", "0.0.0.0"], "WEB_TOKEN= (--token) is needed"),
                                         (["--token", "short"], "16 characters"),
                                         (["--port", "99999"], "--port 99999")])
def test_a_page_that_cannot_be_is_refused(run, args, words):
    refused = run.monitor("--web", *args)
    assert refused.returncode == 2 and words in refused.stderr and "Traceback" not in refused.stderr


def test_ctrl_c_ends_the_page_in_order(run):
    with Page(run.work) as page:
        pass
    assert page.process.returncode == 0 and "Traceback" not in page.said, page.said


def test_a_port_in_use_is_refused(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = run.monitor("--web", "--port", str(taken.getsockname()[1]))
    assert refused.returncode == 2 and "WEB_PORT=" in refused.stderr


# ---- metrics, pictures, snapshots, make

def test_the_dashboard_asks_for_metrics_that_there_are(served):
    dashboard = (ROOT / "tests" / "grafana.json").read_text()
    asked = set(re.findall(r"\bextract_[a-z_]+", " ".join(
        target["expr"] for panel in json.loads(dashboard)["panels"] for target in panel["targets"])))
    text = served.get("/metrics")[2]
    # GPU metrics have no samples here, but their names are said
    assert asked and asked <= set(re.findall(r"^# TYPE (\S+)", text, re.M))


def test_metrics_name_their_units_and_have_help(served):
    text = served.get("/metrics")[2]
    names = re.findall(r"^# TYPE (\S+) (\S+)", text, re.M)
    assert all(re.search(rf"^# HELP {name} \S", text, re.M) for name, _ in names)
    assert {name for name, kind in names if kind == "counter"} == {n for n, _ in names if n.endswith("_total")}


def test_plot_draws_a_picture(run):
    history(run, gpu=0.9, shards=3)
    drawn = run.monitor("--plot", str(run.folder / "run.png"))
    assert drawn.returncode == 0 and (run.folder / "run.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("name, made, words", [("run.png", False, "no history yet"), ("run.xyz", True, "run.xyz"),
                                               ("no/such/run.png", True, "no/such")])
def test_a_picture_that_cannot_be_drawn_is_refused(run, name, made, words):
    history(run) if made else None
    refused = run.monitor("--plot", str(run.folder / name))
    assert refused.returncode == 2 and words in refused.stderr and "Traceback" not in refused.stderr


@pytest.fixture
def snapshot(run, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t/of+this.test")
    run.progress(0), run.process(0), history(run)
    (run.work / "logs" / "shard_0.log").write_text(
        "upload failed: s3cr3t/of+this.test\nAKIAABCDEFGHIJKLMNOP\naws_session_token = FwoGZXIvYXdzEBYaDKtoken99\nlast\n")
    said = run.monitor("--snapshot", "GPUS = 4\n")
    assert said.returncode == 0, said.stderr
    (folder,) = (run.work / "snapshots").iterdir()
    return said.stdout, folder


def test_a_snapshot_says_in_one_line_where_it_is(snapshot):
    said, folder = snapshot
    assert str(folder) in said and said.count("\n") == 1


def test_a_snapshot_holds_the_scripts_as_they_are(snapshot):
    _, folder = snapshot
    assert all((folder / name).read_bytes() == (ROOT / name).read_bytes()
               for name in ("extract.py", "monitor.py", "warmup.py", "export.py", "Makefile", "requirements.txt"))


def test_a_snapshot_holds_status_versions_knobs_logs_and_curves(snapshot):
    _, folder = snapshot
    found = {name: (folder / name).read_text() for name in ("STATUS.md", "versions.txt", "knobs.txt", "shard_0.log")}
    assert "| 0 | running |" in found["STATUS.md"] and "\ntorch==" in found["versions.txt"]
    assert found["knobs.txt"] == "GPUS = 4\n" and found["shard_0.log"].endswith("last\n")
    assert (folder / "run.png").stat().st_size > 10_000


def test_a_snapshot_holds_no_credentials(snapshot):
    _, folder = snapshot
    text = b"".join(file.read_bytes() for file in folder.iterdir())
    assert not any(secret in text for secret in (b"s3cr3t/of+this.test", b"AKIAABCDEFGHIJKLMNOP", b"FwoGZXIvYXdz"))


def make(*words):
    return subprocess.run(["make", f"PY={sys.executable}", *map(str, words)], cwd=ROOT, text=True,
                          capture_output=True, timeout=120)


def test_make_snapshot_keeps_the_knobs(run):
    run.progress(0)
    said = make("snapshot", f"WORK={run.work}", "GPUS=7", "ARGS=--final")
    (folder,) = (run.work / "snapshots").iterdir()
    assert said.returncode == 0 and {"GPUS = 7", "ARGS = --final"} <= {*(folder / "knobs.txt").read_text().splitlines()}


def test_make_logs_names_the_logs_that_there_are(run):
    (run.work / "logs" / "shard_0.log").write_text("")
    said = make("logs", f"WORK={run.work}", "SHARD=7")
    assert said.returncode == 2 and "shard_0.log" in said.stdout


def test_make_web_serves_the_knobs_port(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port}" in make("web", f"WORK={run.work}", f"WEB_PORT={port}").stderr
        assert f"--port {port}" in make("web", f"WORK={run.work}", f"PORT={port}").stderr


def test_help_has_groups_and_the_knobs_values():
    text = make("WEB_PORT=1234").stdout
    assert re.search(r"\nLook at it\n.*  web  ", text, re.S) and re.search(r"WEB_PORT +1234 ", text)
