"""Which entry of the KV state makes the difference? From layer and site to KV head to position.

Given one step of a destination whose old K and V rows differ from a source's in some unknown place, each K and each V
of one layer is replaced by the source's; where the logits then have the source's bits, single KV heads are tried, and
there single positions. A place is *located* when replacing it alone gives the source's logits bit for bit, which needs
every entry that differs to lie inside it: one differing row is found exactly, and differences in more than one layer or
site leave nothing located (the table of recoveries then says how much each contributes).

Controls: all patched steps are proven (`interventions.check_landed`); a destination that already has the source's
logits is refused, because every place would be located.
"""

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from mechkv.errors import InputError
from mechkv.guards import same_bits
from mechkv.interventions import Patch
from mechkv.patch_bench import PatchBench, distances, floor, recovery
from mechkv.paths import Step
from mechkv.sites import CACHE_SITES
from mechkv.sources import Source

GRAINS = ("layer", "kv_head", "position")


@dataclass(frozen=True)
class Place:
    """A part of the KV state: one site and layer, narrowed to a KV head and a position where these are given."""

    site: str
    layer: int
    kv_head: int | None = None
    position: int | None = None


@dataclass(frozen=True)
class Located:
    """What was tried and found.

    Attributes:
        frame: One row per patched step: grain, site, layer, KV head, position, relative L2 distance of the logits from
            the source's, recovery, and whether they have the source's bits.
        places: Places of the finest grain whose replacement alone gives the source's bits.
    """

    frame: pd.DataFrame
    places: tuple[Place, ...]


def localise_kv(bench: PatchBench, base: Step, source: Source, clean: Step) -> Located:
    """Find what differs in the old K and V rows of `base`.

    Args:
        bench: Bench of the destination path.
        base: The destination's step.
        source: Where the values should come from.
        clean: The source's own step, computed the same way (same path): its logits are the target.

    Raises:
        InputError: The destination already has the source's logits.
    """
    if same_bits(base.logits, clean.logits):
        raise InputError(
            "nothing to localise", got="bitwise equal logits", expected="a difference", remedy="Take another step."
        )
    layers = range(len(base.kv.keys))
    found, rows = [Place(site, layer) for layer in layers for site in CACHE_SITES], []
    for grain in GRAINS:
        if grain == "kv_head":
            found = [replace(p, kv_head=h) for p in found for h in range(base.kv.keys[p.layer].shape[0])]
        elif grain == "position":
            found = [replace(p, position=i) for p in found for i in base.kv_before.positions(p.layer)]
        tried = [(place, _try(bench, base, source, clean, place)) for place in found]
        rows += [{"grain": grain} | vars(place) | row for place, row in tried]
        found = [place for place, row in tried if row["equals_source"]]
    frame = pd.DataFrame(rows).astype({"kv_head": "Int64", "position": "Int64"})
    return Located(frame, tuple(found))


def _try(bench: PatchBench, base: Step, source: Source, clean: Step, place: Place) -> dict[str, Any]:
    patch = Patch(
        source,
        bench.path,
        (place.site,),
        layers=(place.layer,),
        kv_heads=None if place.kv_head is None else (place.kv_head,),
        positions="past" if place.position is None else (place.position,),
    )
    table = distances([bench.patched(base, patch).logits, base.logits], clean.logits)
    patched, unpatched = (float(value) for value in table["rel_l2"])
    return {
        "rel_l2": patched,
        "recovery": recovery(patched, unpatched, floor("rel_l2", clean.logits.numel(), unpatched)),
        "equals_source": bool(table["bitwise_equal"][0]),
    }
