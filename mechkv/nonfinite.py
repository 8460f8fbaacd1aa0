"""Where does a run stop being finite? The first layer and site with NaN or infinity, and the size just before it."""

from typing import TYPE_CHECKING

import torch

from mechkv.errors import NonFiniteError
from mechkv.sites import supported

if TYPE_CHECKING:
    from mechkv.paths import PathRunner, Step


def locate_non_finite(runner: "PathRunner", step: "Step") -> NonFiniteError:
    """The first layer and site that is not finite in this step, with the largest finite value before it.

    It is called an overflow where the dtype is float16, the weights are finite, and the first values that are not
    finite are infinite or follow values within two orders of the largest number; a mask gives NaN among small values.
    """
    wanted = supported(runner.model, ["resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"])
    probe = type(runner)(
        runner.model, runner.path, sites=wanted, rows="all", interventions=runner.interventions, log=runner.log
    )
    with probe:
        seen = probe.unchecked(step).activations
    largest, where, jumped = 0.0, "logits", bool(torch.isinf(step.logits).any())
    order = [(layer, site) for layer in range(len(seen[wanted[0]])) for site in wanted]
    for layer, site in order:
        value = seen[site][layer]
        finite = torch.isfinite(value)
        if not finite.all():
            where = f"{site} of layer {layer} ({int((~finite).sum())} of {finite.numel()} values)"
            jumped = bool(torch.isinf(value).any())
            break
        largest = max(largest, float(value.abs().max()))
    dtype = step.logits.dtype
    limit = torch.finfo(dtype).max
    sound = all(bool(torch.isfinite(p).all()) for p in runner.model.original_model.parameters())
    overflow = dtype == torch.float16 and sound and (jumped or largest > limit / 100)
    return NonFiniteError(
        f"the {runner.path} path is not finite at step {step.index}",
        got=f"NaN or infinity first at {where}; the largest finite value before it is {largest:.3g}",
        expected=f"finite values ({dtype} ends at {limit:.3g})",
        remedy="The model overflows float16: load it with dtype='bfloat16' (or 'float32')."
        if overflow
        else "Look at the mask and the weights: this is not a matter of range alone.",
    )
