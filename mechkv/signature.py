"""What kind of difference is it? From where, when and on which side it shows, what it can and cannot be.

Layer profiles tell: rounding is 0 at the embeddings and grows gently; a wrong learned position shows at the embeddings;
a wrong rotary position or mask jumps at block 0 and stays flat; one corrupted layer is 0 before it and jumps after it.
Inside the first bad block, modules that ran before and agree (q, k and v, say) leave attention itself: its mask, its
window or the cached rows it reads. A position table (rotary cosines) that differs leaves the positions. What two
paths cannot tell apart is not guessed: kinds are as coarse as the evidence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import pandas as pd

Kind = Literal[
    "causality", "state", "length", "positions", "attention", "layer", "chunks", "cache not updated", "unknown"
]


@dataclass(frozen=True)
class References:
    """What third references say; None where a path could not be asked.

    Attributes:
        later_token: Path -> how much logits (or hidden rows) at earlier positions move when the last token changes.
        shorter: Path -> how much they move when the last token is left out.
        state: Path -> how much a call changes after other calls on the same object.
        stepwise: Path -> how much it differs from one token at a time on an empty cache.
        limit: What rounding may do to any of these.
        changed_buffers: Buffers of the model that differ after the paths ran.
    """

    later_token: dict[str, float] = field(default_factory=dict)
    shorter: dict[str, float] = field(default_factory=dict)
    state: dict[str, float] = field(default_factory=dict)
    stepwise: dict[str, float] = field(default_factory=dict)
    limit: float = 0.0
    changed_buffers: tuple[str, ...] = ()

    def beyond(self, name: str) -> list[str]:
        """Paths that a reference convicts."""
        return [path for path, size in getattr(self, name).items() if size > self.limit]


@dataclass(frozen=True)
class Signature:
    """The kind, in the words of the report.

    Attributes:
        kind: As coarse as the evidence.
        when: Over the steps.
        text: What it can be.
        convicted: `cached`, `recomputed`, or None: the pair alone cannot tell.
        because: Which reference convicts, or why none does.
    """

    kind: Kind
    when: str
    text: str
    convicted: str | None
    because: str


def profile_shape(
    profile: pd.DataFrame, layer: int | None, windows: Sequence[bool] = (), own: Sequence[int] | None = None
) -> str:
    """The shape over the layers: embedding, block 0 flat, jump at one layer, only window layers, smooth growth.

    Args:
        profile: Difference and bound by layer (-1: what enters block 0).
        layer: The first one beyond its bound; None for rounding.
        windows: Which layers have a sliding window.
        own: Layers that are wrong when they are given the other path's input; None where that is unknown.
    """
    if not len(profile):
        return "no layers within reach"
    if layer is None:
        over = profile[profile["max_abs"] > profile["bound"]]
        if len(over):
            return f"beyond the bound of layer {int(over['layer'].iloc[0])}, though the logits are within theirs"
        return "zero everywhere" if (profile["max_abs"] == 0).all() else "smooth growth"
    if layer < 0:
        return "embedding"
    if not own:
        return "block 0, flat" if layer == 0 else f"jump at layer {layer}"
    if len(own) == 1:
        return f"jump at layer {own[0]}, the others are right by themselves"
    if any(windows) and tuple(own) == tuple(i for i, window in enumerate(windows) if window) and not all(windows):
        return f"only window layers ({', '.join(map(str, own))})"
    n_layers = int((profile["layer"] >= 0).sum())
    if len(own) == n_layers:
        return "block 0, flat: every layer is wrong by itself"
    return f"{len(own)} of {n_layers} layers wrong by themselves: {', '.join(map(str, own))}"


def when(bad: Sequence[int], positions: Sequence[int], n_prompt: int, chunks: int) -> str:
    """Over the steps, in words."""
    if not bad:
        return "at no position"
    first = positions[bad[0]]
    if first < n_prompt:
        return "from the prompt on (step 0)"
    if bad[0] == 1 or (bad[0] == 0 and first == n_prompt):
        return "only in chunks after the prompt" if chunks > 1 else "only on decode steps, from the first on"
    return f"onset at position {first} (length {first + 1})"


def convict(references: References) -> tuple[str | None, str]:
    """Which side a third reference convicts, and by what."""
    reasons = {
        "later_token": "its earlier rows move when only the last token changes: it sees later tokens",
        "state": "it carries state from call to call",
        "shorter": "its earlier logits move when the last token is left out: they depend on the total length",
    }
    for name, text in reasons.items():
        guilty = references.beyond(name)
        if len(guilty) == 1:
            return guilty[0], text
        if len(guilty) == 2:
            return None, f"both paths fail: {text}"
    if references.stepwise:
        guilty = references.beyond("stepwise")
        if guilty == ["cached"]:
            return "cached", "one token at a time on an empty cache agrees with the recomputed path"
        if guilty == ["recomputed"]:
            return None, (
                "one token at a time on an empty cache agrees with the cached path: either one-token steps are wrong "
                "everywhere or the full pass is"
            )
    return None, "the pair alone cannot tell which side is wrong"


def describe(
    *,
    layer: int | None,
    site: str | None,
    equal_before: Sequence[str],
    tables: Sequence[str],
    watched: bool,
    bad: Sequence[int],
    positions: Sequence[int],
    n_prompt: int,
    chunks: int,
    references: References,
) -> Signature:
    """Kind, time and side of a semantic difference; `watched`: the layers of a torch model were looked at."""
    time = when(bad, positions, n_prompt, chunks)
    side, because = convict(references)
    kind, text = _kind(layer, site, equal_before, tables, time, references)
    if kind == "unknown" and watched:
        text = "what comes after the last block (the final norm or the unembedding): every block agrees"
    return Signature(kind, time, text, side, because)


def _kind(
    layer: int | None,
    site: str | None,
    equal_before: Sequence[str],
    tables: Sequence[str],
    time: str,
    references: References,
) -> tuple[Kind, str]:
    if references.beyond("later_token"):
        return "causality", "the causal mask: later tokens reach earlier rows"
    if references.beyond("state") or references.changed_buffers:
        names = ", ".join(references.changed_buffers)
        held = f"{names} changes while it runs" if names else "a call gives something else after other calls"
        return "state", f"state that the model carries from call to call: {held}"
    onset = time.startswith("onset")
    if references.beyond("shorter"):
        return "length", "something that depends on the total length (rotary scaling, a length-dependent mask)"
    if layer is not None and layer < 0:
        return "positions", "the positions (learned embeddings), or the tokens fed: it differs before any attention"
    if tables:
        return ("length" if onset else "positions"), f"the positions: {', '.join(tables)} differ at that row"
    if layer is not None and site is not None and _in_attention(site, equal_before):
        before = ", ".join(name.rsplit(".", 1)[-1] for name in equal_before[-4:])
        text = f"attention of layer {layer}: its mask, its window or the cached rows it reads ({before} agree)"
        return "attention", text + ("; the window, most likely: it sets in at a length" if onset else "")
    if layer is not None:
        text = f"layer {layer}" + (f", first at {site}" if site else "")
        return ("layer" if site else "attention"), text
    return ("length" if onset else "unknown"), "no torch module within reach: only positions and precision are known"


def _in_attention(site: str, equal_before: Sequence[str]) -> bool:
    """Whether the first bad module follows agreeing projections of the same parent: attention itself is in between."""
    parent = site.rpartition(".")[0]
    siblings = {name.rpartition(".")[2].lower() for name in equal_before if name.rpartition(".")[0] == parent}
    return any(_is_projection(name) for name in siblings) and not _is_projection(site.rpartition(".")[2].lower())


def _is_projection(name: str) -> bool:
    words = ("q_proj", "k_proj", "v_proj", "qkv", "query_key_value", "c_attn", "query", "key", "value")
    norms = ("q_norm", "k_norm")
    return name in ("q", "k", "v", "wq", "wk", "wv") or any(word in name for word in (*words, *norms))
