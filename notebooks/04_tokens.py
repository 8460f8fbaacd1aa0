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
# # Does a user see any of it?
#
# Drift in the last digits of a residual stream is one thing; another word on the screen is another. This notebook asks
# what the two paths *write*, and keeps two clocks apart that are easily mixed up.
#
# **Teacher-forced**: both paths are fed the same tokens, those that the cached path chose. Every step compares two
# distributions for the same context, so a difference is arithmetic and nothing else. **Free-running**: each path feeds
# itself, as in use. After the first different token the two are reading different texts, and nothing that follows can be
# blamed on arithmetic any more; so the question there is *when* the first difference comes, not how many follow.

# %%
import mechkv
from mechkv import plots_tokens
from mechkv.divergence import TokenDivergenceConfig, token_divergence
from mechkv.flip_law import fit_flip_law
from mechkv.policies import Strategy
from mechkv.prompts import format_prompt, word_problems

model = mechkv.load_model("smollm2-135m", dtype="bfloat16")
prompts = sorted((format_prompt(problem) for problem in word_problems()), key=len)[:4]
config = TokenDivergenceConfig(n_tokens=6, strategies=(Strategy(), Strategy(temperature=1.0, top_p=0.9)))
found = token_divergence(model, prompts, config)

# %% [markdown]
# We ask the four shortest of the package's word problems for six tokens, greedily and with nucleus sampling. That is
# little, and the intervals below say so; it is what fits into a minute on an ordinary processor.
#
# ## Three rates, always together

# %%
found.rates()

# %% [markdown]
# The three rates answer three questions and can differ by orders of magnitude. *Prompts with any difference* grows towards
# one hundred per cent with the length of the text, whatever the cause: one early difference is enough. *Aligned positions
# that differ* counts everything after that first difference, and so mixes cause and consequence. *Teacher-forced flips a
# step* is the rate at which arithmetic alone changes the most likely token. A headline that quotes one of them without the
# others can say almost anything.
#
# ## Sampling: drift or luck?
#
# Two sampled texts differ even if the two paths agree to the last bit, simply because the dice were thrown twice. Here
# both paths use the same random number at the same position (*common random numbers*): equal logits give equal tokens by
# construction, so every difference that remains is a difference of the logits.

# %%
found.sampling_noise()

# %% [markdown]
# The rows called `noise` compare the cached path *with itself*, on other draws: no drift at all is involved, and yet
# sampled texts differ almost at once. A divergence rate measured without common random numbers is mostly this. Greedy
# decoding has no draws, so its noise is exactly zero.

# %%
plots_tokens.agreement(found)

# %% [markdown]
# The curve is a Kaplan-Meier estimate: a prompt whose texts agree to the end has not been seen to diverge, and is counted
# as censored instead of being given an invented length. The grey line is luck alone.
#
# ## Could it have flipped at all?
#
# If the margin between the two most likely tokens exceeds twice the largest change of any logit, no flip is possible:
# that is arithmetic. Every step is checked against this certificate, and a contradiction would be an error.

# %%
law = fit_flip_law(plots_tokens.one_context(found))
law.n_certified, law.n_steps, law.n_flips

# %% [markdown]
# Most steps are safe by a wide margin; what a user sees is decided at the few near ties that remain. Where enough steps
# flip, `fit_flip_law` fits the one parameter of a law, the probability of a flip as a function of the margin, and shows
# whether it is calibrated. Eight tokens of four prompts are not enough for that; the experiment `token_divergence` runs
# the same analysis on more.
