"""A language model of the kind of GPT (Radford et al., 2019)."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inputs(states).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = states + self.attention(states)
        return states + self.inner(states)


class GPT(nn.Module):
    """Returns scores of the next token, batch x length x vocabulary, for tokens, batch x length."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.output = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.output(self.blocks(self.tokens(tokens) + self.positions(places)))
