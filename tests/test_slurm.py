"""`make slurm` through a real Slurm: a controller and two nodes on loopback, with a configuration of their own.

    python -m pytest tests/test_slurm.py

Needs root and Debian's slurmctld, slurmd, slurm-client and munge, whose own daemons need not run. One run has it
all: tasks on both nodes, a task requeued, a node set down in the middle; the tests look at what it left.
"""
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from s3 import S3Server
from shards import objects, until

ROOT = Path(__file__).resolve().parent.parent
NEEDED = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if not shutil.which(name)]
pytestmark = pytest.mark.skipif(
    bool(NEEDED) or os.getuid() != 0, reason="needs root, and apt-get install slurmctld slurmd slurm-client munge")

CONFIG = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={lab}/munge/s,cred_expire=5
CredType=cred/munge
SlurmctldPort={ports[0]}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPidFile={lab}/run/slurmctld.pid
SlurmdPidFile={lab}/run/%n.pid
SlurmdSpoolDir={lab}/spool/%n
StateSaveLocation={lab}/state
SlurmctldLogFile={lab}/log/slurmctld.log
SlurmdLogFile={lab}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU,CR_LLN
SlurmdParameters=config_overrides
ReturnToService=0
MinJobAge=3600
GresTypes=gpu
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16 RealMemory=4000 Gres=gpu:2
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=16 RealMemory=4000 Gres=gpu:2
PartitionName=main Nodes=ALL Default=YES
"""
GPUS = """AutoDetect=off
NodeName=node[1-2] Name=gpu File=/dev/null
NodeName=node[1-2] Name=gpu File=/dev/zero
"""
# The Python of the run: it says where it stands, and hides from torch the GPUs that are not there.
PYTHON = """#!/bin/sh
echo "${{SLURM_ARRAY_TASK_ID:-plan}} $1 $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES" >>{folder}/starts
CUDA_VISIBLE_DEVICES= exec {python} "$@"
"""


def free_ports(n):
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A Slurm that runs; gives the environment with which its commands reach it."""
    lab = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool/node1", "spool/node2", "log", "run", "munge"):
        (lab / name).mkdir(parents=True)
    config = CONFIG.format(lab=lab, host=socket.gethostname().split(".")[0], ports=free_ports(3))
    (lab / "slurm.conf").write_text(config)
    (lab / "gres.conf").write_text(GPUS)
    key = lab / "munge/key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    env = {**os.environ, "SLURM_CONF": str(lab / "slurm.conf")}
    subprocess.run(["munged", f"--socket={lab}/munge/s", f"--key-file={key}", f"--pid-file={lab}/run/munged.pid",
                    f"--log-file={lab}/log/munged.log", f"--seed-file={lab}/munge/seed", "--force"], check=True)
    try:
        for command in (["slurmctld", "-c"], ["slurmd", "-N", "node1"], ["slurmd", "-N", "node2"]):
            subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(lambda: subprocess.run(["sinfo", "-h", "-o", "%T %D"], env=env, capture_output=True,
                                     text=True).stdout == "idle 2\n")
        yield env
    finally:
        subprocess.run(["scancel", "-f", "-u", "root"], env=env, stderr=subprocess.DEVNULL)
        for name in ("node1", "node2", "slurmctld", "munged"):
            if (pid := lab / f"run/{name}.pid").exists():
                os.kill(int(pid.read_text()), signal.SIGTERM)


def squeue(env):
    """{"12_0": (state, node)} of what is queued."""
    out = subprocess.run(["squeue", "-hr", "-o", "%i %T %N"], env=env, capture_output=True, text=True).stdout
    return {line.split()[0]: tuple((line.split() + [""])[1:3]) for line in out.splitlines()}


def make(run, *words):
    command = ["make", "--no-print-directory", f"PY={run.folder}/python", *map(str, words), *run.knobs]
    return subprocess.run(command, cwd=ROOT, env=run.env, capture_output=True, text=True, timeout=120)


def shards(run):
    return [json.loads(f.read_text()) for f in sorted(run.work.glob("progress_shard_*.json"))]


def status(run):
    """(what `make status` prints, what it knows)"""
    command = [sys.executable, ROOT / "monitor.py", "--work", run.work, "--json"]
    return make(run, "status").stdout, json.loads(subprocess.run(command, env=run.env, capture_output=True).stdout)


def under_way(run):
    """Every task runs and is past its planning, and a batch is marked."""
    return ({state for state, _ in squeue(run.env).values()} == {"RUNNING"} and len(shards(run)) == 3 and
            {s["state"] for s in shards(run)} <= {"running", "draining"} and [*run.work.glob("markers/.done_*")])


@pytest.fixture(scope="module")
def run(slurm, place, new, staging, tmp_path_factory):
    """Three shards on two nodes: while they upload, slowly, one is requeued and the other node set down."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "python").write_text(PYTHON.format(folder=folder, python=sys.executable))
    (folder / "python").chmod(0o755)
    with S3Server(folder / "s3") as server:
        server.make_bucket("b")
        env = server.environ() | {"SLURM_CONF": slurm["SLURM_CONF"]}
        run = SimpleNamespace(folder=folder, work=folder / "work", out=server.directory / "b/run", env=env)
        run.knobs = [f"MODEL={place.model}", f"DATA={place.chat}", "OUT=s3://b/run", f"WORK={run.work}",
                     f"STAGE={staging()}", "TOKENS=1024", "MAX_LEN=300", "UPLOAD_MBPS=0.6", "UPLOADS=1",
                     "ARGS=--compute-dtype fp32 --dtype fp32", "NODES=1", "GPUS=3"]
        run.submitted, run.again = make(run, "slurm"), make(run, "slurm")
        assert run.submitted.returncode == 0, run.submitted.stdout + run.submitted.stderr
        until(lambda: under_way(run))
        run.tasks, run.running = squeue(env), status(run)
        run.requeued = next(int(name[2:]) for name, (_, node) in run.tasks.items() if node == "node1")
        run.moved = {int(name[2:]) for name, (_, node) in run.tasks.items() if node == "node2"}
        command = ["scontrol", "requeue", next(name for name in run.tasks if name.endswith(f"_{run.requeued}"))]
        subprocess.run(command, env=env, check=True)
        subprocess.run(["scontrol", "update", "nodename=node2", "state=down", "reason=test"], env=env, check=True)
        until(lambda: "pending in Slurm" in (found := status(run))[0] and setattr(run, "waiting", found) is None)
        run.alone = new(place.chat)
        assert run.alone.run() == 0, run.alone.log()
        until(lambda: not squeue(env))
        run.starts = [line.split(" ") for line in (folder / "starts").read_text().splitlines()]
        run.log = lambda shard: (run.work / f"logs/shard_{shard}.log").read_text()
        yield run


def test_make_slurm_submits_a_plan_and_an_array(run):
    assert "array 2 of 3 shards" in run.submitted.stdout


def test_a_second_make_slurm_is_refused_while_the_first_is_queued(run):
    assert run.again.returncode == 2 and "make stop" in run.again.stdout


def test_every_shard_ends_with_0(run):
    assert [(s["exit_code"], s["num_shards"]) for s in shards(run)] == [(0, 3)] * 3, run.log(0)


def test_the_objects_are_those_of_a_single_machine(run):
    assert objects(run.out) == objects(run.alone.out) and len(objects(run.out)) == 11


def test_the_output_is_complete(run):
    assert json.loads((run.out / "manifest.json").read_text())["complete"] is True


def test_each_shard_of_a_node_has_a_gpu_of_its_own(run):
    first = {}
    for task, script, node, device in run.starts:
        if script == "extract.py" and task != "plan":
            first.setdefault(task, (node, device))
    assert len({*first.values()}) == 3 and {device for _, device in first.values()} == {"0", "1"}


def test_the_data_is_tokenized_once_by_the_job_before_the_array(run):
    assert "tokenize" in (run.work / "logs/plan.log").read_text()
    assert not [shard for shard in range(3) if "tokenize" in run.log(shard)]


def test_one_task_of_a_kind_of_node_warms_up(run):
    warmed = [script for _, script, _, _ in run.starts].count("warmup.py")
    assert "".join(map(run.log, range(3))).count("warm already") == warmed - 1


def test_a_requeued_task_drains_and_goes_on(run):
    assert [task for task, script, _, _ in run.starts if script == "extract.py"].count(str(run.requeued)) == 2
    assert "stopped: with" in run.log(run.requeued) and "REQUEUE" in run.log(run.requeued)


def test_tasks_of_a_node_that_is_down_finish_on_another(run):
    assert run.moved
    for shard in map(str, run.moved):
        assert [node for task, script, node, _ in run.starts if (task, script) == (shard, "extract.py")][-1] == "node1"


def test_status_says_where_tasks_run(run):
    text, known = run.running
    assert "RUNNING on node1: 2; RUNNING on node2: 1" in text and known["state"] == "running"


def test_status_says_what_is_pending_in_slurm(run):
    text, known = run.waiting
    waiting = {s["shard"] for s in known["shards"] if s["condition"] == "pending"}
    assert waiting and waiting <= {run.requeued, *run.moved} and "pending in Slurm" in text


def test_status_of_the_finished_array_says_how_far_apart_shards_ended(run):
    text, known = status(run)
    assert known["state"] == "done" and "shards ended within" in text


def test_stop_cancels_plan_and_array(run):
    run.knobs = [f"WORK={run.folder / 'other'}" if k.startswith("WORK=") else k for k in run.knobs]
    run.work = run.folder / "other"
    assert make(run, "slurm").returncode == 0 and len(squeue(run.env)) == 4
    assert "pending in Slurm" in status(run)[0]
    stopped = make(run, "stop")
    assert stopped.returncode == 0 and "stopped" in stopped.stdout and not squeue(run.env)
