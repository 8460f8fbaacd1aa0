# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Residual stream or KV cache?
#
# Cached and recomputed decoding of one model drift apart in half precision. What carries the drift from one step to the
# next? A paper on the effect patched the residual stream of the cached path with that of the recomputed path, saw that
# later steps did not recover, and concluded that the KV cache is the causal variable. It did not patch the cache. This
# notebook patches both.
#
# Two things differ between the paths at every step. The **state**: the keys and values of the earlier tokens, written
# by one-token steps on one path and by a full pass on the other. And the **computation**: the newest row is computed
# alone on one path and as the last row of many on the other. So there are four cells, not two, and the two in the
# middle are what no amount of comparing the paths can show: the recomputed state read by a one-token step, and the
# cached state read by a full pass.

# %%
import mechkv
from mechkv import plots_patching as figures
from mechkv.causal_run import Walks
from mechkv.prompts import format_prompt, word_problems

model = mechkv.load_model("smollm2-135m", dtype="float16")
prompts = [format_prompt(problem) for problem in word_problems()[:2]]
walks = Walks(model)

# %% [markdown]
# `Walks` walks the two paths once for all experiments below: a full pass over all tokens at every step is by far the
# most expensive part, and in float16 a CPU is slow at it. Two prompts and nine steps are enough to see the pattern;
# intervals over prompts need four prompts at least and are left out here.
#
# ## Four cells

# %%
factorial = mechkv.causal_factorial(model, prompts, mechkv.FactorialConfig(n_steps=9, every=2), walks=walks)
factorial.bitwise()

# %% [markdown]
# Each row is one cell, with the share of steps at which its logits (or its last residual) have exactly the bits of
# either path, counted over the steps at which the paths differ at all. If the cell *recomputed state, one token* has
# the bits of the recomputed path, then the one-token computation adds nothing, and everything that separates the paths
# at that step was inherited with the state.

# %%
figures.factorial_cells(factorial)

# %% [markdown]
# Exact zeros stand below the dashed line: a logarithmic axis has no place for them, and here they are the result.
#
# Every patched step is proven. The values that the patch wrote are read back where attention reads them and compared
# bit by bit; everything that the patch did not name is compared with the unpatched step; and giving a path its own
# values changes nothing. How often each of these proofs ran is part of the result.

# %%
factorial.guards

# %% [markdown]
# ## Layer by layer, and one step later
#
# Now one layer at a time is given the recomputed path's values: its residual stream, or the K and V rows of all earlier
# tokens. Recovery is 1 where the logits become those of the recomputed path and 0 where nothing happens.
#
# A warning about the left panel. The residual stream after the last layer *is* what the logits are computed from, so
# patching it restores the logits of that step by construction. That is not evidence about causes. The right panel asks
# the better question: the next step is run from the patched state, unpatched. What a residual patch repaired is gone
# with its step, unless it went into the keys and values of the layers above it.

# %%
config = mechkv.SweepConfig(n_steps=9, every=9, layer_noise=False)
sweep = mechkv.patch_sweep(model, prompts, config, walks=walks)
figures.recovery_by_layer(sweep)

# %% [markdown]
# And all layers at once, with placebos: noise with the norm of the real change in every row, the rows in another order,
# the difference of another prompt, and one cached value moved by the smallest amount that float16 knows. The last one
# is worth a look: it says how little it takes to move the logits as much as the whole drift does.

# %%
figures.recovery_all_layers(sweep)

# %% [markdown]
# ## Where the drift begins
#
# If the state carries the drift, where did the state get it from? The map shows, for the last step, every K and V row
# of one prompt: grey where both paths have the same bits, coloured where they differ.

# %%
onset = mechkv.drift_onset(model, prompts, mechkv.OnsetConfig(n_steps=9), walks=walks)
figures.provenance_map(onset)

# %% [markdown]
# The table tells two beginnings apart. A new row can be *born* different, because it was computed alone. Or an old row
# can have *moved*: the cached row is what it was, but the full pass over one more token rounds that old position in
# another way than the full pass before did. Then it is the reference that changed, and the cache only remembers.

# %%
onset.onset()

# %% [markdown]
# Read `moved_step` beside `step`, and `moved_layer` beside `layer`. Where an old row moved one layer below the place at
# which the first new row differs, at the same step, the one-token computation did not start the drift. On this model,
# in float16, on the CPUs we tried, that is how it begins: the state carries all of the drift, and the drift came into
# being because the *recomputed* path does not compute the same old row twice in the same way. In float32 and bfloat16
# both state and computation contribute; run this notebook with another `dtype` to see it. A patch says what a
# difference passes through. It does not say that the cache is at fault.
