"""A vision-language model: Qwen3-VL (technical report: arXiv 2511.21631), from a vision encoder and
the decoder of model/decoder.py.

In: a packed strip, as for the decoder, and the pictures of its prompts (processor.py). Out: what
the decoder returns. Without pictures it computes the same as `Decoder`. Parameters have the same
names as in Hugging Face.

    pixels → patch embedding + position embedding → block → … → block → merger ──┐ instead of the
    [N, C·Tp·Ph·Pw]                                   └→ merger ─┐               │ embeddings of the
                                                                 ▼               ▼ image tokens
    hidden states after decoder layer 0, 1, 2:       + features at the image tokens

Encoder.  N patches of all pictures are laid end to end; each picture attends to itself, without a
          causal mask. A patch in row y and column x of a picture of h × w patches gets two kinds of
          position:
            learned   a table [S, S, D], interpolated linearly at y (S-1)/(h-1), x (S-1)/(w-1)
            rotary    of E dimensions, pairs i < E/4 turn by y f_i and the next E/4 by x f_i, with
                      f_i = 10000^(-4i/E) (Heo et al. 2024, arXiv 2403.13298, axial)
Merger.   Four neighbouring patches become one token: W2 gelu(W1 [n(x_0) … n(x_3)]), with a
          LayerNorm n.
DeepStack (Meng et al. 2024, arXiv 2406.04334). Features after a few blocks of the encoder have
          mergers of their own, whose norm sees four patches at once, and are added to the hidden
          states of the image tokens after the first decoder layers.
Rotary embedding of the decoder. A position has three axes: time, height, width (processor.py).
          Frequency i < E/2 uses the axis `VisionConfig.axes[i]`. Where the axes are equal, as in
          all text, this is ordinary rotary embedding.

Read before: model/decoder.py. Read next: data.py (pictures in data sets).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanogrpo.kernels.linear import linear
from nanogrpo.model.attention import Packed
from nanogrpo.model.decoder import Attend, Body, Decoder, Linear
from nanogrpo.model.dispatch import functions_for
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.vision.config import VisionConfig
from nanogrpo.vision.processor import Images

EPS = 1e-6  # of all norms


class PatchEmbed(nn.Module):
    """A matrix product: the convolution's stride is its kernel, so it sees every value once."""

    def __init__(self, c: VisionConfig):
        super().__init__()
        kernel = c.temporal_patch_size, c.patch_size, c.patch_size
        self.proj = nn.Conv3d(3, c.hidden_size, kernel, stride=kernel)  # weight [D, C, Tp, Ph, Pw]

    def forward(self, pixels: Tensor) -> Tensor:
        return linear(pixels, self.proj.weight.flatten(1), self.proj.bias)  # [N, D]


class Attention(nn.Module):
    def __init__(self, c: VisionConfig):
        super().__init__()
        self.heads = c.num_heads
        self.qkv = Linear(c.hidden_size, 3 * c.hidden_size)
        self.proj = Linear(c.hidden_size, c.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)  # [N, H, E] each
        q, k = functions_for(x.device).norm_rope(q, k, None, None, cos, sin, EPS)  # only rotates
        return self.proj(attend(0, q, k, v).flatten(-2))  # [N, D]


class MLP(nn.Module):
    def __init__(self, c: VisionConfig):
        super().__init__()
        self.linear_fc1 = Linear(c.hidden_size, c.intermediate_size)
        self.linear_fc2 = Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class EncoderBlock(nn.Module):
    def __init__(self, c: VisionConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(c.hidden_size, EPS)
        self.norm2 = nn.LayerNorm(c.hidden_size, EPS)
        self.attn = Attention(c)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, attend)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """Squares of m · m patches → tokens of the decoder's width. The norm sees one patch or, with
    `together`, the whole square.
    """

    def __init__(self, c: VisionConfig, together: bool):
        super().__init__()
        self.wide = c.hidden_size * c.spatial_merge_size**2
        self.together = together
        self.norm = nn.LayerNorm(self.wide if together else c.hidden_size, EPS)
        self.linear_fc1 = Linear(self.wide, self.wide)
        self.linear_fc2 = Linear(self.wide, c.out_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        squares = (-1, self.wide)
        x = self.norm(x.reshape(squares)) if self.together else self.norm(x).reshape(squares)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))  # [N / m², D of the decoder]


class Encoder(nn.Module):
    """Patches [N, C·Tp·Ph·Pw] → features of tokens [N / m², D of the decoder]: those that become
    embeddings, then those of DeepStack.
    """

    def __init__(self, c: VisionConfig):
        super().__init__()
        self.cfg = c
        self.patch_embed = PatchEmbed(c)
        self.pos_embed = nn.Embedding(c.num_position_embeddings, c.hidden_size)
        self.blocks = nn.ModuleList(EncoderBlock(c) for _ in range(c.depth))
        self.merger = Merger(c, together=False)
        self.deepstack_merger_list = nn.ModuleList(
            Merger(c, together=True) for _ in c.deepstack_visual_indexes
        )

    def by_squares(self, grid: Tensor) -> Tensor:
        """Bring a grid [h, w, …] of patches into the order of the patches, [h · w, …]."""
        m = self.cfg.spatial_merge_size
        h, w = grid.shape[:2]
        squares = grid.reshape(h // m, m, w // m, m, *grid.shape[2:]).transpose(1, 2)
        return squares.reshape(h * w, *grid.shape[2:])

    def learned(self, h: int, w: int) -> Tensor:
        """Return the interpolated table of position embeddings for a picture, [h · w, D]."""
        table = self.pos_embed.weight
        table = table.to(torch.promote_types(table.dtype, torch.float32))
        S = round(len(table) ** 0.5)
        at = torch.arange(S, device=table.device)

        def weights(n: int) -> Tensor:
            """Return each place's shares of the S entries of an axis, [n, S]: at most two."""
            places = torch.arange(n, device=table.device) * (S - 1) / max(n - 1, 1)
            return (1 - (places[:, None] - at).abs()).clamp(min=0).to(table.dtype)

        grid = torch.einsum("hi,ijd,wj->hwd", weights(h), table.unflatten(0, (S, S)), weights(w))
        return self.by_squares(grid)

    def angles(self, h: int, w: int) -> Tensor:
        """Return the angles that rotate a picture's queries and keys, [h · w, E/2] float32."""
        device, E = self.pos_embed.weight.device, self.cfg.hidden_size // self.cfg.num_heads
        even = torch.arange(0, E // 2, 2, device=device, dtype=torch.float32)
        f = 1.0 / 10_000 ** (even / (E // 2))  # [E/4]
        y, x = (torch.arange(n, device=device)[:, None] * f for n in (h, w))  # [h or w, E/4]
        size = (h, w, -1)
        return self.by_squares(torch.cat((y[:, None].expand(size), x.expand(size)), -1))

    def forward(self, pixels: Tensor, grid: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """grid: frames (1), rows and columns of patches of each picture."""
        sizes = [(h, w) for _, h, w in grid]
        lengths = [h * w for h, w in sizes]
        x = self.patch_embed(pixels.to(self.pos_embed.weight.dtype))  # [N, D]
        x = x + torch.cat([self.learned(*size) for size in sizes]).to(x.dtype)
        angles = torch.cat([self.angles(*size) for size in sizes])
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # [N, 1, E]
        cos, sin = angles.cos(), angles.sin()
        ends = torch.tensor([0, *lengths]).cumsum(0).int().to(x.device)
        attend = Packed(ends, max(lengths), causal=False)
        taken, features = self.cfg.deepstack_visual_indexes, []
        for i, block in enumerate(self.blocks):
            x = block(x, cos, sin, attend)
            if i in taken:
                features.append(self.deepstack_merger_list[taken.index(i)](x))
        return [self.merger(x), *features]


class VisionBody(nn.Module):
    """The encoder, and a decoder's body that receives its features."""

    def __init__(self, cfg: VisionConfig, body: Body):
        super().__init__()
        self.cfg = cfg
        self.visual = Encoder(cfg)
        self.language_model = body

    @property
    def embed_tokens(self) -> nn.Embedding:
        return self.language_model.embed_tokens

    @property
    def layers(self) -> nn.ModuleList:
        return self.language_model.layers

    @property
    def norm(self) -> nn.Module:
        return self.language_model.norm

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As in `Body`: for decoding, where the three axes are equal."""
        return self.language_model.angles(positions)

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Attend, *images: tuple[int, Images]
    ) -> Tensor:
        """images: (first row of a prompt in the strip, its pictures)."""
        text, c = self.language_model, self.cfg
        # All ranks gather weights and sum gradients together, and the optimizer counts the steps of
        # each weight. So in training, a strip without pictures sends an empty picture through the
        # encoder and uses nothing of the result: the gradients are 0, but they exist.
        sharded = hasattr(self.visual.blocks[0], "unshard")
        if not (images or sharded or torch.is_grad_enabled()):
            return text(tokens, positions, attend)
        device, m = tokens.device, c.spatial_merge_size
        axes = positions.repeat(3, 1)  # [3, T]
        rows = torch.empty(0, dtype=torch.int64)
        pixels, grid = torch.zeros(m * m, c.patch_values), [(1, m, m)]
        if images:
            for first, found in images:
                own = found.positions
                axes[:, first : first + own.shape[1]] = own.to(device, non_blocking=True)
            rows = torch.cat([first + found.rows for first, found in images])
            pixels = torch.cat([found.pixels for _, found in images])
            grid = [size for _, found in images for size in found.grid]
        rows = rows.to(device)  # [image tokens]
        features = [x[: len(rows)] for x in self.visual(pixels.to(device), grid)]
        x = text.embed_tokens(tokens).index_copy(0, rows, features[0])  # [T, D]
        cos, sin = text.angles(axes[torch.tensor(c.axes, device=device)].T)
        for i, layer in enumerate(text.layers):
            x = layer(x, cos, sin, attend)
            if i + 1 < len(features):
                x = x.index_add(0, rows, features[i + 1])
        return text.norm(x)


class VisionDecoder(Decoder):
    """A Qwen3-VL: a decoder whose `model` receives pictures, too."""

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        # it has whatever others use of a Body, which it contains
        self.model = VisionBody(cfg.vision, self.model)  # type: ignore[assignment]
        self.reset_parameters()

    @property
    def blocks(self) -> list[nn.Module]:
        visual: Encoder = self.model.visual  # type: ignore[assignment] # see __init__
        return [*visual.blocks, *super().blocks]
