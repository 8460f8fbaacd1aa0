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
# # My cached output differs from the uncached one. Rounding or a bug?
#
# You wrote a decoder with a KV cache. You compare it with a full pass over the same tokens, and the logits differ: by
# 0.02 in bfloat16, say. Is that arithmetic, or did a mask get lost? A tolerance cannot tell: rounding in bfloat16 is
# large enough to hide a real bug, and a harmless flipped argmax can make rounding look like one.
#
# What tells them apart is how the difference goes with precision. Rounding shrinks with the unit roundoff of the format;
# a bug is about as large in float64 as in bfloat16. `mechkv.check_paths` runs both paths on a ladder of precisions, each
# on fresh weights, and compares the difference at the most precise rung with what rounding can do *to this model*. That
# bound is measured: every weight is perturbed as rounding would perturb it, and the movement of the logits is recorded.
#
# The code under test below is not Hugging Face's. It is the small GPT of `examples/small_gpt`, a hundred lines with a KV
# cache of its own, and with one planted mistake: on cached steps it numbers the new token one too high.

# %%
import sys
from pathlib import Path

import mechkv
from mechkv import plots_check

root = next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "examples").is_dir())
sys.path.insert(0, str(root / "examples" / "small_gpt"))
from paths import planted, right

# %% [markdown]
# `planted` and `right` each hold what a check needs: a function that builds the model in a given precision, two functions
# that return logits for the positions from the end of the prompt on, the tokens, and the length of the prompt. Nothing in
# them knows mechkv.

# %%
wrong = mechkv.check_paths(planted.build, planted.cached, planted.recomputed, planted.tokens, n_prompt=planted.n_prompt)
print(wrong)

# %% [markdown]
# The verdict is `semantic`: the two paths compute different functions. The report says where it starts. The first bad
# position is the first one after the prompt, so the prefill is fine and only decode steps are wrong; and the first bad
# layer is -1, the embedding, before any attention. Something that goes into the sum of token and position embedding must
# be wrong, which is just where the bug was planted. The first flipped token comes with the margin that it had.

# %%
plots_check.ladder(wrong)

# %% [markdown]
# The blue line is flat: four precisions that differ by a factor of 10^13 in their unit roundoff give the same
# difference. The dashed line is the bound, which follows the precision. In bfloat16 the bug stands *below* the bound of
# rounding or close to it, and no comparison in bfloat16 alone could have found it.

# %%
plots_check.layers(wrong)

# %% [markdown]
# Now the same model without the mistake. Everything else is as before, the weights included.

# %%
fine = mechkv.check_paths(right.build, right.cached, right.recomputed, right.tokens, n_prompt=right.n_prompt)
print(fine)

# %%
plots_check.ladder(fine)

# %% [markdown]
# This time the difference falls with the precision, stays below the bound, and the verdict is `numerical` (or `identical`
# where kernels happen to agree bit for bit). On a CPU the 16-bit rungs can be exactly zero while float32 is not: drift is
# not monotone in precision, which is why lower rungs never decide.
#
# For a model by name, `mechkv check NAME` drives both paths itself. In another project's CI, `mechkv check --paths
# module:object` ends with exit code 0 for rounding and 1 for a bug. The rule, its bound and what it cannot see are told
# on one page in `docs/check.md`.
