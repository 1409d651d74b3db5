"""Kills a run into a real S3 server at every step, many times, lets it end, and proves the result.

    python tests/drill.py [--seed 0] [--kills 50] [--dir DIR]     (`make drill`, minutes)
    python tests/drill.py --link                                  UPLOAD_MBPS held; a wire with 80 ms of delay

Two shards extract a tiny model into `rclone serve s3` on loopback. Each is ended by SIGKILL at seeded random
moments, and at every step of the commit order (EXTRACT_FAULT); some of their `aws` and the server are, too.
After each kill every marker must have its object. Then the run goes on to its end, and each object is compared
with an undisturbed run's. The last line is one JSON object: faults, samples lost, samples doubled, objects
wrong (or markers without one), seed, seconds. Exit code 0 if the three in the middle are zero.
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
               "CUDA_VISIBLE_DEVICES": ""}

import psutil
import pyarrow.parquet as pq
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tiny
from link import Link
from monitor import read_json
from s3 import S3Server
from shards import Shards

POINTS = ("written", "renamed", "uploading", "uploaded", "marked")
SAMPLES, SHARDS = 300, 2


def say(text):
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def markers(work):
    """{key: bytes} of the objects that markers promise."""
    found = [json.loads(f.read_text()) for f in (work / "markers").glob(".done_*")]
    return {marker["key"]: marker["bytes"] for marker in found}


def broken_promises(work, bucket):
    """Markers whose object is not there with their size."""
    return [key for key, size in markers(work).items()
            if not (bucket / key).is_file() or (bucket / key).stat().st_size != size]


def children(process, name):
    """Processes below a shard that run `name`."""
    try:
        return [p for p in psutil.Process(process.pid).children(recursive=True) if name in " ".join(p.cmdline())]
    except psutil.Error:
        return []


def compare(bucket, plain):
    """(samples lost, samples doubled, objects wrong) of an output, against an undisturbed one's bytes."""
    seen, wrong = Counter(), 0
    objects = [f for f in (bucket / "batches").iterdir() if not f.name.startswith(".rclone")]  # of a killed server
    for file in sorted((plain / "batches").iterdir()):
        there = bucket / "batches" / file.name
        wrong += not there.is_file() or there.read_bytes() != file.read_bytes()
    for file in objects:
        with safe_open(file, "np") as f:
            seen.update(f.get_tensor("sample_index").tolist())
    rows = pq.read_table(plain / "index.parquet")["row"].to_pylist()
    wrong += len({f.name for f in objects} ^ set(os.listdir(plain / "batches")))
    wrong += json.loads((bucket / "manifest.json").read_text())["complete"] is not True
    return len(set(rows) - seen.keys()), sum(n - 1 for n in seen.values()), wrong


def drill(folder, seed, kills):
    """Returns the counts of the last line."""
    rng, began, killed, promises = random.Random(seed), time.time(), Counter(), 0
    say(f"a tiny model and {SAMPLES} conversations in {folder}")
    tiny.make_model(folder / "model")
    tiny.make_chat(folder / "chat.jsonl", SAMPLES, seed)
    shards = Shards()

    def start(shard, of, out, work, env, **more):
        flags = ["--model", folder / "model", "--data", folder / "chat.jsonl", "--out", out, "--work", work,
                 "--stage", stage, "--shard", shard, "--num-shards", of, "--tokens", 1024, "--max-len", 300,
                 "--compute-dtype", "fp32", "--dtype", "fp32",
                 "--upload-mbps", 0 if killed["at random"] >= kills else 0.3]  # it must outlive all those kills
        return shards.start(flags, f"{work}_{shard}.log", env, **more)

    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="drill-") as stage, \
            ExitStack() as after, S3Server(folder / "s3") as server:
        server.make_bucket("bucket")
        say("an undisturbed run into a directory")
        plain = start(0, 1, folder / "plain", folder / "plain-work", None)
        plain.join()
        assert plain.exitcode == 0, (folder / "plain-work_0.log").read_text()

        bucket, work = server.directory / "bucket/run", folder / "work"
        running, moment, after_start, told, points, done = {}, {}, {}, 0, list(POINTS), set()

        def state(shard):
            return (read_json(work / f"progress_shard_{shard}.json") or {}).get("state", "planning")
        # into a small staging area batches go as slowly as uploads make room, so that kills meet all of their steps
        if not subprocess.run(["mount", "-t", "tmpfs", "-o", "size=14m", "tmpfs", stage]).returncode:
            after.callback(subprocess.run, ["umount", "-l", stage])
        say(f"two shards into {server.env['AWS_ENDPOINT_URL']}, to be killed {kills} times at random, "
            f"once at each of {', '.join(POINTS)}")
        while len(done) < SHARDS:
            enough = killed["at random"] >= kills
            for shard in set(range(SHARDS)) - running.keys() - done:
                point = points.pop(0) if points else None
                times = rng.randint(5, 30) if point == "uploading" else rng.randint(1, 3)
                fault = {"EXTRACT_FAULT": f"{point}:{times}"}
                process = start(shard, SHARDS, "s3://bucket/run", work, server.environ(), **fault if point else {})
                running[shard] = process, point
                moment[shard] = 1e12 if point or enough else time.time() + rng.uniform(0, 4)
                after_start[shard] = rng.random() < 0.7
            time.sleep(0.02)
            for shard, (process, point) in list(running.items()):
                if after_start[shard] and state(shard) in ("planning", "loading", "warming"):
                    moment[shard] += 0.02  # these are for the time between the batches
                if process.exitcode is None and time.time() > moment[shard]:
                    other = rng.random()
                    if other < 0.05:
                        server.process.kill()
                        server.process.wait()
                        killed["server"] += 1
                        server.start()
                        moment[shard] = time.time() + rng.uniform(0, 4)
                        continue
                    if other < 0.15 and (uploads := children(process, "aws")):
                        rng.choice(uploads).kill()
                        killed["aws"] += 1
                        moment[shard] = time.time() + rng.uniform(0, 4)
                        continue
                    process.kill()
                    process.join()
                    killed["at random"] += 1
                elif process.exitcode == -9:
                    killed[point], point = killed[point] + 1, None
                elif process.exitcode is None:
                    continue
                del running[shard]
                points += [point] if point else []  # it was not met
                if process.exitcode == 0:
                    done.add(shard)
                if broken := broken_promises(work, bucket):
                    promises += len(broken)
                    say(f"markers without their object: {broken}")
                if sum(killed.values()) >= told + 5:
                    told = sum(killed.values())
                    say(f"{len(markers(work))} batches marked | killed: {dict(killed)}")
        shards.close()
        for p in psutil.process_iter(["cmdline"]):
            if stage in " ".join(p.info["cmdline"] or []):
                p.wait(60)  # a killed shard's aws ends by itself
        lost, doubled, wrong = compare(bucket, folder / "plain")
        say(f"killed: {dict(killed)} | {len(markers(work))} batches, all compared with the undisturbed run's")
        assert not points and killed["at random"] >= kills, f"the run ended after {dict(killed)}: take more samples"
    return {"faults": sum(killed.values()), "lost": lost, "doubled": doubled, "wrong": wrong + promises,
            "seed": seed, "seconds": round(time.time() - began, 1)}


def link(folder):
    """Measures what goes over the wire: a shard's two uploads under UPLOAD_MBPS, and `aws s3 cp` with 4 and
    with 10 concurrent requests, with no delay and with 80 ms there and back."""
    found, shards = {}, Shards()
    tiny.make_model(folder / "model")
    tiny.make_chat(folder / "chat.jsonl", 600)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="drill-") as stage, S3Server(folder / "s3") as server:
        server.make_bucket("bucket")
        wire = Link(server.port)
        env = server.environ() | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{wire.port}"}
        flags = ["--model", folder / "model", "--data", folder / "chat.jsonl", "--out", "s3://bucket/run", "--work",
                 folder / "work", "--stage", stage, "--tokens", 32768, "--layers", "0,1,2,3,4,5,6,7", "--max-len", 300,
                 "--dtype", "fp32", "--compute-dtype", "fp32", "--uploads", 2, "--upload-mbps", 6]
        process = shards.start(flags, folder / "work.log", env)
        process.join()
        assert process.exitcode == 0, (folder / "work.log").read_text()
        total, so_far, middle = sum(n for _, n in wire.sent), 0, []
        for t, n in wire.sent:  # without the first and the last sixth, where not both uploads are under way
            so_far += n
            middle += [(t, n)] * (total / 6 < so_far < 5 * total / 6)
        start, end = middle[0][0], middle[-1][0]
        rates = [sum(n for t, n in middle if i <= t - start < i + 5) / 5e6 for i in range(int(end - start) - 5)]
        found["mbps of 6"] = {"over all": round(sum(n for _, n in middle) / 1e6 / (end - start), 2), "median of 5 s":
                              round(statistics.median(rates), 2), "most in 5 s": round(max(rates), 2)}
        say(found)
        big = folder / "big"
        big.write_bytes(os.urandom(1 << 20) * 400)
        for delay in (0.0, 0.04):
            for requests in (4, 10):
                wire = Link(server.port, delay)
                (folder / "aws").write_text(
                    f"[default]\ns3 =\n  max_concurrent_requests = {requests}\n  multipart_chunksize = 16MB\n")
                env = server.environ() | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{wire.port}",
                                          "AWS_CONFIG_FILE": str(folder / "aws")}
                began = time.time()
                subprocess.run([Path(sys.executable).parent / "aws", "s3", "cp", "--only-show-errors", big,
                                "s3://bucket/big"], env=env, check=True)
                name = f"{requests} requests, {2000 * delay:.0f} ms"
                found[name] = round((400 << 20) / 1e6 / (time.time() - began), 1)
                say(f"{name}: {found[name]} MB/s")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the data (default: 0)")
    parser.add_argument("--kills", type=int, default=50, help="SIGKILLs of shards at random moments (default: 50)")
    parser.add_argument("--dir", type=Path, help="an empty directory to keep (default: a temporary one)")
    parser.add_argument("--link", action="store_true", help="measure uploads over a slow wire instead")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drill-") as temporary:
        folder = args.dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        result = link(folder) if args.link else drill(folder.resolve(), args.seed, args.kills)
    print(json.dumps(result))
    return int(any(result.get(key) for key in ("lost", "doubled", "wrong")))


if __name__ == "__main__":
    sys.exit(main())
