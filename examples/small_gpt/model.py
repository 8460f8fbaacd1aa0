"""A GPT of a hundred lines with a KV cache of its own: no Hugging Face, no TransformerLens, no mechkv in here.

`SmallGPT.full` recomputes everything; `SmallGPT.decode` prefills the prompt and then feeds one token at a time. With
`planted=True` the cached path numbers its new token one too high: the off-by-one that KV caches are famous for.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

N_LAYERS, N_HEADS, WIDTH, VOCABULARY, CONTEXT = 4, 4, 64, 101, 64


class Attention(nn.Module):
    """Causal attention; `past` is the (keys, values) of earlier tokens, or None."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """`x` is [new, width]; returns the output for the new rows and all keys and values so far."""
        q, k, v = (rows.view(len(x), N_HEADS, -1).transpose(0, 1) for rows in self.qkv(x).chunk(3, dim=-1))
        if past is not None:
            k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        n_old = k.shape[1] - len(x)
        later = torch.ones(len(x), k.shape[1], dtype=torch.bool).triu(n_old + 1)
        z = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        return self.out(z.transpose(0, 1).reshape(len(x), WIDTH)), (k, v)


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One block on the new rows."""
        mixed, kept = self.attention(self.norm_1(x), past)
        x = x + mixed
        return x + self.down(functional.gelu(self.up(self.norm_2(x)))), kept


class SmallGPT(nn.Module):
    """Learned positions, random weights: enough to tell a right cache from a wrong one."""

    def __init__(self, *, planted: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.planted = planted
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(N_LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            scale = 1 + 0.05 * noise if "norm" in name and name.endswith("weight") else 0.05 * noise
            weight.data = 0.12 * noise if weight.ndim > 1 else scale

    def _rows(self, new: Tensor, first: int, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = self.token(new) + self.place(torch.arange(first, first + len(new)))
        for layer, block in enumerate(self.blocks):
            x, kept = block(x, past[layer] if layer < len(past) else None)
            past[layer : layer + 1] = [kept]
        return self.head(self.norm(x))

    def full(self, tokens: Tensor, n_prompt: int) -> Tensor:
        """Logits of all positions from the last of the prompt on, in one pass."""
        return self._rows(tokens, 0, [])[n_prompt - 1 :]

    def decode(self, tokens: Tensor, n_prompt: int) -> Tensor:
        """The same by prefill and one token at a time."""
        past: list[tuple[Tensor, Tensor]] = []
        rows = [self._rows(tokens[:n_prompt], 0, past)[-1:]]
        for n_old in range(n_prompt, len(tokens)):
            first = past[0][0].shape[1] + (1 if self.planted else 0)  # the planted bug: n_old + 1
            rows.append(self._rows(tokens[n_old : n_old + 1], first, past))
        return torch.cat(rows)
