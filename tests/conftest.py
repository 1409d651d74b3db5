"""What the tests share: a tiny model and chat data, staging in memory, an environment that leads nowhere.

Every AWS variable points at a closed port on loopback; a test that needs S3 takes S3Server(...).environ().
"""
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
OTHERS = "AWS_", "SLURM_", "CUDA_VISIBLE", "MAKE", "MFLAGS", "ARGS"  # a shell's, and a make's around the tests
for name in [name for name in os.environ if name.startswith(OTHERS)]:
    del os.environ[name]
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
               "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
               "AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing",
               "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
               "AWS_CONFIG_FILE": "/nonexistent", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent"}

import pytest

import tiny
from shards import Run, Shards

LONGEST = ["test_make.py", "test_faults.py", "test_run.py", "test_export.py", "test_slurm.py", "test_web.py"]


def pytest_collection_modifyitems(items):
    """The longest files first, so that processes that share the files end at about the same time."""
    items.sort(key=lambda item: (LONGEST + [item.path.name]).index(item.path.name))


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """model: a tiny one; chat: 60 lines, 11 batches of 1024 tokens; few: its first 16 lines, 3 batches."""
    folder = tmp_path_factory.mktemp("tiny")
    place = SimpleNamespace(model=folder / "model", chat=folder / "chat.jsonl", few=folder / "few.jsonl")
    tiny.make_model(place.model)
    tiny.make_chat(place.chat, 60)
    place.few.write_bytes(b"".join(place.chat.read_bytes().splitlines(True)[:16]))
    return place


@pytest.fixture(scope="session")
def staging():
    """Makes directories in memory, as a run's staging is; they are gone at the end."""
    made = []

    def make():
        made.append(Path(tempfile.mkdtemp(prefix="hidden-states-test-", dir="/dev/shm")))
        return made[-1]
    yield make
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def shards():
    """Starts shards, which end with the tests of a file; the process that they are forked from stays for the next."""
    made = Shards()
    yield made
    made.close()


@pytest.fixture(scope="module")
def new(shards, place, staging, tmp_path_factory):
    """new(data, ...) -> a Run, of the tiny model unless told otherwise, with directories of its own."""
    def make(data, model=None, stage=None, **how):
        return Run(shards, tmp_path_factory.mktemp("run"), model or place.model, data, stage or staging(), **how)
    return make


@pytest.fixture(scope="module")
def tmpfs():
    """tmpfs(size) -> the mount point of a new filesystem in memory of that size."""
    made = []

    def new(size, *options):
        folder = Path(tempfile.mkdtemp(prefix="hidden-states-test-", dir="/dev/shm"))
        command = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "tmpfs", folder]
        if subprocess.run(command).returncode:
            folder.rmdir()
            pytest.skip("only root can mount a small filesystem")
        made.append(folder)
        return folder
    yield new
    for folder in made:
        subprocess.run(["umount", "-l", folder], check=True)
        folder.rmdir()
