"""A Llama written out by hand: embeddings, RMSNorm, rotary grouped-query attention, SwiGLU, unembedding.

It shares no code with transformers or TransformerLens, keeps its own K/V rows and computes everything in float64, so it
is the golden reference for the decode loop. It reads weights by the names of a Hugging Face Llama checkpoint.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class ByHand:
    """`weights` by checkpoint name; `n_heads` query heads share `n_kv` key heads."""

    weights: dict[str, Tensor]
    n_layers: int
    n_heads: int
    n_kv: int
    epsilon: float
    theta: float
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, model) -> "ByHand":
        """From a Hugging Face Llama, before anything wraps it."""
        config = model.config
        return cls(
            {name: value.detach().double().clone() for name, value in model.state_dict().items()},
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.rms_norm_eps,
            config.rope_parameters["rope_theta"],
        )

    def logits(self, tokens: Tensor, n_old: int = 0) -> Tensor:
        """`[pos, d_vocab]` of the tokens from `n_old` on, attending to the rows kept from earlier calls."""
        if n_old == 0:
            self.keys, self.values = [], []
        new = tokens[n_old:]
        x = self.weights["model.embed_tokens.weight"][new]
        for layer in range(self.n_layers):
            block = f"model.layers.{layer}"
            x = x + self.attention(layer, self.norm(x, f"{block}.input_layernorm"), n_old)
            x = x + self.swiglu(block, self.norm(x, f"{block}.post_attention_layernorm"))
        return self.norm(x, "model.norm") @ self.weights["lm_head.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def swiglu(self, block: str, x: Tensor) -> Tensor:
        gate, up = (
            x @ self.weights[f"{block}.mlp.gate_proj.weight"].T,
            x @ self.weights[f"{block}.mlp.up_proj.weight"].T,
        )
        return (gate / (1 + (-gate).exp()) * up) @ self.weights[f"{block}.mlp.down_proj.weight"].T

    def attention(self, layer: int, x: Tensor, n_old: int) -> Tensor:
        n_new, total = len(x), n_old + len(x)
        q, k, v = (self.heads(layer, name, x) for name in "qkv")
        positions = torch.arange(n_old, total)
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        if n_old == 0:
            self.keys.append(k)
            self.values.append(v)
        else:
            self.keys[layer] = torch.cat([self.keys[layer], k], dim=1)
            self.values[layer] = torch.cat([self.values[layer], v], dim=1)
        out = torch.empty(self.n_heads, n_new, q.shape[-1], dtype=torch.float64)
        for head in range(self.n_heads):
            shared = head // (self.n_heads // self.n_kv)
            for row in range(n_new):
                visible = n_old + row + 1
                scores = self.keys[layer][shared, :visible] @ q[head, row] / math.sqrt(q.shape[-1])
                pattern = (scores - scores.max()).exp()
                out[head, row] = (pattern / pattern.sum()) @ self.values[layer][shared, :visible]
        together = out.transpose(0, 1).reshape(n_new, -1)
        return together @ self.weights[f"model.layers.{layer}.self_attn.o_proj.weight"].T

    def heads(self, layer: int, name: str, x: Tensor) -> Tensor:
        """`[heads, pos, d_head]`."""
        n = self.n_heads if name == "q" else self.n_kv
        flat = x @ self.weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"].T
        return flat.view(len(x), n, -1).transpose(0, 1)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """The two halves of a head turn as real and imaginary parts: slower the higher the dimension."""
        half = x.shape[-1] // 2
        frequencies = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        turn = torch.polar(torch.ones(len(positions), half, dtype=torch.float64), positions[:, None] * frequencies)
        turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)
