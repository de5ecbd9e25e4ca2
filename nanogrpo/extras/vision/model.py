"""A vision-language model: Qwen3-VL (technical report: arXiv 2511.21631), which consists of a
vision encoder and the decoder of model/decoder.py.

In: a packed micro-batch, as for the decoder, and the pictures of its prompts (processor.py). Out:
what the decoder returns. Without pictures, the result is the same as with `Decoder`. Parameters
have the same names as in Hugging Face.

    pixels → patch embedding + position embedding → block → … → block → merger ──┐ instead of the
    [N, C·Tp·Ph·Pw]                                   └→ merger ─┐               │ embeddings of the
                                                                 ▼               ▼ image tokens
    hidden states after decoder layer 0, 1, 2:       + features at the image tokens

Encoder.  The N patches of all pictures are concatenated; each picture attends to itself, without a
          causal mask. A patch in row y and column x of a picture of h × w patches gets two kinds of
          position:
          * Learned: a table [S, S, D] is interpolated linearly at y (S-1)/(h-1), x (S-1)/(w-1).
          * Rotary: the E dimensions form E/2 pairs. The first E/4 pairs are rotated by y f_i, and
            the other E/4 pairs by x f_i. The frequencies are f_i = 10000^(-4i/E) (Heo et al. 2024,
            arXiv 2403.13298, axial).

Merger.   Four neighbouring patches become one token: W2 gelu(W1 [n(x_0) … n(x_3)]), with a
          LayerNorm n.
DeepStack (Meng et al. 2024, arXiv 2406.04334). A few encoder blocks have their own mergers, whose
          norm sees four patches at once. The outputs of these mergers are added to the hidden
          states of the image tokens after the first decoder layers.
Rotary embedding of the decoder. A position has three axes: time, height, width (processor.py).
          Frequency i < E/2 uses the axis `VisionConfig.axes[i]`. In text, the positions on all axes
          are equal, so the result is ordinary rotary embedding.

Read before: model/decoder.py. Read next: data.py (pictures in data sets).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanogrpo.extras.vision.config import VisionConfig, VisionModelConfig
from nanogrpo.kernels.linear import linear
from nanogrpo.model import rope
from nanogrpo.model.attention import StripAttention
from nanogrpo.model.decoder import Attend, Body, Decoder, Linear
from nanogrpo.model.dispatch import functions_for

if TYPE_CHECKING:  # processor.py needs Pillow
    from nanogrpo.extras.vision.processor import Images

EPS = 1e-6  # the epsilon of all norms


class PatchEmbed(nn.Module):
    """A convolution whose stride equals its kernel size, computed as a matrix product."""

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
        return self.proj(attend(0, q, k, v, 0).flatten(-2))  # [N, D]


class EncoderBlock(nn.Module):
    def __init__(self, c: VisionConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(c.hidden_size, EPS)
        self.norm2 = nn.LayerNorm(c.hidden_size, EPS)
        self.attn = Attention(c)
        layers = {
            "linear_fc1": Linear(c.hidden_size, c.intermediate_size),
            "gelu": nn.GELU("tanh"),
            "linear_fc2": Linear(c.intermediate_size, c.hidden_size),
        }
        self.mlp = nn.Sequential(OrderedDict(layers))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, attend)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """Turn each square of m · m patches into a token of the decoder's width. The norm sees one
    patch or, with `together`, the whole square.
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
    """Patches [N, C·Tp·Ph·Pw] → a list of image-token features [N / m², D of the decoder]. The
    first item replaces the tokens' embeddings, and the others are added in the decoder's first
    layers (DeepStack).
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

    def places(self, h: int, w: int) -> Tensor:
        """Return the row and column of each patch of a picture, in the order of patches, [h · w,
        2].
        """
        m = self.cfg.spatial_merge_size
        grid = torch.cartesian_prod(torch.arange(h), torch.arange(w))  # [h · w, 2], row by row
        return grid.view(h // m, m, w // m, m, 2).transpose(1, 2).reshape(-1, 2)

    def forward(self, pixels: Tensor, grid: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """`grid` has the frames (1), rows and columns of patches of each picture."""
        c, table = self.cfg, self.pos_embed.weight
        S = round(len(table) ** 0.5)
        square = table.T.unflatten(1, (S, S)).unsqueeze(0)  # [1, D, S, S]
        size = c.hidden_size // c.num_heads // 2
        f = rope.frequencies(10_000, size, None, table.device)[0][: size // 2]
        learned, angles = [], []
        for _, h, w in grid:
            at = self.places(h, w).to(table.device)
            one = F.interpolate(square, (h, w), mode="bilinear", align_corners=True)[0]  # [D, h, w]
            learned.append(one[:, at[:, 0], at[:, 1]].T)  # [h · w, D]
            angles.append((at[..., None] * f).flatten(1).repeat(1, 2))  # [h · w, E]
        x = self.patch_embed(pixels.to(table.dtype)) + torch.cat(learned)  # [N, D]
        turn = torch.cat(angles).unsqueeze(1)  # [N, 1, E]
        cos, sin = turn.cos(), turn.sin()
        lengths = [len(one) for one in learned]
        ends = torch.tensor([0, *lengths]).cumsum(0).int().to(x.device)
        attend = StripAttention(ends, max(lengths), causal=False)
        features: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            x = block(x, cos, sin, attend)
            if i in c.deepstack_visual_indexes:
                features.append(self.deepstack_merger_list[len(features)](x))
        return [self.merger(x), *features]

    def activation_bytes(self, item: int, kind: str) -> int:
        """Return how many bytes per image token the backward pass needs (extras/memory.py). `item`
        is the size of a number in bytes, and `kind` is --gradient-checkpointing.
        """
        c, D, F = self.cfg, self.cfg.hidden_size, self.cfg.intermediate_size
        # A block keeps the input and output of two norms, and q, k, v before and after rotation.
        # A block also keeps attention's result and its copy, two MLP products, and statistics.
        block = item * (11 * D + 2 * F) + 4 * (4 + c.num_heads)
        kept = {"none": block, "full": item * D, "selective": item * (7 * D + F)}[kind]
        trained = any(p.requires_grad for p in self.parameters())
        again = 0 if trained and kind == "none" else block  # one block at a time
        mergers = (1 + len(c.deepstack_visual_indexes)) * 4 * item * D
        inputs = 4 * (c.patch_values + 2 * D // c.num_heads)  # pixels, cosines and sines
        return c.spatial_merge_size**2 * (trained * (c.depth * kept + mergers) + again + inputs)


class VisionBody(nn.Module):
    """The encoder, and the body of a decoder, which receives the encoder's features."""

    def __init__(self, cfg: VisionConfig, body: Body):
        super().__init__()
        self.cfg = cfg
        self.visual = Encoder(cfg)
        self.language_model = body

    # The attributes of a Body that the code for decoding text uses.
    # In text, the three axes of a position are equal.
    embed_tokens = property(attrgetter("language_model.embed_tokens"))
    layers = property(attrgetter("language_model.layers"))
    norm = property(attrgetter("language_model.norm"))
    angles = property(attrgetter("language_model.angles"))

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Attend, *images: tuple[int, Images]
    ) -> Tensor:
        """`images` has (first row of a prompt in the micro-batch, its pictures)."""
        text, c = self.language_model, self.cfg
        # All ranks gather weights and sum gradients together, so every rank must use the encoder.
        # Each weight also needs a gradient, because the optimizer counts steps for each weight.
        # So in training, an empty picture is encoded for a micro-batch without pictures.
        # All gradients of an empty picture are 0.
        sharded = hasattr(self.visual.blocks[0], "unshard")
        if not (images or sharded or torch.is_grad_enabled()):
            return text(tokens, positions, attend)
        device, m = tokens.device, c.spatial_merge_size
        axes = positions.repeat(3, 1)  # [3, T]
        rows, grid = [torch.empty(0, dtype=torch.int64)], []
        pixels = [] if images else [torch.zeros(m * m, c.patch_values)]
        for first, found in images:
            own = found.positions  # [3, Q]
            axes[:, first : first + own.shape[1]] = own.to(device, non_blocking=True)
            rows.append(first + found.rows)
            grid += found.grid
            pixels.append(found.pixels)
        at = torch.cat(rows).to(device)  # [image tokens]
        features = self.visual(torch.cat(pixels).to(device), grid or [(1, m, m)])
        features = [x[: len(at)] for x in features]
        x = text.embed_tokens(tokens).index_copy(0, at, features[0])  # [T, D]
        residual = None
        # each frequency is multiplied by the position on its axis: [3, T] → [E, T] → [T, E]
        cos, sin = text.angles(axes[torch.tensor(2 * c.axes, device=device)].T)
        for i, layer in enumerate(text.layers, start=1):
            x, residual = layer(x, residual, cos, sin, attend)
            if i < len(features):
                x = x if residual is None else x + residual
                x, residual = x.index_add(0, at, features[i]), None
        return text.norm.of_sum(x, residual)[0]


class VisionDecoder(Decoder):
    """A Qwen3-VL: a decoder whose `model` also accepts pictures."""

    @classmethod
    def from_config(cls, raw: dict, where: str) -> VisionDecoder:
        return cls(VisionModelConfig.from_dict(raw, where))

    def __init__(self, cfg: VisionModelConfig):
        super().__init__(cfg)
        # VisionBody contains a Body, and has all attributes of Body that other code uses
        self.model = VisionBody(cfg.vision, self.model)  # type: ignore[assignment]
        self.reset_parameters()

    @property
    def blocks(self) -> list[nn.Module]:
        visual: Encoder = self.model.visual  # type: ignore[assignment] # see __init__
        return [*visual.blocks, *super().blocks]
