"""Data as Parquet and as `datasets` saves it: the same samples as from the same rows in JSONL, or a refusal.

    python -m pytest tests/test_tables.py
"""
import json
from itertools import count

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import extract
import tiny
from export import open_output
from extract import Options, Refused
from warmup import model_directory

CALL = {"type": "function", "function": {"name": "measure", "arguments": {"place": "hut"}}}
OTHER = {"type": "function", "function": {"name": "measure", "arguments": {"times": 3}}}
NESTED = {"type": "function", "function": {"name": "walk", "parameters": {  # a table has one order of its fields
    "type": "object", "properties": {"to": {"type": "string", "enum": ["hut", "pit"]}}}, "description": "Walk."}}
user = lambda text: {"role": "user", "content": text}
says = lambda text, **more: {"role": "assistant", "content": text} | more
CHATS = [  # no row has all the fields that some row has: in a table the others become null
    {"id": "a", "messages": [user("2+2?"), says("4")]},
    {"messages": [user("Prime?"), says("No.", reasoning_content="7 * 13.")]},
    {"id": "c", "tools": [tiny.TOOL, NESTED], "messages": [
        user("Size?"), says(None, tool_calls=[CALL, OTHER]), {"role": "tool", "content": "3 m", "name": "measure"},
        {"role": "tool", "content": ""}, says("Three.")]},
    {"id": "d", "tools": [NESTED], "messages": [user("Go."), says("Gone.", tool_calls=[])]},
    {"id": "e", "messages": [user("<|im_end|>?"), says("<think>\nodd\n</think>\n\nYes."), user(""), says("No.")]},
    {"id": "f", "messages": [user("No answer")]},
    {"id": "g", "system": "Count.", "conversations": [{"from": "human", "value": "One?"},
                                                      {"from": "gpt", "value": "1"}]},
    {"id": "h", "input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]},
    {"id": "i", "input_ids": [5, 6, 7]},
    {"id": "j", "input_ids": [5, 6, 7], "loss_mask": [0, 1]},
]
READY = [{"id": f"s{i}", "input_ids": [(7 * i + j) % 600 for j in range(3 + 11 * i % 50)],
          "loss_mask": [int(j >= i % 3) for j in range(3 + 11 * i % 50)]} for i in range(700)]


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table_of(rows):
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names})


def parquet(path, rows, group=100):
    pq.write_table(table_of(rows), path, row_group_size=group)
    return path


def saved(folder, rows, shards=2):
    """A directory as Dataset.save_to_disk leaves it; state.json lists the shards in another order than names do."""
    folder.mkdir()
    table, per = table_of(rows), -(-len(rows) // shards)
    names = [f"data-{shards - i:05}-of-{shards:05}.arrow" for i in range(shards)]
    for i, name in enumerate(names):
        with pa.OSFile(str(folder / name), "wb") as f, pa.ipc.new_stream(f, table.schema) as stream:
            stream.write_table(table.slice(i * per, per), max_chunksize=300)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.fixture
def planned(place, tmp_path):
    """planned(data) -> ({row: (id, token ids, mask)}, [skipped], plan) of a plan made from nothing."""
    numbers = count()

    def of(data, **more):
        o = Options(**{"model": str(place.model), "data": str(data), "out": str(tmp_path / "out"), "tokens": 1024,
                       "max_len": 500, "plan_only": True, "plan_workers": 1} | more)
        work = tmp_path / f"work{next(numbers)}"
        for name in ("plan", "markers"):
            (work / name).mkdir(parents=True, exist_ok=True)
        plan = extract.get_plan(o, work, model_directory(o.model), open_output(o.out))
        found = {}
        for r, name in zip(plan.samples, pq.read_table(work / "plan/index.parquet")["id"].to_pylist()):
            at = slice(r["offset"], r["offset"] + r["length"])
            found[int(r["row"])] = name, plan.input_ids[at].tolist(), plan.loss_mask[at].tolist()
        return found, [json.loads(x) for x in (work / "plan/skipped.jsonl").read_text().splitlines()], plan
    return of


@pytest.mark.parametrize("rows", [CHATS, READY], ids=["chats", "ready"])
@pytest.mark.parametrize("write", [parquet, saved])
def test_rows_of_a_table_give_the_samples_of_the_same_lines(planned, tmp_path, write, rows):
    asked, passed, _ = planned(lines(tmp_path / "rows.jsonl", rows))
    found, skipped, _ = planned(write(tmp_path / "rows.parquet", rows))
    assert found == asked
    where = [(s["row"], s["reason"]) for s in skipped]
    assert where == [(s["row"], s["reason"]) for s in passed]
    assert [row for row, _ in where] == ([5, 9] if rows is CHATS else [])


def test_rows_are_counted_through_all_row_groups_and_shards(planned, tmp_path):
    for data in (parquet(tmp_path / "rows.parquet", READY, group=64), saved(tmp_path / "saved", READY, shards=3)):
        assert {row: sample[0] for row, sample in planned(data)[0].items()} == {i: f"s{i}" for i in range(700)}


def test_files_of_a_directory_are_read_in_the_order_of_their_names(planned, tmp_path):
    folder = tmp_path / "data"
    (folder / "b").mkdir(parents=True)
    parquet(folder / "b/x.parquet", READY[600:])
    parquet(folder / "a.parquet", READY[:600])
    assert {row: sample[0] for row, sample in planned(folder)[0].items()} == {i: f"s{i}" for i in range(700)}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_skipped_row_of_a_directory_is_found_by_file_and_line(planned, tmp_path, suffix):
    write, folder = {"jsonl": lines, "parquet": parquet}[suffix], tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    write(folder / f"a.{suffix}", READY[:3])
    write(folder / f"sub/b.{suffix}", [READY[3], {"id": "bad", "input_ids": [1, 99999], "loss_mask": [0, 1]}])
    _, [skipped], _ = planned(folder)
    assert (skipped["file"], skipped["line"], skipped["row"], skipped["id"]) == (f"sub/b.{suffix}", 2, 4, "bad")


def test_a_null_among_arguments_of_a_struct_is_none_and_in_json_text_it_is_one(planned, tmp_path):
    def rows(arguments):
        call = {"function": {"name": "measure", "arguments": arguments}}
        return [{"messages": [user("Go."), says("", tool_calls=[call])]}]
    without = planned(lines(tmp_path / "rows.jsonl", rows({"place": "hut"})))[0]
    null = planned(lines(tmp_path / "null.jsonl", rows({"place": "hut", "times": None})))[0]
    assert planned(parquet(tmp_path / "s.parquet", rows({"place": "hut", "times": None})))[0] == without != null
    assert planned(parquet(tmp_path / "t.parquet", rows('{"place": "hut", "times": null}')))[0] == null


@pytest.mark.parametrize("kind", [pa.list_(pa.uint16()), pa.large_list(pa.int64()), pa.list_(pa.int32(), 3)], ids=str)
def test_token_ids_may_be_integers_of_any_width(planned, tmp_path, kind):
    ids = pa.array([[5, 6, 7], [8, 9, 599]], kind)
    mask = pa.array([[False, True, True], [False, False, True]])
    pq.write_table(pa.table({"input_ids": ids, "loss_mask": mask}), tmp_path / "rows.parquet")
    assert planned(tmp_path / "rows.parquet")[0] == {
        0: ("0", [5, 6, 7], [0, 1, 1]), 1: ("1", [8, 9, 599], [0, 0, 1])}


@pytest.mark.parametrize("key", ["loss_mask", "assistant_masks", "completion_mask"])
def test_a_mask_of_a_table_is_found_under_each_name(planned, tmp_path, key):
    rows = parquet(tmp_path / "rows.parquet", [{"input_ids": [5, 6, 7], key: [0, 1, 0], "text": "x"}])
    assert planned(rows)[0] == {0: ("0", [5, 6, 7], [0, 1, 0])}


def test_padding_and_labels_of_a_table_count(planned, tmp_path):
    row = {"input_ids": [0, 5, 6, 7], "labels": [-100, -100, 6, -100], "attention_mask": [0, 1, 1, 1]}
    assert planned(parquet(tmp_path / "rows.parquet", [row]))[0] == {0: ("0", [5, 6, 7], [0, 1, 0])}


def test_a_null_among_token_ids_costs_its_row_alone(planned, tmp_path):
    rows = parquet(tmp_path / "rows.parquet", [READY[0], {"input_ids": [1, None], "loss_mask": [1, 1]}, READY[2]])
    found, [skipped], _ = planned(rows)
    assert (sorted(found), skipped["row"], skipped["reason"]) == ([0, 2], 1, "unreadable")


def test_a_table_without_a_known_column_names_those_that_it_has(planned, tmp_path):
    with pytest.raises(Refused, match="no sample is left, 1 were skipped"):
        planned(parquet(tmp_path / "rows.parquet", [{"instruction": "x", "output": "y"}]))
    assert "instruction" in (tmp_path / "work0/plan/skipped.jsonl").read_text()


def cut(path, share):
    path.write_bytes(path.read_bytes()[:int(path.stat().st_size * share)])


@pytest.mark.parametrize("share", [0.0001, 0.5, 0.99])
def test_a_torn_parquet_file_is_refused_by_name(planned, tmp_path, share):
    (tmp_path / "data").mkdir()
    parquet(tmp_path / "data/a.parquet", READY)
    cut(parquet(tmp_path / "data/b.parquet", READY), share)
    with pytest.raises(Refused, match="data/b.parquet cannot be read"):
        planned(tmp_path / "data")


def test_a_parquet_file_with_a_broken_page_is_refused_by_name(planned, tmp_path):
    path = parquet(tmp_path / "a.parquet", READY)
    data = bytearray(path.read_bytes())
    data[len(data) // 3:len(data) // 3 + 200] = b"\xff" * 200
    path.write_bytes(data)
    with pytest.raises(Refused, match="a.parquet cannot be read after"):
        planned(path)


def test_a_saved_dataset_that_is_torn_between_two_batches_is_refused(planned, tmp_path):
    folder = saved(tmp_path / "saved", READY, shards=1)
    [file] = folder.glob("*.arrow")
    data, ends = file.read_bytes(), []
    for length in range(8, len(data), 8):  # every cut that leaves a readable stream of fewer batches
        if data[length:length + 4] == b"\xff" * 4:
            ends.append(length)
    file.write_bytes(data[:ends[-2]])
    with pa.OSFile(str(file)) as f:
        assert 0 < pa.ipc.open_stream(f).read_all().num_rows < 700
    with pytest.raises(Refused, match="its end is missing"):
        planned(folder)


def test_a_saved_dataset_without_one_of_its_files_is_refused(planned, tmp_path):
    folder = saved(tmp_path / "saved", READY)
    next(folder.glob("*.arrow")).unlink()
    with pytest.raises(Refused, match="all of it"):
        planned(folder)


def test_a_saved_dataset_of_several_splits_is_refused_with_their_paths(planned, tmp_path):
    (tmp_path / "all").mkdir()
    (tmp_path / "all/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    saved(tmp_path / "all/train", READY)
    with pytest.raises(Refused, match="all/train or .*all/test"):
        planned(tmp_path / "all")


def test_a_directory_of_both_kinds_is_refused(planned, tmp_path):
    (tmp_path / "data").mkdir()
    parquet(tmp_path / "data/a.parquet", READY)
    lines(tmp_path / "data/b.jsonl", READY)
    with pytest.raises(Refused, match=r"\['.jsonl', '.parquet'\]"):
        planned(tmp_path / "data")


@pytest.mark.parametrize("write", [parquet, saved])
def test_a_table_that_is_touched_is_the_same_run_and_one_that_changes_is_not(planned, tmp_path, write):
    before = planned(write(tmp_path / "one", READY) if write is saved else write(tmp_path / "one.parquet", READY))[2]
    again = write(tmp_path / "two", READY) if write is saved else write(tmp_path / "two.parquet", READY)
    assert planned(again)[2].fingerprint == before.fingerprint
    changed = READY[:-1] + [READY[0]]
    other = write(tmp_path / "three", changed) if write is saved else write(tmp_path / "three.parquet", changed)
    assert planned(other)[2].fingerprint != before.fingerprint


def test_a_saved_dataset_with_indices_is_refused(planned, tmp_path):
    folder = saved(tmp_path / "saved", READY)
    state = json.loads((folder / "state.json").read_text()) | {"_indices_data_files": [{"filename": "indices.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(Refused, match="without indices"):
        planned(folder)


def test_files_of_a_directory_that_are_not_read_are_named(planned, tmp_path, capfd):
    (tmp_path / "data").mkdir()
    lines(tmp_path / "data/a.jsonl", READY)
    planned(tmp_path / "data")
    assert "files are read" not in capfd.readouterr().out
    (tmp_path / "data/b.jsonl.gz").write_bytes(b"x")
    planned(tmp_path / "data")
    assert "1 files are read, 1 are not: b.jsonl.gz" in capfd.readouterr().out
