"""Trains a tiny DFlash-like head on an output, through HiddenStates and a DataLoader. An example, not a drafter.

    python tests/train_demo.py --out work/demo/s3/hidden-states/run1 [--steps 100]      (make train-demo)

As in DFlash, the captured layers of all tokens up to an anchor condition a block: the anchor's token and BLOCK - 1
masks, which attend to that context and to each other, and predict the tokens that follow. Here the head has one
layer, and its embedding and lm_head are its own, while DFlash takes the target's. Prints the loss as it falls, on
samples that are not trained on too; the last line is JSON. Exit code 1 where the loss has not fallen.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from export import HiddenStates

BLOCK, WIDTH, ANCHORS = 4, 128, 32


class Head(nn.Module):
    """states [T, K*H], ids [T], anchors [A] -> logits [A, BLOCK - 1, vocabulary]"""

    def __init__(self, wide, vocabulary):
        super().__init__()
        self.fuse = nn.Sequential(nn.RMSNorm(wide), nn.Linear(wide, WIDTH))
        self.embed = nn.Embedding(vocabulary + 1, WIDTH)  # the last one is the mask
        self.place = nn.Embedding(BLOCK, WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.mlp = nn.Sequential(
            nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.lm_head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, states, ids, anchors):
        context, (a, t) = self.fuse(states), (len(anchors), len(ids))
        block = torch.full((a, BLOCK), self.embed.num_embeddings - 1)
        block[:, 0] = ids[anchors]
        block = (self.embed(block) + self.place.weight).flatten(0, 1)  # [A*BLOCK, WIDTH]
        # a block sees itself, and the context before its anchor, whose own state is not known when it is drafted
        own = torch.eye(a, dtype=torch.bool).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        before = (torch.arange(t) < anchors[:, None]).repeat_interleave(BLOCK, 0)
        kv = self.kv(torch.cat([context, block])).unflatten(-1, (2, 4, -1)).permute(1, 2, 0, 3)
        q = self.q(block).unflatten(-1, (4, -1)).transpose(0, 1)  # [heads, A*BLOCK, WIDTH/4]
        seen = F.scaled_dot_product_attention(q, *kv, attn_mask=torch.cat([before, own], 1))
        block = block + seen.transpose(0, 1).flatten(1)
        return self.lm_head(block + self.mlp(block)).unflatten(0, (a, BLOCK))[:, 1:]


def loss_of(head, sample, generator):
    """Cross entropy of the tokens behind up to ANCHORS supervised anchors; None for a sample without any."""
    ids, mask = sample["input_ids"], sample["loss_mask"].bool()
    if len(ids) < BLOCK:
        return None
    places = mask.unfold(0, BLOCK, 1).all(1).nonzero().flatten()
    if not len(places):
        return None
    anchors = places[torch.randperm(len(places), generator=generator)[:ANCHORS]]
    logits = head(sample["hidden_states"].float(), ids, anchors)
    targets = ids[anchors[:, None] + torch.arange(1, BLOCK)]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def evaluate(head, data):
    with torch.no_grad():
        losses = [loss_of(head, sample, torch.Generator().manual_seed(0)) for sample in data]
    losses = [loss.item() for loss in losses if loss is not None]
    return sum(losses) / len(losses)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="local output directory")
    parser.add_argument("--steps", type=int, default=100, help="steps of 8 samples (default 100)")
    a = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # it is too small for more
    data = HiddenStates(a.out)
    held = min(16, len(data) // 4)
    train, rest = Subset(data, range(held, len(data))), [data[i] for i in range(held)]
    vocabulary = 1 + max(int(sample["input_ids"].max()) for sample in data)
    print(f"{len(data)} samples, layers {data.manifest['layers']}, {held} of them held out")
    head, generator = Head(data[0]["hidden_states"].shape[1], vocabulary), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(head.parameters(), 3e-3)
    loader = DataLoader(train, batch_size=8, shuffle=True, num_workers=1, collate_fn=list)
    before, began, step, recent = evaluate(head, rest), time.time(), 0, []
    print(f"step    0  held-out loss {before:.3f}")
    while step < a.steps:
        for samples in loader:
            losses = [loss for sample in samples if (loss := loss_of(head, sample, generator)) is not None]
            if not losses or step == a.steps:
                continue
            optimizer.zero_grad()
            loss = torch.stack(losses).mean()
            loss.backward()
            optimizer.step()
            step, recent = step + 1, [*recent, loss.item()]
            if step % max(1, a.steps // 5) == 0:
                mean = sum(recent) / len(recent)
                print(f"step {step:4}  loss {mean:.3f}  held-out loss {evaluate(head, rest):.3f}", flush=True)
                recent = []
    after = evaluate(head, rest)
    print(
        json.dumps(
            {
                "loss_before": round(before, 4),
                "loss_after": round(after, 4),
                "steps": a.steps,
                "seconds": round(time.time() - began, 1),
            }
        )
    )
    return 0 if after < before else 1


if __name__ == "__main__":
    sys.exit(main())
