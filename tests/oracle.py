"""Check an output against the plain model: every sample alone, unpacked, sharing no code with extract.py.

    python tests/oracle.py --out OUT --model MODEL [--samples 100|all] [--data chat.jsonl]

OUT is an output (manifest.json, index.parquet, batches/), a local directory or s3://bucket/prefix; of one in S3
a listing must have every batch in its size, and as many are fetched as hold the samples. Samples are drawn, run
one at a time through untouched transformers, and compared with what is stored. All files are checked against
each other, the index and the manifest. --data compares token ids with those of the chat template (row r is line
r of a JSONL file). With --partial, or where the manifest does not say complete, batches that are not there are
no fault.

Exit codes: 0 all agree; 1 something does not, and is named; 2 an input is missing or unreadable.
"""
import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

os.environ["FLA_FLASH_QLA"] = "0"  # on a GPU, FLA's own kernels: those under test may be FlashQLA's
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from export import OutputError, open_output

# Largest relative error by the stored dtype, when both sides compute in fp32. Computing in bf16 errs more
# than storing in it: where either side computes in bf16, BF16_COMPUTE is allowed (sound dense models: 0.02 to
# 0.05; with experts, whose routing flips, it takes a larger --tolerance).
TOLERANCE = {"fp32": 1e-4, "bf16": 4e-3, "fp8": 0.1}
BF16_COMPUTE = 0.1
STORED = {"fp32": "F32", "bf16": "BF16", "fp8": "F8_E4M3"}  # safetensors' names
BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I32": 4, "I64": 8, "U8": 1}


def model_directory(name):
    """Directory of a checkpoint; one on the hub is downloaded. Raises FileNotFoundError."""
    from huggingface_hub import snapshot_download

    if Path(name).is_dir():
        return name
    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"])
    except Exception as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FileNotFoundError(f"MODEL {name}: no model directory, and not to be had from the hub ({why})") from None


def load_model(path, dtype=torch.float32, device="cpu"):
    """The untouched model in eval mode. Raises ValueError when the checkpoint lacks some of its weights."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    path = model_directory(path)
    options = {"dtype": dtype, "output_loading_info": True}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(path, **options)
    except ValueError:  # no text-only class for this architecture
        model, info = AutoModelForImageTextToText.from_pretrained(path, **options)
    if info["missing_keys"]:
        raise ValueError(f"{path} lacks weights: {', '.join(sorted(info['missing_keys'])[:3])} ...")
    return model.to(device).eval()


@torch.no_grad()
def solo_states(model, input_ids, layers, final=False):
    """States of one sequence run alone, in fp32 where the model is: [T, K*H], and [T, H] with `final`, else None.

    input_ids: [T] integers. layers: 0-based; L means the output of decoder layer L, `hidden_states[L + 1]`.
    The second value is the last layer's output before the final norm, which `hidden_states[-1]` has been
    through: hence the hook. Raises RuntimeError for a model with another number of hidden states."""
    decoder, last = model.get_decoder().layers, []
    keep = lambda module, args, output: last.append(output[0] if isinstance(output, tuple) else output)
    handle = decoder[-1].register_forward_hook(keep)
    try:
        ids = torch.as_tensor(input_ids, dtype=torch.long, device=model.device)[None]
        states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    finally:
        handle.remove()
    if len(states) != len(decoder) + 1:
        raise RuntimeError(f"{len(states)} hidden states out of {len(decoder)} layers, expected one more")
    states = [*states[1:-1], last[0]]
    return torch.cat([states[layer][0].float() for layer in layers], dim=-1), last[0][0].float() if final else None


def relative_errors(stored, true, parts):
    """For each of `parts` column blocks of two [T, parts*H] tensors, how far `stored` is from `true`.

    The larger of ||a-b|| / ||b|| over the block and its mean over tokens: in some models the first token's
    state is hundreds of times longer than the others and would hide them. Not a number counts as infinite."""
    a, b = (x.unflatten(1, (parts, -1)).transpose(0, 1) for x in (stored, true))
    whole = (a - b).flatten(1).norm(dim=1) / b.flatten(1).norm(dim=1)
    tokens = ((a - b).norm(dim=2) / b.norm(dim=2)).mean(dim=1)
    return torch.nan_to_num(torch.maximum(whole, tokens), nan=float("inf")).tolist()


def stored_states(file, begin, end, layers):
    """Tokens [begin, end) of an open batch file in fp32: hidden_states [T, K*H], any final state beside."""
    parts = [file.get_slice("hidden_states")[begin:end].float()]
    if "hidden_states_scale" in file.keys():  # fp8: one scale per token and layer
        scale = file.get_slice("hidden_states_scale")[begin:end].float()
        parts = [(parts[0].unflatten(1, (layers, -1)) * scale[:, :, None]).flatten(1)]
    if "last_hidden_state" in file.keys():
        parts.append(file.get_slice("last_hidden_state")[begin:end].float())
    return torch.cat(parts, dim=1)


def tensors(manifest, n, samples):
    """{tensor of a batch of n tokens and so many samples: (dtype, shape)}"""
    layers, hidden, dtype = manifest["layers"], manifest["hidden_size"], manifest["dtype"]
    wanted = {"hidden_states": (STORED[dtype], [n, len(layers) * hidden]), "input_ids": ("I32", [n]),
              "loss_mask": ("U8", [n]), "cu_seqlens": ("I32", [samples + 1]), "sample_index": ("I64", [samples])}
    if dtype == "fp8":
        wanted["hidden_states_scale"] = ("F32", [n, len(layers)])
    if manifest.get("final"):
        wanted["last_hidden_state"] = (STORED["bf16" if dtype == "fp8" else dtype], [n, hidden])
    return wanted


def file_problems(file, batch, rows, manifest, excluded):
    """What is inconsistent in one open batch file: a list of sentences. rows: its index rows, by start."""
    layers, n = manifest["layers"], file.get_slice("input_ids").get_shape()[0]
    wanted = tensors(manifest, n, len(rows))
    found = {key: (file.get_slice(key).get_dtype(), file.get_slice(key).get_shape()) for key in file.keys()}
    if found != wanted:
        return [f"{key} is {found.get(key, 'not there')}, expected {wanted.get(key, 'none')}"
                for key in sorted(found | wanted) if found.get(key) != wanted.get(key)]
    bad, (bounds, mask) = [], (file.get_tensor(key).long() for key in ("cu_seqlens", "loss_mask"))
    meta = json.loads((file.metadata() or {}).get("meta", "{}"))
    for key, value in {"fingerprint": manifest["fingerprint"], "layers": layers, "batch": batch}.items():
        if meta.get(key) != value:
            bad.append(f"meta says {key} {meta.get(key)!r}, expected {value!r}")
    if bounds[0] != 0 or bounds[-1] != n or bool((bounds.diff() <= 0).any()):
        bad.append(f"cu_seqlens do not rise from 0 to {n}")
    elif bounds.tolist() != [row["start"] for row in rows] + [n]:
        bad.append("cu_seqlens differ from the index's starts")
    elif bounds.diff().tolist() != [row["length"] for row in rows]:
        bad.append("cu_seqlens differ from the index's lengths")
    if file.get_tensor("sample_index").tolist() != [row["row"] for row in rows]:
        bad.append("sample_index differs from the index's rows")
    if bool((mask > 1).any()):
        bad.append("loss_mask has values other than 0 and 1")
    for row in rows:
        supervised, planned = int(mask[row["start"]:][:row["length"]].sum()), row["supervised"]
        if supervised != (0 if row["row"] in excluded else planned):
            bad.append(f"row {row['row']} has {supervised} supervised tokens, the index says {planned}")
    return bad


def expected_tokens(line, tokenizer, template_args):
    """(token ids, loss mask or None) that one JSONL line asks for; whatever is wrong with it is raised."""
    line = json.loads(line.decode("utf-8-sig"))
    if "input_ids" in line:
        return line["input_ids"], line.get("loss_mask")
    messages = line.get("messages")
    if messages is None:
        names = {"human": "user", "gpt": "assistant"}
        messages = [{"role": "system", "content": line["system"]}] if line.get("system") else []
        messages += [{"role": names.get(turn["from"], turn["from"]), "content": turn["value"]}
                     for turn in line["conversations"]]
    for call in [call for message in messages for call in message.get("tool_calls") or []]:
        call = call.get("function", call)
        if isinstance(call.get("arguments"), str):
            call["arguments"] = json.loads(call["arguments"])
    text = tokenizer.apply_chat_template(messages, tools=line.get("tools"), return_dict=True, **template_args)
    return text["input_ids"], None


def check_files(out, manifest, rows, excluded, partial):
    """Check every file of `out`: (index rows of the sound ones by batch, sentences about the others)."""
    files = {int(path.stem[6:]): path for path in (out / "batches").glob("batch_*.safetensors")}
    batches, sound, problems = {}, [], []
    for row in sorted(rows, key=lambda row: row["start"]):
        batches.setdefault(row["batch"], []).append(row)
    if len({row["row"] for row in rows}) != len(rows):
        problems.append("index.parquet holds some row twice")
    for batch in sorted(batches.keys() | files.keys()):
        if batch not in batches:
            problems.append(f"{files[batch].name} is not in the index")
        elif batch not in files:
            problems += [] if partial else [f"batch_{batch:06d}.safetensors is not there"]
        else:
            try:
                with safe_open(files[batch], "pt") as file:
                    bad = file_problems(file, batch, batches[batch], manifest, excluded)
            except (SafetensorError, ValueError) as error:
                bad = [f"cannot be read ({error})"]
            problems += [f"{files[batch].name}: {sentence}" for sentence in bad]
            sound += [] if bad else batches[batch]
    return sound, problems


def listing_problems(there, index, manifest, partial):
    """A listing {key: bytes} against index and manifest: ({whole batch: its samples}, sentences about the rest).

    The tensors' bytes are known; a header of up to 4 KiB comes on top, and the manifest has the sum of all."""
    whole, problems, lengths, total = {}, [], {}, manifest.get("counts", {}).get("bytes")
    there = {key: size for key, size in there.items() if key.endswith(".safetensors")}
    for batch, length in zip(index["batch"].to_pylist(), index["length"].to_pylist()):
        lengths.setdefault(batch, []).append(length)
    keys = {f"batches/batch_{batch:06d}.safetensors": batch for batch in lengths}
    for key in sorted(keys.keys() | there.keys()):
        name, size = Path(key).name, there.get(key)
        if key not in keys:
            problems.append(f"{name} is not in the index")
        elif size is None:
            problems += [] if partial else [f"{name} is not there"]
        else:
            n, samples = sum(lengths[keys[key]]), len(lengths[keys[key]])
            least = sum(BYTES[kind] * math.prod(shape) for kind, shape in tensors(manifest, n, samples).values())
            if least < size < least + 4096:
                whole[keys[key]] = samples
            else:
                problems.append(f"{name} has {size:,} bytes, its tensors alone {least:,}")
    if len(whole) == len(keys) and total not in (None, sum(there[key] for key in keys)):
        problems.append(f"the batches have {sum(there[key] for key in keys):,} bytes, the manifest says {total:,}")
    return whole, problems


def fetch(url, samples, seed, folder, partial):
    """Fetch of an output in S3 into `folder` manifest, index, and batches, drawn with `seed`, until they hold
    `samples` samples (None: all). Returns what is wrong with its listing: sentences.

    Raises OutputError in the words of `aws`, FileNotFoundError for an object that should be there."""
    output, held = open_output(url), 0

    def get(key):
        (folder / key).parent.mkdir(exist_ok=True)
        try:
            output.aws("s3", "cp", f"{output}/{key}", str(folder / key), "--only-show-errors", deadline=3600.0)
        except OutputError as error:
            if "404" not in str(error):
                raise
            raise FileNotFoundError(f"no object {output}/{key}") from None
    for key in ("manifest.json", "index.parquet", *output.sizes("excluded/")):
        get(key)
    manifest = json.loads((folder / "manifest.json").read_text())
    partial, there = partial or not manifest.get("complete", True), output.sizes("batches/")
    whole, problems = listing_problems(there, pq.read_table(folder / "index.parquet"), manifest, partial)
    for batch in random.Random(seed).sample(sorted(whole), len(whole)):
        if samples is not None and held >= samples:
            break
        get(f"batches/batch_{batch:06d}.safetensors")
        held += whole[batch]
    print(f"fetched batches of {held:,} samples from {output}")
    return problems


def fitting_dtype(model, manifest, device):
    """fp32 where a checkpoint's weights, mostly of 2 bytes, fit into memory with 4; else bf16, and for quantized
    weights, which run in nothing else."""
    config, weights = Path(model) / "config.json", Path(model).glob("*.safetensors")
    if not config.is_file():  # of a hub model, what the run did
        return manifest.get("compute_dtype", "fp32")
    on_gpu = str(device).startswith("cuda")
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    fits = 2 * sum(file.stat().st_size for file in weights) < 0.8 * free
    return "fp32" if fits and "quantization_config" not in json.loads(config.read_text()) else "bf16"


def check(out, model, samples=None, seed=0, dtype="fp32", tolerance=None, data=None, tokenizer=None,
          partial=False, device="cpu"):
    """Check output directory `out` against `model`, a checkpoint directory or what `load_model` gave for it.

    samples: how many to draw with `seed`, None for all. dtype: fp32, bf16 or auto, for loading. tolerance: the
    largest relative error, None for TOLERANCE's. data: JSONL file to compare token ids with (beside a loaded
    model, give its tokenizer too). partial: only the batches that are there.

    Returns a dictionary: ok, samples, tokens, layers ({name: {"largest", "median"}}), largest, tolerance,
    worst ([(error, layer, row, id)] over the tolerance, worst first), problems (sentences).
    Raises OSError, ValueError or KeyError where an input is missing or not what it should be."""
    out = Path(out)
    manifest = json.loads((out / "manifest.json").read_text())
    rows = pq.read_table(out / "index.parquet").to_pylist()
    layers, final = manifest["layers"], bool(manifest.get("final"))
    if dtype == "auto":
        dtype = fitting_dtype(model, manifest, device)
    if tolerance is None:
        in_bf16 = "bf16" in (manifest.get("compute_dtype"), dtype)
        tolerance = max(TOLERANCE[manifest["dtype"]], BF16_COMPUTE if in_bf16 else 0)
    if data and (Path(data).is_dir() or Path(data).suffix == ".parquet"):
        raise ValueError(f"data {data} is not one JSONL file, whose lines are the rows")
    lines = Path(data).read_bytes().split(b"\n") if data else []
    template_args = manifest.get("template_args") or {}
    template_args = json.loads(template_args) if isinstance(template_args, str) else template_args
    if isinstance(model, (str, Path)):
        from transformers import AutoTokenizer
        path, model = model, load_model(model, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype], device)
        tokenizer = AutoTokenizer.from_pretrained(path) if data else None

    excluded = {int(e["row"] if isinstance(e, dict) else e) for e in manifest.get("excluded", [])}
    for note in out.glob("excluded/batch_*.json"):  # the manifest has them once it is complete
        excluded |= {int(row) for row in json.loads(note.read_text())}
    partial = partial or not manifest.get("complete", True)  # a run that goes on
    sound, problems = check_files(out, manifest, rows, excluded, partial)
    drawn = [row for row in sound if row["row"] not in excluded]
    if samples is not None and samples < len(drawn):
        drawn = [drawn[i] for i in sorted(random.Random(seed).sample(range(len(drawn)), samples))]
    names = [f"layer {layer}" for layer in layers] + ["final"] * final
    errors, worst, cut = {name: [] for name in names}, [], set()
    for row in tqdm(drawn, "compare", unit=" samples", disable=None):
        begin, end = row["start"], row["start"] + row["length"]
        with safe_open(out / f"batches/batch_{row['batch']:06d}.safetensors", "pt") as file:
            ids, mask = (file.get_slice(key)[begin:end].tolist() for key in ("input_ids", "loss_mask"))
            stored = stored_states(file, begin, end, len(layers))
        true = torch.cat([s for s in solo_states(model, ids, layers, final) if s is not None], dim=1)
        for name, error in zip(names, relative_errors(stored.to(true.device), true, len(names)), strict=True):
            errors[name].append(error)
            if error > tolerance:
                worst.append((error, name, row["row"], row["id"]))
        if data:
            where = f"row {row['row']}: line {row['row'] + 1} of {data}"
            try:
                asked, asked_mask = expected_tokens(lines[row["row"]], tokenizer, template_args)
            except Exception as error:  # a template may raise anything
                problems.append(f"{where} gives no tokens ({error})")
                continue
            if ids != asked[:len(ids)] or (asked_mask and mask != asked_mask[:len(ids)]):
                problems.append(f"{where} has other token ids or another mask")
            cut |= {len(ids)} if len(ids) < len(asked) else set()
    if len(cut) > 1:
        problems.append(f"samples are cut at several lengths: {sorted(cut)}")
    spread = {name: {"largest": max(e), "median": statistics.median(e)} for name, e in errors.items() if e}
    return {"ok": bool(drawn) and not problems and not worst, "samples": len(drawn),
            "tokens": sum(row["length"] for row in drawn), "layers": spread, "tolerance": tolerance,
            "largest": max((layer["largest"] for layer in spread.values()), default=0.0), "dtype": dtype,
            "worst": sorted(worst, key=lambda entry: -entry[0]), "problems": problems}


def number_or_all(text):
    return None if text == "all" else int(text)


def main():
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="local output directory or s3://bucket/prefix")
    parser.add_argument("--model", required=True, help="checkpoint directory or hub name")
    parser.add_argument("--samples", type=number_or_all, default=100, help="how many, or all (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="for the draw (default 0)")
    parser.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16"],
                        help="how to run the model (default auto: fp32 where it fits into memory, else bf16)")
    parser.add_argument("--tolerance", type=float, help="largest relative error (default: 1e-4 for states "
                        "stored as fp32, 4e-3 bf16, 0.1 fp8; at least 0.1 where either side computes in bf16)")
    parser.add_argument("--data", help="the JSONL file that OUT was made from: compare its token ids too")
    parser.add_argument("--partial", action="store_true", help="check only the batches that are there")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        help="cpu or cuda (default: a GPU if there is one)")
    a = parser.parse_args()
    try:
        model = model_directory(a.model)  # before anything is fetched
        with tempfile.TemporaryDirectory(prefix="verify-") as folder:
            out, partial, listed = a.out, a.partial, []
            if out.startswith("s3://"):
                listed = fetch(out, a.samples, a.seed, Path(folder), partial)
                out, partial = folder, True
            result = check(out, model, a.samples, a.seed, a.dtype, a.tolerance, a.data, partial=partial,
                           device=a.device)
            result |= {"problems": listed + result["problems"], "ok": result["ok"] and not listed}
    except (OSError, ValueError, KeyError, RuntimeError, MemoryError, ImportError, OutputError) as error:
        way_out = "; --dtype bf16 takes half of fp32's memory, --device cpu takes none of the GPU's" * (
            "out of memory" in str(error) or isinstance(error, MemoryError))
        print(f"cannot check {a.out}: {type(error).__name__}: {str(error).strip()}{way_out}", file=sys.stderr)
        return 2
    print(f"transformers alone in {result['dtype']} on {a.device}")
    for name, error in result["layers"].items():
        print(f"{name:>9}   largest {error['largest']:.1e}   median {error['median']:.1e}")
    for sentence in result["problems"][:20]:
        print(f"INCONSISTENT {sentence}")
    for error, name, row, sample in result["worst"][:10]:
        print(f"WRONG row {row} (id {sample}), {name}: relative error {error:.1e}")
    more = f"; {len(result['worst'])} over it, {len(result['problems'])} inconsistencies" * (not result["ok"])
    final = "final" in result["layers"]
    print(f"compared {result['samples']:,} samples, {result['tokens']:,} tokens, "
          f"{len(result['layers']) - final} layers{' and the final state' * final}: largest relative "
          f"error {result['largest']:.1e} (tolerance {result['tolerance']:.1e}){more}")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
