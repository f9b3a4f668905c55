"""Models of the size people fine-tune, in plain torch: a Llama-like decoder and ViT-B/16."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class RMSNorm(nn.Module):
    """Root mean square normalization (Zhang & Sennrich 2019), computed in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return self.weight * scaled.to(x.dtype)


class LlamaBlock(nn.Module):
    """Attention with rotary positions and grouped keys, then a gated feed-forward layer."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, groups * self.size, bias=False)
        self.v_proj = nn.Linear(width, groups * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        n, t, d = x.shape
        h = self.norm1(x)
        q = self.q_proj(h).view(n, t, self.heads, self.size).transpose(1, 2)
        k = self.k_proj(h).view(n, t, self.groups, self.size).transpose(1, 2)
        v = self.v_proj(h).view(n, t, self.groups, self.size).transpose(1, 2)
        q, k = rotated(q, cosine, sine), rotated(k, cosine, sine)
        k, v = (z.repeat_interleave(self.heads // self.groups, dim=1) for z in (k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(seen.transpose(1, 2).reshape(n, t, d))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate pairs of features by angles that grow with the position (Su et al. 2021)."""
    left, right = x.chunk(2, dim=-1)
    return (x * cosine + torch.cat([-right, left], dim=-1) * sine).to(x.dtype)


class Llama(nn.Module):
    """A decoder of the shape of Llama 3.2 1B, with tied embeddings: 1.24e9 parameters."""

    def __init__(
        self,
        *,
        vocabulary: int = 128_256,
        width: int = 2048,
        depth: int = 16,
        heads: int = 32,
        groups: int = 8,
        inner: int = 8192,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups, inner) for _ in range(depth))
        self.norm = RMSNorm(width)
        self.size = width // heads
        self.is_checkpointed = False  # whether blocks keep their input only, and run again
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)
        powers = torch.arange(0, self.size, 2, device=ids.device, dtype=torch.float32) / self.size
        angles = (places[:, None] * 5e5**-powers).repeat(1, 2)
        x = self.tokens(ids)
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            if self.is_checkpointed:
                x = checkpoint(block, x, cosine, sine, use_reentrant=False)
            else:
                x = block(x, cosine, sine)
        return F.linear(self.norm(x), self.tokens.weight)


class ViTBlock(nn.Module):
    """Pre-norm attention and feed-forward layers of a vision transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.inner(self.norm2(x))


class ViT(nn.Module):
    """ViT-B/16 (Dosovitskiy et al. 2021): 86 million parameters."""

    def __init__(
        self,
        *,
        size: int = 224,
        patch: int = 16,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(ViTBlock(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])
