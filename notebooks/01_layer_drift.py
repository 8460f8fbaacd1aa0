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
# # Where do cached and recomputed decoding differ?
#
# A decoder that keeps its keys and values in a cache and a decoder that recomputes everything at every step should give
# the same numbers: the cache holds what the full pass would compute again. In exact arithmetic they do. In half
# precision they do not quite, because a matrix product with one row and a matrix product with many rows are done by
# different kernels, which add in a different order.
#
# This notebook measures that difference on SmolLM2-135M, layer by layer. **Drift** is the value on the cached path minus
# the value on the recomputed path, at the same place, the same position, after the same tokens. Both paths are fed the
# same tokens (*teacher forcing*), so whatever differs is arithmetic and can be attributed to a layer.

# %%
import mechkv
from mechkv import plots
from mechkv.prompts import format_prompt, word_problems

model = mechkv.load_model("smollm2-135m", dtype="float16")
prompts = [format_prompt(problem) for problem in word_problems()[:4]]

# %% [markdown]
# Loading already proves a few things, and refuses the model otherwise: every parameter has the dtype that was asked for,
# attention is the implementation that fires hooks, and overwriting one cached value changes the next logits, so that
# attention really reads the cache.
#
# The profile walks both paths in lockstep and keeps no activations, only metrics, so it would not need more memory for a
# thousand steps. Eight steps and four prompts are few: the bands below are wide, as they should be. (On a processor without
# 16-bit matrix instructions float16 is slow; the cell takes about a minute.)

# %%
profile = mechkv.drift_profile(model, prompts, mechkv.DriftConfig(n_steps=8, split_every=3))
profile.guards

# %% [markdown]
# The guards that ran are part of the result. The most telling: `null_control` (on the prompt itself both paths do the
# same work, so the drift there must be exactly zero, and is), and `repeatable` (a step done twice gives the same bits on
# either path, so nothing below is noise from run to run). The same tokens were then run in float32 with the very same
# weights, as a control.
#
# ## Along the layers

# %%
plots.drift_by_layer(profile)

# %% [markdown]
# Read the figure from left to right. In float16 the first layers have no drift at all (hollow markers: exactly zero, over
# all steps and prompts); it begins somewhere in the middle of the model and grows by a modest factor per layer from there.
# Nowhere does it jump to the size of the signal, which is what a bug in one layer would look like. The float32 line lies
# far lower, but it is no scaled copy: there every step differs, from the very first layer on. The two dtypes use other
# kernels, and it is the kernels that decide *whether* a sum is added in another order; the dtype decides only how large
# the difference is when it is.
#
# ## When does it begin?

# %%
profile.onset()

# %% [markdown]
# For every prompt this is the first step with any difference, the layer, and the first site in the order of computation.
# In float16 the first half dozen steps are bitwise equal; then something happens in one layer, and what it left in the
# keys and values stays. Whether it happens depends on the length of the text: kernels are chosen by shape. That is why
# drift must never be judged on one prompt and one step.
#
# ## Born here or carried on?
#
# Two things make the output of a block differ: its input differs already (*propagated*), or the block computes the same
# input differently (*injected*: its own kernels, and the cached keys and values that it attends to). Giving each block of
# the cached path the recomputed path's residual stream separates the two.

# %%
plots.split_by_layer(profile)

# %% [markdown]
# Where the drift begins it is injected, since nothing has come before; in the upper layers the propagated part is the
# larger one, as it has to be in a residual stream: what was added early stays and is carried along. Only every third
# step is sampled, and on most of the early ones there is nothing to split.
#
# ## The cache itself
#
# Keys and values written while the prompt was processed are the same on both paths, bit for bit (hollow markers). All of
# the difference is in rows that decode steps wrote.

# %%
plots.kv_drift(profile)

# %% [markdown]
# What this does not say: it is one small model on one processor; a large model on a GPU uses other kernels. And it says
# nothing yet about tokens. Whether a user sees any of this, and whether the cache or the residual stream is to blame, are
# the questions of the other notebooks.
