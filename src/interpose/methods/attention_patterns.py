"""Where every head looks: attention probabilities of one text, softmax(q k / scale + mask), drawn head by head.

A row of a pattern is a query, and its numbers say how the head shares its attention out over the keys; they add up
to 1, or to less in models with sinks, which take a share and are no keys (gpt-oss). In a causal model no query sees a
later key, so everything above the diagonal is exactly 0. Models with a fused attention kernel never make these numbers:
the layers that are asked for compute them, and no other.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

import interpose as ip
from interpose.methods.layers import sites_in
from interpose.models.selection import Some, entries
from interpose.render import colours, escape, png
from interpose.render.html import image
from interpose.render.text import table

_THUMB, _PIXELS = 96, 64  # how wide a small picture is shown, and how many keys it has at most
_CELL, _ENLARGED = 16, 128  # pixels of a cell when enlarged, and the longest text that is
_ROW = "display:flex;flex-wrap:wrap;gap:8px 10px;margin:10px 0"
_HEAD = "font-weight:normal;color:#57606a;text-align:right;white-space:pre;font-size:11px;border:0;padding:0 6px"
_TURNED = "writing-mode:vertical-rl;transform:rotate(180deg);display:inline-block;max-height:9em;overflow:hidden"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class AttentionPatterns(ip.Scores):
    """Attention probabilities [layer, head, query, key] of one text.

    ```python
    patterns.head(5, 0)              # one head's, [query, key]
    patterns.strongest(5, 0)         # what each query looks at most
    patterns.entropy()               # how spread out each head is, [layer, head]
    patterns.save("patterns.html")   # every head, each opens when clicked
    ```
    """

    def head(self, layer: int, head: int) -> ip.Scores:
        """One head's pattern, [query, key]."""
        return ip.Scores(
            title=f"Attention of head {layer}.{head}",
            values=self.at(layer=layer, head=head),
            axes={name: self.axes[name] for name in ("query", "key")},
            unit=self.unit,
            protocol=self.protocol,
            evidence=self.evidence,
            tokens=self.tokens,
        )

    def strongest(self, layer: int, head: int) -> list[dict[str, Any]]:
        """For each query the key that the head looks at most, and how much."""
        weights, keys = self.at(layer=layer, head=head).max(-1)
        found = []
        for query, (weight, key) in enumerate(zip(weights.tolist(), keys.tolist())):
            said = {"query": query, "key": key, "value": weight}
            if self.tokens is not None:
                said |= {"token": self.tokens[query], "looks_at": self.tokens[key]}
            found.append(said)
        return found

    def entropy(self) -> ip.Scores:
        """How far each head spreads its attention, [layer, head]: the mean over queries of each row's entropy.

        0 bits is one key alone, 1 bit two keys alike, 2 bits four.
        """
        weights = self.values.float()
        bits = -torch.xlogy(weights, weights).sum(-1) / torch.log(torch.tensor(2.0, device="cpu"))
        return ip.Scores(
            title="Entropy of attention",
            values=bits.mean(-1),
            axes={name: self.axes[name] for name in ("layer", "head")},
            unit="bits",
            protocol=self.protocol,
            evidence="How spread out attention is, not what it is for.",
        )

    def text_body(self, high: int) -> str:
        """For each head what the last query looks at most, and how spread out the head is.

        Args:
            high: how many lines there are for it.
        """
        bits, last, rows = self.entropy(), len(self.axes["query"]) - 1, []
        for layer, head in itertools.product(self.axes["layer"], self.axes["head"]):
            most = self.strongest(layer, head)[last]
            spread = f"{bits.at(layer=layer, head=head):.2f}"
            seen = self.labels["key"][most["key"]]
            rows.append((f"{layer}.{head}", seen, f"{most['value']:.2f}", spread))
        names = ("head", f"from {self.labels['query'][last]} to", "weight", "entropy, bits")
        return "\n" + table(names, rows, most=high - 3)

    def html_body(self) -> str:
        """All heads as small pictures, a row for each layer; a click enlarges one, pointing at it says more."""
        parts = [_legend()]
        for row, layer in enumerate(self.axes["layer"]):
            heads = "".join(self._drawn(row, at) for at in range(len(self.axes["head"])))
            label = f'<div style="width:4.5em;color:#57606a">layer {layer}</div>'
            parts.append(f'<div style="{_ROW}">{label}{heads}</div>')
        return "".join(parts)

    def _drawn(self, row: int, column: int) -> str:
        """One head: a small picture, and the large one behind it."""
        layer, head = self.axes["layer"][row], self.axes["head"][column]
        pattern, last = self.values[row, column].float(), self.strongest(layer, head)[-1]
        hint = (
            f"head {layer}.{head}: {self.labels['query'][-1]} looks at "
            f"{self.labels['key'][last['key']]} with {last['value']:.2f}"
        )
        size = min(_PIXELS, len(pattern))
        small = adaptive_max_pool2d(pattern[None], size)[0] if size < len(pattern) else pattern
        thumb = f'<span title="{escape.html(hint)}">{_picture(small, _THUMB)}</span>'
        if len(pattern) > _ENLARGED:  # too long to read: head(layer, head) has the numbers
            return f'<div style="text-align:center;font-size:11px">{thumb}<br>{layer}.{head}</div>'
        return (
            '<details style="text-align:center;font-size:11px;max-width:100%">'
            f'<summary style="list-style:none;cursor:pointer">{thumb}<br>{layer}.{head}</summary>'
            f"{self._enlarged(pattern)}</details>"
        )

    def _enlarged(self, pattern: Tensor) -> str:
        """The pattern with its tokens; pointing at a row says which keys it looks at most."""
        queries, keys = self.labels["query"], self.labels["key"]
        turned = "".join(
            f'<th style="{_HEAD};padding:0;width:{_CELL}px;vertical-align:bottom"><span style="{_TURNED}">'
            f"{escape.html(key)}</span></th>"
            for key in keys
        )
        lines = [f'<tr><th style="{_HEAD};vertical-align:bottom">query / key</th>{turned}</tr>']
        for query, weights in zip(queries, pattern):
            best = weights.topk(min(5, len(weights)))
            said = ", ".join(
                f"{keys[key]} {weight:.3f}"
                for weight, key in zip(best.values.tolist(), best.indices.tolist())
                if weight > 0
            )
            strip = _picture(weights[None], _CELL * len(keys), high=_CELL)
            lines.append(
                f'<tr title="{escape.html(f"{query}: {said}")}"><th style="{_HEAD}">{escape.html(query)}</th>'
                f'<td colspan="{len(keys)}" style="padding:0;line-height:0;border:0">{strip}</td></tr>'
            )
        style = "border-collapse:collapse;margin:6px 0;border:1px solid #d0d7de"
        return f'<div style="overflow-x:auto"><table style="{style}">{"".join(lines)}</table></div>'


def attention_patterns(
    model: ip.TransformerModel,
    texts: Any,
    *,
    layer: Some = None,
    head: Some = None,
    prepend_bos: bool | None = None,
) -> AttentionPatterns:
    """The attention probabilities of every head on one text, [layer, head, query, key].

    ```python
    patterns = ip.attention_patterns(model, "When Mary and John went to the store, John gave a drink to")
    patterns.strongest(5, 0)[-1]     # what head 0 of layer 5 looks at from the last token
    patterns.save("patterns.html")
    ```

    Args:
        model: a model of transformers, in eval mode.
        texts: one text, or its tokens [pos] or [1, pos].
        layer: which; by default all that have attention. Only these compute their patterns explicitly.
        head: which; by default all.
        prepend_bos: as in ``to_tokens``, for texts.
    """
    batch, *more = ip.batches(model, texts, batch_size=1, prepend_bos=prepend_bos)
    if more:
        raise ValueError(
            f"attention_patterns draws one text; got {1 + len(more)}. Call it once for each."
        )
    chosen = sites_in(model, "pattern", layer, "attention")
    with torch.no_grad():
        _, cache = model.run_with_cache(
            batch.clean, names_filter=list(chosen.values()), remove_batch_dim=True, return_type=None
        )
    found = [cache[name].cpu() for name in chosen.values()]  # each [head, query, key]
    sizes = {len(pattern) for pattern in found}
    if len(sizes) > 1:
        raise ip.Unsupported(
            f"layers of this model have {' and '.join(map(str, sorted(sizes)))} heads, so their patterns are no "
            "one table. Ask for layer=[...] that are alike."
        )
    numbers = entries(head, sizes.pop(), "head", "the model")
    values = torch.stack(found)[:, numbers]
    positions = list(range(values.shape[-1]))
    return AttentionPatterns(
        title=f"Attention patterns of {len(found)} layers, {len(positions)} tokens",
        values=values,
        axes={
            "layer": list(chosen),
            "head": numbers,
            "query": positions,
            "key": positions,
        },
        unit="share of attention",
        protocol={"forwards": 1},
        evidence="Where a head looks, not what it does there: a head may look at a token and copy nothing of it, and "
        "what it copies may be undone later. Ablate or patch it to see whether it matters.",
        tokens=batch.str_tokens,
    )


def _picture(values: Tensor, width: int, high: int | None = None) -> str:
    """Shares [height, width] in colours from dark blue, 0, to yellow, 1."""
    palette = torch.tensor(colours.table(colours.sequential), dtype=torch.uint8, device="cpu")
    pixels = palette[(values.nan_to_num().clamp(0, 1) * 255).round().long()]
    drawn = image(png.encode(pixels.contiguous().numpy()), width=width)
    return (
        drawn
        if high is None
        else drawn.replace('style="', f'style="display:block;height:{high}px;')
    )


def _legend() -> str:
    steps = ",".join(colours.css(colours.sequential(step / 8)) for step in range(9))
    strip = f"display:inline-block;width:120px;height:0.8em;margin:0 6px;background:linear-gradient(to right,{steps})"
    about = "rows are queries, columns keys. Click a head to enlarge it."
    return f'<p class="note">0<span style="{strip}"></span>1; {about}</p>'
