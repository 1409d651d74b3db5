"""What trainers make of an export, with their own loaders from their own packages; and some steps of training.

    PYTHONPATH=<packages> python tests/loaders.py speculators|specforge|modelopt RESULT ALGORITHM=DIR ...

Writes into RESULT, by torch.save, for each algorithm: samples, a list of what the loader gave, in its order;
config, the layers that the trainer reads from the file in DIR; losses of a tiny drafter of the trainer's own, in
fp32 on the CPU. Not trained: specforge's EAGLE-3, and modelopt's, which call Qwen3RotaryEmbedding(device=...), an
argument that the transformers of this environment does not take.
"""

import copy
import json
import sys
import warnings
from pathlib import Path

import torch

warnings.simplefilter("ignore")


def steps(model, loss_of, count=8):
    """Losses of `count` steps on the same batch, with the same random numbers each."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-3)
    losses = []
    for _ in range(count):
        torch.manual_seed(0)
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def in_fp32(batch):
    return {k: v.float() if v.is_floating_point() else v for k, v in batch.items() if torch.is_tensor(v)}


def speculators(algorithm, folder):
    from speculators.train import cli
    from speculators.train.config import TrainConfig
    from speculators.train.data import ArrowDataset, CollateFn

    data = ArrowDataset(max_len=300, datapath=folder, on_missing="raise")
    config = TrainConfig.from_sources(cli={}, config_path=str(folder / "train.yaml"), argv=[])
    layers = config.draft.target_layer_ids
    found = {"samples": [data[i] for i in range(len(data))], "config": layers}
    target = config.verifier.verifier_name_or_path
    width = data[0]["verifier_last_hidden_states"].shape[1]
    shape = cli.create_transformer_layer_config(
        verifier_name_or_path=target,
        num_layers=1,
        draft_arch="llama" if algorithm == "eagle3" else "qwen3",
        hidden_act="silu",
        sliding_window=64,
        full_attention_indices=[0],
        mrope_full_head_hack=True,
        trust_remote_code=False,
    )
    kind = cli.SpeculatorModel.registry[algorithm]
    arguments = dict(
        verifier_name_or_path=target,
        target_layer_ids=layers,
        draft_vocab_size=shape.vocab_size,
        block_size=4,
        mask_token_id=0,
        draft_attn_impl="eager",
        loss_fn="ce",
        loss_implementation="eager",
        max_anchors=16,
        ttt_steps=2,
        norm_before_residual=True,
        embed_requires_grad=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        ttt_step_loss_decay=1.0,
        use_off_policy_tokens=False,
    )
    model = kind.from_training_args(verifier_config=shape, t2d=None, d2t=None, **arguments).float()
    preprocess = cli.shift_batch if algorithm == "eagle3" else None
    batch = in_fp32(CollateFn(300, width, len(layers), preprocess=preprocess)([data[i] for i in range(3)]))
    more = kind.get_trainer_kwargs(**arguments)[0]
    found["losses"] = steps(model, lambda: model(**batch, **more)[1])
    return found


def specforge(algorithm, folder):
    from specforge.algorithms.common import dflash_family_data as family
    from specforge.algorithms.eagle3 import data as eagle3
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig
    from specforge.runtime.data_plane.feature_store import load_feature_file

    how = dict(run_id="test", ttt_length=1, max_len=300)
    reader, normalizer = {
        "dflash": (family.build_offline_reader, family.build_offline_normalizer),
        "dspark": (family.build_dspark_offline_reader, family.build_dspark_offline_normalizer),
        "eagle3": (eagle3.build_offline_reader, eagle3.build_offline_normalizer),
    }[algorithm]
    refs = (reader if algorithm == "eagle3" else lambda *a, **k: reader(algorithm, *a, **k))(folder, **how)
    refs.validate_files = True  # it looks into every file
    files = [ref.feature_store_uri.removeprefix("file://") for ref in refs.read()]
    samples = [normalizer(300)(load_feature_file(file)) for file in files]
    config = AutoDraftModelConfig.from_file(folder / "draft_config.json")
    own = config.eagle_config if algorithm == "eagle3" else config.dflash_config
    layers = own["eagle_aux_hidden_state_layer_ids" if algorithm == "eagle3" else "target_layer_ids"]
    found = {"samples": samples, "files": files, "config": layers}
    if algorithm != "eagle3":
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel, OnlineDSparkModel
        from specforge.modeling.target.target_utils import TargetEmbeddingsAndHead

        target = TargetEmbeddingsAndHead.from_pretrained(
            str(folder / "target"), device="cpu", dtype=torch.float32
        )
        config._attn_implementation = "sdpa"
        draft = AutoDraftModel.from_config(config, torch_dtype=torch.float32)
        kind = {"dflash": OnlineDFlashModel, "dspark": OnlineDSparkModel}[algorithm]
        model = kind(
            draft,
            target.lm_head,
            target.embed_tokens,
            0,
            block_size=4,
            attention_backend="sdpa",
            num_anchors=16,
        )
        for part in (target.lm_head, target.embed_tokens):
            part.requires_grad_(False)
        batch = in_fp32(max(samples, key=lambda sample: sample["input_ids"].shape[1]))
        found["losses"] = steps(model, lambda: model(**batch)[0])
    return found


def modelopt(algorithm, folder):
    from modelopt.torch.speculative.config import DFlashConfig, EagleConfig
    from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset

    files = sorted(map(str, folder.glob("*.pt")))
    data = OfflineSupervisedDataset(files, answer_only_loss=True)
    given = json.loads((folder / "modelopt.json").read_text())
    config = (EagleConfig if algorithm == "eagle3" else DFlashConfig)(**copy.deepcopy(given))
    inner = config.eagle_architecture_config if algorithm == "eagle3" else config.dflash_architecture_config
    key = "eagle_aux_hidden_state_layer_ids" if algorithm == "eagle3" else "target_layer_ids"
    EagleOfflineDataCollator(128)([data[0], data[1]])
    return {"samples": [data[i] for i in range(len(data))], "files": files, "config": inner[key]}


if __name__ == "__main__":
    trainer, result, *exports = sys.argv[1:]
    made = {}
    for algorithm, _, folder in (export.partition("=") for export in exports):
        made[algorithm] = globals()[trainer](algorithm, Path(folder))
    torch.save(made, result)
