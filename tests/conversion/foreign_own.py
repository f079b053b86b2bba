"""Networks of anybody's own, small, with attention layers as people write them."""

import timm
import torch
from einops import rearrange
from einops.layers.torch import Rearrange
from torch import nn
from torch.nn import functional as F

DIM, HEADS = 48, 4


class Timms(nn.Module):
    """As most repositories copy it."""

    def __init__(self, dim=DIM, num_heads=HEADS, **more):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        attn = self.attn_drop((q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1))
        return self.proj_drop(self.proj((attn @ v).transpose(1, 2).reshape(b, n, c)))


class WithMaps(Timms):
    """As DINO's, whose attention maps are looked at."""

    def forward(self, x, mask=None):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        attn = (q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1)
        self.seen = attn
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c)), attn


class Rearranged(nn.Module):
    """A norm in front, a projection whose rows are (h, d, p), and one behind with dropout; no number of heads."""

    def __init__(self, dim=DIM, heads=HEADS, dim_head=8):
        super().__init__()
        self.norm, self.to_qkv = nn.LayerNorm(dim), nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.cut = Rearrange("b n (h d p) -> p b h n d", h=heads, p=3)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(0.1))

    def forward(self, x):
        y = F.scaled_dot_product_attention(*self.cut(self.to_qkv(self.norm(x))))
        return self.to_out(rearrange(y, "b h n d -> b n (h d)"))


class HeadsFirst(nn.Module):
    """Rows (h, p, d), with norms of the heads' queries and keys, and one of the answers' channels."""

    def __init__(self):
        super().__init__()
        self.heads, self.in_proj, self.out_proj = HEADS, nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.k_ln, self.q_ln = nn.LayerNorm(DIM // HEADS), nn.LayerNorm(DIM // HEADS)

    def forward(self, x):
        q, k, v = rearrange(self.in_proj(x), "b n (h p d) -> p b h n d", h=self.heads, p=3)
        y = F.scaled_dot_product_attention(self.q_ln(q), self.k_ln(k), v)
        return self.out_proj(rearrange(y, "b h n d -> b n (h d)"))


class KeysFirst(nn.Module):
    """Three projections in an order of their own, and norms of all channels in the layer behind."""

    def __init__(self, scale=None):
        super().__init__()
        self.n_head, self.factor = HEADS, scale
        self.key, self.query, self.value, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.inner_ln = nn.LayerNorm(DIM)

    def forward(self, x, attention_mask=None):
        q, k, v = (
            rearrange(one(x), "b n (h d) -> b h n d", h=self.n_head) for one in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, scale=self.factor)
        return self.out(self.inner_ln(rearrange(y, "b h n d -> b n (h d)")))


class OfThree(nn.Module):
    """Called as PyTorch's own, with tokens three times; answers no maps."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.proj = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, query, key, value, need_weights=False):
        tokens = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        y = F.scaled_dot_product_attention(*(rearrange(one, "b n (h d) -> b h n d", h=HEADS) for one in tokens))
        return self.proj(rearrange(y, "b h n d -> b n (h d)")), None


class OfTwo(nn.Module):
    """Keys and values of one projection."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_kv, self.to_out = nn.Linear(DIM, 32), nn.Linear(DIM, 64), nn.Linear(32, DIM)

    def forward(self, x, context=None):
        k, v = rearrange(self.to_kv(x if context is None else context), "b n (p h d) -> p b h n d", h=HEADS, p=2)
        y = F.scaled_dot_product_attention(rearrange(self.to_q(x), "b n (h d) -> b h n d", h=HEADS), k, v)
        return self.to_out(rearrange(y, "b h n d -> b n (h d)"))


class BesideBiases(Timms):
    """As VideoMAE's, whose keys have no bias."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.ones(DIM)), nn.Parameter(torch.ones(DIM))

    def forward(self, x):
        bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])
        q, k, v = F.linear(x, self.qkv.weight, bias).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ThreeNorms(HeadsFirst):
    """Norms in front, of queries and keys of all heads, and none of the answers."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner_ln = nn.LayerNorm(DIM), None
        self.q_ln, self.k_ln = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def forward(self, x):
        q, k, v = rearrange(self.in_proj(self.norm(x)), "b n (h p d) -> p b n (h d)", h=self.heads, p=3)
        q, k, v = (rearrange(one, "b n (h d) -> b h n d", h=self.heads) for one in (self.q_ln(q), self.k_ln(k), v))
        return self.out_proj(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))


class ZerosOfKeys(Timms):
    """As BEiT's in EVA's school, whose keys have a bias that is a buffer of zeros; with a norm of the answers."""

    def __init__(self):
        super().__init__()
        self.qkv, self.inner_attn_ln = nn.Linear(DIM, 3 * DIM, bias=False), nn.LayerNorm(DIM)
        self.q_bias, self.v_bias = nn.Parameter(torch.ones(DIM)), nn.Parameter(torch.ones(DIM))
        self.register_buffer("k_bias", torch.zeros(DIM), persistent=False)

    def forward(self, x):
        bias = torch.cat([self.q_bias, self.k_bias, self.v_bias])
        q, k, v = F.linear(x, self.qkv.weight, bias).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(self.inner_attn_ln(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


class Block(nn.Module):
    def __init__(self, attn, times=1):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.times = nn.LayerNorm(DIM), attn, nn.LayerNorm(DIM), times
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x, return_attention=False):
        y = self.attn(*[self.norm1(x)] * self.times)
        if isinstance(y, tuple):
            y, maps = y
            if return_attention:
                return maps
        x = x + y
        return x + self.mlp(self.norm2(x))


class Network(nn.Module):
    """Somebody's, with a class token and positions that are resampled; says nothing of its size."""

    def __init__(self, layer, times=1, embed=None):
        super().__init__()
        self.to_patches = nn.Conv2d(3, DIM, 8, 8) if embed is None else embed
        self.cls_token, self.pos_embed = nn.Parameter(torch.randn(1, 1, DIM)), nn.Parameter(torch.randn(1, 17, DIM))
        self.layers = nn.ModuleList(Block(layer(), times) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, images):
        return self.norm(self.features(images))[:, 0]

    def features(self, images):
        x = self.to_patches(images)
        places = rearrange(self.pos_embed[:, 1:], "b (y x) c -> b c y x", y=4)
        x = x + F.interpolate(places, x.shape[-2:], mode="bilinear")
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1) + self.pos_embed[:, :1], x.flatten(2).mT], dim=1)
        for layer in self.layers:
            x = layer(x)
        return x


PROVEN = {"timm's": Timms, "maps": WithMaps, "rearranged": Rearranged, "heads": HeadsFirst, "keys": KeysFirst}
PROVEN |= {"biases": BesideBiases, "two": OfTwo, "three": OfThree}
PROVEN |= {"three norms": ThreeNorms, "zeros of keys": ZerosOfKeys}


def somebodys(name):
    torch.manual_seed(0)
    network = Network(PROVEN[name], times=3 if name == "three" else 1)
    for one in network.parameters():
        nn.init.normal_(one, std=0.2)
    return network.eval()


STEMS = {
    "overlapping": lambda: nn.Conv2d(3, DIM, 8, 6),
    "convolutions": lambda: nn.Sequential(
        *(part for i in (3, 16, 32) for part in (nn.Conv2d(i, max(16, 2 * (i - i % 2)), 3, 2, 1), nn.ReLU())),
        nn.Conv2d(64, DIM, 1),
    ),
    "hybrid": lambda: nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 3), nn.BatchNorm2d(16), nn.MaxPool2d(3, 2, 1), nn.Conv2d(16, DIM, 3, 2, 1), nn.GELU()
    ),
    "pooled": lambda: nn.Sequential(nn.Conv2d(3, DIM, 3, 1, 1), nn.AvgPool2d(8, 7)),
}


class Cut(nn.Module):
    """Patches of 8 × 8, cut by einops' function, with a norm in front of the linear layer, as a map."""

    def __init__(self):
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(192), nn.Linear(192, DIM)

    def forward(self, x):
        patches = rearrange(x, "b c (y p) (x q) -> b (y x) (p q c)", p=8, q=8)
        return rearrange(self.proj(self.norm(patches)), "b (y x) c -> b c y x", x=x.shape[3] // 8)


class CutBesideThumbnails(Cut):
    """What a small picture of it all says is added to each patch."""

    def __init__(self):
        super().__init__()
        self.look = nn.Conv2d(3, DIM, 3)

    def forward(self, x):
        seen = self.look(x[:, :, ::2, ::2]).mean(dim=(2, 3), keepdim=True)
        return super().forward(x) + seen


class Unfolded(nn.Module):
    """Patches of 4 × 16, by PyTorch's function."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(192, DIM)

    def forward(self, image):
        tokens = self.proj(F.unfold(image, (4, 16), stride=(4, 16)).mT)
        return tokens.mT.unflatten(2, (image.shape[2] // 4, image.shape[3] // 16))


class Tutorial(nn.Module):
    """All in one module, with PyTorch's layers, whose images stand behind their tokens."""

    def __init__(self, cut="b c (y p) (x q) -> (y x) b (c p q)"):
        super().__init__()
        self.cut, self.class_token, self.input_layer = cut, nn.Parameter(torch.zeros(1, 1, DIM)), nn.Linear(192, DIM)
        self.layers, self.head = nn.ModuleList(TorchBlock() for _ in range(2)), nn.Linear(DIM, 5)

    def forward(self, images):
        x = self.input_layer(rearrange(images, self.cut, p=8, q=8))
        x = torch.cat([self.in_front().expand(-1, x.shape[1], -1), x])
        for layer in self.layers:
            x = layer(x)
        return self.head(x[0])

    def in_front(self):
        return self.class_token


class TorchBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn, self.fc = nn.LayerNorm(DIM), nn.MultiheadAttention(DIM, HEADS), nn.Linear(DIM, DIM)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + F.gelu(self.fc(x))


class Timmed(nn.Module):
    """Of timm's blocks, as many repositories have it, with patches cut by reshaping."""

    def __init__(self):
        super().__init__()
        self.embed, self.cls_token = nn.Linear(192, DIM), nn.Parameter(torch.zeros(1, 1, DIM))
        self.blocks = nn.Sequential(*(timm.models.vision_transformer.Block(DIM, HEADS) for _ in range(2)))

    def forward(self, x):
        b, c, y, x_ = x.shape
        patches = x.reshape(b, c, y // 8, 8, x_ // 8, 8).permute(0, 2, 4, 3, 5, 1).reshape(b, -1, 192)
        return self.blocks(torch.cat([self.cls_token.expand(b, -1, -1), self.embed(patches)], dim=1))


CUTS = {
    "of timm's blocks": Timmed,
    "einops": lambda: Network(Timms, embed=Cut()),
    "beside thumbnails": lambda: Network(Timms, embed=CutBesideThumbnails()),
    "unfold": lambda: Network(Timms, embed=Unfolded()),
    "tutorial": Tutorial,
}
