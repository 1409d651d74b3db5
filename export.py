"""An output of extract.py, wherever it lies: an s3:// prefix or a local directory, read and written by key.

    from export import open_output
    open_output("s3://bucket/run1").read("manifest.json")

OUT/manifest.json, OUT/index.parquet and OUT/batches/batch_000123.safetensors: extract.py says what they hold.
S3 is reached through the `aws` command alone, with the user's own profile, region, endpoint and credentials.
"""
import json
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
from collections import Counter
from pathlib import Path

from monitor import say

KEY = "batches/batch_{:06d}.safetensors"
NOTE = "excluded/batch_{:06d}.json"  # {row: why}, where samples of a batch were excluded after planning
PASSED = Counter()  # fault points


def fault(point):
    """A step of the commit order; EXTRACT_FAULT=marked:3 kills the process at its third pass of that step.

    Steps: written, renamed, uploading (a pass every 0.05 s), uploaded, marked. For drills; unset, it is nothing.
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
                           "config profile|No such file or directory|user-provided path")

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
    there, found, missing = output.sizes(), {}, set()
    for batch, size in planned.items():
        key, note, has = KEY.format(batch), NOTE.format(batch), there.get(KEY.format(batch))
        if has == size:
            if batch not in done:
                found[batch] = output.read_json(note) if note in there else {}
            continue
        missing.add(batch)
        if has is not None or batch in done:
            say(f"{key} {'is not there' if has is None else f'has {has:,} bytes'}, {size:,} were planned"
                + ": its marker goes" * (batch in done))
        if note in there:  # of an object that is no more
            output.write(note, "{}")
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
                fault("uploading")
                os.replace(tmp, self.root / key)
            finally:
                tmp.unlink(missing_ok=True)
            if (self.root / key).stat().st_size != size:
                raise OutputError(f"{self.root / key} is not of the planned {size} bytes")
        except OSError as e:
            raise OutputError(f"{e.filename or self.root / key}: {e.strerror}") from None

    def sizes(self):
        """{key: bytes} of the batches that are there, and of the notes on them."""
        found, folders = {}, [self.root / Path(key).parent for key in (KEY, NOTE)]
        for folder in (folder for folder in folders if folder.is_dir()):
            with os.scandir(folder) as entries:
                found |= {f"{folder.name}/{entry.name}": entry.stat().st_size for entry in entries}
        return found

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
                    fault("uploading") if args[:2] == ("s3", "cp") else None
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
        url = f"s3://{self.bucket}/{self.prefix}{key}"
        self.aws("s3", "cp", str(path), url, "--only-show-errors", deadline=deadline)
        there = self.api("head-object", "--key", self.prefix + key, "--query", "ContentLength", "--output",
                         "text").decode().strip()
        if there != str(size):  # exit code 0 alone proves nothing
            raise OutputError(f"{url} has {there} bytes after its upload, {size} were planned")

    def sizes(self):
        found = {}
        for folder in (os.path.dirname(key) for key in (KEY, NOTE)):
            listed = self.api("list-objects-v2", "--prefix", f"{self.prefix}{folder}/", "--query",
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
            say(f"did not look for multipart uploads left open: {e}")
