"""What only a GPU can show: the fast kernels against transformers alone, one compilation, memory that runs short.

    make test-gpu          (python -m pytest tests/test_gpu.py; skipped where torch sees no GPU)
"""
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import bench
import extract
import warmup

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
SHAPE = ["--tokens", "1024", "--max-len", "300", "--layers", "0,3,7"]
PATHS = {"bf16": [], "fp32": ["--compute-dtype", "fp32", "--dtype", "fp32"],
         "fp8": ["--dtype", "fp8", "--final"], "split": ["--forward-tokens", "300"],
         "alone": ["--samples-per-forward", "1"]}
LIMIT = {"fp32": "2e-3"}  # of the rest, the oracle's own for what is stored and computed in bf16 and fp8


def command(script, place, folder, *args):
    flags = ["--model", place.model, "--work", folder / "work", *SHAPE, *args]
    if script == "extract.py":
        flags += ["--data", place.chat, "--out", folder / "out", "--stage", folder / "stage"]
    return subprocess.run([sys.executable, ROOT / script, *map(str, flags)], text=True, capture_output=True)


@pytest.fixture(scope="module")
def runs(place, tmp_path_factory):
    """{name: (its folder, its finished process)}, each made when it is first asked for."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, command("extract.py", place, folder, *PATHS[name])
        return made[name]
    return get


@pytest.mark.parametrize("name", PATHS)
def test_every_sample_equals_transformers_alone(place, runs, name):
    folder, process = runs(name)
    assert process.returncode == 0, process.stdout + process.stderr
    how = ["--dtype", "fp32" if name == "fp32" else "bf16", "--device", "cuda", "--samples", "all"]
    how += ["--tolerance", LIMIT[name]] if name in LIMIT else []
    judged = subprocess.run([sys.executable, ROOT / "tests" / "oracle.py", "--out", folder / "out", "--model",
                             place.model, *how], text=True, capture_output=True)
    assert judged.returncode == 0, judged.stdout + judged.stderr


def test_other_samples_of_a_row_change_nothing_at_all(runs):
    checks = [line for line in runs("bf16")[1].stdout.splitlines() if "start checks passed" in line]
    assert json.loads(checks[0].split("passed: ")[1])["isolation"] == 0.0


def test_a_split_forward_leaves_everything_but_the_states_as_it_is(runs):
    whole, split = (sorted((runs(name)[0] / "out" / "batches").iterdir()) for name in ("bf16", "split"))
    for one, other in zip(whole, split, strict=True):
        one, other = load_file(one), load_file(other)
        for name in one.keys() - {"hidden_states"}:
            assert np.array_equal(one[name], other[name]), name


def test_a_second_process_finds_everything_compiled_and_auto_finds_a_size(place, tmp_path):
    process = command("warmup.py", place, tmp_path, "--forward-tokens", "auto")
    assert process.returncode == 0, process.stdout + process.stderr
    report = json.loads(process.stdout.splitlines()[-1])
    assert report["second_process"]["triton_compiled"] == report["second_process"]["graphs_compiled"] == 0
    assert report["found_forward_tokens"] in (512, 1024)
    process = command("extract.py", place, tmp_path, "--forward-tokens", "auto")
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.fixture
def extractor(place):
    """A proved extractor of 1,024 tokens, and its slot."""
    o = extract.Options(tokens=1024, max_len=300)
    extractor, slot = warmup.loaded(o, place.model, [0, 3, 7], False)
    warmup.prepare(extractor)
    return extractor, slot


def samples(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 200, n).astype(np.int32) for n in lengths]


def states(slot, tokens):
    slot.copied.synchronize()
    return slot.host["hidden_states"][:tokens].float()


MIXES = [[300, 300, 300], [7] * 100, [1, 299, 2, 250], [64] * 16, [1]]


def test_no_mix_of_lengths_compiles_anything_after_the_first_batch(extractor):
    x, slot = extractor
    x.batch(samples([200, 30]), slot)
    torch.cuda.synchronize()
    count = bench.compilations()
    for lengths in MIXES:
        x.batch(samples(lengths), slot)
    torch.cuda.synchronize()
    assert count() == 0


def test_a_batch_that_does_not_fit_into_memory_is_split_and_said_so(extractor, capfd):
    x, slot = extractor
    ids = samples([250, 300, 40, 100])
    x.batch(ids, slot)
    whole, row = states(slot, 690).clone(), x.row

    def short_of_memory(ids, sink, fill=0):  # a real allocation that is too large, whenever a row is long
        if sum(map(len, ids)) > 400 or fill > 400:
            torch.empty(1 << 50, device="cuda")
        return row(ids, sink, fill)
    x.row = short_of_memory
    assert x.batch(ids, slot) == []
    assert warmup.relative(states(slot, 690), whole) < 0.02
    assert x.splits > 0 and capfd.readouterr().out.count("out of GPU memory") == 1


def test_a_sample_that_does_not_fit_alone_is_named(extractor):
    x, slot = extractor
    row = x.row

    def short_of_memory(ids, sink, fill=0):
        if any(len(one) == 300 for one in ids):
            torch.empty(1 << 50, device="cuda")
        return row(ids, sink, fill)
    x.row = short_of_memory
    assert x.batch(samples([50, 300, 20]), slot) == [1]


def test_the_copy_on_the_host_is_the_one_on_the_device(extractor):
    x, slot = extractor
    x.batch(samples([111, 222]), slot)
    torch.cuda.synchronize()
    assert torch.equal(slot.host["hidden_states"][:333], slot.device["hidden_states"][:333].cpu())


def test_two_shards_share_a_gpu_through_make(place, tmp_path):
    knobs = {"PY": sys.executable, "MODEL": place.model, "DATA": place.chat, "OUT": tmp_path / "out", "GPUS": 2,
             "WORK": tmp_path / "work", "STAGE": tmp_path / "stage", "TOKENS": 1024, "MAX_LEN": 300,
             "LAYERS": "0,3,7", "CUDA_VISIBLE_DEVICES": "0,0"}
    process = subprocess.run(["make", "-C", ROOT, "--no-print-directory", "extract",
                              *(f"{k}={v}" for k, v in knobs.items())], text=True, capture_output=True,
                             env=os.environ | {"CUDA_VISIBLE_DEVICES": "0,0"})
    assert process.returncode == 0, process.stdout + process.stderr
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["complete"]


def test_flash_qla_gives_what_transformers_alone_gives_and_keeps_samples_apart():
    pytest.importorskip("flash_qla")
    o, plan = extract.Options(tokens=2048, max_len=1024), bench.Plan([], [0, 3], 512)
    model = bench.decoder(4, vocab_size=1000, hidden_size=512, intermediate_size=1024, num_attention_heads=4,
                          num_key_value_heads=2)  # the delta rule's heads are of the real size
    report = warmup.prepare(extract.Extractor(o, plan, model))  # raises where they are too far apart
    assert report["kernels"]["torch_chunk_gated_delta_rule"] == warmup.RULES[True]
    assert report["isolation"] == 0.0


def test_flash_qla_gives_what_fla_gives_whatever_the_lengths():
    pytest.importorskip("flash_qla")
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1000, 2, 128, device="cuda", dtype=torch.bfloat16)
    v = torch.randn(1, 1000, 6, 128, device="cuda", dtype=torch.bfloat16)
    g, beta = -torch.rand(1, 1000, 6, device="cuda"), torch.rand(1, 1000, 6, device="cuda").bfloat16()
    for lengths in ([1000], [1, 63, 64, 65, 807], [999, 1], [8] * 125):
        cpu = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
        with torch.no_grad(), warmup.packing(cpu.cuda(), cpu, None, None):
            one, other = (rule(q, k, v, g, beta, True) for rule in (warmup.rule_by_fla, warmup.rule_by_flash_qla))
        assert warmup.relative(one.float(), other.float()) < 0.01, lengths
