"""A small Llama-like decoder: RMSNorm, rotary embedding, grouped-query SDPA, SwiGLU."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F  # noqa: N812  what everybody calls it
from torch import nn

if TYPE_CHECKING:
    from everstep.trainer.config import ModelConfig


class Decoder(nn.Module):
    """Predicts the next token; weights are a function of `seed` alone."""

    def __init__(self, config: ModelConfig, *, seq_len: int, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        angles = _angles(config.dim // config.heads, seq_len, config.rope_theta)
        self.cos: torch.Tensor
        self.sin: torch.Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialize(seed, config.layers)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the summed cross-entropy of `targets`, both of shape (batch, time)."""
        time = tokens.shape[1]
        cos, sin = self.cos[:time], self.sin[:time]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        # The output layer shares its weights with the embedding.
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")

    def _initialize(self, seed: int, layers: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            # Layers that write into the residual stream add up over depth: GPT-2 scales them down.
            depth = (2 * layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
            nn.init.normal_(parameter, std=0.02 * depth, generator=generator)


class Block(nn.Module):
    """Attention and feed-forward, each on a normalized copy of the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim)
        self.ffn = SwiGLU(config.dim, config.ffn_dim)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the stream after this block."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return cast("torch.Tensor", x + self.ffn(self.ffn_norm(x)))


class Attention(nn.Module):
    """Causal self-attention; several query heads may share one key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        width = config.dim // config.heads
        self.query = nn.Linear(config.dim, config.heads * width, bias=False)
        self.key = nn.Linear(config.dim, config.kv_heads * width, bias=False)
        self.value = nn.Linear(config.dim, config.kv_heads * width, bias=False)
        self.out = nn.Linear(config.heads * width, config.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Attend from each position to itself and those before it."""
        query = _rotate(_split(self.query(x), self.heads), cos, sin)
        key = _rotate(_split(self.key(x), self.kv_heads), cos, sin)
        value = _split(self.value(x), self.kv_heads)
        shared = self.heads != self.kv_heads
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)
        return cast("torch.Tensor", self.out(y.transpose(1, 2).flatten(2)))


class SwiGLU(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's contribution to the stream."""
        return cast("torch.Tensor", self.down(F.silu(self.gate(x)) * self.up(x)))


def _split(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(batch, time, heads * width) -> (batch, heads, time, width)."""
    batch, time, width = x.shape
    return x.view(batch, time, heads, width // heads).transpose(1, 2)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + width/2) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _angles(width: int, seq_len: int, theta: float) -> torch.Tensor:
    speeds = theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    return torch.outer(torch.arange(seq_len, dtype=torch.float32), speeds)
