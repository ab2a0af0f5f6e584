"""CLIP with a ResNet out of plain modules, whose state dict has the names of OpenAI's."""

import torch
from safetensors.torch import save_file
from torch import nn

from tests.helpers.tiny_models import WORDS, tokens


def conv(inner: int, outer: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inner, outer, size, stride, padding=size // 2, bias=False)


class Block(nn.Module):
    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inner, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.pool = nn.AvgPool2d(stride)
        if stride > 1 or inner != 4 * width:
            parts = {"-1": nn.AvgPool2d(stride), "0": conv(inner, 4 * width, 1)}
            self.downsample = nn.ModuleDict(parts | {"1": nn.BatchNorm2d(4 * width)})

    def forward(self, x):
        out = self.bn1(self.conv1(x)).relu()
        out = self.pool(self.bn2(self.conv2(out)).relu())
        out = self.bn3(self.conv3(out))
        if hasattr(self, "downsample"):
            for part in ("-1", "0", "1"):
                x = self.downsample[part](x)
        return (x + out).relu()


class Pool(nn.Module):
    def __init__(self, channels: int, places: int, dim: int) -> None:
        super().__init__()
        self.positional_embedding = nn.Parameter(torch.randn(places + 1, channels))
        self.q_proj, self.k_proj = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.v_proj, self.c_proj = nn.Linear(channels, channels), nn.Linear(channels, dim)

    def forward(self, x):
        """Token by token and head by head: the first is the pooled one."""
        out = []
        for image in x:
            places = image.flatten(1).T
            places = torch.cat([places.mean(0)[None], places]) + self.positional_embedding
            q, k, v = self.q_proj(places), self.k_proj(places), self.v_proj(places)
            attended = [
                torch.softmax(a @ b.T / 8, 1) @ c
                for a, b, c in zip(*(part.split(64, 1) for part in (q, k, v)), strict=True)
            ]
            out.append(self.c_proj(torch.cat(attended, 1)))
        return torch.stack(out)


class Visual(nn.Module):
    def __init__(self, blocks: tuple[int, ...], width: int, edge: int, dim: int) -> None:
        super().__init__()
        half_width = width // 2
        self.conv1, self.bn1 = conv(3, half_width, 3, 2), nn.BatchNorm2d(half_width)
        self.conv2, self.bn2 = conv(half_width, half_width, 3), nn.BatchNorm2d(half_width)
        self.conv3, self.bn3 = conv(half_width, width, 3), nn.BatchNorm2d(width)
        inner = width
        for stage, count in enumerate(blocks):
            stage_width = width * 2**stage
            parts = [Block(inner, stage_width, 2 if stage else 1)]
            parts += [Block(4 * stage_width, stage_width, 1) for _ in range(count - 1)]
            setattr(self, f"layer{stage + 1}", nn.Sequential(*parts))
            inner = 4 * stage_width
        self.attnpool = Pool(inner, edge**2, dim)

    def forward(self, x):
        for number in "123":
            x = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(x)).relu()
        x = nn.AvgPool2d(2)(x)
        for number in "1234":
            x = getattr(self, f"layer{number}")(x)
        return self.attnpool(x)


class TextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(width, width // 64, batch_first=True)
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        wide = {"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)}
        self.mlp = nn.ModuleDict(wide)

    def forward(self, x):
        is_future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=is_future, need_weights=False)[0]
        wide = self.mlp["c_fc"](self.ln_2(x))
        return x + self.mlp["c_proj"](wide * torch.sigmoid(1.702 * wide))


class PlainCLIP(nn.Module):
    def __init__(self, blocks=(2, 1, 1, 1), width=4, edge=2, dim=24, text=128, room=24) -> None:
        super().__init__()
        self.visual = Visual(blocks, width, edge, dim)
        self.token_embedding = nn.Embedding(len(WORDS) + 3, text)
        self.positional_embedding = nn.Parameter(torch.randn(room, text))
        self.transformer = nn.ModuleDict({"resblocks": nn.Sequential(TextBlock(text), TextBlock(text))})
        self.ln_final = nn.LayerNorm(text)
        self.text_projection = nn.Parameter(torch.randn(text, dim))
        self.logit_scale = nn.Parameter(torch.tensor(3.0))

    def text(self, ids: list[int]):
        x = self.token_embedding(torch.tensor([ids])) + self.positional_embedding[: len(ids)]
        x = self.transformer["resblocks"](x)
        return self.ln_final(x)[0, -1] @ self.text_projection


def save(directory, seed: int = 0, **shape) -> PlainCLIP:
    """A tiny random model, in half precision as the original release is."""
    torch.manual_seed(seed)
    model = PlainCLIP(**shape)
    for name, value in model.named_buffers():  # as if it had been trained
        if name.endswith("running_mean"):
            value.normal_()
        elif name.endswith("running_var"):
            value.uniform_(0.5, 2)
    state = {
        key: tensor.half() if tensor.is_floating_point() else tensor
        for key, tensor in model.eval().requires_grad_(False).state_dict().items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, directory / "w.safetensors")
    model.load_state_dict({key: tensor.float() for key, tensor in state.items()})
    tokens(directory, start=True)
    return model
