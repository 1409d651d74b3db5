"""The tiny model, and the oracle that judges outputs: right ones pass, each kind of wrong one fails.

    python -m pytest tests/test_oracle.py
"""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import oracle
import tiny
from s3 import S3Server

LAYERS = [1, 4, 7]  # the last layer is where the final norm can go wrong
BATCHES = [[0, 2, 4, 6, 7], [1, 3, 5]]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a tiny model and 8 lines of chat data."""
    place = tmp_path_factory.mktemp("oracle")
    tiny.make_model(place / "model")
    tiny.make_chat(place / "chat.jsonl", 8, seed=3)
    return place


@pytest.fixture(scope="module")
def model(place):
    return oracle.load_model(place / "model")


@pytest.fixture(scope="module")
def tokenizer(place):
    return AutoTokenizer.from_pretrained(place / "model")


@pytest.fixture(scope="module")
def right(place, model, tokenizer):
    """A right output of two batches, made one sample at a time: nothing is packed, nothing can leak."""
    return write_output(place / "right", place, model, tokenizer)


@pytest.fixture
def out(right, tmp_path):
    """A copy of the right output, to spoil."""
    return shutil.copytree(right, tmp_path / "out")


def write_output(out, place, model, tokenizer, store="fp32"):
    """Write the layout that extract.py must produce, states stored as `store` (fp32, bf16 or fp8)."""
    lines, index = (place / "chat.jsonl").read_bytes().splitlines(), []
    (out / "batches").mkdir(parents=True)
    for batch, members in enumerate(BATCHES):
        asked = [oracle.expected_tokens(lines[row], tokenizer, {}) for row in members]
        ids = [torch.tensor(one[:150], dtype=torch.int32) for one, _ in asked]
        mask = [torch.tensor(m[:150]) if m else torch.arange(len(one)) % 2 for one, (_, m) in zip(ids, asked)]
        states, final = map(torch.cat, zip(*[oracle.solo_states(model, one, LAYERS, True) for one in ids]))
        bounds = torch.tensor([0] + [len(one) for one in ids]).cumsum(0)
        index += [{"id": f"s{row}", "row": row, "batch": batch, "start": int(start), "length": len(one),
                   "supervised": int(m.sum())} for row, start, one, m in zip(members, bounds, ids, mask)]
        tensors = {"hidden_states": states, "last_hidden_state": final, "input_ids": torch.cat(ids),
                   "loss_mask": torch.cat(mask).to(torch.uint8), "cu_seqlens": bounds.int(),
                   "sample_index": torch.tensor(members)}
        if store != "fp32":
            tensors["last_hidden_state"] = final.bfloat16()
            tensors["hidden_states"] = states.bfloat16()
        if store == "fp8":
            scale = states.unflatten(1, (len(LAYERS), -1)).abs().amax(2) / 448
            tensors["hidden_states_scale"] = scale
            states = states / scale.repeat_interleave(tiny.HIDDEN, dim=1)
            tensors["hidden_states"] = states.to(torch.float8_e4m3fn)
        meta = {"batch": batch, "fingerprint": "f", "layers": LAYERS}
        save_file(tensors, out / f"batches/batch_{batch:06d}.safetensors", {"meta": json.dumps(meta)})
    pq.write_table(pa.Table.from_pylist(index), out / "index.parquet")
    (out / "manifest.json").write_text(json.dumps({
        "fingerprint": "f", "layers": LAYERS, "dtype": store, "compute_dtype": "fp32", "final": True,
        "hidden_size": tiny.HIDDEN}))
    return out


def spoil(out, change):
    """Rewrite batch 0 of `out` with its tensors as `change(tensors)` leaves them."""
    file = out / "batches/batch_000000.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, file,
              {"meta": json.dumps({"batch": 0, "fingerprint": "f", "layers": LAYERS})})


def sequences(tensors):
    return tensors["input_ids"].split(tensors["cu_seqlens"].diff().tolist())


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next", "llama"])
def test_tiny_model_loads_without_missing_keys(kind, tmp_path):
    tiny.make_model(tmp_path / "model", kind)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


def test_tiny_model_is_the_same_every_time(place, tmp_path):
    tiny.make_model(tmp_path / "model")
    again = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    assert again == {file.name: file.read_bytes() for file in (place / "model").iterdir()}


def test_right_output_passes(right, place, model, tokenizer):
    result = oracle.check(right, model, data=place / "chat.jsonl", tokenizer=tokenizer)
    assert result["ok"] and result["samples"] == 8 and result["largest"] < 1e-6, result


@pytest.mark.parametrize("store, least", [("bf16", 1e-3), ("fp8", 1e-2)])
def test_right_output_in_a_smaller_dtype_passes(store, least, place, model, tokenizer, tmp_path):
    result = oracle.check(write_output(tmp_path / "out", place, model, tokenizer, store), model)
    assert result["ok"] and result["largest"] > least, result


def test_swapped_states_fail(out, model):
    def swap(tensors):
        parts = list(tensors["hidden_states"].split(tensors["cu_seqlens"].diff().tolist()))
        parts[1], parts[2] = parts[2], parts[1]
        tensors["hidden_states"] = torch.cat(parts)
    spoil(out, swap)
    result = oracle.check(out, model)
    assert not result["ok"] and {2, 4} == {row for _, _, row, _ in result["worst"]}, result


def test_swapped_rows_fail(out, model):
    spoil(out, lambda tensors: tensors.update(sample_index=torch.tensor([2, 0, 4, 6, 7])))
    assert "sample_index" in oracle.check(out, model)["problems"][0]


def test_states_of_the_layer_before_fail(out, model):
    def shift(tensors):
        before = [layer - 1 for layer in LAYERS]
        states = [oracle.solo_states(model, ids, before)[0] for ids in sequences(tensors)]
        tensors["hidden_states"] = torch.cat(states)
    spoil(out, shift)
    result = oracle.check(out, model)
    assert {name for _, name, _, _ in result["worst"]} == {"layer 1", "layer 4", "layer 7"}, result


def test_final_norm_applied_fails(out, model):
    def norm(tensors):
        with torch.no_grad():
            tensors["last_hidden_state"] = model.get_decoder().norm(tensors["last_hidden_state"])
    spoil(out, norm)
    assert {name for _, name, _, _ in oracle.check(out, model)["worst"]} == {"final"}


def test_leaking_neighbours_fail(out, model):
    def leak(tensors):
        tensors["hidden_states"] = oracle.solo_states(model, tensors["input_ids"], LAYERS)[0]
    spoil(out, leak)
    rows = {row for _, _, row, _ in oracle.check(out, model)["worst"]}
    assert rows == {2, 4, 6, 7}  # all but the first


def test_not_a_number_fails(out, model):
    spoil(out, lambda tensors: tensors["hidden_states"][5].fill_(float("nan")))
    assert oracle.check(out, model)["worst"][0][0] == float("inf")


def test_corrupted_mask_fails(out, model):
    spoil(out, lambda tensors: tensors.update(loss_mask=1 - tensors["loss_mask"].roll(1)))
    assert "supervised" in oracle.check(out, model)["problems"][0]


@pytest.mark.parametrize("where, value", [(0, 1), (2, 0), (2, 10_000), (-1, 5)])
def test_corrupted_cu_seqlens_fail(where, value, out, model):
    spoil(out, lambda tensors: tensors["cu_seqlens"][where].fill_(value))
    assert "cu_seqlens" in oracle.check(out, model)["problems"][0]


def test_moved_boundary_fails(out, model):
    spoil(out, lambda tensors: tensors["cu_seqlens"][1].add_(1))
    assert "cu_seqlens differ" in oracle.check(out, model)["problems"][0]


def test_missing_batch_fails_unless_partial(out, model):
    (out / "batches/batch_000000.safetensors").unlink()
    assert not oracle.check(out, model)["ok"] and oracle.check(out, model, partial=True)["ok"]


def test_cut_off_file_fails(out, model):
    file = out / "batches/batch_000000.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "cannot be read" in oracle.check(out, model)["problems"][0]


def test_tokens_of_another_line_fail(right, place, model, tokenizer, tmp_path):
    lines = (place / "chat.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_bytes(b"".join([lines[1], lines[0], *lines[2:]]))
    result = oracle.check(right, model, data=tmp_path / "other.jsonl", tokenizer=tokenizer)
    assert ["other token ids" in problem for problem in result["problems"][:2]] == [True, True]


@pytest.mark.parametrize("code, ruin", [
    (0, None), (1, "batches/batch_000001.safetensors"), (2, "manifest.json"), (2, "index.parquet")])
def test_exit_code(code, ruin, out, place, monkeypatch, capsys):
    if ruin:
        (out / ruin).unlink()
    monkeypatch.setattr("sys.argv", ["oracle.py", "--out", str(out), "--model", str(place / "model")])
    assert oracle.main() == code
    said = capsys.readouterr()
    assert (ruin in said.err) if code == 2 else said.out.splitlines()[-1].startswith("compared ")


@pytest.fixture
def verify(place, monkeypatch, capsys):
    """verify(out, ...) -> (exit code, standard output, standard error) of the command"""
    def run(out, *args):
        monkeypatch.setattr("sys.argv", ["oracle.py", "--out", str(out), "--model", str(place / "model"), *args])
        return oracle.main(), *capsys.readouterr()
    return run


@pytest.fixture(scope="module")
def bucket(right, tmp_path_factory):
    """A server with the right output in s3://bucket/run."""
    with S3Server(tmp_path_factory.mktemp("s3") / "data") as server:
        server.make_bucket("bucket")
        shutil.copytree(right, server.directory / "bucket/run")
        yield server


@pytest.fixture
def remote(bucket, monkeypatch):
    for name, value in bucket.environ().items():
        monkeypatch.setenv(name, value)
    return bucket.directory / "bucket"


def test_of_an_output_in_s3_no_more_batches_are_fetched_than_the_samples_need(remote, verify):
    code, said, _ = verify("s3://bucket/run", "--samples", "2")
    assert code == 0 and "compared 2 samples" in said
    held = int(said.partition("fetched batches of ")[2].split()[0])
    assert held in (3, 5)  # one of the two


def test_an_output_in_s3_is_checked_whole(remote, verify):
    code, said, _ = verify("s3://bucket/run", "--samples", "all")
    assert code == 0 and "compared 8 samples" in said


def test_wrong_states_in_s3_fail(remote, out, verify):
    spoil(out, lambda tensors: tensors["hidden_states"].mul_(2))
    shutil.copytree(out, remote / "wrong")
    assert verify("s3://bucket/wrong", "--samples", "all")[0] == 1


def test_a_batch_missing_from_a_complete_output_in_s3_is_named(remote, out, verify):
    (out / "manifest.json").write_text(json.dumps(json.loads((out / "manifest.json").read_text()) | {"complete": True}))
    (out / "batches/batch_000001.safetensors").unlink()
    shutil.copytree(out, remote / "lacking")
    code, said, _ = verify("s3://bucket/lacking", "--samples", "1")  # the other batch has as many
    assert code == 1 and "INCONSISTENT batch_000001.safetensors is not there" in said


def test_a_batch_missing_from_an_output_in_s3_is_no_fault_with_partial(remote, out, verify):
    (out / "batches/batch_000001.safetensors").unlink()
    shutil.copytree(out, remote / "less")
    code, said, _ = verify("s3://bucket/less", "--samples", "all", "--partial")
    assert code == 0 and "compared 5 samples" in said


def test_a_batch_of_another_size_in_s3_is_named_without_being_fetched(remote, out, verify):
    file = out / "batches/batch_000001.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])
    shutil.copytree(out, remote / "cut")
    code, said, _ = verify("s3://bucket/cut", "--samples", "all")
    assert code == 1 and "INCONSISTENT batch_000001.safetensors has" in said and "compared 5 samples" in said


def test_batches_in_s3_of_another_size_in_all_than_the_manifest_says_fail(remote, out, verify):
    size = sum(file.stat().st_size for file in (out / "batches").iterdir())
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(manifest | {"counts": {"bytes": size + 1}}))
    shutil.copytree(out, remote / "other")
    code, said, _ = verify("s3://bucket/other", "--samples", "1")
    assert code == 1 and f"the batches have {size:,} bytes, the manifest says {size + 1:,}" in said


def test_nothing_at_a_place_in_s3_is_said(remote, verify):
    code, _, words = verify("s3://bucket/nothing")
    assert code == 2 and "s3://bucket/nothing/manifest.json" in words


def test_a_model_that_is_nowhere_is_said_at_once(right):
    """Without the hub's retries, which transformers would wait for."""
    env = os.environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    p = subprocess.run(["make", f"PY={sys.executable}", "verify", f"OUT={right}", "MODEL=no/such"], env=env, text=True,
                       cwd=Path(oracle.__file__).parent.parent, capture_output=True)
    assert p.returncode == 2 and "Retrying" not in p.stderr
    assert "MODEL no/such: no model directory, and not to be had from the hub" in p.stderr


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
                                   MemoryError()], ids=["gpu", "host"])
def test_memory_that_runs_out_is_a_message_with_the_way_out(right, verify, monkeypatch, error):
    def fail(*args, **more):
        raise error
    monkeypatch.setattr(oracle, "solo_states", fail)
    code, _, words = verify(right)
    assert code == 2 and "--dtype bf16" in words and "--device cpu" in words


@pytest.mark.parametrize("free, dtype", [(10**10, "fp32"), (10**6, "bf16")])
def test_the_model_runs_in_fp32_where_that_fits(right, verify, monkeypatch, free, dtype):
    monkeypatch.setattr(oracle.psutil, "virtual_memory", lambda: type("Memory", (), {"available": free}))
    code, said, _ = verify(right, "--device", "cpu", "--samples", "1")
    assert code == 0 and f"transformers alone in {dtype} on cpu" in said


def test_largest_and_median_error_are_printed_by_layer(right, verify):
    said = verify(right)[1].splitlines()
    assert [line.split()[:2] for line in said if "median" in line] == [
        ["layer", "1"], ["layer", "4"], ["layer", "7"], ["final", "largest"]]


def test_data_that_is_no_jsonl_file_is_refused(right, verify, tmp_path):
    code, _, words = verify(right, "--data", str(tmp_path))
    assert code == 2 and "not one JSONL file" in words
