"""Small denoising networks of diffusers for images of 32 px and ten classes: training them, other attention in them.

The U-Net has the blocks of Stable Diffusion's, with self-attention on 32×32 and 16×16 tokens and the class where that
has a text; the DiT has 16×16 tokens. Both predict the noise of a cosine schedule.
"""

import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.conversion import convert
from subquad.data import load_dataset
from subquad.errors import SubquadError, reason_of
from subquad.holding import holding
from subquad.training.engine import Interruptions
from subquad.writing import replacing

SIDE, CLASSES = 32, 10
BATCH, RATE, WARMUP, AVERAGED = 64, 2e-4, 500, 0.999
SAVED_EVERY = 600.0
"""Seconds between two states."""


def schedule() -> Any:
    """The noise schedule, and the sampler of Song et al. 2021 on it (arXiv 2010.02502)."""
    from diffusers import DDIMScheduler

    return DDIMScheduler(beta_schedule="squaredcos_cap_v2", num_train_timesteps=1000)


class Denoiser(nn.Module):
    """A network that is asked for the noise in images (b, 3, y, x), at levels (b,), of classes (b,)."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, noisy: Tensor, levels: Tensor, labels: Tensor) -> Tensor:
        # a class is a text of one token
        told = {"encoder_hidden_states": F.one_hot(labels, CLASSES)[:, None].to(noisy)}
        if not hasattr(self.network, "down_blocks"):
            told = {"class_labels": labels}
        return self.network(noisy, timestep=levels, **told).sample

    def predict(self, noisy: Tensor, level: int, labels: Tensor) -> Tensor:
        """What the patches of `subquad.diffusion` see as one step of sampling."""
        return self(noisy, torch.full((len(noisy),), level, device=noisy.device), labels)


def make_unet(*, toy: bool = False) -> Denoiser:
    """3 M parameters, 0.74 G multiply-adds an image; or next to none."""
    from diffusers import UNet2DConditionModel

    return Denoiser(
        UNet2DConditionModel(
            sample_size=SIDE,
            in_channels=3,
            out_channels=3,
            block_out_channels=(8, 8, 8) if toy else (32, 64, 128),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=CLASSES,
            attention_head_dim=(1, 2, 4),  # the number of heads, as diffusers has it
            norm_num_groups=8,
        )
    )


def make_dit(*, toy: bool = False) -> Denoiser:
    """2 M parameters, 0.40 G multiply-adds an image; or next to none."""
    from diffusers import DiTTransformer2DModel

    sizes = {"attention_head_dim": 8, "num_layers": 2} if toy else {"attention_head_dim": 64, "num_layers": 6}
    common = {"in_channels": 3, "out_channels": 3, "patch_size": 2, "sample_size": SIDE, "num_embeds_ada_norm": CLASSES}
    return Denoiser(DiTTransformer2DModel(num_attention_heads=2, **sizes, **common))


NETWORKS: dict[str, Callable[..., Denoiser]] = {"unet": make_unet, "dit": make_dit}


def converted(denoiser: Denoiser, name: str) -> Denoiser:
    """A copy whose self-attention is our mechanism's, behind the trained projections; for softmax a plain copy."""
    denoiser = deepcopy(denoiser)
    return denoiser if name == "softmax" else Denoiser(convert(denoiser.network, name, in_place=True))


def load_images(archive: Path, split: str, count: int | None = None) -> tuple[Tensor, Tensor]:
    """CIFAR-10 as bytes (n, 3, 32, 32) and classes (n,)."""
    data = load_dataset("cifar10", split=split, data_dir=archive, strict=True, max_images=count)
    import numpy as np

    pictures = np.stack([np.asarray(data.picture(index)) for index in range(len(data))])
    return torch.from_numpy(pictures).movedim(3, 1).contiguous(), torch.tensor(list(data.labels))


def as_input(pictures: Tensor) -> Tensor:
    """Bytes as numbers from -1 to 1."""
    return pictures.float() / 127.5 - 1


class Training:
    """A network in training, kept in a file: it is stopped at any update and goes on as if it had not been.

    What an update draws follows from the seed and its number alone. The rate is constant behind its warm-up and the
    weights that are judged are an average, so that whenever it is stopped there is a network.
    """

    def __init__(self, denoiser: Denoiser, file: Path, *, seed: int = 0, amp: str = "", device: str = "cpu") -> None:
        self.denoiser, self.file, self.seed, self.device = denoiser.to(device), file, seed, device
        self.averaged = deepcopy(self.denoiser).eval().requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.denoiser.parameters(), lr=RATE, weight_decay=0.0)
        self.cast = torch.autocast(torch.device(device).type, torch.bfloat16, enabled=amp == "bf16")
        self.kept = schedule().alphas_cumprod.to(device)
        self.updates, self.seconds, self.losses = 0, 0.0, []
        if file.exists():
            self._restore()

    def _restore(self) -> None:
        try:
            state = torch.load(self.file, map_location=self.device, weights_only=True)
            self.denoiser.load_state_dict(state["weights"])
            self.averaged.load_state_dict(state["averaged"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.updates, self.seconds, self.losses = (state[name] for name in ("updates", "seconds", "losses"))
        except Exception as error:
            raise SubquadError(f"{self.file} can't be gone on from: {reason_of(error)[:100]}") from None

    def save(self) -> None:
        """Write all that the next update needs."""
        state = {"weights": self.denoiser.state_dict(), "averaged": self.averaged.state_dict()}
        state |= {"optimizer": self.optimizer.state_dict(), "updates": self.updates}
        state |= {"seconds": self.seconds, "losses": self.losses}
        with replacing(self.file) as aside:
            torch.save(state, aside)

    def run(self, pictures: Tensor, labels: Tensor, updates: int, log: Callable[[str], None] = print) -> None:
        """Train until there were so many updates.

        Raises:
            SubquadError: it was interrupted; the file has what was done.
        """
        if self.updates >= updates:
            return
        with holding(self.file.parent), Interruptions() as interruptions:
            started = saved = time.monotonic()
            before = self.seconds
            try:
                while self.updates < updates:
                    interruptions.check()
                    loss = self.update(pictures, labels)
                    self.seconds = before + time.monotonic() - started
                    if self.updates % 100 == 0 or self.updates == updates:
                        self.losses.append((self.updates, loss))
                        log(f"{self.file.parent.name}: {self.updates} of {updates} updates, loss {loss:.4f}")
                    if time.monotonic() - saved > SAVED_EVERY:
                        saved = time.monotonic()
                        with interruptions.held_back():
                            self.save()
            except KeyboardInterrupt:
                self.save()
                raise SubquadError(
                    f"interrupted: {self.updates} of {updates} updates are kept in {self.file}"
                ) from None
            self.save()

    def update(self, pictures: Tensor, labels: Tensor) -> float:
        """One update; its loss."""
        # of a seed for the CPU 32 bits count
        torch.manual_seed((100_000_000 * self.seed + self.updates) % 2**32)
        rows = torch.randint(len(pictures), (BATCH,))
        images = as_input(pictures[rows])
        flipped = torch.rand(BATCH) < 0.5
        images[flipped] = images[flipped].flip(-1)
        noise, levels = torch.randn_like(images), torch.randint(len(self.kept), (BATCH,))
        images, noise, levels, classes = (x.to(self.device) for x in (images, noise, levels, labels[rows]))
        kept = self.kept[levels][:, None, None, None]
        self.denoiser.train()
        with self.cast:
            answer = self.denoiser(kept.sqrt() * images + (1 - kept).sqrt() * noise, levels, classes)
        loss = F.mse_loss(answer.float(), noise)
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (self.updates + 1) / WARMUP)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.denoiser.parameters(), 1.0)
        self.optimizer.step()
        self.updates += 1
        with torch.no_grad():
            # as much of the past as there is
            share = min(AVERAGED, self.updates / (self.updates + 10))
            for mean, new in zip(self.averaged.parameters(), self.denoiser.parameters(), strict=True):
                mean.lerp_(new, 1 - share)
            for mean, new in zip(self.averaged.buffers(), self.denoiser.buffers(), strict=True):
                mean.copy_(new)
        return float(loss.detach())
