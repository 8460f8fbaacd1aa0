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
# # What has precision to do with it?
#
# If the two paths differ because they round differently, the difference has to shrink with the precision of the
# arithmetic, and by a predictable factor. The unit roundoff of float16 is 2^-11, that of float32 is 2^-24. An error of the
# logits is proportional to it. The Kullback-Leibler divergence between the two next-token distributions is quadratic in
# the error of the logits. So from float16 to float32 it should fall by the square of 2^13, which is 7.8 orders of
# magnitude. The paper reports eight, and this is where they come from.

# %%
import mechkv
from mechkv import plots_precision
from mechkv.oracle import OracleConfig, oracle_study
from mechkv.precision import LadderConfig, precision_ladder
from mechkv.prompts import format_prompt, word_problems

prompts = sorted((format_prompt(problem) for problem in word_problems()), key=len)[:4]
ladder = precision_ladder("smollm2-135m", prompts, LadderConfig(dtypes=("float16", "float32"), n_steps=3))

# %% [markdown]
# The tokens are the same on both rungs: the greedy choice of the float32 model. Each rung loads its weights afresh and
# rounds them for itself; with `weights="common"` all rungs hold the very same numbers instead, so that nothing but the
# arithmetic differs.

# %%
ladder.ratios()

# %% [markdown]
# Orders of magnitude, observed beside predicted. Mean, median and flipped steps are given apart, because few steps carry
# the mean and, on a processor whose kernels happen to agree at many lengths, the median may be exactly zero: then it has
# no ratio, and none is invented. With four prompts and three steps the interval is wide.

# %%
plots_precision.kl_by_precision(ladder)

# %% [markdown]
# The dashed line is the prediction, drawn from the first rung and not fitted.
#
# ## Which path is right?
#
# That the paths differ does not say which one errs. There is a truth to compare with: the same 16-bit weights, as they
# are, with all arithmetic in float64. We call it the oracle. If decoding with the cache really were the more accurate
# way, the cached path would be the nearer one at clearly more than half of the steps.

# %%
model = mechkv.load_model("smollm2-135m", dtype="float16")
oracle = oracle_study(model, prompts, OracleConfig(n_steps=3, floor_every=3))
oracle.summary()

# %% [markdown]
# Steps at which both paths have the same logits, or differ by less than the oracle's own floor, are ties and belong to
# neither side. The share among the decided steps comes with an interval that resamples prompts, not steps, because the
# steps of one text are not independent of each other.

# %%
plots_precision.nearer_path(oracle)

# %% [markdown]
# Every point is a step; above the line the cached path is nearer. What to look for is not the side on which a few points
# lie but how close they are to the line: the distance of *either* path from the truth is usually much larger than the
# distance between the two. Both round, in nearly the same way, and the cache changes only a small part of it.
#
# Not shown here: `precision_by_site` lifts the storage of the cache, the attention, the projections, the residual stream
# or the unembedding to float32, one at a time and all but one, and `determinism` repeats a run in other processes and with
# other numbers of threads. Both are part of the experiment `precision_control`.
