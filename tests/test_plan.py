"""The plan and what is around it, in process: packing, layers, file layout, fingerprint, rows, options.

    python -m pytest tests/test_plan.py
"""
import errno
import json
import math
import os
import random
import shutil
from dataclasses import fields
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import extract
from export import OutputError, open_output
from extract import Options, Refused
from warmup import layer_ids, model_directory


# ---- packing

def lengths(n, seed=0, middle=400, longest=4096):
    rng = random.Random(seed)
    return [max(1, min(longest, round(middle * math.exp(rng.gauss(-0.5, 1))))) for _ in range(n)]


def totals(sizes, batches):
    out = np.zeros(max(batches) + 1, np.int64)
    np.add.at(out, batches, sizes)
    return out


def test_every_sample_is_packed_once_and_batch_numbers_have_no_gap():
    batches = extract.pack(lengths(5000), 32768)
    assert len(batches) == 5000
    assert set(batches.tolist()) == set(range(int(batches.max()) + 1))


@pytest.mark.parametrize("capacity", [4096, 5000, 32768])
def test_no_batch_is_over_capacity(capacity):
    sizes = lengths(5000, seed=1)
    assert totals(sizes, extract.pack(sizes, capacity)).max() <= capacity


def test_packing_is_deterministic():
    sizes = lengths(3000, seed=2)
    assert extract.pack(sizes, 32768).tolist() == extract.pack(list(sizes), 32768).tolist()


@pytest.mark.parametrize("middle", [400, 2300])
def test_batches_are_nearly_full(middle):
    sizes = lengths(20000, seed=3, middle=middle)
    full = totals(sizes, extract.pack(sizes, 32768))[:-8]  # the last ones are what was left
    assert full.mean() > 0.995 * 32768


def test_at_most_a_window_of_batches_is_open_at_a_time():
    batches = extract.pack(lengths(3000, seed=4), 4096, window=8).tolist()
    first, last = {}, {}
    for i, b in enumerate(batches):
        first.setdefault(b, i)
        last[b] = i
    assert max(sum(first[b] <= i < last[b] for b in first) for i in range(0, len(batches), 7)) <= 8


def test_a_sample_goes_to_the_first_open_batch_with_room():
    assert extract.pack([6, 5, 4, 3, 2], 10).tolist() == [0, 1, 0, 1, 1]


def test_a_full_window_closes_its_fullest_batch():
    assert extract.pack([6, 7, 8, 4, 3], 10, window=2).tolist() == [0, 1, 2, 0, 3]


def test_samples_that_fill_a_batch_each():
    assert extract.pack([8] * 20, 8).tolist() == list(range(20))


def test_one_sample():
    assert extract.pack([1], 8).tolist() == [0]


# ---- layers

@pytest.mark.parametrize("rule, depth, ids", [
    ("dflash:5", 64, [1, 16, 31, 46, 61]), ("dflash:1", 64, [32]), ("dflash:2", 64, [1, 61]),
    ("eagle3", 64, [1, 31, 60]), ("eagle3", 36, [1, 17, 32]), ("5", 8, [5]), ("0,7", 8, [0, 7]),
    ("7,1,4", 8, [7, 1, 4]), ("3,3,1", 8, [3, 3, 1])])
def test_layer_rules_and_lists(rule, depth, ids):
    assert layer_ids(rule, depth) == ids


@pytest.mark.parametrize("rule", ["8", "1,8", "-1", "1,-2", "1,,2", "1.5", "", "dflash", "dflash:",
                                  "dflash:0", "dflash:x", "all", "no/such/config.json", "0x1", "1 2"])
def test_other_layers_are_refused_with_the_value(rule):
    with pytest.raises(Refused) as e:
        layer_ids(rule, 8)
    assert rule in str(e.value) and "0 to 7" in str(e.value)


@pytest.mark.parametrize("directory", [False, True])
def test_layers_of_a_drafter_config(tmp_path, directory):
    config = {"num_hidden_layers": 5, "dflash_config": {"target_layer_ids": [1, 3, 5], "block_size": 16}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert layer_ids(str(tmp_path if directory else tmp_path / "config.json"), 8) == [1, 3, 5]


@pytest.mark.parametrize("text", ["", "[1, 2]", "{}", '{"dflash_config": {}}', '{"target_layer_ids": [1, 8]}',
                                  '{"target_layer_ids": ["1"]}', '{"target_layer_ids": 3}',
                                  '{"target_layer_ids": [true]}', '{"target_layer_ids": null}',
                                  '{"dflash_config": [1]}', '{"dflash_config": "x"}'])
def test_a_drafter_config_without_usable_layers_is_refused(tmp_path, text):
    (tmp_path / "drafter.json").write_text(text)
    with pytest.raises(Refused, match="drafter.json"):
        layer_ids(str(tmp_path / "drafter.json"), 8)


# ---- plans

READY = [{"id": f"s{i}", "input_ids": [(7 * i + j) % 600 for j in range(3 + 11 * i % 90)]} for i in range(40)]


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def case(place, tmp_path):
    """case(**options) -> the plan of a few token sequences, in WORK tmp_path/work."""
    def plan(**more):
        o = Options(**{"model": str(place.model), "data": str(tmp_path / "ready.jsonl"),
                       "out": str(tmp_path / "out"), "work": str(tmp_path / "work"), "plan_only": True,
                       "tokens": 256, "max_len": 100, "layers": "1,4"} | more)
        extract.check_options(o)
        work = Path(o.work)
        for name in ("plan", "markers"):
            (work / name).mkdir(parents=True, exist_ok=True)
        return extract.get_plan(o, work, model_directory(o.model), open_output(o.out))
    write_lines(tmp_path / "ready.jsonl", READY)
    return plan


def test_a_plan_holds_every_sample_once(case):
    assert sorted(case().samples["row"].tolist()) == list(range(40))


def test_samples_of_a_batch_keep_the_order_of_the_data(case):
    plan = case()
    for batch in range(plan.counts["batches"]):
        rows = plan.rows(batch)["row"].tolist()
        assert rows == sorted(rows)


def test_samples_of_a_batch_lie_end_to_end(case):
    plan = case()
    for batch in range(plan.counts["batches"]):
        rows = plan.rows(batch)
        ends = np.cumsum(rows["length"])
        assert rows["start"].tolist() == [0, *ends[:-1]] and plan.batch_tokens[batch] == ends[-1] <= 256


def test_token_ids_of_a_plan_are_those_of_the_data(case):
    plan = case()
    for batch in range(plan.counts["batches"]):
        for row, ids in zip(plan.rows(batch)["row"], plan.gather(plan.input_ids, batch)):
            assert ids.tolist() == READY[row]["input_ids"]


def test_the_counts_of_a_plan_are_right(case):
    plan = case()
    sizes = [plan.layout(b)[2] for b in range(plan.counts["batches"])]
    tokens = sum(len(r["input_ids"]) for r in READY)
    assert plan.counts == {
        "samples": 40, "tokens": tokens, "supervised": tokens, "batches": len(sizes), "bytes": sum(sizes),
        "largest": max(sizes), "skipped": 0, "skipped_by_reason": {}, "turns_lost": 0}


def test_the_index_names_every_sample(case, tmp_path):
    plan = case()
    rows = pq.read_table(tmp_path / "work/plan/index.parquet").to_pylist()
    assert [r["id"] for r in rows] == [f"s{row}" for row in plan.samples["row"]]
    assert set(rows[0]) == {"id", "row", "batch", "start", "length", "supervised"}


def test_a_plan_is_made_once(case, tmp_path):
    case()
    before = (tmp_path / "work/plan/samples.npy").stat()
    case()
    after = (tmp_path / "work/plan/samples.npy").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_planning_alone_writes_nothing_to_out(case, tmp_path):
    case()
    assert not (tmp_path / "out").exists()


def test_a_plan_without_plan_json_is_made_anew(case, tmp_path):
    before = case()
    known, samples = before.known, before.samples.tolist()
    del before  # while somebody has a plan in memory, no other is made in its place
    (tmp_path / "work/plan/plan.json").unlink()
    (tmp_path / "work/plan/tokens.bin").write_bytes(b"torn")
    after = case()
    assert after.known == known and after.samples.tolist() == samples
    assert len(after.input_ids) == after.counts["tokens"]


def test_a_plan_that_was_killed_half_way_is_made_anew(case, tmp_path):
    known, file = case().known, tmp_path / "work/plan/plan.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"whole": False}))
    assert case().known == known


def test_a_plan_that_a_running_shard_has_in_memory_is_not_replaced(case):
    running = case(tokens=256)
    with pytest.raises(Refused, match="another plan"):
        case(tokens=512)
    assert running.tokens == 256


def test_data_that_was_touched_is_the_same_run(case, tmp_path):
    before = case()
    (tmp_path / "work/markers/.done_000000").write_text("{}")
    os.utime(tmp_path / "ready.jsonl", (1, 1))
    assert case().fingerprint == before.fingerprint


def test_other_settings_replace_a_plan_without_markers(case):
    assert case().tokens == 256
    assert case(tokens=512).tokens == 512


def test_what_a_replaced_plan_left_in_staging_is_named(case, tmp_path, capfd):
    left = tmp_path / "stage" / case().fingerprint
    left.mkdir(parents=True)
    (left / "batch_000001.safetensors").write_text("staged")
    case(tokens=512, stage=str(tmp_path / "stage"))
    assert f"{left} holds batches of the plan that this one replaces" in capfd.readouterr().out


def test_other_settings_are_refused_once_there_are_markers(case, tmp_path):
    case()
    (tmp_path / "work/markers/.done_000000").write_text("{}")
    with pytest.raises(Refused, match="tokens was 256, now 512"):
        case(tokens=512)


def test_markers_of_another_out_are_refused(case, tmp_path):
    case()
    (tmp_path / "work/markers/.done_000000").write_text("{}")
    with pytest.raises(Refused, match="elsewhere"):
        case(out=str(tmp_path / "elsewhere"))


@pytest.mark.parametrize("text", ["[1]", "not JSON", '{"fingerprint": 3}'])
def test_a_foreign_manifest_in_out_is_refused(case, tmp_path, text):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/manifest.json").write_text(text)
    with pytest.raises((Refused, OutputError), match="out"):
        case(plan_only=False)


# ---- layout of a batch file

@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp8"])
def test_a_planned_size_is_the_real_size_and_safetensors_loads_it(case, tmp_path, dtype, final):
    plan, file = case(dtype=dtype, final=final), tmp_path / "batch.safetensors"
    header, names, size = plan.layout(1)
    tokens, n = int(plan.batch_tokens[1]), len(plan.rows(1))
    generator = torch.Generator().manual_seed(0)
    arrays = {"input_ids": torch.arange(tokens, dtype=torch.int32), "sample_index": torch.arange(n),
              "cu_seqlens": torch.arange(n + 1, dtype=torch.int32),
              "loss_mask": torch.ones(tokens, dtype=torch.uint8)}
    for name, (wide, kind) in plan.states().items():
        arrays[name] = torch.randn(tokens, wide, generator=generator).to(kind)
    file.write_bytes(b"".join([header, *(extract.raw(arrays[name]) for name in names)]))
    assert file.stat().st_size == size
    loaded = load_file(file)
    assert loaded.keys() == arrays.keys()
    for name, tensor in arrays.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name].float(), tensor.float())


def test_the_metadata_of_a_batch_is_one_sorted_key(case, tmp_path):
    plan, file = case(), tmp_path / "batch.safetensors"
    header, _, size = plan.layout(2)
    file.write_bytes(header.ljust(size, b"\0"))
    with safe_open(file, "pt") as f:
        metadata = f.metadata()
    meta = json.loads(metadata.pop("meta"))
    assert not metadata and list(meta) == sorted(meta)
    assert meta == {"batch": 2, "convention": extract.CONVENTION, "fingerprint": plan.fingerprint,
                    "layers": [1, 4]}


def test_tensors_are_aligned_in_the_file(case):
    for dtype in ("bf16", "fp32", "fp8"):
        header, names, _ = case(dtype=dtype).layout(0)
        assert len(header) % 8 == 0
        described = json.loads(header[8:])
        sizes = {"I64": 8, "I32": 4, "F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1}
        assert all(described[n]["data_offsets"][0] % sizes[described[n]["dtype"]] == 0 for n in names)


# ---- fingerprint

@pytest.fixture
def fingerprint(place, tmp_path):
    """fingerprint(model=, data=, **options) -> the fingerprint of a plan made from nothing."""
    work, numbers = tmp_path / "works", count()

    def of(model=place.model, data=None, **more):
        data = data or write_lines(tmp_path / "ready.jsonl", READY[:5])
        o = Options(**{"model": str(model), "data": str(data), "out": str(tmp_path / "out"), "tokens": 256,
                       "max_len": 100, "plan_only": True} | more)
        folder = work / str(next(numbers))
        for name in ("plan", "markers"):
            (folder / name).mkdir(parents=True)
        path = model_directory(str(model))
        return extract.get_plan(o, folder, path, open_output(o.out)).fingerprint
    return of


@pytest.mark.parametrize("change", [
    {"layers": "1,4"}, {"final": True}, {"dtype": "fp8"}, {"compute_dtype": "fp32"}, {"tokens": 512},
    {"max_len": 99}, {"min_len": 2}, {"min_supervised": 2}, {"overlong": "skip"},
    {"template_args": '{"enable_thinking": false}'}], ids=lambda change: next(iter(change)))
def test_the_fingerprint_changes_with_what_determines_the_content(fingerprint, change):
    assert fingerprint(**change) != fingerprint()


@pytest.mark.parametrize("change", [
    {"num_shards": 4, "shard": 3}, {"uploads": 4}, {"upload_mbps": 5.0}, {"work": "elsewhere"},
    {"stage": "elsewhere"}, {"out": "elsewhere"}, {"plan_workers": 3}, {"forward_tokens": 128},
    {"samples_per_forward": 1}, {"eager": True}], ids=lambda change: next(iter(change)))
def test_the_fingerprint_does_not_change_with_how_a_run_is_done(fingerprint, change):
    assert fingerprint(**change) == fingerprint()


def test_layers_by_rule_by_list_and_by_drafter_are_the_same_run(fingerprint, tmp_path):
    (tmp_path / "drafter.json").write_text('{"dflash_config": {"target_layer_ids": [1, 2, 3, 4, 5]}}')
    rules = "dflash:5", "1,2,3,4,5", str(tmp_path / "drafter.json")
    assert len({fingerprint(layers=rule) for rule in rules}) == 1


def test_the_fingerprint_changes_with_one_letter_of_the_data(fingerprint, tmp_path):
    before, data = fingerprint(), tmp_path / "ready.jsonl"
    changed = tmp_path / "changed.jsonl"
    changed.write_bytes(data.read_bytes().replace(b"s3", b"s9"))
    assert fingerprint(data=changed) != before


def test_the_fingerprint_does_not_change_with_the_data_s_name_or_time(fingerprint, tmp_path):
    before = fingerprint()
    moved = shutil.copy(tmp_path / "ready.jsonl", tmp_path / "moved.jsonl")
    os.utime(moved, (1, 1))
    assert fingerprint(data=moved) == before


def test_the_fingerprint_does_not_change_with_a_copy_of_the_model(fingerprint, place, tmp_path):
    copy = shutil.copytree(place.model, tmp_path / "copy", copy_function=shutil.copyfile)
    assert fingerprint(model=copy) == fingerprint()


@pytest.mark.parametrize("file", ["first", "last"])
@pytest.mark.parametrize("end", [0, -1], ids=["begin", "end"])
def test_the_fingerprint_changes_with_one_byte_of_the_weights(fingerprint, place, tmp_path, file, end):
    copy = shutil.copytree(place.model, tmp_path / "copy")
    weights = sorted(copy.glob("*.safetensors"))[0 if file == "first" else -1]
    data = bytearray(weights.read_bytes())
    data[end or 8 + int.from_bytes(data[:8], "little")] ^= 1
    weights.write_bytes(data)
    assert fingerprint(model=copy) != fingerprint()


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("file, old, new", [
    ("chat_template.jinja", "There are no messages", "There are no messages at all"),
    ("tokenizer.json", "<tool_response>", "<tool_answer>"),
    ("config.json", '"rope_theta": 10000.0', '"rope_theta": 20000.0')])
def test_the_fingerprint_changes_with_a_file_of_the_model(fingerprint, place, tmp_path, file, old, new):
    copy = shutil.copytree(place.model, tmp_path / "copy")
    edit(copy / file, old, new)
    assert fingerprint(model=copy) != fingerprint()


@pytest.mark.parametrize("file", ["additional_chat_templates/tool_use.jinja", "special_tokens_map.json",
                                  "added_tokens.json", "merges.txt"])
def test_the_fingerprint_changes_with_a_file_that_a_tokenizer_may_have(fingerprint, place, tmp_path, file):
    copy = shutil.copytree(place.model, tmp_path / "copy")
    (copy / file).parent.mkdir(exist_ok=True)
    if file == "merges.txt":
        (copy / "tokenizer.json").unlink()  # it has them
    seen = {fingerprint(model=copy)}
    for text in ('{"a": "x"}', '{"a": "y"}'):
        (copy / file).write_text(text)
        seen.add(fingerprint(model=copy))
    assert len(seen) == 3


@pytest.mark.parametrize("file, text", [
    ("model.safetensors.index.json", '{"weight_map": null}'), ("model.safetensors.index.json", '[1]'),
    ("consolidated.safetensors.index.json", '{"weight_map": {"x": "consolidated-1.safetensors"}}')])
def test_an_index_that_transformers_does_not_need_is_no_reason_to_refuse(fingerprint, place, tmp_path, file, text):
    copy = shutil.copytree(place.model, tmp_path / "copy")
    (copy / file).write_text(text)
    assert fingerprint(model=copy) == fingerprint()


def test_a_stale_index_beside_a_whole_file_is_no_reason_to_refuse(fingerprint, place, tmp_path):
    copy = shutil.copytree(place.model, tmp_path / "copy")
    first, *others = sorted(copy.glob("*.safetensors"))
    first.rename(copy / "model.safetensors")
    for other in others:
        other.unlink()
    assert fingerprint(model=copy)


def test_the_fingerprint_does_not_change_with_spaces_in_the_template_arguments(case, tmp_path):
    first, other = ('{"a": 1, "b": [2]}', '{ "b":[2],"a":1 }')
    assert case(template_args=first).fingerprint == case(template_args=other, work=str(tmp_path / "w")).fingerprint


def test_the_fingerprint_does_not_change_with_who_saved_the_config(fingerprint, place, tmp_path):
    copy = shutil.copytree(place.model, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config |= {"transformers_version": "9", "_name_or_path": "x"}
    (copy / "config.json").write_text(json.dumps(config))
    assert fingerprint(model=copy) == fingerprint()


# ---- rows: one bad line costs one line

def line(i, text="a river"):
    messages = [{"role": "user", "content": "a garden"}, {"role": "assistant", "content": text}]
    return json.dumps({"id": f"s{i}", "messages": messages}, ensure_ascii=False)


@pytest.fixture
def rows(case, tmp_path):
    """rows(data) -> ({row: id} of the plan, [(row, line number, reason)] of the skipped)."""
    def of(data):
        if isinstance(data, bytes):
            (tmp_path / "rows.jsonl").write_bytes(data)
            data = tmp_path / "rows.jsonl"
        case(data=str(data), max_len=200)
        index = pq.read_table(tmp_path / "work/plan/index.parquet").to_pylist()
        skipped = [json.loads(x) for x in (tmp_path / "work/plan/skipped.jsonl").read_text().splitlines()]
        return {r["row"]: r["id"] for r in index}, [(s["row"], s["line"], s["reason"]) for s in skipped]
    return of


def test_rows_of_plain_lines(rows):
    assert rows("\n".join([line(0), line(1), ""]).encode()) == ({0: "s0", 1: "s1"}, [])


def test_a_last_line_without_newline_counts(rows):
    assert rows("\n".join([line(0), line(1)]).encode()) == ({0: "s0", 1: "s1"}, [])


def test_a_byte_order_mark_is_passed_over(rows):
    assert rows(b"\xef\xbb\xbf" + "\n".join([line(0), line(1)]).encode()) == ({0: "s0", 1: "s1"}, [])


def test_lines_may_end_in_carriage_return_and_newline(rows):
    assert rows("\r\n".join([line(0), line(1), ""]).encode()) == ({0: "s0", 1: "s1"}, [])


def test_blank_lines_keep_their_rows_and_are_no_samples(rows):
    assert rows("\n".join(["", line(1), " \t", "\r", line(4), ""]).encode()) == ({1: "s1", 4: "s4"}, [])


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\u0085", "\x0b", "\x1c", "\r"], ids=ascii)
def test_only_a_newline_ends_a_line(rows, inside):
    text = line(0, f"a{'X'}b").replace("X", inside if inside > "\x7f" else json.dumps(inside)[1:-1])
    assert rows("\n".join([text, line(1)]).encode()) == ({0: "s0", 1: "s1"}, [])


@pytest.mark.parametrize("broken", [
    b"{", b"nonsense", b"\xff\xfe", b"[1, 2]", b"3", b"null", b'"text"', b"{}", b'{"messages": 3}',
    b'{"messages": [3]}', b'{"input_ids": "x"}', b'{"input_ids": [1, 2], "loss_mask": [1]}',
    b'{"input_ids": [1e99]}', b"[" * 100_000, b'{"id": "\\ud800", "input_ids": [1, 2]}'],
    ids=lambda b: repr(b[:30]))
def test_a_broken_line_in_the_middle_costs_one_line(rows, broken):
    found, skipped = rows(b"\n".join([line(0).encode(), broken, line(2).encode()]))
    assert (found, [(row, number) for row, number, _ in skipped]) == ({0: "s0", 2: "s2"}, [(1, 2)])


def test_lines_of_a_directory_are_numbered_on_through_its_files(rows, tmp_path):
    folder = tmp_path / "data"
    (folder / "more").mkdir(parents=True)
    (folder / "a.jsonl").write_text("\n".join([line(0), "", line(2)]))  # no newline at its end
    (folder / "b.jsonl").write_text("\n".join(["broken", line(4), ""]))
    (folder / "more" / "c.jsonl").write_text(line(5) + "\n")
    (folder / "notes.txt").write_text("not data\n")
    assert rows(folder) == ({0: "s0", 2: "s2", 4: "s4", 5: "s5"}, [(3, 1, "unreadable")])


def test_equal_ids_stay_separate_rows(rows):
    assert rows("\n".join([line(0), line(0)]).encode()) == ({0: "s0", 1: "s0"}, [])


def test_a_sample_without_id_is_called_by_its_row(rows):
    assert rows(b'\n{"input_ids": [1, 2]}\n{"uuid": 17, "input_ids": [1, 2]}') == ({1: "1", 2: "17"}, [])


def test_every_reason_to_skip_is_counted(case, tmp_path):
    lines = [{"input_ids": [1] * 5}, {"input_ids": [1]}, {"input_ids": [1] * 101}, {"messages": "x"},
             {"input_ids": [1, 2, 99999]}, {"input_ids": [1, 2], "loss_mask": [0, 0]},
             {"messages": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]},
             {"messages": [{"role": "assistant", "content": "x"}]}]
    plan = case(data=str(write_lines(tmp_path / "mixed.jsonl", lines)), min_len=2, overlong="skip")
    assert plan.counts["samples"] == 1 and plan.counts["skipped"] == 7
    assert plan.counts["skipped_by_reason"] == dict.fromkeys(
        ["too_short", "too_long", "id_out_of_range", "nothing_supervised", "unreadable", "template_refused",
         "unsupported_content"], 1)


def test_turns_that_are_not_located_count_in_skipped_samples_too(case, place, tmp_path):
    model = shutil.copytree(place.model, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}")
    chat = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 3
    plan = case(model=str(model), data=str(write_lines(tmp_path / "chat.jsonl", [*chat, READY[0]])))
    assert (plan.counts["skipped_by_reason"], plan.counts["turns_lost"]) == ({"nothing_supervised": 3}, 3)


@pytest.mark.parametrize("value", ["[]", '[["input_ids", [1, 2]]]', "3", "null", '"x"'])
def test_a_line_that_is_no_object_is_unreadable_and_says_so(case, tmp_path, value):
    data = write_lines(tmp_path / "mixed.jsonl", READY[:2])
    data.write_text(data.read_text() + value + "\n")
    assert case(data=str(data)).counts["skipped_by_reason"] == {"unreadable": 1}
    assert "no JSON object" in (tmp_path / "work/plan/skipped.jsonl").read_text()


def test_a_request_to_stop_while_planning_is_not_taken_for_a_bad_sample(case, tmp_path, monkeypatch):
    from transformers import PreTrainedTokenizerBase

    def interrupted(*args, **more):
        raise extract.Stopped("before the first batch")
    (tmp_path / "chat.jsonl").write_text(line(0) + "\n")
    monkeypatch.setattr(PreTrainedTokenizerBase, "apply_chat_template", interrupted)
    with pytest.raises(extract.Stopped):
        case(data=str(tmp_path / "chat.jsonl"))


def test_planning_with_processes_gives_the_same_plan(place, case, tmp_path):
    lines = place.few.read_bytes().splitlines(True)
    ready = json.dumps(READY[7] | {"note": "x" * 8000}).encode() + b"\n"  # 9 MB in all: enough for processes
    many = tmp_path / "many.jsonl"
    many.write_bytes(b"".join(ready * 70 + line for line in lines))
    one = case(data=str(many), plan_workers=1, work=str(tmp_path / "one"))
    two = case(data=str(many), plan_workers=2, work=str(tmp_path / "two"))
    assert one.known == two.known and np.array_equal(one.input_ids, two.input_ids)


# ---- staging

@pytest.fixture
def brake(tmp_path, monkeypatch):
    """brake(used) -> whether a reservation succeeds with so many of 100 MB used."""
    stage = extract.Stage(tmp_path, "fingerprint")

    def at(used):
        monkeypatch.setattr(extract.monitor, "room", lambda path: (used * 10**6, (100 - used) * 10**6))
        f = stage.reserve(stage.dir / "batch_000000.tmp", 1000)
        if f:
            f.close()
        return bool(f)
    return at


def test_the_brake_closes_at_80_percent(brake):
    assert [brake(used) for used in (0, 50, 79, 80)] == [True, True, True, False]


def test_the_brake_opens_only_below_70_percent(brake, tmp_path):
    (tmp_path / "fingerprint").mkdir()
    (tmp_path / "fingerprint/batch_000007.safetensors").touch()
    assert [brake(used) for used in (80, 79, 75, 70, 69, 79)] == [False, False, False, False, True, True]


def test_the_brake_does_not_wait_for_other_people_s_files(brake):
    assert [brake(used) for used in (80, 79)] == [False, True]


def test_a_reservation_larger_than_what_is_left_is_refused(tmp_path, monkeypatch):
    stage = extract.Stage(tmp_path, "fingerprint")
    monkeypatch.setattr(extract.monitor, "room", lambda path: (0, 999))
    assert stage.reserve(stage.dir / "batch_000000.tmp", 1000) is None


def test_a_reservation_has_its_whole_size_on_disk(tmp_path, monkeypatch):
    stage = extract.Stage(tmp_path, "fingerprint")
    monkeypatch.setattr(extract.monitor, "room", lambda path: (0, 10**9))
    stage.reserve(stage.dir / "batch_000000.tmp", 1 << 20).close()
    found = (stage.dir / "batch_000000.tmp").stat()
    assert found.st_size == 1 << 20 and found.st_blocks * 512 >= 1 << 20


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_reservation_that_fails_leaves_no_file(tmp_path, monkeypatch, code):
    def fail(*args):
        raise OSError(code, os.strerror(code))
    stage = extract.Stage(tmp_path, "fingerprint")
    monkeypatch.setattr(extract.monitor, "room", lambda path: (0, 10**9))
    monkeypatch.setattr(os, "posix_fallocate", fail)
    try:
        assert stage.reserve(stage.dir / "batch_000000.tmp", 1000) is None and code == errno.ENOSPC
    except OSError:
        assert code == errno.EIO  # a full disk is waited for, anything else is an error
    assert not list(stage.dir.iterdir())


def test_a_staging_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="file"):
        extract.Stage(tmp_path / "file", "fingerprint")


# ---- options

def options(*args):
    return extract.parse_options(["--model", "m", "--data", "d", "--out", "o", *args], Options, "")


def test_the_defaults_are_accepted():
    extract.check_options(options())


@pytest.mark.parametrize("flag, value", [
    ("--tokens", "15"), ("--tokens", "1048577"), ("--max-len", "0"), ("--min-len", "0"),
    ("--num-shards", "0"), ("--min-supervised", "-1"), ("--uploads", "0"), ("--uploads", "17"),
    ("--upload-mbps", "-1"), ("--upload-mbps", "nan"), ("--upload-min-mbps", "0"), ("--upload-attempts", "0"),
    ("--plan-workers", "-1"), ("--samples-per-forward", "-1"), ("--forward-tokens", "100")])
def test_a_number_out_of_range_is_refused_by_name_and_value(flag, value):
    with pytest.raises(Refused) as e:
        extract.check_options(options(flag, value))
    assert f"{flag} {value}" in str(e.value)


@pytest.mark.parametrize("args", [["--tokens", "many"], ["--dtype", "int4"], ["--overlong", "cut"],
                                  ["--nonsense"], ["--layers"]])
def test_what_cannot_be_parsed_ends_with_2(args, capsys):
    with pytest.raises(SystemExit) as e:
        options(*args)
    assert e.value.code == 2 and args[0].removeprefix("--") in capsys.readouterr().err


def test_max_len_above_tokens_is_refused():
    with pytest.raises(Refused, match="--max-len 300 is above --tokens 256"):
        extract.check_options(options("--tokens", "256", "--max-len", "300"))


def test_max_len_may_equal_tokens():
    extract.check_options(options("--tokens", "256", "--max-len", "256"))


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "enable_thinking=false"])
def test_template_arguments_must_be_a_json_object(text):
    with pytest.raises(Refused, match="--template-args"):
        extract.check_options(options("--template-args", text))


@pytest.mark.parametrize("name", ["model", "data", "out"])
def test_a_missing_name_is_refused(name):
    with pytest.raises(Refused, match=f"--{name}"):
        extract.check_options(options(f"--{name}", ""))


@pytest.mark.parametrize("shard", ["4", "-1", "x", "1.0", "", "auto"])
def test_a_shard_out_of_range_is_refused(shard, monkeypatch):
    for name in ("SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "JOB_COMPLETION_INDEX", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(Refused, match=f"--shard {shard}"):
        extract.own_shard(Options(shard=shard, num_shards=4))


@pytest.mark.parametrize("variables, expected", [
    ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8", "SLURM_PROCID": "0"}, (3, 8)),
    ({"SLURM_ARRAY_TASK_ID": "8", "SLURM_ARRAY_TASK_COUNT": "8", "SLURM_ARRAY_TASK_MIN": "1"}, (7, 8)),
    ({"SLURM_ARRAY_TASK_ID": "14", "SLURM_ARRAY_TASK_COUNT": "8", "SLURM_ARRAY_TASK_STEP": "2"}, (7, 8)),
    ({"SLURM_PROCID": "2", "SLURM_NTASKS": "5"}, (2, 5)), ({"JOB_COMPLETION_INDEX": "1"}, (1, 4)),
    ({"RANK": "6", "WORLD_SIZE": "7"}, (6, 7))])
def test_shard_auto_comes_from_the_scheduler(variables, expected, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    o = Options(shard="auto", num_shards=4)
    extract.own_shard(o)
    assert (o.shard, o.num_shards) == expected


@pytest.mark.parametrize("variables", [
    {"RANK": "x"}, {"RANK": "1", "WORLD_SIZE": "many"}, {"JOB_COMPLETION_INDEX": "4"},
    {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_COUNT": "2"}])
def test_a_scheduler_s_nonsense_is_refused(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refused, match="--shard|WORLD_SIZE"):
        extract.own_shard(Options(shard="auto", num_shards=4))


def test_help_names_every_flag_and_its_default(capsys):
    with pytest.raises(SystemExit) as e:
        extract.parse_options(["--help"], Options, extract.__doc__)
    text = " ".join(capsys.readouterr().out.split())
    assert e.value.code == 0
    for f in fields(Options):
        assert f"--{f.name.replace('_', '-')}" in text
        assert f.default in ("", False) or f"(default: {f.default})" in text, f.name


# ---- small things

@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64, torch.uint8])
def test_raw_bytes_of_tensors_and_arrays_agree(dtype):
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    assert bytes(extract.raw(tensor)) == bytes(extract.raw(tensor.numpy())) == tensor.numpy().tobytes()
