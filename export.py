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
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

KEY = "batches/batch_{:06d}.safetensors"
TORCH = {"F32": "float32", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "I32": "int32", "I64": "int64",
         "U8": "uint8"}  # safetensors' dtypes in a batch


class OutputError(Exception):
    """Reading or writing failed, in the server's or system's words; `permanent`: another try cannot help."""
    PERMANENT = re.compile("NoSuchBucket|InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied|ExpiredToken|"
                           "InvalidToken|Forbidden|[Uu]nable to locate credentials|[Pp]artial credentials|"
                           "[Ii]nvalid bucket name|PermanentRedirect|AuthorizationHeaderMalformed|"
                           "config profile|No such file or directory")

    @property
    def permanent(self):
        return bool(self.PERMANENT.search(str(self)))


CHILDREN = set()  # process groups of the aws commands under way


def kill_children():
    """Ends every aws command at once; what it was uploading stays where it was."""
    for group in list(CHILDREN):
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            pass


def open_output(out, config=None, abort=None, mbps=0.0):
    """OUT -> its Local or S3.

    config: where the private copy of the AWS configuration goes (default: a temporary file); abort: an event
    that ends transfers under way; mbps: limit of one upload, in megabytes per second, 0 for none. Raises
    OutputError.
    """
    if re.match(r"[A-Za-z][\w+.-]*:/", out) and not re.match("s3://[^/]", out):
        raise OutputError("it is neither s3://bucket/prefix nor a local directory")
    return S3(out, config, abort or threading.Event(), mbps) if out.startswith("s3://") else Local(out)


class Local:
    """OUT as a local directory; every file appears whole, by rename."""

    def __init__(self, out):
        self.root = Path(out).expanduser().resolve()

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
                with open(path, "rb") as source, open(tmp, "wb") as f:
                    shutil.copyfileobj(source, f, 1 << 24)
                    f.flush()
                    os.fsync(f.fileno())
                os.replace(tmp, self.root / key)
            finally:
                tmp.unlink(missing_ok=True)
            if (self.root / key).stat().st_size != size:
                raise OutputError(f"{self.root / key} is not of the planned {size} bytes")
        except OSError as e:
            raise OutputError(f"{e.filename or self.root / key}: {e.strerror}") from None

    def clean(self, keys):
        """Takes back what killed uploads of these keys left behind."""
        for tmp in (self.root / "batches").glob("*.safetensors.*.tmp"):
            if f"batches/{tmp.name.partition('.safetensors')[0]}.safetensors" in keys:
                tmp.unlink(missing_ok=True)


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
                    how = f"ended after {deadline:.0f} s" if time.monotonic() > end else None
                    how = "stopped" if self.abort.is_set() else how
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

    def api(self, command, *args):
        return self.aws("s3api", command, "--bucket", self.bucket, *args)

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
        url = f"s3://{self.bucket}/{self.prefix}{key}"
        self.aws("s3", "cp", str(path), url, "--only-show-errors", deadline=deadline)
        there = self.api("head-object", "--key", self.prefix + key, "--query", "ContentLength", "--output",
                         "text").decode().strip()
        if there != str(size):  # exit code 0 alone proves nothing
            raise OutputError(f"{url} has {there} bytes after its upload, {size} were planned")

    def clean(self, keys):
        try:
            prefix = self.prefix + "batches/"
            found = self.api("list-multipart-uploads", "--prefix", prefix, "--output", "json") or b"{}"
            for upload in json.loads(found).get("Uploads") or []:
                key, identity = upload["Key"], upload["UploadId"]
                if key.removeprefix(self.prefix) in keys:
                    self.api("abort-multipart-upload", "--key", key, "--upload-id", identity)
        except OutputError as e:
            print(f"did not look for multipart uploads left open: {e}", flush=True)


# --------------------------------------------------------------------------------------------------- samples
class Batch:
    """A batch file, memory-mapped. Raises OutputError where it is cut short, or not of the run `fingerprint`."""

    def __init__(self, path, fingerprint):
        try:
            with open(path, "rb") as f:  # copy on write, since torch takes no read-only memory; nobody writes
                self.map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
            begin = 8 + int.from_bytes(self.map[:8], "little")
            header = json.loads(self.map[8:begin])
            of = json.loads(header.pop("__metadata__")["meta"])["fingerprint"]
            self.tensors = {name: (TORCH[x["dtype"]], x["shape"], begin + x["data_offsets"][0])
                            for name, x in header.items()}
            size = begin + max(x["data_offsets"][1] for x in header.values())
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise OutputError(f"{path} is no batch file of ours ({e})") from None
        if of != fingerprint or size != len(self.map):
            raise OutputError(f"{path} is of the run {of}, the manifest of {fingerprint}" if of != fingerprint
                              else f"{path} has {len(self.map):,} bytes instead of {size:,}: fetch it again")

    def rows(self, name, start, length):
        """Rows of a tensor as a view of the file; clone what is kept."""
        import torch
        dtype, shape, offset = self.tensors[name]
        dtype, wide = getattr(torch, dtype), shape[1] if len(shape) > 1 else 1
        flat = torch.frombuffer(self.map, dtype=dtype, count=length * wide,
                                offset=offset + start * wide * dtype.itemsize)
        return flat.view(length, *shape[1:])

    def sample(self, start, length):
        """{name: tensor [length, ...]}; states stored as fp8 come as bf16."""
        states = self.rows("hidden_states", start, length)
        if "hidden_states_scale" in self.tensors:  # [T, K]: one a token and layer
            scale = self.rows("hidden_states_scale", start, length)
            states = states.float().unflatten(1, (scale.shape[1], -1)) * scale[..., None]
            states = states.flatten(1).bfloat16()
        found = {"hidden_states": states.clone(), "input_ids": self.rows("input_ids", start, length).long(),
                 "loss_mask": self.rows("loss_mask", start, length).long()}
        if "last_hidden_state" in self.tensors:
            found["last_hidden_state"] = self.rows("last_hidden_state", start, length).clone()
        return found

    def is_zero(self, start, length):
        """Whether this sample was left out after planning: then its mask is zero, and so are its states."""
        import torch
        first = self.rows("hidden_states", start, 1).view(torch.uint8)
        return not (self.rows("loss_mask", start, length).any() or first.any())


open_batch = functools.lru_cache(256)(Batch)  # a bound on the files that are mapped at a time


class Samples:
    """The samples of a local OUT: HiddenStates without its base class, which needs torch."""

    def __init__(self, out):
        import pyarrow.parquet as pq
        if "://" in str(out):
            raise OutputError(f"{out} is not a local directory: fetch it, as with aws s3 sync")
        output = Local(str(out))
        self.out, self.manifest = output.root, output.read_json("manifest.json")
        if not self.manifest or not (self.out / "index.parquet").is_file():
            raise OutputError(f"{out} has no manifest.json and index.parquet: it is no output of extract.py")
        index = pq.read_table(self.out / "index.parquet")
        there = {int(m[1]) for m in (re.fullmatch(r"batches/batch_(\d{6,})\.safetensors", key) for key in listing(output)) if m}
        rows = zip(*(index[name].to_pylist() for name in ("batch", "row", "start", "length")))
        keep = [i for i, (batch, row, start, length) in enumerate(rows) if batch in there and not (
            str(row) in self.manifest["excluded"] or not self.manifest["complete"]
            and self.open(batch).is_zero(start, length))]
        self.index = index.take(keep)
        self.ids, self.lengths = self.index["id"], self.index["length"].to_numpy()
        self.places = [self.index[name].to_numpy() for name in ("batch", "start", "length")]

    def open(self, batch):
        return open_batch(self.out / KEY.format(batch), self.manifest["fingerprint"])

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        batch, start, length = (int(place[i]) for place in self.places)
        return self.open(batch).sample(start, length) | {"id": self.ids[i % len(self)].as_py()}


def __getattr__(name):
    """HiddenStates comes into being when it is asked for: who needs the rest does not wait for torch."""
    if name != "HiddenStates":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torch.utils.data import Dataset
    text = """A local OUT, finished or growing, for PyTorch: random access to one sample without its batch.

    HiddenStates(out)[i] is a dictionary: hidden_states [T, K*H] in the dtype of the run (bf16 for fp8), input_ids
    and loss_mask [T] int64, with --final last_hidden_state [T, H], and id, a str. `lengths` has every T, `index`
    the rows of index.parquet in this order, `manifest` what the run is. Samples that were excluded after planning
    are not in it, nor are batches that are not there yet. It can be pickled and forked. Raises OutputError where
    OUT is none of ours or a batch is of another run; IndexError."""
    made = globals()[name] = type(name, (Samples, Dataset), {"__doc__": text, "__module__": __name__})
    return made


# --------------------------------------------------------------------------------------------------- trainers
SHAPE = ("vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim "
         "rms_norm_eps max_position_embeddings").split()  # of a draft, as its target has them


def lacks(manifest, kind, algorithm):
    """What a run lacks for a trainer, and the flag to extract with; None where it lacks nothing."""
    layers = manifest["layers"]
    if not manifest["final"] and (kind, algorithm) != ("specforge", "dflash"):
        return "the last layer's state: extract with --final into another OUT"
    if algorithm == "eagle3" and len(layers) != 3:
        return f"three layers, it has {layers}: extract with --layers eagle3 into another OUT"
    if (kind != "specforge" or algorithm == "eagle3") and layers != sorted(set(layers)):
        ids = ",".join(map(str, sorted(set(layers))))
        return f"layers in ascending order, it has {layers}: extract with --layers {ids} into another OUT"
    return None


def config_of(kind, algorithm, manifest, to, target):
    """(name, content) of the trainer's own configuration: the layers as it counts them, and where things lie.

    target: the target's text configuration, {} where the run has no head."""
    layers, k = manifest["layers"], len(manifest["layers"])
    if kind == "speculators":  # JSON is YAML, too
        model = str(to / "target") if target else manifest["model"]
        return "train.yaml", {"speculator_type": algorithm, "data": {"data_path": str(to)}, "draft": {
            "target_layer_ids": [i + 1 for i in layers]}, "verifier": {"verifier_name_or_path": model}}
    if kind == "modelopt":
        ids = {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}
        return "modelopt.json", {"eagle_architecture_config": ids} if algorithm == "eagle3" else {
            "dflash_architecture_config": {"target_layer_ids": layers, "num_hidden_layers": k}}
    shape = {"hidden_size": manifest["hidden_size"]} | {name: target[name] for name in SHAPE if name in target}
    if algorithm == "eagle3":
        return "draft_config.json", shape | {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}}
    return "draft_config.json", shape | {
        "architectures": [{"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}[algorithm]],
        "model_type": "qwen3", "num_hidden_layers": k, "layer_types": ["full_attention"] * k, "block_size": 16,
        "num_target_layers": target.get("num_hidden_layers"), "dflash_config": {"target_layer_ids": layers}}


def listing(output):
    """{key: bytes} of all that is in OUT."""
    if not isinstance(output, S3):
        found = (f for f in output.root.rglob("*.*") if f.is_file())
        return {str(f.relative_to(output.root)): f.stat().st_size for f in found}
    query = "--query", "Contents[].[Key,Size]", "--output", "json"
    found = json.loads(output.api("list-objects-v2", "--prefix", output.prefix, *query) or b"null")
    return {key.removeprefix(output.prefix): size for key, size in found or []}


def write_whole(path, write):
    """write(path of a temporary file), and then the file has its name."""
    tmp = path.with_name(path.name + ".tmp")
    write(tmp)
    os.replace(tmp, path)


def write_json(path, value):
    write_whole(path, lambda tmp: tmp.write_text(json.dumps(value, indent=1) + "\n"))


class Export:
    """An OUT on its way into a directory, batch by batch; what is done leaves its mark in TO/.export."""

    def __init__(self, output, to, kind, algorithm):
        from warmup import Refused
        self.output = output
        self.to, self.kind, self.algorithm = Path(to).resolve(), kind, algorithm
        self.done, self.manifest = self.to / ".export/done", output.read_json("manifest.json")
        if not self.manifest:
            raise Refused(f"--from {output}: no manifest.json is there. Give the OUT of a run")
        if lost := lacks(self.manifest, kind, algorithm):
            raise Refused(f"{kind} {algorithm} needs {lost}")
        self.keys, self.fingerprint = listing(output), self.manifest["fingerprint"]
        if "head.safetensors" not in self.keys and kind != "speculators" and (kind, algorithm) != (
                "specforge", "dflash"):
            raise Refused(f"{kind} {algorithm} needs the final norm: run the same extraction with --save-head, "
                          "which adds head.safetensors to OUT and computes nothing again")
        for folder in (self.done, self.to / "hidden_states" if kind == "speculators" else self.to):
            folder.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.done.parent / "lock", "w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"--to {to}: another export is writing there") from None
        run, what = self.done.parent / "run.json", {"format": kind, "algorithm": algorithm, "run": self.fingerprint}
        if run.exists() and (was := json.loads(run.read_text())) != what:
            raise Refused(f"--to {to} holds another export, {was}: give another directory")
        write_json(run, what)
        for tmp in self.to.rglob("*.tmp"):  # of an export that was killed
            tmp.unlink()
        self.index, there = self.read_index(), re.findall(r"batches/batch_(\d{6,})\.", "\n".join(self.keys))
        self.there = set(map(int, there))
        self.todo = sorted(self.there - {int(f.stem) for f in self.done.glob("*.parquet")})
        used = set(self.marked("number")["number"].to_pylist()) if self.there - set(self.todo) else ()
        self.numbers = (n for n in itertools.count() if n not in used)
        need = sum(length for batch in self.todo for _, _, length in self.index[batch])
        need *= 2 * self.manifest["hidden_size"] * (len(self.manifest["layers"]) + self.manifest["final"]) + 40
        if (free := shutil.disk_usage(self.to).free) < need:
            raise Refused(f"--to {to} has {free / 1e9:,.1f} GB free and takes {need / 1e9:,.1f}: use another disk")
        self.norm, target = self.head() if "head.safetensors" in self.keys else (None, {})
        name, config = config_of(kind, algorithm, self.manifest, self.to, target)
        write_json(self.to / name, config)

    @contextmanager
    def local(self, key):
        """A key of OUT as a local file, for as long as the block lasts."""
        if not isinstance(self.output, S3):
            yield self.output.root / key
            return
        path, url = self.done / f"{Path(key).name}.tmp", f"s3://{self.output.bucket}/{self.output.prefix}{key}"
        try:
            limit = 60 + self.keys.get(key, 0) / 5e6
            self.output.aws("s3", "cp", url, str(path), "--only-show-errors", deadline=limit)
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
        """TO/target: of the target what a trainer needs. Returns (its own norm, its text configuration)."""
        from safetensors import safe_open
        import warmup
        target = self.to / "target"
        target.mkdir(exist_ok=True)
        if not (target / "model.safetensors").exists():
            with self.local("head.safetensors") as path:
                write_whole(target / "model.safetensors", lambda tmp: shutil.copyfile(path, tmp))
        with safe_open(target / "model.safetensors", "pt") as f:
            meta, names = json.loads(f.metadata()["meta"]), dict.fromkeys(f.keys(), "model.safetensors")
            weights = {name[11:]: f.get_tensor(name) for name in names if name.startswith("model.norm.")}
        if meta["fingerprint"] != self.fingerprint:
            raise warmup.Refused(f"head.safetensors of {self.output} is of another run: extract with --save-head")
        write_json(target / "config.json", meta["config"])
        write_json(target / "model.safetensors.index.json", {"weight_map": names})
        norm = warmup.skeleton(target).get_decoder().norm.to_empty(device="cpu")  # its arithmetic is its own
        norm.load_state_dict(weights)
        return norm.requires_grad_(False), warmup.text_config(target).to_dict()

    def open(self, batch):
        """(Batch, its samples to be exported as (row, start, length), {row: why it is left out})"""
        with self.local(KEY.format(batch)) as path:  # what is mapped stays readable
            opened, kept, out = Batch(path, self.fingerprint), [], {}
        for row, start, length in self.index[batch]:
            mask = opened.rows("loss_mask", start, length)
            if str(row) in self.manifest["excluded"] or opened.is_zero(start, length):
                out[row] = "excluded"
            elif self.kind == "specforge" and self.algorithm != "eagle3" and not (mask[:-1] & mask[1:]).any():
                out[row] = "no two adjacent supervised tokens"
            else:
                kept.append((row, start, length))
        return opened, kept, out

    def file(self, sample, row, number):
        """(name, content) of the file that the trainer reads for a sample."""
        import torch
        made = {name: sample[name] for name in ("input_ids", "loss_mask")}
        states, last = sample["hidden_states"].bfloat16(), sample.get("last_hidden_state")
        if self.kind == "speculators":
            states = torch.cat([states, last.bfloat16()], 1).unflatten(1, (-1, last.shape[1]))
            name, made = f"hidden_states/hs_{number}.safetensors", {"token_ids": made["input_ids"]}
            return name, made | {"hidden_states": states}
        if (self.kind, self.algorithm) == ("specforge", "dflash"):
            return f"row_{row:09d}.ckpt", made | {"hidden_states": states}
        last = self.norm.to(last.dtype)(last).bfloat16()
        if self.kind == "modelopt":
            return f"row_{row:09d}.pt", made | {"hidden_states": last, "aux_hidden_states": states}
        return f"row_{row:09d}.ckpt", made | (
            {"hidden_state": last[None], "aux_hidden_state": states[None]} if self.algorithm == "eagle3" else
            {"hidden_states": states, "target_last_hidden_states": last})

    def write(self, batch, opened, kept, out, numbers):
        """The files of a batch, and then its mark. Returns how many samples it has."""
        import pyarrow as pa
        import pyarrow.parquet as pq
        import torch
        from safetensors.torch import save_file
        save, mark = save_file if self.kind == "speculators" else torch.save, []
        for (row, start, length), number in zip(kept, numbers):
            sample = opened.sample(start, length)
            name, made = self.file(sample, row, number)
            write_whole(self.to / name, lambda tmp: save(made, tmp))
            ids, mask = (sample[name].tolist() for name in ("input_ids", "loss_mask"))
            mark.append({"number": number, "row": row, "why": "", "input_ids": ids, "loss_mask": mask,
                         "seq_len": length})
        mark += [{"number": -1, "row": row, "why": why} for row, why in out.items()]
        kinds = [("number", pa.int64()), ("row", pa.int64()), ("why", pa.string()), ("input_ids", pa.list_(
            pa.int32())), ("loss_mask", pa.list_(pa.int8())), ("seq_len", pa.int64())]
        table = pa.Table.from_pylist(mark, pa.schema(kinds))
        write_whole(self.done / f"{batch:06d}.parquet", lambda tmp: pq.write_table(table, tmp))
        return len(mark)

    def marked(self, *columns):
        """These columns of what is done: number, row, why (it was left out), input_ids, loss_mask, seq_len."""
        import pyarrow.parquet as pq
        files = sorted(self.done.glob("*.parquet"))
        return pq.read_table(files, columns=list(columns)) if files else None

    def data_set(self):
        """What `datasets` loads as TO: the samples' tokens, in the order of their numbers."""
        import pyarrow as pa
        import pyarrow.compute as pc
        features = {name: {"feature": {"dtype": kind, "_type": "Value"}, "_type": "List"}
                    for name, kind in (("input_ids", "int32"), ("loss_mask", "int8"))}
        features["seq_len"] = {"dtype": "int64", "_type": "Value"}
        table = self.marked("number", *features)
        table = table.filter(pc.field("number") >= 0).sort_by("number").drop_columns("number")
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})

        def save(tmp):
            with pa.OSFile(str(tmp), "wb") as f, pa.ipc.new_stream(f, table.schema) as out:
                out.write_table(table, 1000)
        write_whole(self.to / "data-00000-of-00001.arrow", save)
        write_json(self.to / "dataset_info.json", {"features": features, "citation": "", "description": "",
                                                   "homepage": "", "license": ""})
        write_json(self.to / "state.json", {
            "_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": f"{self.fingerprint}{len(table)}",
            "_format_columns": list(features), "_format_kwargs": {}, "_format_type": "torch",
            "_output_all_columns": False, "_split": None})


def export(a, abort):
    """Runs an export, as far as OUT is there. Raises Refused, OutputError."""
    import torch
    from tqdm import tqdm
    x = Export(open_output(a.source, abort=abort), a.to, a.format, a.algorithm)
    torch.set_num_threads(max(1, os.cpu_count() // a.jobs))
    opened, writing, todo = deque(), deque(), deque(x.todo)
    samples = sum(len(x.index[batch]) for batch in todo)
    with ThreadPoolExecutor(a.jobs) as pool, tqdm(total=samples, unit=" samples", desc="export") as bar:
        try:
            while todo or opened or writing:
                while todo and len(opened) < a.jobs:
                    opened.append((todo[0], pool.submit(x.open, todo.popleft())))
                if opened and len(writing) < a.jobs:  # in the order of the batches, whoever is ready first
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
        raise OutputError(f"{x.output} has no batch yet: run the same again when there are some")
    if a.format == "speculators":
        x.data_set()
    why, total = Counter(x.marked("why")["why"].to_pylist()), x.manifest["counts"]["batches"]
    print(f"{why.pop('', 0):,} samples of {len(x.there):,} batches are in {x.to} for {a.format} {a.algorithm}; "
          f"left out: {dict(why) or 'none'}")
    if len(x.there) < total:
        print(f"The run has {total:,} batches: the same command adds those that come")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"refused: {message}; --help describes every flag\n")
    parser.add_argument("--from", dest="source", required=True, help="OUT: an s3:// prefix or a directory")
    parser.add_argument("--to", required=True, help="directory for the files; made where it is not there")
    parser.add_argument("--format", required=True, choices=("speculators", "specforge", "modelopt"))
    parser.add_argument("--algorithm", default="dflash", choices=("dflash", "dspark", "eagle3"),
                        help="what is to be trained (default: dflash)")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count()), help="batches at a time (default: "
                        "one a core, 4 at most)")
    a, abort = parser.parse_args(argv), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from warmup import Refused
    try:
        if a.jobs < 1:
            raise Refused(f"--jobs {a.jobs} is below 1")
        export(a, abort)
        return 0
    except Refused as e:
        code, text = 2, f"refused: {e}"
    except (OutputError, OSError) as e:
        code, text = 1, f"failed: {e}"
    except KeyboardInterrupt:
        code, text = 3, "stopped: the same command goes on"
    print(text, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
