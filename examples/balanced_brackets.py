"""A transformer judges brackets: one head weighs, at every bracket, what opens and closes from there on.

Run: python examples/balanced_brackets.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, arange

from interpose.dialects.transformer_lens import HookedTransformer
from interpose.dialects.transformer_lens.train import HookedTransformerTrainConfig, train

SHAPE = {"n_layers": 2, "d_model": 32, "n_heads": 1, "d_head": 32, "d_mlp": 64, "act_fn": "relu"}
SHAPE |= {"n_ctx": 19, "d_vocab": 3, "d_vocab_out": 2, "attention_dir": "bidirectional"}
SHAPE |= {"normalization_type": None, "positional_embedding_type": "shortformer", "device": "cpu"}
STRINGS = 1 - 2 * (arange(2**17, 2**18, 2)[:, None] >> arange(18) & 1)  # all from 1, "(", to -1
TOKENS = F.pad((STRINGS < 0).long(), (1, 0), value=2)  # a start token before each
REST = STRINGS.flip(1).cumsum(1).flip(1)  # how much more is opened than closed from a bracket on
KIND = (REST > 0).any(1) + 2 * (REST[:, 0] != 0)  # balanced; or wrong in order, in count, in both
LABELS = torch.cat([KIND[:, None] == 0, REST <= 0], 1).long()  # of the start token, of each bracket
ROWS = torch.randperm(2**16, generator=torch.Generator().manual_seed(0))
SEEN = torch.cat([ROWS[KIND[ROWS] == kind][:4000] for kind in range(4)])
UNSEEN = torch.cat([ROWS[KIND[ROWS] == kind][4000:4800] for kind in range(4)])


def loss_of(model: HookedTransformer, batch: list[Tensor]) -> Tensor:
    """The verdict, given at the start token, counts as much as all brackets together."""
    logits, labels = model(batch[0]).transpose(1, 2), batch[1]
    return F.cross_entropy(logits, labels) + F.cross_entropy(logits[..., 0], labels[:, 0])


def train_model(seed: int = 0, epochs: int = 5) -> HookedTransformer:
    """Positions start as waves, in which a head can soon tell later from earlier."""
    model, wave = HookedTransformer(SHAPE | {"seed": seed}), arange(1, 17)
    angle = arange(19)[:, None] * wave * torch.pi / 19
    model.pos_embed.W_pos.data = torch.cat([angle.sin(), angle.cos()], 1) / wave.repeat(2).sqrt()
    config = HookedTransformerTrainConfig(max(1, epochs), batch_size=64, lr=3e-3, print_every=None)
    if epochs:
        train(model, config, list(zip(TOKENS[SEEN], LABELS[SEEN])), loss_of)
    print(f"after {epochs} epochs (kinds: balanced; wrong are the order, the count, both):")
    return model


@torch.no_grad()
def find_head(model: HookedTransformer) -> dict[str, Tensor]:
    """Where the head looks from "("; what is judged rightly, by kind, where it ignores the string."""
    cache, pos = model.run_with_cache(TOKENS[UNSEEN])[1], arange(19)[:, None, None]
    later = cache["pattern", 0][:, 0, 1:, 1:].triu().sum(-1)[STRINGS[UNSEEN] > 0].mean()
    found, usual = {"looks at itself and later": later}, cache["z", 0][:800].mean(0)
    for where, at in {"nowhere": pos < 0, "at the first two": pos < 2, "inside": pos > 1}.items():
        hook = ("blocks.0.attn.hook_z", lambda z, at=at, **_: torch.where(at, usual, z))
        verdicts = model.run_with_hooks(TOKENS[UNSEEN], fwd_hooks=[hook])[:, 0].argmax(-1)
        found[f"right, off {where}"] = (verdicts == LABELS[UNSEEN, 0]).view(4, 800).float().mean(1)
    print("\n".join(f"  {what:27} {x.double().numpy().round(3)}" for what, x in found.items()))
    return found


if __name__ == "__main__":
    found = {epochs: find_head(train_model(epochs=epochs)) for epochs in (0, 5)}
