"""HiddenStates, and what trainers' own loaders make of an export, against plain transformers.

    python -m pytest tests/test_export.py

The trainers' packages go into work/trainers, once. Runs are real ones; what is spoiled is a copy of one.
"""
import contextlib
import functools
import hashlib
import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import export
import oracle
import tiny
import warmup
from export import HiddenStates
from s3 import S3Server
from shards import times, until

ROOT = Path(__file__).resolve().parent.parent
# The trainers, and as much of what they import as the product's environment lacks.
PACKAGES = """speculators==0.9.0 hs-connectors==0.9.0 specforge==0.2.0 nvidia-modelopt==0.47.0 openai==3.57.0
sniffio==1.3.1 datasets==5.1.0 multiprocess==0.70.19 dill==0.4.1 pandas==3.1.1 xxhash==4.1.0 requests==2.34.2
pydantic-settings==2.16.3 loguru==0.7.3 omegaconf==2.4.0 pulp==3.3.2 scipy==1.17.1""".split()
UNREACHABLE = ("Temporary failure in name resolution", "Network is unreachable", "Connection refused",
               "Failed to establish a new connection", "Connection timed out", "No route to host")


@pytest.fixture(scope="module")
def trainers():
    """Directory of the trainers' packages."""
    name = hashlib.sha256(" ".join(PACKAGES).encode()).hexdigest()[:12]
    folder = ROOT / "work" / "trainers" / name
    if not folder.exists():
        tmp = folder.with_suffix(f".{os.getpid()}.tmp")
        p = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp,
                            *PACKAGES], capture_output=True, text=True)
        if p.returncode:
            shutil.rmtree(tmp, ignore_errors=True)
            if any(words in p.stderr for words in UNREACHABLE):
                pytest.skip("the package index cannot be reached, and the trainers' packages are not here yet")
            pytest.fail(p.stderr[-2000:])
        os.replace(tmp, folder)
    return folder


def finished(run, *args):
    """OUT of a run, with these arguments."""
    assert run.run(*args) == 0, run.log()
    return run.out


@pytest.fixture(scope="module")
def run(new, place):
    """A run with all that any trainer wants: three layers and the final state in fp32, and later the head."""
    made = new(place.few, args=["--layers", "eagle3"])
    out = finished(made)
    (out.parent / "before.json").write_text(json.dumps(times(out)))
    return finished(made, "--save-head")


@pytest.fixture(scope="module")
def small(new, place):
    """A run with little: descending layers in fp8, no final state, no head."""
    return finished(new(place.few), "--dtype", "fp8", "--layers", "6,3")


@pytest.fixture(scope="module")
def truth(run, place):
    """{row: id, ids, mask, states [T, 3H], last [T, H] before and normed after the final norm}, one at a time."""
    model, found, lines = oracle.load_model(place.model), {}, place.few.read_bytes().splitlines()
    for row in pq.read_table(run / "index.parquet").to_pylist():
        with safe_open(run / export.KEY.format(row["batch"]), "pt") as f:
            at = slice(row["start"], row["start"] + row["length"])
            ids, mask = (f.get_slice(name)[at].long() for name in ("input_ids", "loss_mask"))
        states, last = oracle.solo_states(model, ids, [1, 3, 4], True)
        with torch.no_grad():
            normed = model(ids[None], output_hidden_states=True).hidden_states[-1][0]
        name = json.loads(lines[row["row"]]).get("id", str(row["row"]))
        found[row["row"]] = SimpleNamespace(id=name, ids=ids, mask=mask, states=states, last=last, normed=normed)
    return found


def close(given, true, tolerance=oracle.TOLERANCE["bf16"]):
    """Whether each layer of given [T, n*H] is the true one, up to how it is stored."""
    parts = given.shape[1] // tiny.HIDDEN
    return given.shape == true.shape and max(oracle.relative_errors(given.float(), true, parts)) < tolerance


def export_py(*args):
    """`python export.py ...`, in this process; those with an environment or an end of their own are real ones."""
    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = export.main([str(arg) for arg in args])
    except SystemExit as e:
        code = e.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


ALGORITHMS = {"specforge": ("dflash", "dspark", "eagle3"), "speculators": ("dflash", "eagle3"),
              "modelopt": ("dflash", "eagle3")}


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    """exported(format, algorithm) -> directory of a finished export of `run`."""
    @functools.cache
    def make(kind, algorithm):
        to = tmp_path_factory.mktemp("exported") / kind
        p = export_py("--from", run, "--to", to, "--format", kind, "--algorithm", algorithm)
        assert p.returncode == 0, p.stderr
        return to
    return make


@pytest.fixture(scope="module")
def loaded(exported, trainers, tmp_path_factory):
    """loaded(format) -> {algorithm: what the trainer's own loader gives: samples, config, losses}"""
    @functools.cache
    def load(kind):
        result = tmp_path_factory.mktemp("loaded") / "result.pt"
        exports = [f"{algorithm}={exported(kind, algorithm)}" for algorithm in ALGORITHMS[kind]]
        p = subprocess.run([sys.executable, ROOT / "tests/loaders.py", kind, result, *exports], text=True,
                           capture_output=True, env=os.environ | {"PYTHONPATH": str(trainers)})
        assert p.returncode == 0, p.stderr[-3000:]
        return torch.load(result)
    return load


def row_of(file):
    return int(Path(file).stem.removeprefix("row_"))


# --------------------------------------------------------------------------------------------- HiddenStates
def test_reader_gives_what_plain_transformers_gives(run, truth):
    data = HiddenStates(run)
    rows = data.index["row"].to_pylist()
    assert sorted(rows) == sorted(truth) and list(data.lengths) == [len(truth[row].ids) for row in rows]
    for sample, row in zip(data, rows):
        true = truth[row]
        assert sample["id"] == true.id and sample["input_ids"].equal(true.ids), row
        assert sample["loss_mask"].equal(true.mask) and sample["input_ids"].dtype == torch.int64
        assert close(sample["hidden_states"], true.states, 1e-4), row
        assert close(sample["last_hidden_state"], true.last, 1e-4), row


def test_reader_gives_bf16_for_fp8(small, run):
    data, other, bounds = HiddenStates(small), HiddenStates(run), 0
    batches = [load_file(file) for file in sorted((small / "batches").iterdir())]
    values = torch.cat([b["hidden_states"].float().unflatten(1, (2, -1)) for b in batches])
    scales = torch.cat([b["hidden_states_scale"] for b in batches])
    for i, sample in enumerate(data):
        n = len(sample["input_ids"])
        own = values[bounds:bounds + n] * scales[bounds:bounds + n, :, None]
        assert sample["hidden_states"].equal(own.flatten(1).bfloat16())
        assert close(sample["hidden_states"][:, tiny.HIDDEN:], other[i]["hidden_states"][:, 64:128], 0.1)
        assert set(sample) == {"hidden_states", "input_ids", "loss_mask", "id"}
        bounds += n
    assert bounds == len(values)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_reader_works_in_workers_of_a_dataloader(run, start):
    data = HiddenStates(run)
    assert isinstance(data, Dataset) and len(pickle.dumps(data)) < 100_000  # no states in it
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=start)
    for i, sample in enumerate(loader):
        assert sample["hidden_states"].equal(data[i]["hidden_states"])
    assert i == len(data) - 1


def test_reader_counts_from_the_end_and_ends(run):
    data = HiddenStates(run)
    assert data[-1]["id"] == data[len(data) - 1]["id"] and len(list(data)) == len(data)
    with pytest.raises(IndexError):
        data[len(data)]


def test_reader_reads_a_sample_without_its_batch(run, tmp_path):
    """A batch of 3 GB, nearly all of it a hole: a sample in its middle costs less than 100 MB of memory."""
    out, n, wide = tmp_path / "out", 300_000, 5120
    shutil.copytree(run, out)
    index = pq.read_table(out / "index.parquet").slice(0, 1)
    index = index.set_column(index.column_names.index("start"), "start", [[n // 2]])
    pq.write_table(index, out / "index.parquet")
    sizes = {"hidden_states": ("BF16", 2 * wide, [n, wide]), "input_ids": ("I32", 4, [n]), "loss_mask": ("U8", 1, [n])}
    with safe_open(out / export.KEY.format(0), "pt") as f:
        header, at = {"__metadata__": f.metadata()}, 0
    for name, (kind, size, shape) in sizes.items():
        header[name], at = {"dtype": kind, "shape": shape, "data_offsets": [at, at + n * size]}, at + n * size
    with open(out / export.KEY.format(0), "wb") as f:
        text = json.dumps(header).encode()
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + at)
    code = ("import resource, sys; from export import HiddenStates; import pyarrow.parquet, numpy, torch\n"
            "used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "before = used(); shape = HiddenStates(sys.argv[1])[0]['hidden_states'].shape\n"
            "print(shape[1], (used() - before) // 1024)")
    p = subprocess.run([sys.executable, "-c", code, out], cwd=ROOT, capture_output=True, text=True)
    width, megabytes = map(int, p.stdout.split())
    assert width == wide and megabytes < 100, p.stdout + p.stderr


def spoil(out, batch, change):
    """Rewrites a batch file with its tensors as change(tensors) leaves them."""
    path = out / export.KEY.format(batch)
    with safe_open(path, "pt") as f:
        meta = f.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, meta)


def edit(out, **changes):
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(manifest | changes))


@pytest.fixture
def growing(run, tmp_path):
    """A copy of `run` whose last batch is not there yet, and its row 0 was excluded: (out, rows that are there)"""
    out = shutil.copytree(run, tmp_path / "growing")
    index = pq.read_table(run / "index.parquet").to_pylist()
    (out / export.KEY.format(index[-1]["batch"])).unlink()
    edit(out, complete=False)
    gone = index[0]

    def zero(tensors):
        for name in ("hidden_states", "last_hidden_state", "loss_mask"):
            tensors[name][gone["start"]:gone["start"] + gone["length"]] = 0
    spoil(out, gone["batch"], zero)
    return out, [row["row"] for row in index[1:] if row["batch"] != index[-1]["batch"]], gone["row"]


def test_reader_of_a_growing_output_has_what_is_there(growing):
    out, rows, _ = growing
    assert HiddenStates(out).index["row"].to_pylist() == rows


def test_reader_leaves_out_what_the_manifest_excludes(run, tmp_path):
    out = shutil.copytree(run, tmp_path / "out")
    row = pq.read_table(out / "index.parquet")["row"][3].as_py()
    edit(out, excluded={str(row): "bad numbers"})
    assert row not in HiddenStates(out).index["row"].to_pylist()
    assert len(HiddenStates(out)) == len(HiddenStates(run)) - 1


def test_reader_refuses_a_batch_of_another_run(run, tmp_path):
    out = shutil.copytree(run, tmp_path / "out")
    edit(out, fingerprint="of-another-run")
    with pytest.raises(export.OutputError, match="of-another-run"):
        HiddenStates(out)[0]


def test_reader_refuses_a_batch_under_another_number(run, tmp_path):
    out = shutil.copytree(run, tmp_path / "out")
    shutil.copy(out / export.KEY.format(1), out / export.KEY.format(0))
    with pytest.raises(export.OutputError, match="holds batch 1"):
        HiddenStates(out)[0]


def test_reader_refuses_a_torn_batch(run, tmp_path):
    out = shutil.copytree(run, tmp_path / "out")
    with open(out / export.KEY.format(0), "r+b") as f:
        f.truncate(f.seek(0, os.SEEK_END) - 100)
    with pytest.raises(export.OutputError, match="bytes"):
        HiddenStates(out)[0]


@pytest.mark.parametrize("out, words", [("s3://bucket/run", "aws s3 sync"), ("/nonexistent", "manifest.json")])
def test_reader_says_what_it_cannot_read(out, words):
    with pytest.raises(export.OutputError, match=words):
        HiddenStates(out)


def test_importing_export_needs_no_torch():
    code = "import export, sys; print({'torch', 'numpy', 'pyarrow', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "set()\n"


# ------------------------------------------------------------------------------------------------- --save-head
def test_head_is_the_checkpoints(run, place):
    """The checkpoint is a multimodal one, whose names differ from those of the text model that transformers loads."""
    head = load_file(run / "head.safetensors")
    weights = AutoModelForCausalLM.from_pretrained(place.model, dtype=torch.bfloat16).state_dict()
    assert sorted(head) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    for name, tensor in head.items():
        assert tensor.equal(weights[name]), name


def test_head_changes_no_fingerprint_and_is_added_to_a_finished_run(run):
    assert times(run) == json.loads((run.parent / "before.json").read_text())


def tiny_llama(path, **more):
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, **more)
    model = LlamaForCausalLM(config)
    model.model.norm.weight.data.normal_(1, 0.3)
    model.save_pretrained(path)
    return model


def save_head(model, folder):
    folder.mkdir(exist_ok=True)
    warmup.save_head(model, folder, export.open_output(str(folder / "out")), "f")
    return load_file(folder / "out/head.safetensors")


def test_head_of_tied_weights_has_the_embedding_twice(tmp_path):
    model = tiny_llama(tmp_path / "model", tie_word_embeddings=True)
    head = save_head(tmp_path / "model", tmp_path / "w")
    assert head["lm_head.weight"].equal(model.lm_head.weight)
    assert head["model.embed_tokens.weight"].equal(model.lm_head.weight)


def test_head_that_is_gone_from_out_is_written_again(tmp_path):
    tiny_llama(tmp_path / "model")
    save_head(tmp_path / "model", tmp_path / "w")
    (tmp_path / "w/out/head.safetensors").unlink()
    assert "lm_head.weight" in save_head(tmp_path / "model", tmp_path / "w")


def test_head_that_the_checkpoint_lacks_is_a_failure(tmp_path):
    tiny_llama(tmp_path / "model", tie_word_embeddings=False)
    weights = load_file(tmp_path / "model/model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model/model.safetensors", {"format": "pt"})
    with pytest.raises(warmup.Failed, match="lm_head"):
        save_head(tmp_path / "model", tmp_path / "w")


# ----------------------------------------------------------------------------------------------------- trainers
@pytest.mark.parametrize("algorithm", ALGORITHMS["specforge"])
def test_specforge_loads(loaded, truth, algorithm):
    result = loaded("specforge")[algorithm]
    assert sorted(map(row_of, result["files"])) == sorted(truth) and result["config"] == [1, 3, 4]
    for file, sample in zip(result["files"], result["samples"]):
        true = truth[row_of(file)]
        assert sample["input_ids"].equal(true.ids[None])
        mask = true.mask.clone()
        if algorithm == "eagle3":  # its loader takes the last token out
            mask[-1] = 0
        assert sample["loss_mask"].equal(mask[None])
        states = sample["hidden_state" if algorithm == "eagle3" else "hidden_states"]
        assert states.dtype == torch.bfloat16 and close(states[0], true.states), file
        if algorithm != "dflash":
            last = sample["target" if algorithm == "eagle3" else "target_last_hidden_states"]
            assert close(last[0], true.normed), file


@pytest.mark.parametrize("algorithm", ALGORITHMS["speculators"])
def test_speculators_loads(loaded, truth, algorithm):
    result = loaded("speculators")[algorithm]
    by_ids = {tuple(true.ids.tolist()): true for true in truth.values()}
    assert len(result["samples"]) == len(truth) == len(by_ids) and result["config"] == [2, 4, 5]
    for sample in result["samples"]:
        true = by_ids.pop(tuple(sample["input_ids"].tolist()))
        assert sample["loss_mask"].equal(true.mask) and sample["hidden_states"].dtype == torch.bfloat16
        assert close(sample["hidden_states"], true.states)
        assert close(sample["verifier_last_hidden_states"], true.last)


@pytest.mark.parametrize("algorithm", ALGORITHMS["modelopt"])
def test_modelopt_loads(loaded, truth, algorithm):
    result = loaded("modelopt")[algorithm]
    assert sorted(map(row_of, result["files"])) == sorted(truth) and result["config"] == [1, 3, 4]
    for file, sample in zip(result["files"], result["samples"]):
        true = truth[row_of(file)]
        assert sample["input_ids"].equal(true.ids) and sample["loss_mask"].equal(true.mask)
        assert close(sample["aux_hidden_states"], true.states) and not sample["base_hidden_prenorm"]
        assert close(sample["base_model_hidden_states"], true.normed)


@pytest.mark.parametrize("kind, algorithm", [
    ("specforge", "dflash"), ("specforge", "dspark"), ("speculators", "dflash"), ("speculators", "eagle3")])
def test_trainer_trains(loaded, kind, algorithm):
    """Its own drafter, tiny, on what its loader gave, with the target's head from the export: the loss falls."""
    losses = loaded(kind)[algorithm]["losses"]
    assert losses[-1] < 0.95 * losses[0], losses


def test_norm_of_one_plus_w_equals_transformers_own(run, place, exported):
    norm, data = oracle.load_model(place.model).get_decoder().norm, HiddenStates(run)
    assert type(norm).__name__ == "Qwen3_5RMSNorm"
    for i, row in enumerate(data.index["row"].to_pylist()):
        given = torch.load(exported("modelopt", "dflash") / f"row_{row:09d}.pt")["hidden_states"]
        with torch.no_grad():
            assert given.equal(norm(data[i]["last_hidden_state"]).bfloat16())


def test_norm_of_w_in_bf16_equals_transformers_own(new, tmp_path):
    data, model = tmp_path / "ids.jsonl", tiny_llama(tmp_path / "model")
    data.write_text("".join(json.dumps({"input_ids": list(range(i, i + 20))}) + "\n" for i in range(4)))
    run = new(data, model=tmp_path / "model")
    out = finished(run, "--dtype", "bf16", "--final", "--save-head", "--layers", "0")
    p = export_py("--from", out, "--to", tmp_path / "to", "--format", "modelopt")
    assert p.returncode == 0, p.stderr
    norm = model.bfloat16().model.norm
    for i, sample in enumerate(HiddenStates(out)):
        given = torch.load(tmp_path / f"to/row_{i:09d}.pt")["hidden_states"]
        with torch.no_grad():
            assert given.equal(norm(sample["last_hidden_state"]))


# ------------------------------------------------------------------------------------------------ the command
@pytest.mark.parametrize("which, kind, algorithm, flag", [
    ("small", "specforge", "dspark", "--final"), ("small", "speculators", "dflash", "--final"),
    ("small", "modelopt", "dflash", "extract with --final --layers 3,6 --save-head"),
    ("small", "specforge", "eagle3", "extract with --final --layers eagle3 --save-head"),
    ("small", "speculators", "eagle3", "extract with --final --layers eagle3, into another OUT"),
    ("two", "specforge", "eagle3", "--layers eagle3"), ("two", "speculators", "dflash", "--layers 3,6"),
    ("three", "modelopt", "dflash", "the same extraction once more with --save-head"),
    ("three", "specforge", "dspark", "--save-head"),
    ("none", "specforge", "dflash", "OUT"), ("other", "specforge", "dflash", "another directory")])
def test_what_is_missing_is_refused_with_the_flag(run, small, exported, tmp_path, which, kind, algorithm, flag):
    out, to = tmp_path / "out", tmp_path / "to"
    if which in ("two", "three"):
        shutil.copytree(small if which == "two" else run, out)
        (out / "head.safetensors").unlink(missing_ok=True)
        edit(out, final=True)
    out = {"small": small, "other": run}.get(which, out)
    to = exported("speculators", "dflash") if which == "other" else to
    p = export_py("--from", out, "--to", to, "--format", kind, "--algorithm", algorithm)
    assert p.returncode == 2 and flag in p.stderr and "Traceback" not in p.stderr, p.stderr
    assert which == "other" or not to.exists()


@pytest.mark.parametrize("below", ["/proc", "file"])
def test_a_directory_that_cannot_be_written_is_refused(small, tmp_path, below):
    (tmp_path / "file").write_text("")
    to = tmp_path / below / "to"
    p = export_py("--from", small, "--to", to, "--format", "specforge")
    assert p.returncode == 2 and f"--to {to} cannot be written" in p.stderr and "Traceback" not in p.stderr, p.stderr


def test_bad_flags_are_refused():
    p = export_py("--from", "x", "--to", "y", "--format", "vllm")
    assert p.returncode == 2 and p.stderr.startswith("refused: ") and "specforge" in p.stderr


def test_dflash_needs_neither_final_state_nor_head(small, tmp_path):
    p = export_py("--from", small, "--to", tmp_path / "to", "--format", "specforge")
    assert p.returncode == 0, p.stderr
    row = HiddenStates(small).index["row"][0].as_py()
    given = torch.load(tmp_path / f"to/row_{row:09d}.ckpt")
    assert given["hidden_states"].equal(HiddenStates(small)[0]["hidden_states"])
    config = json.loads((tmp_path / "to/draft_config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == [6, 3]


def files(folder):
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()
            and ".export" not in f.parts and f.suffix not in (".json", ".yaml")}


def test_specforge_gets_only_what_it_can_train_on(run, tmp_path):
    """Two supervised tokens must be neighbours, or its loader raises."""
    out = shutil.copytree(run, tmp_path / "out")
    first = pq.read_table(out / "index.parquet").to_pylist()[0]

    def sparse(tensors):
        mask = tensors["loss_mask"][first["start"]:first["start"] + first["length"]]
        mask[:] = 0
        mask[::2] = 1
    spoil(out, first["batch"], sparse)
    p = export_py("--from", out, "--to", tmp_path / "to", "--format", "specforge")
    assert p.returncode == 0 and "no two adjacent supervised tokens': 1" in p.stdout, p.stdout + p.stderr
    assert not (tmp_path / f"to/row_{first['row']:09d}.ckpt").exists()
    assert len(list((tmp_path / "to").glob("*.ckpt"))) == len(HiddenStates(run)) - 1


def test_a_growing_output_is_exported_as_it_grows(run, growing, tmp_path):
    """Excluded samples are left out, and the data set numbers what is there without a gap, then the rest."""
    (out, rows, excluded), to = growing, tmp_path / "to"
    for step in ("growing", "complete"):
        if step == "complete":
            missing = {f.name for f in (run / "batches").iterdir()} - {f.name for f in (out / "batches").iterdir()}
            shutil.copy(run / "batches" / missing.pop(), out / "batches")
            edit(out, complete=True, excluded={str(excluded): "bad numbers"})
            rows = [row for row in HiddenStates(run).index["row"].to_pylist() if row != excluded]
        p = export_py("--from", out, "--to", to, "--format", "speculators")
        assert p.returncode == 0 and "'excluded': 1" in p.stdout, p.stdout + p.stderr
        assert ("the same command" in p.stdout) == (step == "growing")
        with pa.ipc.open_stream(to / "data-00000-of-00001.arrow") as stream:
            table = stream.read_all()
        states = sorted((to / "hidden_states").iterdir(), key=lambda f: int(f.stem[3:]))
        assert [f.name for f in states] == [f"hs_{i}.safetensors" for i in range(len(rows))]
        data = HiddenStates(run)
        place = {row: i for i, row in enumerate(data.index["row"].to_pylist())}
        for row, ids, file in zip(rows, table["input_ids"].to_pylist(), states, strict=True):
            assert ids == data[place[row]]["input_ids"].tolist() == load_file(file)["token_ids"].tolist()


@pytest.fixture(scope="module")
def bucket(run, tmp_path_factory):
    """`run` in a real S3: environment for it; it is s3://b/run."""
    folder = tmp_path_factory.mktemp("bucket")
    with S3Server(folder / "s3") as server:
        server.make_bucket("b")
        shutil.copytree(run, folder / "s3/b/run")
        yield server.environ()


def test_export_from_s3_equals_the_local_one(bucket, exported, tmp_path):
    to = tmp_path / "to"
    p = subprocess.run([sys.executable, ROOT / "export.py", "--from", "s3://b/run/", "--to", to, "--format",
                        "speculators"], env=bucket, capture_output=True, text=True)
    assert p.returncode == 0, p.stderr
    assert files(to) == files(exported("speculators", "dflash"))
    assert not list(to.rglob("*.tmp"))  # batches that were fetched are gone


def test_killed_export_goes_on_and_ends_the_same(bucket, exported, tmp_path):
    to = tmp_path / "to"
    command = [sys.executable, ROOT / "export.py", "--from", "s3://b/run", "--to", to, "--format", "speculators",
               "--jobs", "1"]
    p = subprocess.Popen(command, env=bucket, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    done = until(lambda: list(to.glob(".export/done/*.parquet")), p)
    p.send_signal(signal.SIGKILL)
    p.wait()
    assert not (to / "state.json").exists()
    before = {f: f.stat().st_mtime_ns for f in done}
    (to / "hidden_states/hs_99.safetensors.tmp").write_bytes(b"torn")
    p = subprocess.run(command, env=bucket, capture_output=True, text=True)
    assert p.returncode == 0, p.stderr
    assert {f: f.stat().st_mtime_ns for f in done} == before  # what was done is not done again
    assert files(to) == files(exported("speculators", "dflash")) and not list(to.rglob("*.tmp"))


def test_an_order_to_stop_leaves_with_3(bucket, tmp_path):
    command = [sys.executable, ROOT / "export.py", "--from", "s3://b/run", "--to", tmp_path / "to", "--format",
               "specforge", "--jobs", "1"]
    p = subprocess.Popen(command, env=bucket, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until((tmp_path / "to/.export/done").exists, p)
    p.terminate()
    assert "same command goes on" in p.communicate(timeout=60)[1] and p.returncode == 3


def test_make_export(run, tmp_path):
    p = subprocess.run(["make", "--no-print-directory", f"PY={sys.executable}", "export", f"OUT={run}",
                        f"TO={tmp_path / 'to'}", "FORMAT=modelopt", "ALGORITHM=eagle3"], cwd=ROOT,
                       capture_output=True, text=True)
    assert p.returncode == 0, p.stdout + p.stderr
    assert len(list((tmp_path / "to").glob("*.pt"))) == len(HiddenStates(run))


def test_the_example_of_training_learns(run):
    p = subprocess.run([sys.executable, ROOT / "tests/train_demo.py", "--out", run, "--steps", "20"],
                       capture_output=True, text=True)
    assert p.returncode == 0, p.stdout + p.stderr
    last = json.loads(p.stdout.splitlines()[-1])
    assert last["loss_after"] < 0.9 * last["loss_before"], p.stdout


def test_files_of_somebody_else_in_the_directory_stay(run, tmp_path):
    kept = tmp_path / "to/thesis/notes.tmp"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    for _ in range(2):
        p = export_py("--from", run, "--to", tmp_path / "to", "--format", "specforge")
        assert p.returncode == 0, p.stderr
    assert kept.read_text() == "mine"


def test_an_output_of_extract_is_no_place_for_an_export(run):
    p = export_py("--from", run, "--to", run, "--format", "specforge")
    assert p.returncode == 2 and "output of extract.py" in p.stderr
