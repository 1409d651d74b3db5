"""Hidden states of a large language model, at chosen layers, for every token of a chat data set.

One process is one shard; `make extract` starts one per GPU, and a cluster's scheduler can do the same:

    python extract.py --model Qwen/Qwen3.6-27B --data chat.jsonl --out s3://b/run --plan-only
    python extract.py --model Qwen/Qwen3.6-27B --data chat.jsonl --out s3://b/run --shard 0 --num-shards 4

OUT/manifest.json                      what this is; `complete` once every batch is there
OUT/index.parquet                      a row per sample: id, row, batch, start, length, supervised
OUT/batches/batch_000123.safetensors   hidden_states [n_tokens, K*H], input_ids and loss_mask [n_tokens],
                                       cu_seqlens [n+1], sample_index [n]; no padding
WORK/plan/                             the content of every batch, fixed before the first one is computed
WORK/markers/.done_000123              batch 123 was seen in OUT with the size that the plan foretold
WORK/progress_shard_0.json             what `make status` reads
STAGE/<fingerprint>/                   finished batches on their way to OUT

A batch is done when its marker exists. Kill anything at any time: the next start uploads what was staged,
computes what is missing, and repeats at most the batches that were in flight. RESUME CONTRACT stands where
order matters. Exit codes: 0 every batch of the shard is in OUT and marked; 1 failed; 2 refused before the
model was loaded; 3 stopped on request, resumable. Elsewhere: the packed kernels and their proof in warmup.py,
the way to OUT in export.py, progress and the room that is left in monitor.py.
"""
import errno
import fcntl
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import monitor
import warmup
from export import KEY, NOTE, OutputError, compare, crc_of, fault, kill_children, marked, open_output, persist
from monitor import read_json, write_atomic
from warmup import (Failed, Refused, compact, determined_by, first_line, opt, own_shard, parse_options,
                    say, sha, stamp)

CONVENTION = "id L = output of decoder layer L, 0-based = transformers hidden_states[L+1]"
KINDS = {"bf16": ("BF16", torch.bfloat16), "fp32": ("F32", torch.float32),
         "fp8": ("F8_E4M3", torch.float8_e4m3fn)}  # --dtype: safetensors' name, torch's

# ---------------------------------------------------------------------------------------------------- options
@dataclass
class Options:
    """Every flag; its default is the field's, and a number outside of its range is refused."""
    model: str = opt("", "target model: a local directory or a hub id")
    data: str = opt("", "chats or token ids: JSONL, Parquet or a directory of it, or saved by `datasets`")
    out: str = opt("", "where the states go: s3://bucket/prefix or a local directory")
    work: str = opt("work", "work directory: plan, markers, progress, logs")
    stage: str = opt("/dev/shm/hidden-states", "staging directory, best in memory")
    shard: str = opt("0", "number of this shard, from 0; auto: as Slurm, Kubernetes or torchrun number it")
    num_shards: int = opt(1, "shards; shard i takes the batches with batch mod num_shards = i", 1, 10**5)
    shards_here: int = opt(0, "how many of them share this machine's staging at a time; 0: all", 0, 10**5)
    layers: str = opt("dflash:5", "0-based ids as 1,16,31,46,61, or dflash:N, eagle3, or a drafter's config")
    final: bool = opt(False, "store the last layer's output before the final norm, too")
    save_head: bool = opt(False, "write OUT/head.safetensors, too: embedding, final norm and lm_head")
    dtype: str = opt("bf16", "how states are stored", choices=("bf16", "fp32", "fp8"))
    compute_dtype: str = opt("bf16", "how the model runs", choices=("bf16", "fp32"))
    tokens: int = opt(32768, "tokens of a batch", 16, 1 << 20)
    max_len: int = opt(4096, "tokens of the longest sample; at most --tokens", 1, 1 << 20)
    overlong: str = opt("truncate", "what happens to longer samples", choices=("truncate", "skip"))
    min_len: int = opt(1, "skip samples of fewer tokens", 1, 1 << 20)
    min_supervised: int = opt(1, "skip samples with fewer supervised tokens", 0, 1 << 20)
    template_args: str = opt("{}", "more arguments for the chat template, a JSON object")
    plan_workers: int = opt(0, "processes that tokenize; 0: one a core, 8 at most", 0, 512)
    plan_only: bool = opt(False, "plan, print the estimate and stop; nothing is written to OUT")
    reconcile: bool = opt(False, "make the markers agree with a listing of OUT, and stop")
    resume_from_output: bool = opt(False, "first make the shard's markers agree with a listing of OUT")
    uploads: int = opt(2, "`aws s3 cp` processes at a time", 1, 16)
    upload_mbps: float = opt(0.0, "megabytes per second of all uploads together; 0: no limit", 0, 1e6)
    upload_min_mbps: float = opt(5.0, "megabytes per second under which an upload is ended", 0.001, 1e6)
    upload_attempts: int = opt(5, "tries at an upload; then the file waits for the next start", 1, 100)
    forward_tokens: str = opt(0, "tokens of a forward; 0: --tokens; auto: what warm-up found to fit")
    samples_per_forward: int = opt(0, "samples of a forward; 1 for what cannot be packed; 0: any", 0, 10**6)
    skip_bad: bool = opt(False, "zeros and no mask for samples with bad numbers, which else end the run")
    allow_slow: bool = opt(False, "on a GPU, run without the fast kernels")
    eager: bool = opt(False, "on a GPU, do not compile the layers")

class Stopped(BaseException):  # not an Exception: nothing on its way may take it for a failure of its own
    code = 3

def check_options(o):
    """What argparse cannot tell. Raises Refused."""
    warmup.check_ranges(o)
    for name in ("model", "data", "out"):
        if not getattr(o, name):
            raise Refused(f"--{name} ({name.upper()}= for make) is missing. `make help` explains")
    if o.max_len > o.tokens:
        raise Refused(f"--max-len {o.max_len} is above --tokens {o.tokens}: a sample must fit into a batch")
    if o.forward_tokens != "auto":
        if not str(o.forward_tokens).isdecimal() or 0 < int(o.forward_tokens) < o.max_len:
            raise Refused(f"--forward-tokens {o.forward_tokens}: give --max-len {o.max_len} or more, or auto")
        o.forward_tokens = int(o.forward_tokens)
    try:  # as the fingerprint has it, whatever its spaces and order
        o.template_args = json.dumps(dict(json.loads(o.template_args).items()), sort_keys=True)
    except (ValueError, AttributeError):
        raise Refused(f"--template-args {o.template_args} is no JSON object like "
                      '{"enable_thinking": false}') from None

# ------------------------------------------------------------------------------ data: chat to tokens and mask
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "user": "user", "assistant": "assistant",
         "system": "system", "tool": "tool"}  # ShareGPT's `from`
TEXTS = ("content", "value", "text", "refusal")  # where datasets have what was said
BEGIN, END = "\ue000", "\ue001"  # private-use characters that stand for a text while the template is probed

class Skip(Exception):
    """One sample is left out: Skip(reason, detail), and with its id once that is known."""

def as_text(content):
    """A message's content -> str; a list of text parts equals the plain string."""
    parts = content if isinstance(content, list) else [{"text": "" if content is None else content}]
    for part in parts:
        text = isinstance(part, dict) and part.get("type", "text") == "text" and part.get("text")
        if not isinstance(text, str) or {"image", "image_url", "video"}.intersection(part):
            raise Skip("unsupported_content", f"content that is not text: {compact(part)[:80]}")
    return "".join(part["text"] for part in parts)

def without_nulls(value, but=()):
    """Dictionaries without the nulls that tables fill in; below the keys of `but` null is a value."""
    if isinstance(value, dict):
        return {k: v if k in but else without_nulls(v, but) for k, v in value.items() if v is not None}
    return [without_nulls(v, but) for v in value] if isinstance(value, list) else value

def conversation(record):
    """One line of data -> (messages, tools) as chat templates take them. Raises Skip."""
    turns = without_nulls(record.get("messages") or record.get("conversations"), ("arguments",))
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise Skip("unreadable", f"no list under messages or conversations, no input_ids: {list(record)[:9]}")
    for turn in turns:
        if "role" not in turn:
            if turn.get("from") not in ROLES:
                raise Skip("unreadable", f"unknown speaker {turn.get('from')!r}")
            turn["role"] = ROLES[turn.pop("from")]
        turn["content"] = as_text(next((turn[key] for key in TEXTS if key in turn), None))
        if "function_call" in turn:  # OpenAI's name before there were several
            turn["tool_calls"] = [{"function": turn.pop("function_call")}]
        for call in (c.get("function", c) for c in turn.get("tool_calls", ())):
            if isinstance(call.get("arguments"), str):  # a dict and its JSON text are the same call
                call["arguments"] = json.loads(call["arguments"] or "{}")
    if record.get("system") and [m["role"] for m in turns[:1]] != ["system"]:
        turns.insert(0, {"role": "system", "content": as_text(record["system"])})
    tools = record.get("tools") or None
    return turns, json.loads(tools) if isinstance(tools, str) else tools

class Encoder:
    """One line of data -> token ids and loss mask, by the model's own tokenizer and chat template.

    The mask marks what the model would have generated: what follows the generation prompt, up to and with the
    end-of-turn token. A template with {% generation %} says so itself. With any other, the conversation is
    rendered once more with the tokens that open and end a turn taken out of the data, character for
    character, so that those left are the template's: a turn starts after the generation prompt (or the part
    of it that this turn keeps) and ends with the first end-of-turn, unless another turn opens before. A turn
    that is not found so is not supervised, and counted.
    """

    def __init__(self, o, path, vocab_size):
        self.o, self.path, self.vocab_size, self.tokenizer, self.lost = o, path, vocab_size, None, 0
        self.args = json.loads(o.template_args)

    def load(self):
        from transformers import AutoTokenizer
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(self.path)
            assert self.tokenizer.is_fast, "it is not a fast one (tokenizer.json)"
            assert len(self.tokenizer) > 128, "its vocabulary is empty (tokenizer.json)"
            assert self.tokenizer.chat_template, "it has no chat template"
        except Exception as e:
            raise Refused(f"chat data needs the tokenizer in {self.path}: {first_line(e)}") from None
        self.tagged = bool(re.search(r"\{%-?\s*generation\s*-?%\}", str(self.tokenizer.chat_template)))
        self.starts, self.own = [], []
        user, thought = {"role": "user", "content": END}, f"<think>\n{BEGIN}\n</think>\n\n{BEGIN}"
        try:  # the end-of-turn token, and what earlier and last turns keep of the generation prompt
            without = self.render([user], None)
            whole = self.render([user], None, add_generation_prompt=True)
            prompt = whole[len(without):] if whole.startswith(without) else ""
            pairs = ([user, {"role": "assistant", "content": text}] * 2 for text in (BEGIN, thought))
            turns = [turn.split(BEGIN) for pair in pairs for turn in self.render(pair, None).split(END)[1:]]
            special = [str(t) for t in self.tokenizer.added_tokens_decoder.values() if t.special]
            self.end = turns[1][1][:min(turns[1][1].index(t) + len(t) for t in special if t in turns[1][1])]
            parts = [prompt[:k] for k in range(len(prompt), 0, -1)]
            kept = {next((p for p in parts if before.endswith(p) or p == prompt in before), "")
                    for before, *_ in turns} - {""}
            self.starts = sorted(kept or {turns[0][0].rstrip(" ")}, key=len)[::-1]
            header = self.starts[-1]
            opening = min((t for t in special if t in header), key=header.find, default=header.strip())
            self.own = [opening, self.end.strip()]
        except (Skip, ValueError, IndexError):
            pass  # no turn can be located with this template: every sample says so

    def render(self, messages, tools, **more):
        try:
            return self.tokenizer.apply_chat_template(messages, tools, tokenize=False, **self.args | more)
        except Exception as e:
            raise Skip("template_refused", first_line(e)) from None

    def turns(self, messages, tools, text):
        """Characters (begin, end) of each turn, as far as located, that the model would have generated."""
        if self.tagged:  # transformers' own mask takes in a token that begins before the turn
            from transformers.utils.chat_template_utils import render_jinja_template
            (own,), (found,) = render_jinja_template(
                [messages], tools, chat_template=self.tokenizer.get_chat_template(None, tools),
                return_assistant_tokens_mask=True, **self.tokenizer.special_tokens_map | self.args)
            return found if own == text else []
        if not all(self.own) or not self.own:
            return []
        data, own, found = json.dumps([messages, tools], ensure_ascii=False), text, []
        if any(token in data for token in self.own):
            spare = (c for c in map(chr, range(0xE000, 0xF900)) if c not in text)
            others = [(token, next(spare) * len(token)) for token in self.own]
            for token, other in others:
                data = data.replace(token, other)
            try:
                own = back = self.render(*json.loads(data))
            except Skip:
                return []
            for token, other in others:
                back = back.replace(other, token)
            if back != text:
                return []
        for match in re.finditer(re.escape(self.starts[-1]), own):
            start = next(start for start in self.starts if own.startswith(start, match.start()))
            begin = match.start() + len(start)
            end, opening = own.find(self.end, begin), own.find(self.own[0], begin)
            if end >= 0 and not 0 <= opening < end:
                found.append((begin, end + len(self.end)))
        return found

    def chat(self, record):
        messages, tools = conversation(record)
        text = self.render(messages, tools)
        coded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        begins = np.array(coded["offset_mapping"], np.int64).reshape(-1, 2)[:, 0]
        mask, found, turns = np.zeros(len(begins), np.uint8), 0, self.turns(messages, tools, text)
        asked = [m.get("weight", 1) and m.get("loss", 1) for m in messages if m["role"] == "assistant"]
        if not all(asked):  # which turn is whose is known where all are located
            turns = [turn for turn, wanted in zip(turns, asked) if wanted and len(turns) == len(asked)]
        for turn in turns:
            first, last = np.searchsorted(begins, turn)  # a token that begins before the turn is not in it
            mask[first:last] = 1
            found += first < last
        return coded["input_ids"], mask, max(0, sum(map(bool, asked)) - found)

    def pretokenized(self, record):
        get = lambda key, other: other if record.get(key) is None else np.asarray(record[key])
        ids = get("input_ids", None)
        mask = get("loss_mask", get("assistant_masks", get("completion_mask", get("labels", ids) != -100)))
        real = get("attention_mask", ids != -100)  # where it is 0 there is padding
        if any(x.ndim != 1 or x.size and x.dtype.kind not in "iub" for x in (ids, mask, real)):
            raise Skip("unreadable", "input_ids and masks must be lists of integers")
        if not len(mask) == len(real) == len(ids) or not set(mask.tolist()) <= {0, 1}:
            values = str(sorted(set(mask.tolist())))[:40]
            raise Skip("unreadable", f"loss_mask of {len(mask)} values {values}, {len(ids)} input_ids")
        return ids[real > 0], mask[real > 0], 0

    def encode(self, line):
        """bytes or dict -> (id or None, ids int32 [n], mask uint8 [n], lost turns); or Skip(reason, …, id)"""
        name, o = None, self.o
        try:
            record = json.loads(line) if isinstance(line, bytes) else without_nulls(line)
            if not isinstance(record, dict):
                raise Skip("unreadable", f"no JSON object: {str(record)[:40]}")
            names = [record.get(key) for key in ("id", "conversation_id", "uuid")]
            name = next((str(n) for n in names if n is not None), None)
            (name or "").encode()  # an id with a lone surrogate fits into no index
            chat = record.get("input_ids") is None
            if chat and not self.tokenizer:
                self.load()
            ids, mask, lost = (self.chat if chat else self.pretokenized)(record)
            self.lost += lost
            n, ids, mask = len(ids), np.array(ids[:o.max_len], np.int64), np.array(mask[:o.max_len], np.uint8)
            low, high = (ids.min(), ids.max()) if n else (0, 0)
            for wrong, reason, detail in (
                    (n > o.max_len and o.overlong == "skip", "too_long", f"{n} tokens"),
                    (n < o.min_len, "too_short", f"{n} tokens"),
                    (low < 0 or high >= self.vocab_size, "id_out_of_range", f"{low} to {high}"),
                    (mask.sum() < o.min_supervised, "nothing_supervised", f"{n} tokens, {lost} turns lost")):
                if wrong:
                    raise Skip(reason, detail)
            return name, ids.astype(np.int32), mask, lost
        except Skip as e:
            raise Skip(*e.args, name) from None
        except (ValueError, RecursionError, AttributeError, TypeError, KeyError, OverflowError) as e:
            raise Skip("unreadable", first_line(e), name) from None  # no JSON, no UTF-8, a lone surrogate

def start_encoder(*args):
    global ENCODER
    ENCODER = Encoder(*args)
    if parent := multiprocessing.parent_process():  # a worker does not outlive a killed shard
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()

def encode_part(where, first, row, part):
    """A part of the data -> [(row, name, ids and mask as bytes)], [what was skipped], turns not located"""
    good, bad, before = [], [], ENCODER.lost
    for row, line in enumerate(part, row):
        if not isinstance(line, bytes) or (line := line.removeprefix(b"\xef\xbb\xbf")).strip():
            try:
                name, ids, mask, _ = ENCODER.encode(line)
                good.append((row, name or str(row), ids.tobytes(), mask.tobytes()))
            except Skip as e:
                why = dict(zip(("reason", "detail", "id"), e.args))
                bad.append(where | {"line": row - first + 1, "row": row} | why)
    return good, bad, ENCODER.lost - before

# --------------------------------------------------------------------------------------------------- the plan
SAMPLE = np.dtype([("row", "i8"), ("offset", "i8"), ("length", "i4"), ("supervised", "i4"), ("batch", "i4"),
                   ("start", "i4")])  # offset: first token in tokens.bin; start: first token in the batch
PLAN_FILES = "samples.npy", "tokens.bin", "loss_mask.bin"

def pack(lengths, capacity, window=8):
    """First-fit over a bounded window of open batches, in the order given: lengths -> batches, int32 [n]."""
    batch, opened, made = np.empty(len(lengths), np.int32), [], 0
    for i, n in enumerate(lengths):
        into = next((b for b in opened if n <= b[0]), None)  # [room left, number]
        if into is None:
            if len(opened) == window:
                opened.remove(min(opened))  # the fullest closes
            opened.append(into := [capacity, made])
            made += 1
        into[0] -= n
        batch[i] = into[1]
    return batch

class Plan:
    """What every batch holds, to the byte; made once, memory-mapped by every shard."""

    def __init__(self, directory):
        self.known = read_json(directory / "plan.json")
        self.__dict__.update(self.known)  # fingerprint, what determines it, model, counts, …
        self.samples = np.load(directory / "samples.npy", mmap_mode="r")  # SAMPLE, by batch and start
        self.input_ids = np.memmap(directory / "tokens.bin", "i4", "r")
        self.loss_mask = np.memmap(directory / "loss_mask.bin", "u1", "r")
        self.first = np.searchsorted(self.samples["batch"], np.arange(self.counts["batches"] + 1))
        self.batch_tokens = np.add.reduceat(self.samples["length"], self.first[:-1], dtype=np.int64)

    def rows(self, batch):
        return self.samples[self.first[batch]:self.first[batch + 1]]

    def gather(self, array, batch):
        return [array[r["offset"]:r["offset"] + r["length"]] for r in self.rows(batch)]

    def states(self):
        """{tensor that depends on the model: (columns, dtype)}; they have a row a token."""
        kind, k = KINDS[self.dtype][1], len(self.layers)
        shapes = {"hidden_states": (k * self.hidden_size, kind)}
        if self.dtype == "fp8":
            shapes["hidden_states_scale"] = k, torch.float32
        if self.final:
            shapes["last_hidden_state"] = self.hidden_size, torch.bfloat16 if self.dtype == "fp8" else kind
        return shapes

    def layout(self, batch):
        """(safetensors header, tensor names in order, bytes of the file) of a batch before it is made."""
        t, n = int(self.batch_tokens[batch]), len(self.rows(batch))
        tensors = {"sample_index": ("I64", 8, [n]), "cu_seqlens": ("I32", 4, [n + 1]),
                   "input_ids": ("I32", 4, [t]), "loss_mask": ("U8", 1, [t])}
        names = {kind: name for name, kind in KINDS.values()}
        tensors |= {k: (names[kind], kind.itemsize, [t, wide]) for k, (wide, kind) in self.states().items()}
        meta = {k: self.known[k] for k in ("convention", "fingerprint", "layers")} | {"batch": batch}
        header, offset = {"__metadata__": {"meta": compact(meta)}}, 0
        # wide types first, so that every tensor is aligned
        for name, (kind, size, shape) in sorted(tensors.items(), key=lambda item: -item[1][1]):
            end = offset + size * int(np.prod(shape))
            header[name], offset = {"dtype": kind, "shape": shape, "data_offsets": [offset, end]}, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text, list(header)[1:], 8 + len(text) + offset

def tokenize(o, path, vocab_size, files, directory):
    """The data -> tokens.bin, loss_mask.bin, skipped.jsonl; returns (SAMPLE [n], ids, counts)."""
    from tqdm import tqdm
    samples, names, skipped, lost, offset, pending = [], [], Counter(), 0, 0, deque()
    workers, parts = o.plan_workers or min(8, os.cpu_count()), warmup.read_parts(files, Path(o.data))
    start_encoder(o, path, vocab_size)
    pool, context = None, multiprocessing.get_context("spawn")
    if workers > 1 and sum(f.stat().st_size for f in files) > 8 << 20:  # less is done before they start
        pool = ProcessPoolExecutor(workers, context, start_encoder, (o, path, vocab_size))
    with pool or nullcontext(), open(directory / "tokens.bin", "wb") as tokens, \
            open(directory / "loss_mask.bin", "wb") as masks, open(directory / "skipped.jsonl", "w") as out, \
            tqdm(desc="tokenize", unit=" samples", mininterval=5) as bar:
        while True:
            while len(pending) < 3 * workers and (part := next(parts, None)):  # not all of it
                job = partial(encode_part, *part)
                pending.append(pool.submit(job).result if pool else job)
            if not pending:
                break
            good, bad, unlocated = pending.popleft()()
            lost += unlocated
            for row, name, ids, mask in good:
                tokens.write(ids)
                masks.write(mask)
                samples.append((row, offset, len(mask), mask.count(1), 0, 0))
                names.append(name)
                offset += len(mask)
            out.writelines(compact(line) + "\n" for line in bad)
            skipped.update(line["reason"] for line in bad)
            bar.update(len(good) + len(bad))
    counts = {"skipped": skipped.total(), "skipped_by_reason": dict(skipped), "turns_lost": lost}
    return np.array(samples, SAMPLE), names, counts

def make_plan(o, path, vocab_size, files, directory, known):
    """RESUME CONTRACT: plan.json comes last; without it the plan is made again from nothing."""
    (directory / "plan.json").unlink(missing_ok=True)
    samples, names, counts = tokenize(o, path, vocab_size, files, directory)
    if [[f.name, *stamp(f)] for f in files] != known["inputs"]:
        raise Refused(f"--data {o.data} changed while it was read: start again when it is whole")
    if not len(samples):
        raise Refused(f"--data {o.data}: no sample is left, {counts['skipped']} were skipped "
                      f"{counts['skipped_by_reason']}, {counts['turns_lost']} turns were not located; "
                      f"{directory / 'skipped.jsonl'} has a line for each")
    samples["batch"] = pack(samples["length"].tolist(), o.tokens)
    order = np.argsort(samples["batch"], kind="stable")
    samples = samples[order]
    before = np.cumsum(samples["length"], dtype=np.int64) - samples["length"]
    samples["start"] = before - before[np.searchsorted(samples["batch"], samples["batch"])]
    np.save(directory / "samples.npy", samples)
    index = {name: samples[name] for name in ("row", "batch", "start", "length", "supervised")}
    pq.write_table(pa.table({"id": [names[i] for i in order]} | index), directory / "index.parquet")
    known["counts"] = counts | {
        "samples": len(samples), "tokens": int(samples["length"].sum(dtype="i8")),
        "supervised": int(samples["supervised"].sum(dtype="i8")), "batches": int(samples["batch"][-1]) + 1}
    known["files"] = {f: warmup.size_of(directory / f) for f in PLAN_FILES}
    write_atomic(directory / "plan.json", json.dumps(known))  # without `whole`, for the sizes below
    draft = Plan(directory)
    sizes = [draft.layout(b)[2] for b in range(draft.counts["batches"])]
    known["counts"] |= {"bytes": sum(sizes), "largest": max(sizes)}
    write_atomic(directory / "plan.json", json.dumps(known | {"whole": True}, indent=1))
    return Plan(directory)

def get_plan(o, work, path, output):
    """The plan of WORK, made by the shard that comes first. Raises Refused where WORK or OUT hold another."""
    data, directory, config = Path(o.data), work / "plan", warmup.text_config(path, o.compute_dtype)
    if (slow := warmup.slow_kernels(config)) and not o.allow_slow:
        raise Refused(slow)
    files = warmup.data_files(data, (work, o.out, o.stage))
    layers, final = warmup.layer_ids(o.layers, config.num_hidden_layers), o.final or o.layers == "eagle3"
    inputs = [[f.name, *stamp(f)] for f in files]
    in_use = open(directory / ".in_use", "a")  # shared by every running shard: its plan is mapped into memory
    with open(directory / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it however this process ends
        there = output.read_json("manifest.json")
        output.prove(there)
        old = read_json(directory / "plan.json") or {}
        sizes = {f: warmup.size_of(directory / f) for f in PLAN_FILES}
        old, begun = old if old.get("whole") and old["files"] == sizes else {}, bool(marked(work))
        data = old["data"] if old.get("inputs") == inputs else sha(*map(warmup.file_hash, files))
        now = determined_by(o, path, data, layers, final)
        known = now | {"fingerprint": sha(compact(now)), "model": o.model, "hidden_size": config.hidden_size,
                       "convention": CONVENTION, "out": str(output), "inputs": inputs}
        for place, was in ((f"OUT {output}", there), (f"WORK {work}", old if begun else {})):
            if was and was.get("fingerprint") != known["fingerprint"]:
                what = "; ".join(f"{k} was {was.get(k)}, now {now[k]}" for k in now if was.get(k) != now[k])
                raise Refused(f"{place} holds another run. What differs: {what}. Use another OUT and WORK")
        of = old.get("out", "a plan that is gone or damaged")
        current = of == str(output) and old["fingerprint"] == known["fingerprint"]
        if begun and (of != str(output) or not there and not o.plan_only) and not (
                o.reconcile or o.resume_from_output):
            raise Refused(f"WORK {work} has markers of {of}, {output} holds {'a' if there else 'no'} run: "
                          "use another WORK, or let `make reconcile` make markers anew from what OUT holds")
        try:
            shared = current and not o.reconcile
            fcntl.flock(in_use, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"a shard of WORK {work} runs with this or another plan: `make stop`") from None
        for file in () if current else marked(work).values():
            file.unlink()  # nobody knows of what, or of another OUT
        left = Path(o.stage, old.get("fingerprint", "-"))
        if left.name != known["fingerprint"] and any(left.glob("batch_*.safetensors")):
            say(f"{left} holds batches of the plan that this one replaces: delete it if that run is given up")
        plan = Plan(directory) if current else make_plan(o, path, config.vocab_size, files, directory, known)
        fcntl.flock(in_use, fcntl.LOCK_SH) if not o.reconcile else None
        plan.in_use, plan.complete = in_use, there.get("complete")
        if plan.inputs != inputs:  # equal data under new dates: next time it need not be read to know
            write_atomic(directory / "plan.json", json.dumps(plan.known | {"inputs": inputs}, indent=1))
        if not o.plan_only and not (there and output.sizes("index.")):  # else it was lost, or is nobody's
            output.write("index.parquet", (directory / "index.parquet").read_bytes())
        if not o.plan_only and not there:  # which also proves that S3 takes objects, before a model is loaded
            output.write("manifest.json", manifest(plan))
    return plan

def manifest(plan, excluded=None, complete=False):
    import transformers
    record = {"versions": {"torch": torch.__version__, "transformers": transformers.__version__},
              "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
              "excluded": excluded or {}, "complete": complete}
    local = ("files", "inputs", "out", "whole")
    return json.dumps({k: v for k, v in plan.known.items() if k not in local} | record, indent=1)

# ------------------------------------------------------------------------------------------ model and forward
class Slot:
    """One batch's states: buffers on the device and, for the one copy, pinned ones on the host."""

    def __init__(self, plan, tokens, device):
        cuda, captures = device.type == "cuda", len(plan.layers) + plan.final
        shapes = plan.states() | {"range": (2 * captures, torch.float32)}  # least and greatest of every state
        self.device = {k: torch.empty(tokens, n, dtype=t, device=device) for k, (n, t) in shapes.items()}
        self.host = self.device if not cuda else {
            k: torch.empty_like(t, device="cpu", pin_memory=True) for k, t in self.device.items()}
        self.began, self.ended, self.copied = (cuda and torch.cuda.Event(True) for _ in "123")

    def store(self, column, row, states):
        """states [n, H] of a capture (with --final the last is the final state) -> rows from `row` on."""
        n, h = states.shape
        rows, at, into = slice(row, row + n), slice(column * h, (column + 1) * h), self.device
        into["range"][rows, 2 * column:2 * column + 2] = torch.stack(torch.aminmax(states, dim=-1), -1)
        if at.start >= into["hidden_states"].shape[1]:
            into["last_hidden_state"][rows] = states
        elif "hidden_states_scale" not in into:
            into["hidden_states"][rows, at] = states
        else:  # a scale for each token and layer brings its largest value to the end of e4m3's range
            fp8 = torch.float8_e4m3fn
            scale = (states.float().abs().amax(-1, keepdim=True) / torch.finfo(fp8).max).clamp(min=1e-30)
            into["hidden_states_scale"][rows, column] = scale[:, 0]
            into["hidden_states"][rows, at] = (states.float() / scale).to(fp8)

def load_decoder(o, path):
    """The text decoder of a model, on the GPU where there is one. Raises Failed for missing weights."""
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    how = {"dtype": KINDS[o.compute_dtype][1], "output_loading_info": True}
    if torch.cuda.is_available():
        how["device_map"] = {"": 0}  # straight there, with no second copy of the weights on the host
    auto = warmup.auto_class(transformers.AutoConfig.from_pretrained(path))
    model, info = auto.from_pretrained(path, **how)
    if info["missing_keys"]:
        raise Failed(f"{path} lacks weights of its model: {sorted(info['missing_keys'])[:3]} …")
    if not isinstance(getattr(model.get_decoder(), "layers", None), torch.nn.ModuleList):
        raise Failed(f"{type(model.get_decoder()).__name__} has no list of layers to take hidden states from")
    return model.get_decoder()

class Extractor:
    """A text decoder, cut after the last captured layer; batch() leaves a batch's states in a Slot."""

    def __init__(self, o, plan, decoder):
        self.o, self.plan, self.splits, self.packs = o, plan, 0, o.samples_per_forward != 1
        self.decoder, self.device = decoder.eval(), next(decoder.parameters()).device
        self.cuda = self.device.type == "cuda"
        self.fill = (o.forward_tokens or o.tokens) * self.cuda  # a GPU sees one shape always
        self.copies = torch.cuda.Stream() if self.cuda else None
        last = len(decoder.layers) - 1 if plan.final else max(plan.layers)
        decoder.layers, decoder.norm = decoder.layers[:last + 1], torch.nn.Identity()
        decoder.config.num_hidden_layers = last + 1
        self.captures = [*plan.layers, *[last] * plan.final]
        for column, layer in enumerate(self.captures):  # hooks stay outside of the compiled layers
            decoder.layers[layer].register_forward_hook(
                lambda _, args, out, c=column: self.sink(c, (out[0] if type(out) is tuple else out)[0]))

    @torch.no_grad()
    def row(self, ids, sink, fill=0):
        """One forward over samples (int32 arrays) laid end to end as [1, T]; sink(column, states [T, H])."""
        self.sink, longest, lengths = sink, self.o.max_len, [len(x) for x in ids]
        pad = max(0, fill - sum(lengths))  # a dummy, in pieces no longer than a sample
        lengths += [min(longest, pad - i) for i in range(0, pad, longest)]
        host = [np.concatenate([*ids, np.zeros(pad, np.int32)]).astype(np.int64),
                np.concatenate([np.arange(n) for n in lengths]), np.cumsum([0, *lengths], dtype=np.int32)]
        host = [torch.from_numpy(x) for x in host]
        host = [x.pin_memory() for x in host] if self.cuda else host  # else copies wait for the GPU
        tokens, positions, cu = (x.to(self.device, non_blocking=True) for x in host)
        inside = warmup.packing(cu, host[2], longest, positions[None]) if self.packs else nullcontext({})
        with inside as packed:
            self.decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **packed)

    def batch(self, ids, slot):
        """A batch's samples -> slot, in as many forwards as it takes; returns those too large for memory."""
        at, too_large, groups = np.cumsum([0, *map(len, ids)]).tolist(), [], [(0, len(ids))]
        limit, most = self.o.forward_tokens or self.o.tokens, self.o.samples_per_forward or len(ids)
        began = time.time()
        slot.began.record() if self.cuda else None
        while groups:
            a, b = groups.pop(0)
            size, out_of_memory = at[b] - at[a], False
            if size <= limit and b - a <= most:
                try:
                    self.row(ids[a:b], lambda c, states: slot.store(c, at[a], states[:size]), self.fill)
                    continue
                except torch.OutOfMemoryError:
                    out_of_memory, self.splits = True, self.splits + 1
                    say("out of GPU memory: forwards are split by samples from here on, files stay the same. "
                        "--forward-tokens sets it") if self.splits == 1 else None
            if out_of_memory and self.fill > size:  # first without so much of the dummy
                self.fill //= 2
                groups.insert(0, (a, b))
            elif b - a > 1:
                groups[:0] = [(a, (a + b) // 2), ((a + b) // 2, b)]
            else:
                too_large.append(a)
        if self.cuda:
            slot.ended.record()
            self.copies.wait_event(slot.ended)
            with torch.cuda.stream(self.copies):  # one copy a batch, beside the next forward
                for name, tensor in slot.device.items():
                    slot.host[name][:at[-1]].copy_(tensor[:at[-1]], non_blocking=True)
                slot.copied.record()
        slot.seconds = time.time() - began
        return too_large

# ---------------------------------------------------------------------------------------- staging and writing
class Stage:
    """Where finished batches wait for their upload; its brake closes at 80 % full and opens at 70 %."""

    def __init__(self, path, fingerprint):
        self.dir, self.closed = Path(path).resolve() / fingerprint, False
        try:
            self.dir.parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise Refused(f"--stage {path} cannot be used: {e}") from None

    def claim(self, work, num_shards):
        """Refuses staging through which another WORK, or this one in other shards, runs the same."""
        mine = self.dir / f".run_{sha(work.resolve(), num_shards)}"
        try:
            self.dir.mkdir(exist_ok=True)
            turn, self.lock = open(self.dir / ".claim", "w"), open(mine, "w")
        except OSError as e:
            raise Refused(f"--stage {self.dir.parent} cannot be written to: {e}") from None
        fcntl.flock(turn, fcntl.LOCK_EX)  # until this returns: nobody else is looking
        fcntl.flock(self.lock, fcntl.LOCK_SH)
        for other in set(self.dir.glob(".run_*")) - {mine}:
            try:
                with open(other) as f:
                    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Refused(f"another WORK or --num-shards runs through {self.dir}: `make stop`") from None

    def capacity(self):
        return monitor.room(self.dir.parent)[1] + sum(map(warmup.size_of, self.dir.glob("batch_*")))

    def reserve(self, path, size):
        """An open file of `size` allocated bytes, or None while there is no room."""
        used, left = monitor.room(self.dir.parent)
        ours = any(self.dir.glob("batch_*"))  # without any, waiting for 70 % would wait for somebody else
        self.closed = used >= (0.7 if self.closed and ours else 0.8) * (used + left)
        if self.closed or left < size:
            return None
        self.dir.mkdir(exist_ok=True)
        f = open(path, "wb")
        try:
            os.posix_fallocate(f.fileno(), 0, size)  # a full /dev/shm says so here, before a byte is written
            return f
        except OSError as e:
            f.close()
            path.unlink()
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

def raw(array):
    """The bytes of a tensor or array; no copy where it is contiguous."""
    if isinstance(array, torch.Tensor):
        array = array.contiguous().view(torch.uint8).numpy()
    return memoryview(np.ascontiguousarray(array)).cast("B")

def write_batch(o, plan, stage, uploads, progress, stop, batch, slot, too_large):
    """The writer thread's work: a batch from its buffers into staging, numbers checked. Returns the slot."""
    if slot.copied:
        slot.copied.synchronize()
    progress.computed(slot)
    rows, n = plan.rows(batch), int(plan.batch_tokens[batch])
    arrays = {name: tensor[:n] for name, tensor in slot.host.items()} | {
        name: np.concatenate(plan.gather(getattr(plan, name), batch)) for name in ("input_ids", "loss_mask")}
    arrays |= {"sample_index": rows["row"], "cu_seqlens": np.append(rows["start"], n).astype(np.int32)}
    least, greatest = arrays["range"].numpy().reshape(n, -1, 2).transpose(2, 0, 1)
    wrong = np.flatnonzero((~np.isfinite(least) | ~np.isfinite(greatest) | (least == greatest)).any(1))
    bad = set(np.searchsorted(rows["start"], wrong, "right") - 1) - set(too_large)
    if bad and not o.skip_bad:
        raise Failed(f"batch {batch}: states of sample {rows['row'][min(bad)]} (row of the data) hold NaN, "
                     "Inf or are constant; the batch was not written. --skip-bad passes over such samples")
    why = {i: "bad numbers" for i in bad} | {i: "too large for GPU memory" for i in too_large}
    for i in why:
        for name in [*plan.states(), "loss_mask"]:
            arrays[name][rows["start"][i]:rows["start"][i] + rows["length"][i]] = 0
    header, names, total = plan.layout(batch)
    path = stage.dir / Path(KEY.format(batch)).name
    while not (f := stage.reserve(path.with_suffix(".tmp"), total)):
        if progress.wait_for_room(True):
            say(f"waiting for room: {stage.dir.parent} is above the brake"
                + ("" if any(stage.dir.glob("batch_*")) else ", with other files than this run's"))
        if stop.wait(0.2) or uploads.fatal:
            return slot  # nothing of it was written: the next start computes it again
        if uploads.failed and not uploads.pending:
            raise Failed(f"{stage.dir} is full and uploads fail: {uploads.last_error}")
    progress.wait_for_room(False)
    if why:  # beside the file, so that a start that finds it staged knows them, too
        write_atomic(path.with_suffix(".json"), compact({int(rows["row"][i]): why[i] for i in why}))
    with f:  # RESUME CONTRACT: .tmp, then rename; nothing touches a file that has its final name
        f.writelines((header, *(raw(arrays[name]) for name in names)))
        if f.tell() != total:
            raise Failed(f"batch {batch}: {f.tell():,} bytes, {total:,} were planned")
        os.fsync(f.flush() or f.fileno())  # its room on a disk outlives a power cut: so must its bytes
    fault("written")
    os.replace(path.with_suffix(".tmp"), path)
    progress.wrote()
    fault("renamed")
    uploads.add(batch, path)
    return slot

# ----------------------------------------------------------------------------------------------------- upload
class Uploads:
    """At most --uploads transfers at a time; each ends in a marker, or its file waits for the next start."""

    def __init__(self, o, plan, work, output, progress, abort):
        self.o, self.plan, self.work, self.output = o, plan, work, output
        self.progress, self.abort = progress, abort
        self.pool, self.lock = ThreadPoolExecutor(o.uploads), threading.Lock()
        self.pending, self.staged, self.failed, self.fatal, self.last_error = 0, 0, 0, None, ""

    def add(self, batch, path):
        with self.lock:
            self.pending, self.staged = self.pending + 1, self.staged + path.stat().st_size
        self.pool.submit(self.run, batch, path, path.stat().st_size)

    def run(self, batch, path, size):
        try:
            if not (self.abort.is_set() or self.fatal):
                self.upload(batch, path, size)
        except BaseException as e:  # main looks at `fatal` between two batches
            say(traceback.format_exc()) if not isinstance(e, (OutputError, OSError)) else None
            self.fatal = self.fatal or first_line(e)
        with self.lock:
            self.pending, self.staged = self.pending - 1, self.staged - size

    def upload(self, batch, path, size):
        o, before, excluded = self.o, stamp(path), read_json(path.with_suffix(".json")) or {}
        slowest = min(o.upload_min_mbps, o.upload_mbps / o.uploads / 3 or 1e9)
        def transfer():
            if excluded or NOTE.format(batch) in self.noted:  # before the object: no whole object lacks it
                self.output.write(NOTE.format(batch), compact(excluded))
            self.output.put(path, KEY.format(batch), size, 60 + size / 1e6 / slowest)
            if stamp(path) != before:
                raise OutputError(f"{path} changed while it was uploaded")
        try:
            persist(transfer, o.upload_attempts, self.abort, f"batch {batch}: upload")
        except OutputError as e:
            if not self.abort.is_set():
                self.last_error, self.failed = str(e), self.failed + (not e.permanent)
                if e.permanent:
                    raise
            return
        fault("uploaded")
        # RESUME CONTRACT: the object was seen with its planned size: now the marker, and then the file may go
        mark(self.work, self.plan, batch, crc_of(path), excluded)
        fault("marked")
        self.progress.marked(batch, len(excluded))
        for file in (path, path.with_suffix(".json")):
            file.unlink(missing_ok=True)

    @cached_property
    def noted(self):  # notes of earlier starts, which may say what is no longer so
        return self.output.sizes("excluded/")

    def drain(self, stop):
        """Waits for the uploads; once `stop` is set 8 s at most, and what is left stays in staging."""
        end = None
        while self.pending and not self.fatal and not (end and time.monotonic() > end):
            end = end or (time.monotonic() + 8 if stop.is_set() else None)
            time.sleep(0.1)
        if self.pending:
            self.abort.set()
        self.pool.shutdown(cancel_futures=True)

# ------------------------------------------------------------------------------------------------------- main
def mark(work, plan, batch, crc, excluded):
    write_atomic(work / "markers" / f".done_{batch:06d}", compact(
        {"batch": batch, "key": KEY.format(batch), "bytes": plan.layout(batch)[2], "crc32": crc,
         "excluded": excluded, "samples": len(plan.rows(batch)), "tokens": int(plan.batch_tokens[batch])}))

def reconcile(plan, work, output, batches):
    """Makes the markers of these batches agree with one listing of OUT; returns those not whole there."""
    done = marked(work)  # before the listing: what others mark meanwhile is left alone
    found, missing = compare(output, {batch: plan.layout(batch)[2] for batch in batches}, done)
    for batch, excluded in found.items():
        mark(work, plan, batch, None, excluded)  # a listing knows no crc32
    for batch in done.keys() & missing:
        done[batch].unlink()
    return missing

def run(o, work, progress, stop):
    """One shard, from the plan to its last marker. Raises Refused, Failed or Stopped."""
    check_options(o)
    if not Path(o.data).exists():
        raise Refused(f"--data {o.data}: no such file or directory")
    path, abort = warmup.model_directory(o.model), threading.Event()
    try:
        aws_config = work / "aws" / (f"shard_{o.shard}.config" if progress else "plan.config")
        output = open_output(o.out, aws_config, abort, o.upload_mbps / o.uploads)
        plan = persist(lambda: get_plan(o, work, path, output), 3, abort, f"OUT {o.out}: try")
        mine = range(o.shard, plan.counts["batches"], o.num_shards)
        if o.reconcile or progress and o.resume_from_output:
            batches = range(plan.counts["batches"]) if o.reconcile else mine
            if reconcile(plan, work, output, batches) and plan.complete:
                output.write("manifest.json", manifest(plan))
                plan.complete = False
    except OutputError as e:
        look = "name, the credentials, AWS_ENDPOINT_URL" if o.out.startswith("s3:") else "path, permissions"
        raise Refused(f"OUT {o.out} cannot be used: {str(e).rstrip('.')}. Look at its {look}") from None
    stage = Stage(o.stage, plan.fingerprint)
    for line in monitor.estimate(plan, work, stage, o.num_shards) if not o.reconcile else ():
        say(line)
    if not progress:
        return
    warmup.save_head(path, work, output, plan.fingerprint) if o.save_head else None
    stage.claim(work, o.num_shards)
    if stage.capacity() < (least := 2 * plan.counts["largest"] * (o.shards_here or o.num_shards)):
        raise Refused(f"--stage {o.stage} has room for {stage.capacity():,} bytes; two batches a shard take "
                      f"{least:,}. Use another one, fewer --tokens, or say how many --shards-here share it")
    uploads = Uploads(o, plan, work, output, progress, abort)
    progress.planned(plan, mine, uploads)

    writer, writing, printed = ThreadPoolExecutor(1), deque(), 0
    try:
        # RESUME CONTRACT: torn files of ours go, whole ones without marker are uploaded, the rest is computed
        output.clean({KEY.format(batch) for batch in mine})
        done, todo = marked(work), []
        for file in stage.dir.glob("batch_*.*"):  # of any shard: on a cluster its next start may be elsewhere
            if file.stem[6:].isdecimal() and int(file.stem[6:]) in done:
                file.unlink(missing_ok=True)
        for batch in mine:
            file = stage.dir / Path(KEY.format(batch)).name
            file.with_suffix(".tmp").unlink(missing_ok=True)
            if batch in done:
                progress.marked(batch, len((read_json(done[batch]) or {}).get("excluded", {})), earlier=True)
            elif file.is_file() and file.stat().st_size == plan.layout(batch)[2]:
                uploads.add(batch, file)
            else:  # what is known of a file that is computed again is known no more
                file.with_suffix(".json").unlink(missing_ok=True)
                todo.append(batch)
        before = len(done.keys() & set(mine))
        say(f"shard {o.shard} of {o.num_shards}: {len(mine)} batches; {before} were done, "
            f"{len(mine) - len(todo) - before} staged, {len(todo)} are to be computed")

        progress.set(state="loading" if todo else "draining")
        if todo:
            if o.forward_tokens == "auto":
                o.forward_tokens = warmup.found_forward_tokens(o, work, path)
            extractor = Extractor(o, plan, load_decoder(o, path))
            progress.set(state="warming")
            say(f"start checks passed: {compact(warmup.prepare(extractor))}")
            slots = deque(Slot(plan, o.tokens, extractor.device) for _ in range(2))
            progress.running()
        for batch in todo:
            # between two batches: has somebody asked for an end, or have the uploads come to one?
            if stop.is_set() or uploads.fatal:
                break
            # both slots are taken: wait until the older one is written. The writer's errors come up here
            if not slots:
                slots.append(writing.popleft().result())
            # launch the forward and the copy; on a GPU nothing here waits for them
            slot = slots.popleft()
            too_large = extractor.batch(plan.gather(plan.input_ids, batch), slot)
            # the writer waits for the copy, then for room in staging, writes, and hands over to the uploads
            writing.append(writer.submit(
                write_batch, o, plan, stage, uploads, progress, stop, batch, slot, too_large))
            # a line for the log every 10 s
            if time.time() > printed + 10:
                printed = time.time()
                say(progress.line())
        while writing:
            writing.popleft().result()
    except BaseException:
        stop.set()
        raise
    finally:
        progress.set(state="draining")
        writer.shutdown(cancel_futures=True)
        uploads.drain(stop)

    if uploads.fatal or uploads.failed:
        cause = uploads.fatal or uploads.last_error
        raise Failed(f"{uploads.failed or 'all further'} uploads failed: {cause}. "
                     f"The rest waits in {stage.dir}; when the cause is mended, the same command goes on")
    if progress.now["batch"] < len(mine):
        raise Stopped(f"with {progress.now['batch']} of {len(mine)} batches done; the same command goes on")
    if o.resume_from_output and (rest := set(range(plan.counts["batches"])) - marked(work).keys()):
        reconcile(plan, work, output, sorted(rest))  # other shards' batches, maybe from other machines
    markers = marked(work)
    if markers.keys() >= set(range(plan.counts["batches"])):  # whoever comes last; twice is harmless
        excluded = {}
        for file in markers.values():
            excluded |= (read_json(file) or {}).get("excluded", {})
        last = partial(output.write, "manifest.json", manifest(plan, excluded, complete=True))
        if not plan.complete or before < len(mine):  # else it says already what computed this, and where
            persist(last, o.upload_attempts, stop, "manifest.json")
        shutil.rmtree(stage.dir, ignore_errors=True)
        say(f"all {plan.counts['batches']} batches are in {output}; its manifest.json says complete")

def main(argv=None):
    o, progress, code, error, stop = parse_options(argv, Options, __doc__), None, 0, None, threading.Event()
    work, alone, asked = Path(o.work), o.plan_only or o.reconcile, []

    def asked_to_stop(signum, frame):
        if asked:  # the second time: at once. Markers and staging are sound at every moment
            progress.set(state="stopped", exit_code=3) if progress else None
            kill_children()
            os._exit(3)
        idle = not progress or not progress.left or progress.now["state"] in (
            "planning", "loading", "warming")
        asked.append(idle)  # `stop` may be set by a failure, which drains, too
        stop.set()
        if idle:
            raise Stopped("with no batch under way")

    for signum in (signal.SIGTERM, signal.SIGINT):  # started by a background shell, SIGINT would be ignored
        signal.signal(signum, asked_to_stop)
    try:
        own_shard(o)
        try:
            for name in ("plan", "markers", "pids", "logs"):
                (work / name).mkdir(parents=True, exist_ok=True)
            pid_file = open(work / "pids" / (".plan" if alone else f"shard_{o.shard}.pid"), "a+")
            fcntl.flock(pid_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            pid_file.truncate(0)
            print(os.getpid(), file=pid_file, flush=True)
        except BlockingIOError:
            who = f"a plan of {work}" if alone else f"shard {o.shard} of {work}"
            raise Refused(f"{who} is under way already: wait, or see `make status`") from None
        except OSError as e:
            raise Refused(f"--work {work} cannot be written to ({e.strerror}): use another one") from None
        if not alone:
            progress = monitor.Progress(work, o.shard, o.num_shards, o.stage)
            progress.start()
        run(o, work, progress, stop)
    except (Refused, Failed, Stopped, OutputError) as e:
        code, error = getattr(e, "code", 1), str(e)
    except BaseException as e:
        say(traceback.format_exc())
        code, error = 1, f"{type(e).__name__}: {first_line(e)}"
        if asked == [True]:  # an import which Stopped has ended gives it another name
            code, error = 3, "with no batch under way"
    state = "done failed failed stopped".split()[code]
    say(f"{'refused' if code == 2 else state}: {error}") if error else None
    progress.set(state=state, exit_code=code, error=error) if progress else None
    return code

if __name__ == "__main__":
    sys.exit(main())
