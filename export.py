"""An output of extract.py: reached by key, read sample by sample, turned into what a trainer loads.

    python export.py --from s3://bucket/run1 --to data --format specforge --algorithm dflash   (`make export`)

    from export import HiddenStates
    sample = HiddenStates("out/run1")[0]     # a torch.utils.data.Dataset over a local OUT

    from export import open_output
    open_output("s3://bucket/run1").read("manifest.json")

OUT/manifest.json, OUT/index.parquet and OUT/batches/batch_000123.safetensors: extract.py says what they hold.
S3 is reached through the `aws` command alone, with the user's own profile, region, endpoint and credentials.
Nothing here needs the model. Exit codes: 0 every batch that is there was exported; 1 failed; 2 refused; 3
stopped, and the same command goes on.
"""
import argparse
import fcntl
import functools
import itertools
import json
import mmap
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from monitor import say

KEY = "batches/batch_{:06d}.safetensors"
NOTE = "excluded/batch_{:06d}.json"  # {row: why}, where samples of a batch were excluded after planning
TORCH = {"F32": "float32", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "I32": "int32", "I64": "int64",
         "U8": "uint8"}  # safetensors' dtypes in a batch
PASSED = Counter()  # fault points


def fault(point):
    """A step of the commit order; EXTRACT_FAULT=marked:3 kills the process at its third pass of that step.

    Steps: written, renamed, uploading (a pass every 0.05 s), uploaded, marked. Unset, it is nothing.
    """
    name, _, count = os.environ.get("EXTRACT_FAULT", "").partition(":")
    PASSED[point] += 1
    if point == name and PASSED[point] == int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)


class OutputError(Exception):
    """Reading or writing failed, in the server's or system's words; `permanent`: another try cannot help."""
    PERMANENT = re.compile("NoSuchBucket|InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied|ExpiredToken|"
                           "InvalidToken|Forbidden|[Uu]nable to locate credentials|[Pp]artial credentials|"
                           "[Ii]nvalid bucket name|PermanentRedirect|AuthorizationHeaderMalformed|"
                           "config profile|No such file or directory|user-provided path|"
                           "Permission denied|Read-only file system|is none of ours|it holds batches, but|"
                           "no file can be made in")

    @property
    def permanent(self):
        return bool(self.PERMANENT.search(str(self)))


CHILDREN = set()  # process groups of the aws commands under way


def kill_children():
    """Ends every aws command at once; what it was uploading stays where it was."""
    for group in list(CHILDREN):
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def persist(action, attempts, abort, what):
    """action(), tried again with growing, jittered waits. Raises its last OutputError; at once for one that
    is permanent, and once the event abort is set."""
    for attempt in range(1, attempts + 1):
        try:
            return action()
        except OutputError as e:
            if e.permanent or abort.is_set():
                raise
            say(f"{what} {attempt} of {attempts} failed: {e}")
            if attempt == attempts or abort.wait(min(60, 2 ** attempt) * random.uniform(0.5, 1)):
                raise


def marked(work):
    """{batch: path of its marker} of a work directory."""
    found = ((re.fullmatch(r"\.done_(\d{6,})", f.name), f) for f in (work / "markers").iterdir())
    return {int(match[1]): f for match, f in found if match}


def crc_of(path):
    with open(path, "rb") as f:
        crc = 0
        while part := f.read(1 << 24):
            crc = zlib.crc32(part, crc)
    return crc


def compare(output, planned, done):
    """One listing of OUT against planned {batch: bytes} and the batches that have a marker.

    Prints the difference. Returns {batch that is whole there without a marker: its exclusions} and the set of
    batches that are not whole there. Raises OutputError.
    """
    there, found, missing = output.sizes("batches/", "excluded/"), {}, set()
    for batch, size in planned.items():
        key, note, has = KEY.format(batch), NOTE.format(batch), there.get(KEY.format(batch))
        if has == size:
            if batch not in done:
                found[batch] = output.read_json(note) if note in there else {}
            continue
        missing.add(batch)
        if has is not None or batch in done:
            say(f"{key} {'is not there' if has is None else f'has {has:,} bytes'}, {size:,} were planned"
                f"{': its marker goes' if batch in done else ''}")
    say(f"{output}: {len(planned) - len(missing):,} of {len(planned):,} batches are whole; {len(found):,} "
        f"markers added, {len(missing & done.keys()):,} dropped")
    return found, missing


def open_output(out, config=None, abort=None, mbps=0.0):
    """OUT -> its Local or S3.

    config: where the private copy of the AWS configuration goes (default: a temporary file); abort: an event
    that ends transfers under way; mbps: limit of one upload, in megabytes per second, 0 for none. Raises
    OutputError.
    """
    if re.match(r"[A-Za-z][\w+.-]*:/", out) and not re.match("s3://[^/]", out):
        raise OutputError("it is neither s3://bucket/prefix nor a local directory")
    return S3(out, config, abort or threading.Event(), mbps) if out.startswith("s3://") else Local(out, abort)


class Local:
    """OUT as a local directory; every file appears whole, by rename."""

    def __init__(self, out, abort=None):
        self.root, self.abort = Path(out).expanduser().resolve(), abort or threading.Event()

    def __str__(self):
        return str(self.root)

    def read(self, key):
        """bytes, or None where there is no such file."""
        return (self.root / key).read_bytes() if (self.root / key).is_file() else None

    def read_json(self, key):
        """The JSON object under a key, {} where there is none. Raises OutputError for anything else."""
        try:
            return dict(json.loads(self.read(key) or b"{}"))
        except (ValueError, TypeError):
            raise OutputError(f"{self}/{key} is none of ours, it holds no JSON object") from None
        except OSError as e:
            raise OutputError(f"{self}/{key}: {e.strerror}") from None

    def prove(self, manifest):
        """Raises OutputError where nobody knows of which run batches are, or a run could leave no file."""
        if not manifest and self.sizes("batches/"):
            raise OutputError("it holds batches, but no manifest.json that says of which run: "
                              "use another OUT")
        if not manifest.get("complete"):
            self.try_out()

    def try_out(self):
        """Makes a file without a name in OUT, or in what there is of its path. Raises OutputError."""
        there = self.root
        try:
            there = next(path for path in (there, *there.parents) if path.exists())
            tempfile.TemporaryFile(dir=there).close()
        except OSError as e:
            raise OutputError(f"no file can be made in {there} ({e.strerror})") from None

    def write(self, key, data):
        """str or bytes -> OUT/key."""
        with tempfile.NamedTemporaryFile() as f:
            f.write(data if isinstance(data, bytes) else data.encode())
            f.flush()
            self.put(Path(f.name), key, f.tell(), 120.0)

    def put(self, path, key, size, deadline):
        """A file -> OUT/key, seen there with `size` bytes, within `deadline` seconds. Raises OutputError."""
        try:
            tmp = self.root / f"{key}.{os.getpid()}.tmp"
            tmp.parent.mkdir(parents=True, exist_ok=True)
            try:
                end = time.monotonic() + deadline
                with open(path, "rb") as source, open(tmp, "wb") as f:
                    with suppress(OSError):  # where the filesystem knows locks, other machines see it in use
                        fcntl.flock(f, fcntl.LOCK_EX)
                    while part := source.read(1 << 24):
                        f.write(part)
                        if self.abort.is_set() or time.monotonic() > end:
                            raise OutputError(f"{self.root / key}: " + (
                                "stopped" if self.abort.is_set() else f"not written within {deadline:.0f} s"))
                    f.flush()
                    os.fsync(f.fileno())
                    fault("uploading")
                    os.replace(tmp, self.root / key)
            finally:
                tmp.unlink(missing_ok=True)
            if (self.root / key).stat().st_size != size:
                raise OutputError(f"{self.root / key} is not of the planned {size} bytes")
        except OSError as e:
            raise OutputError(f"{e.filename or self.root / key}: {e.strerror}") from None

    def sizes(self, *starts):
        """{key: bytes} of what is there under keys that begin so, by a listing each."""
        files = (file for start in starts for file in self.root.glob(f"{start}*") if file.suffix != ".tmp")
        return {str(file.relative_to(self.root)): file.stat().st_size for file in files}

    def clean(self, keys):
        """Takes back what killed uploads of these keys, and of the files beside them, left behind."""
        for tmp in self.root.glob("*/batch_*.*.tmp"):
            if f"batches/{tmp.name.partition('.')[0]}.safetensors" in keys:
                tmp.unlink(missing_ok=True)
        for tmp in self.root.glob("*.tmp"):  # any shard may write these: only where its process is gone
            ours = re.fullmatch(r"(?:index\.parquet|manifest\.json|head\.safetensors)\.(\d+)\.tmp", tmp.name)
            if ours and not Path("/proc", ours[1]).exists():
                with suppress(OSError), open(tmp, "ab") as f:
                    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    tmp.unlink()


class S3(Local):
    """OUT as an s3:// prefix."""

    def __init__(self, out, config, abort, mbps):
        self.bucket, _, prefix = out.removeprefix("s3://").partition("/")
        self.prefix, self.abort = "".join(f"{part}/" for part in prefix.split("/") if part), abort
        if not config:  # gone with this object
            self.temporary = tempfile.TemporaryDirectory(prefix="aws-")
            config = Path(self.temporary.name) / "config"
        search = f"{os.environ.get('PATH', os.defpath)}:{Path(sys.executable).parent}"
        self.env = os.environ | {"AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": "5", "AWS_PAGER": "",
                                 "AWS_CONFIG_FILE": str(config.resolve()), "PATH": search}
        # These settings have no environment variables: a private copy of the user's configuration takes them.
        theirs = Path(os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser()
        config.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as f:
            f.write(theirs.read_bytes() if theirs.is_file() else b"")
        settings = {"max_concurrent_requests": 4, "multipart_chunksize": "16MB"}
        if mbps:
            settings["max_bandwidth"] = f"{max(1, round(mbps * 1e6 / 1024))}KB/s"  # of 1024 bytes for aws
        for name, value in settings.items():
            self.aws("configure", "set", f"s3.{name}", str(value))

    def __str__(self):
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def aws(self, *args, deadline=120.0):
        """One aws command under nice, ended as a group at its deadline (s) -> stdout. Raises OutputError."""
        command = ["nice", "-n", "19", "aws", *args]
        command += ["--cli-read-timeout", "30", "--cli-connect-timeout", "30"]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            p = subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                 process_group=0)
            CHILDREN.add(p.pid)
            end, how = time.monotonic() + deadline, None
            try:
                while p.poll() is None and not how:
                    time.sleep(0.05)
                    if args[:2] == ("s3", "cp"):
                        fault("uploading")
                    if self.abort.is_set():
                        how = "stopped"
                    elif time.monotonic() > end:
                        how = f"ended after {deadline:.0f} s"
                if how and p.poll() is None:
                    os.killpg(p.pid, signal.SIGINT)  # aws takes its multipart upload back
                    p.wait(6)
            except subprocess.TimeoutExpired:
                pass
            finally:  # also when a request to stop comes up here
                if p.poll() is None:
                    os.killpg(p.pid, signal.SIGKILL)
                CHILDREN.discard(p.pid)
            if p.wait() or how:
                err.seek(max(0, err.seek(0, os.SEEK_END) - 2000))
                words = " ".join(err.read().decode(errors="replace").split())
                how = how or f"exit code {p.returncode}"
                raise OutputError(f"aws {' '.join(args[:2])}: {how}: {words or 'no words'}")
            out.seek(0)
            return out.read()

    def try_out(self):
        """Nothing: reading has shown bucket and credentials; a try at writing would leave a trace."""

    def api(self, command, *args, deadline=120.0):
        return self.aws("s3api", command, "--bucket", self.bucket, *args, deadline=deadline)

    def read(self, key):
        with tempfile.NamedTemporaryFile() as f:
            try:
                self.api("get-object", "--key", self.prefix + key, f.name)
                return Path(f.name).read_bytes()
            except OutputError as e:
                if "NoSuchKey" in str(e):
                    return None
                raise

    def put(self, path, key, size, deadline):
        self.aws("s3", "cp", str(path), f"{self}/{key}", "--only-show-errors", deadline=deadline)
        there = self.api("head-object", "--key", self.prefix + key, "--query", "ContentLength", "--output",
                         "text").decode().strip()
        if there != str(size):  # exit code 0 alone proves nothing
            raise OutputError(f"{self}/{key} has {there} bytes after its upload, {size} were planned")

    def sizes(self, *starts):
        found = {}
        for start in starts:
            listed = self.api("list-objects-v2", "--prefix", self.prefix + start, "--query",
                              "Contents[].[Key, Size]", "--output", "json", deadline=600.0)
            pairs = json.loads(listed or b"null") or []
            found |= {key.removeprefix(self.prefix): size for key, size in pairs}
        return found

    def clean(self, keys):
        try:
            prefix = self.prefix + "batches/"
            found = self.api("list-multipart-uploads", "--prefix", prefix, "--output", "json") or b"{}"
            for upload in json.loads(found).get("Uploads") or []:
                key, identity = upload["Key"], upload["UploadId"]
                if key.removeprefix(self.prefix) in keys:
                    self.api("abort-multipart-upload", "--key", key, "--upload-id", identity)
        except OutputError as e:
            if "NoSuchUpload" not in str(e):  # rclone's way to say that there are none
                say(f"did not look for multipart uploads left open: {e}")


# -------------------------------------------------------------------------------------------------- samples
class Batch:
    """A batch file, memory-mapped. Raises OutputError for one that is torn, or not this batch of this run."""

    def __init__(self, path, fingerprint, number):
        try:
            with open(path, "rb") as f:
                self.map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
            begin = 8 + int.from_bytes(self.map[:8], "little")
            header = json.loads(self.map[8:begin])
            meta = json.loads(header.pop("__metadata__")["meta"])
            of, held = meta["fingerprint"], meta["batch"]
            self.tensors = {name: (TORCH[x["dtype"]], x["shape"], begin + x["data_offsets"][0])
                            for name, x in header.items()}
            size = begin + max(x["data_offsets"][1] for x in header.values())
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise OutputError(f"{path} is no whole batch file of ours ({e})") from None
        if of != fingerprint:
            raise OutputError(f"{path} is of the run {of}, the manifest of {fingerprint}: two runs are mixed")
        if held != number:
            raise OutputError(f"{path} holds batch {held}: it was renamed or copied; fetch it again")
        if size != len(self.map):
            raise OutputError(f"{path} has {len(self.map):,} bytes instead of {size:,}: fetch it again")

    def rows(self, name, start, length):
        """Rows of a tensor, copied from the file; no other part of it is read."""
        import numpy as np
        import torch
        kind, shape, offset = self.tensors[name]
        kind = getattr(torch, kind)
        size = kind.itemsize * (shape[1] if len(shape) > 1 else 1)
        data = np.frombuffer(self.map, "u1", length * size, offset + start * size).copy()
        return torch.from_numpy(data).view(kind).view(length, *shape[1:])

    def sample(self, start, length):
        """{name: tensor [length, ...]}; states stored as fp8 come as bf16."""
        got = {name: self.rows(name, start, length) for name in self.tensors
               if name not in ("cu_seqlens", "sample_index")}
        if (scale := got.pop("hidden_states_scale", None)) is not None:  # [T, K], one a token and layer
            states = got["hidden_states"].float().unflatten(1, (scale.shape[1], -1)) * scale[..., None]
            got["hidden_states"] = states.flatten(1).bfloat16()
        return got | {name: got[name].long() for name in ("input_ids", "loss_mask")}

    def excluded(self, start, length):
        """Whether a sample was left out after planning: its mask is zero then, and so are its states."""
        import torch
        first = self.rows("hidden_states", start, 1).view(torch.uint8)
        return not (self.rows("loss_mask", start, length).any() or first.any())


open_batch = functools.lru_cache(256)(Batch)  # so many files are mapped at a time


def batches(keys):
    """The numbers of the batch files among keys."""
    return {int(m[1]) for m in (re.fullmatch(r"batches/batch_(\d{6,})\.safetensors", k) for k in keys) if m}


class Samples:
    """HiddenStates without its base class, which needs torch."""

    def __init__(self, out):
        import pyarrow as pa
        import pyarrow.parquet as pq
        if str(out).startswith("s3://"):
            raise OutputError(f"{out} is not local: fetch it, say with aws s3 sync, or use python export.py")
        output = open_output(str(out))
        self.root, self.manifest = output.root, output.read_json("manifest.json")
        if not (self.manifest and (self.root / "index.parquet").is_file()):
            raise OutputError(f"{out} has no manifest.json and index.parquet: it is no output of extract.py")
        index, there, kept = pq.read_table(self.root / "index.parquet"), batches(output.sizes("batches/")), []
        places = zip(*(index[name].to_pylist() for name in ("batch", "start", "length", "row")))
        for i, (batch, start, length, row) in enumerate(places):
            if batch in there and str(row) not in self.manifest["excluded"] and (
                    self.manifest["complete"] or not self.batch(batch).excluded(start, length)):
                kept.append(i)
        self.index = index.take(pa.array(kept, "i8"))
        self.places = [self.index[name].to_numpy() for name in ("batch", "start", "length")]
        self.lengths = self.places[2]

    def batch(self, number):
        return open_batch(self.root / KEY.format(number), self.manifest["fingerprint"], number)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        batch, start, length = (int(place[i]) for place in self.places)
        return self.batch(batch).sample(start, length) | {"id": self.index["id"][i % len(self)].as_py()}


def __getattr__(name):  # HiddenStates is made when it is asked for: nobody else here waits for torch
    if name != "HiddenStates":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torch.utils.data import Dataset
    text = """A local OUT, finished or growing, as a data set for PyTorch that reads one sample at a time.

    HiddenStates(out)[i] is a dictionary: hidden_states [T, K*H] in the dtype of the run (bf16 for fp8),
    input_ids and loss_mask [T] int64, with --final last_hidden_state [T, H], and id, a str. `index` has the
    rows of index.parquet in this order, `lengths` every T, `manifest` what the run is. Samples that were
    excluded after planning are not in it, nor batches that were not there when it was made. It can be pickled
    and forked. Raises OutputError where OUT is none of ours, or a batch is torn or of another run.
    """
    made = globals()[name] = type(name, (Samples, Dataset), {"__doc__": text, "__module__": __name__})
    return made


# ------------------------------------------------------------------------------------------------- trainers
def lacks(kind, algorithm, manifest, keys):
    """All that a trainer needs and OUT lacks, with the flags to extract with; None where it lacks nothing."""
    layers, plain = manifest["layers"], (kind, algorithm) == ("specforge", "dflash")
    ordered, what = sorted(set(layers)), {}
    if not (manifest["final"] or plain):
        what["--final"] = "the last layer's output"
    if algorithm == "eagle3" and len(ordered) != 3:
        what["--layers eagle3"] = f"three layers, not {layers}"
    elif layers != ordered and (kind != "specforge" or algorithm == "eagle3"):
        what[f"--layers {','.join(map(str, ordered))}"] = f"ascending layers, not {layers}"
    if "head.safetensors" not in keys and not plain and kind != "speculators":
        what["--save-head"] = "the final norm"
    how = f"extract with {' '.join(what)}, into another OUT with another WORK"
    if list(what) == ["--save-head"]:
        how = "run the same extraction once more with --save-head, which adds it and computes nothing again"
    return f"{', and '.join(what.values())}: {how}" if what else None


SHAPE = ("vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim "
         "rms_norm_eps max_position_embeddings").split()  # what a draft has in common with its target


def configuration(kind, algorithm, manifest, to, text):
    """(file, content): the layers as the trainer counts them, where it reads them.

    text: the target's text configuration, {} where OUT has no head."""
    layers, k = manifest["layers"], len(manifest["layers"])
    if kind == "speculators":  # JSON is YAML
        return "train.yaml", {
            "speculator_type": algorithm, "data": {"data_path": str(to)},
            "draft": {"target_layer_ids": [layer + 1 for layer in layers]},
            "verifier": {"verifier_name_or_path": str(to / "target") if text else manifest["model"]}}
    eagle = {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}
    if kind == "modelopt":
        return "modelopt.json", {"eagle_architecture_config": eagle} if algorithm == "eagle3" else {
            "dflash_architecture_config": {"target_layer_ids": layers, "num_hidden_layers": k}}
    draft = {"hidden_size": manifest["hidden_size"]} | {name: text[name] for name in SHAPE if name in text}
    if algorithm == "eagle3":
        return "draft_config.json", draft | {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
            "eagle_config": eagle}
    architecture = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}[algorithm]
    if "num_hidden_layers" in text:
        draft["num_target_layers"] = text["num_hidden_layers"]
    return "draft_config.json", draft | {
        "architectures": [architecture], "model_type": "qwen3", "num_hidden_layers": k, "block_size": 16,
        "layer_types": ["full_attention"] * k,
        "dflash_config": {"target_layer_ids": layers}}


def write_whole(path, write):
    """write(a temporary path), and then the file has its name."""
    tmp = path.with_name(f"{path.name}.tmp")
    write(tmp)
    os.replace(tmp, path)


def write_json(path, value):
    write_whole(path, lambda tmp: tmp.write_text(json.dumps(value, indent=1) + "\n"))


class Export:
    """OUT on its way into directory TO, batch by batch; one is done when TO/.export/done has its mark.

    Raises Refused where OUT lacks what the trainer needs or TO cannot take it; OutputError."""

    def __init__(self, output, to, kind, algorithm):
        from warmup import Refused
        self.output, self.to, self.kind, self.algorithm = output, Path(to).resolve(), kind, algorithm
        self.manifest = manifest = output.read_json("manifest.json")
        if not manifest:
            raise Refused(f"--from {output}: there is no manifest.json. Give the OUT of a run")
        self.keys, self.done = output.sizes("batches/", "head."), self.to / ".export/done"
        if lack := lacks(kind, algorithm, manifest, self.keys):
            raise Refused(f"{kind} {algorithm} needs {lack}")
        self.claim(to)
        self.index, self.there = self.read_index(), batches(self.keys)
        self.todo = sorted(self.there - {int(f.stem) for f in self.done.glob("*.parquet")})
        used = set(self.marks(["number"])["number"].to_pylist()) if len(self.todo) < len(self.there) else ()
        self.numbers = (n for n in itertools.count() if n not in used)
        width = 2 * manifest["hidden_size"] * (len(manifest["layers"]) + manifest["final"]) + 40
        need = sum(length for batch in self.todo for _, _, length in self.index[batch]) * width
        if (free := shutil.disk_usage(self.to).free) < need:
            raise Refused(f"--to {to} has {free / 1e9:,.1f} GB of room, {need / 1e9:,.1f} are needed")
        self.norm, text = self.head() if "head.safetensors" in self.keys else (None, {})
        name, config = configuration(kind, algorithm, manifest, self.to, text)
        write_json(self.to / name, config)

    def claim(self, to):
        """Makes TO this export's alone, without what a killed one left half-written there. Raises Refused."""
        from warmup import Refused
        try:
            for folder in (self.done, self.to / "hidden_states" if self.kind == "speculators" else self.to):
                folder.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.done.parent / "lock", "w")
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"--to {to}: another export is writing there") from None
        except OSError as e:
            raise Refused(f"--to {to} cannot be written ({e.strerror}): give another directory") from None
        if (self.to / "manifest.json").exists():
            raise Refused(f"--to {to} holds an output of extract.py: give another directory")
        own = self.done.parent / "export.json"
        what = {"format": self.kind, "algorithm": self.algorithm,
                "fingerprint": self.manifest["fingerprint"]}
        if own.exists() and (was := json.loads(own.read_text())) != what:
            raise Refused(f"--to {to} holds another export, {was}: give another directory")
        if own.exists():  # an export that was killed may have left these
            for tmp in (*self.to.glob("row_*.tmp"), *self.to.glob("hidden_states/hs_*.tmp"),
                        *self.done.glob("*.tmp")):
                tmp.unlink()
        write_json(own, what)

    @contextmanager
    def local(self, key):
        """A key of OUT as a local file, for as long as the block lasts."""
        if not isinstance(self.output, S3):
            yield self.output.root / key
            return
        path = self.done / f"{Path(key).name}.tmp"
        try:
            self.output.aws("s3", "cp", f"{self.output}/{key}", str(path), "--only-show-errors",
                            deadline=60 + self.keys.get(key, 0) / 5e6)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def read_index(self):
        """{batch: [(row, start, length)]}"""
        import pyarrow.parquet as pq
        with self.local("index.parquet") as path:
            index, found = pq.read_table(path).to_pydict(), {}
        for batch, *place in zip(*(index[name] for name in ("batch", "row", "start", "length"))):
            found.setdefault(batch, []).append(place)
        return found

    def head(self):
        """TO/target, what training needs of the target -> (its own final norm, its text configuration)"""
        from safetensors import safe_open

        import warmup
        target = self.to / "target"
        target.mkdir(exist_ok=True)
        if not (target / "model.safetensors").exists():
            with self.local("head.safetensors") as path:
                write_whole(target / "model.safetensors", lambda tmp: shutil.copyfile(path, tmp))
        with safe_open(target / "model.safetensors", "pt") as f:
            meta, names = json.loads(f.metadata()["meta"]), list(f.keys())
            weights = {name[11:]: f.get_tensor(name) for name in names if name.startswith("model.norm.")}
        if meta["fingerprint"] != self.manifest["fingerprint"]:
            raise warmup.Refused(f"{self.output}/head.safetensors is of another run: --save-head writes it")
        write_json(target / "config.json", meta["config"])
        write_json(target / "model.safetensors.index.json",
                   {"weight_map": dict.fromkeys(names, "model.safetensors")})
        norm = warmup.skeleton(target).get_decoder().norm.to_empty(device="cpu")  # its arithmetic is its own
        norm.load_state_dict(weights)
        return norm.requires_grad_(False), warmup.text_config(target).to_dict()

    def open(self, batch):
        """(Batch, its samples to be exported as (row, start, length), {row: why it is left out})"""
        with self.local(KEY.format(batch)) as path:  # what is mapped stays readable
            opened, kept, out = Batch(path, self.manifest["fingerprint"], batch), [], {}
        for row, start, length in self.index[batch]:
            mask = opened.rows("loss_mask", start, length)
            if str(row) in self.manifest["excluded"] or opened.excluded(start, length):
                out[row] = "excluded"
            elif self.kind == "specforge" and self.algorithm != "eagle3" and not (mask[1:] & mask[:-1]).any():
                out[row] = "no two adjacent supervised tokens"
            else:
                kept.append((row, start, length))
        return opened, kept, out

    def file(self, sample, row, number):
        """(name, content) of what the trainer reads for a sample."""
        import torch
        states, last = sample["hidden_states"].bfloat16(), sample.get("last_hidden_state")
        made = {name: sample[name] for name in ("input_ids", "loss_mask")}
        if self.kind == "speculators":
            states = torch.cat([states, last.bfloat16()], 1).unflatten(1, (-1, last.shape[1]))
            return f"hidden_states/hs_{number}.safetensors", {
                "hidden_states": states, "token_ids": sample["input_ids"]}
        if (self.kind, self.algorithm) == ("specforge", "dflash"):
            return f"row_{row:09d}.ckpt", made | {"hidden_states": states}
        last = self.norm.to(last.dtype)(last).bfloat16()
        if self.kind == "modelopt":
            return f"row_{row:09d}.pt", made | {"hidden_states": last, "aux_hidden_states": states}
        if self.algorithm == "dspark":
            return f"row_{row:09d}.ckpt", made | {"hidden_states": states, "target_last_hidden_states": last}
        return f"row_{row:09d}.ckpt", made | {"hidden_state": last[None], "aux_hidden_state": states[None]}

    def write(self, batch, opened, kept, out, numbers):
        """A batch's files, then its mark, which has its tokens, too. Returns how many samples it has."""
        import pyarrow as pa
        import pyarrow.parquet as pq
        import torch
        from safetensors.torch import save_file
        save, mark = save_file if self.kind == "speculators" else torch.save, []
        for (row, start, length), number in zip(kept, numbers):
            sample = opened.sample(start, length)
            name, made = self.file(sample, row, number)
            write_whole(self.to / name, lambda tmp: save(made, tmp))
            mark.append({"number": number, "row": row, "why": None, "seq_len": length} | {
                name: sample[name].tolist() for name in ("input_ids", "loss_mask")})
        mark += [{"number": -1, "row": row, "why": why} for row, why in out.items()]
        table = pa.Table.from_pylist(mark, pa.schema({
            "number": "i8", "row": "i8", "why": "string", "seq_len": "i8", "input_ids": pa.list_(pa.int32()),
            "loss_mask": pa.list_(pa.int8())}))
        write_whole(self.done / f"{batch:06d}.parquet", lambda tmp: pq.write_table(table, tmp))
        return len(mark)

    def marks(self, columns):
        """These columns of the marks of what is done, a table."""
        import pyarrow.parquet as pq
        return pq.read_table(sorted(self.done.glob("*.parquet")), columns=columns)

    def data_set(self):
        """Makes TO what `datasets` loads: tokens and masks, in the order of the numbers."""
        import pyarrow as pa
        features = {name: {"feature": {"dtype": kind, "_type": "Value"}, "_type": "List"}
                    for name, kind in (("input_ids", "int32"), ("loss_mask", "int8"))}
        features["seq_len"] = {"dtype": "int64", "_type": "Value"}
        table = self.marks(["number", *features]).sort_by("number")
        table = table.filter([n.as_py() >= 0 for n in table["number"]]).select(list(features))
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})

        def save(tmp):
            with pa.OSFile(str(tmp), "wb") as f, pa.ipc.new_stream(f, table.schema) as stream:
                stream.write_table(table, 1000)
        write_whole(self.to / "data-00000-of-00001.arrow", save)
        write_json(self.to / "dataset_info.json", {"features": features} | dict.fromkeys(
            ("citation", "description", "homepage", "license"), ""))
        write_json(self.to / "state.json", {
            "_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_format_columns": list(features),
            "_fingerprint": f"{self.manifest['fingerprint']}{len(table)}", "_format_type": "torch",
            "_format_kwargs": {}, "_output_all_columns": False, "_split": None})


def export(a, abort):
    """`python export.py`, as far as OUT is there. Raises Refused or OutputError."""
    import torch
    from tqdm import tqdm

    from warmup import Refused
    try:
        x = Export(open_output(a.source, abort=abort), a.to, a.format, a.algorithm)
    except OutputError as e:
        raise Refused(f"--from {a.source} cannot be used: {e}") from None
    torch.set_num_threads(max(1, os.cpu_count() // a.jobs))
    opened, writing, todo = deque(), deque(), deque(x.todo)
    total = sum(len(x.index[batch]) for batch in todo)
    with ThreadPoolExecutor(a.jobs) as pool, tqdm(total=total, unit=" samples", desc="export") as bar:
        try:
            while todo or opened or writing:
                while todo and len(opened) < a.jobs:
                    opened.append((todo[0], pool.submit(x.open, todo.popleft())))
                if opened and len(writing) < a.jobs:  # numbers are given in the order of the batches
                    batch, job = opened.popleft()
                    found, kept, out = job.result()
                    numbers = list(itertools.islice(x.numbers, len(kept)))
                    writing.append(pool.submit(x.write, batch, found, kept, out, numbers))
                else:
                    bar.update(writing.popleft().result())
        except BaseException:
            abort.set()
            pool.shutdown(cancel_futures=True)
            raise
    if not x.there:
        raise OutputError(f"{x.output} has no batch yet: run the same command when it has")
    if a.format == "speculators":
        x.data_set()
    why = Counter(x.marks(["why"])["why"].to_pylist())
    print(f"{why.pop(None, 0):,} samples are in {x.to} for {a.format} {a.algorithm}, left out: {dict(why)}")
    if len(x.there) < (planned := x.manifest["counts"]["batches"]):
        print(f"{len(x.there):,} of {planned:,} batches were there: the same command adds the others")


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.error = lambda message: p.exit(2, f"refused: {message}; --help describes every flag\n")
    p.add_argument("--from", dest="source", required=True, help="OUT of a run: an s3:// prefix, a directory")
    p.add_argument("--to", required=True, help="directory for the files, made where it is missing")
    p.add_argument("--format", required=True, choices=("speculators", "specforge", "modelopt"), help="whose")
    p.add_argument("--algorithm", default="dflash", choices=("dflash", "dspark", "eagle3"),
                   help="what it trains (default: dflash)")
    p.add_argument("--jobs", type=int, default=min(4, os.cpu_count()), choices=range(1, 65), metavar="N",
                   help="batches at a time (default: one a core, 4 at most)")
    a = p.parse_args(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from warmup import Failed, Refused
    try:
        export(a, threading.Event())
        return 0
    except KeyboardInterrupt:
        code, text = 3, "stopped: the same command goes on"
    except (Refused, Failed, OutputError, OSError) as e:
        code = getattr(e, "code", 1)
        text = f"{'refused' if code == 2 else 'failed'}: {e}"
    print(text, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
