"""LaViT: a pyramid, or a plain ViT, whose later layers compute no scores of their own.

LaViT, Zhang et al. 2024, arXiv 2406.00427. No official code is public: this is the paper's method with our decisions
where it leaves one open, see docs/papers.md. It is not sub-quadratic.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.models.backbone import Backbone, grids_of
from subquad.models.layers import Block, Mechanism
from subquad.models.less_attention import AttentionResidual, LessAttention, ScoreAttention, ScoreBlock, ScoreStage
from subquad.models.pvt import SpatialReductionAttention
from subquad.models.stages import ConvEmbed, Stage, by_stage, drop_path_rates
from subquad.models.vit import PatchEmbed, Plain
from subquad.ranges import Count, DropRate, NotNegative, Positive, Ratio, checks_arguments


class Passing:
    """Holds a tensor of the last forward pass; copies and files of a model do not have it."""

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Passing":
        return Passing()

    def __reduce__(self) -> tuple[type["Passing"], tuple[()]]:
        return Passing, ()


class ScoreBackbone(Backbone):
    """What both forms share: the loss on the layers that carry scores on. Arguments are those of `Backbone`."""

    own_attention = "less"

    def __init__(self, *sizes: Any, loss_weight: float, **more: Any) -> None:
        super().__init__(*sizes, **more)
        self.loss_weight = loss_weight
        self.last_loss = Passing()

    def auxiliary_loss(self) -> Tensor:
        """The weighted diagonality-preserving loss of the last forward pass in training, a mean over its layers.

        Zero in evaluation. The training loop adds it to the cross-entropy.
        """
        loss = self.last_loss.value
        return next(self.parameters()).new_zeros(()) if loss is None or not self.training else self.loss_weight * loss

    def _keep_loss(self, losses: list[Tensor]) -> None:
        layers = sum(isinstance(module, LessAttention) for module in self.modules())
        self.last_loss.value = sum(losses[1:], losses[0]) / layers if losses else None

    def no_weight_decay(self) -> set[str]:
        """Parameters that are not decayed."""
        scales = {name for name, _ in self.named_parameters() if name.endswith("residual.scale")}
        return super().no_weight_decay() | scales


class LaViT(ScoreBackbone):
    """A pyramid as PVT's: spatial reduction in the first stages, less attention in the last two.

    Args:
        attention: the mechanism of each block; the last two stages have attention of their own and leave theirs unused.
        depths: blocks of each stage.
        sr_ratio: of each block, used in the first stages.
        embed_dims, num_heads, mlp_ratios: of each stage.
        less_from: for each stage, the first block without scores of its own; None for none. By default half of the
            blocks of the last two stages.
        transform: "dense", "kron" or "share", see `ScoreTransform`.
        tied: whether queries and keys are mixed alike.
        score_norm: see `LessAttention`.
        attention_residual: whether the last scores of stage 3 go into the first of stage 4.
        class_token: join one in the last stage, for the head to read.
        loss_weight, loss_kind: of `auxiliary_loss`.
    """

    everything = 1

    @checks_arguments
    def __init__(
        self,
        attention: Sequence[Mechanism],
        *,
        depths: Sequence[Positive],
        sr_ratio: Sequence[Positive],
        img_size: tuple[Positive, Positive] = (224, 224),
        patch_size: Positive = 4,
        in_chans: Positive = 3,
        num_classes: Count = 1000,
        embed_dims: Sequence[Positive] = (64, 128, 320, 512),
        num_heads: Sequence[Positive] = (1, 2, 5, 8),
        mlp_ratios: Sequence[Ratio] = (4, 4, 4, 4),
        less_from: Sequence[Count | None] | None = None,
        transform: str = "dense",
        tied: bool = False,
        score_norm: bool = False,
        attention_residual: bool = True,
        class_token: bool = False,
        loss_weight: NotNegative = 0.1,
        loss_kind: str = "centred",
        global_pool: str | None = None,
        drop_rate: DropRate = 0,
        drop_path_rate: DropRate = 0,
    ) -> None:
        grids = grids_of(img_size, patch_size, len(depths))
        grids[-1] = TokenGrid(*grids[-1].shape, int(class_token))
        mechanisms, ratios = by_stage(attention, depths), by_stage(sr_ratio, depths)
        rates, firsts = drop_path_rates(drop_path_rate, depths), _less_from(less_from, depths)
        scored = len(depths) - 2  # the first stage with scores of its own
        stages: list[nn.Module] = []
        for s, (dim, grid) in enumerate(zip(embed_dims, grids, strict=True)):
            sizes: dict[str, Any] = {"mlp_ratio": mlp_ratios[s], "drop": drop_rate}
            stride = patch_size if s == 0 else 2
            embed = ConvEmbed(in_chans if s == 0 else embed_dims[s - 1], dim, stride, stride)
            if s < scored:
                blocks: list[nn.Module] = [
                    Block(
                        dim,
                        SpatialReductionAttention(dim, num_heads[s], mechanism, grid=grid, sr_ratio=ratio),
                        drop_path=rate,
                        **sizes,
                    )
                    for mechanism, ratio, rate in zip(mechanisms[s], ratios[s], rates[s], strict=True)
                ]
                stages.append(Stage(embed, blocks, dim, grid=grid, positions="bilinear", drop_rate=drop_rate))
                continue
            layers = score_layers(
                dim,
                num_heads[s],
                depths[s],
                firsts[s],
                keep_last=attention_residual and s == scored,
                grid=grid,
                transform=transform,
                tied=tied,
                score_norm=score_norm,
            )
            blocks = [
                ScoreBlock(dim, layer, drop_path=rate, **sizes) for layer, rate in zip(layers, rates[s], strict=True)
            ]
            residual = None
            if attention_residual and s > scored:
                residual = AttentionResidual(num_heads[s - 1], num_heads[s], prefix=grid.prefix)
            stages.append(
                ScoreStage(
                    embed,
                    blocks,
                    dim,
                    grid=grid,
                    positions="bilinear",
                    drop_rate=drop_rate,
                    residual=residual,
                    loss_kind=loss_kind,
                )
            )
        super().__init__(
            stages,
            embed_dims,
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            norm=nn.LayerNorm(embed_dims[-1], eps=1e-6),
            global_pool=("token" if class_token else "avg") if global_pool is None else global_pool,
            drop_rate=drop_rate,
            loss_weight=loss_weight,
        )

    @staticmethod
    def default_reach(img_size: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        """Where attention is quadratic, each stage's default; the last two attend to all in any case."""
        return {"sr_ratio": (8, 4, 1, 1)}

    def walk(self, x: Tensor) -> Iterator[tuple[Tensor, TokenGrid]]:
        """Tokens and their grid at the end of each stage."""
        self.check_images(x)
        scores, losses = None, []
        for stage in self.stages:
            if isinstance(stage, ScoreStage):
                tokens, grid, scores, loss = stage(x, scores)
                if self.training and loss is not None:
                    losses.append(loss)
            else:
                tokens, grid = stage(x)
            # at each stage, as whoever walks may stop there, and the loss of another pass would stay
            self._keep_loss(losses)
            yield tokens, grid
            x = grid.to_image(tokens)

    def forward_features(self, x: Tensor) -> Tensor:
        self.check_images(x)
        for last in self.walk(x):
            tokens, grid = last
        return self._as_output(self.norm(tokens), grid)

    def _cut_after(self, level: int) -> None:
        super()._cut_after(level)
        last = self.stages[-1].blocks[-1].attn
        if isinstance(last, ScoreAttention):
            # nobody is left to read its scores
            last.keep_scores = False


class LaViTPlain(ScoreBackbone, Plain):
    """A plain ViT whose last blocks compute no scores of their own.

    Args:
        attention: as many as there are blocks; they have attention of their own and leave these unused.
        less_from: the first block without scores of its own, half of the blocks by default.
        transform, tied, score_norm, loss_weight, loss_kind: as in `LaViT`.
        embed_dim, num_heads, class_token, global_pool: as in `ViT`.
    """

    takes_mechanisms = False

    @checks_arguments
    def __init__(
        self,
        attention: Sequence[Mechanism],
        *,
        img_size: tuple[Positive, Positive] = (224, 224),
        patch_size: Positive = 16,
        in_chans: Positive = 3,
        num_classes: Count = 1000,
        embed_dim: Positive = 768,
        num_heads: Positive = 12,
        mlp_ratio: Ratio = 4,
        less_from: Count | None = None,
        transform: str = "dense",
        tied: bool = False,
        score_norm: bool = False,
        class_token: bool = True,
        loss_weight: NotNegative = 0.1,
        loss_kind: str = "centred",
        global_pool: str | None = None,
        drop_rate: DropRate = 0,
        drop_path_rate: DropRate = 0,
    ) -> None:
        depth = len(attention)
        grid = TokenGrid(*grids_of(img_size, patch_size, 1)[0].shape, int(class_token))
        layers = score_layers(
            embed_dim,
            num_heads,
            depth,
            max(1, depth // 2) if less_from is None else less_from,
            grid=grid,
            transform=transform,
            tied=tied,
            score_norm=score_norm,
        )
        blocks = [
            ScoreBlock(embed_dim, layer, mlp_ratio=mlp_ratio, drop=drop_rate, drop_path=rate)
            for layer, rate in zip(layers, drop_path_rates(drop_path_rate, [depth])[0], strict=True)
        ]
        embed = PatchEmbed(in_chans, embed_dim, patch_size)
        stage = ScoreStage(
            embed, blocks, embed_dim, grid=grid, positions="bicubic", drop_rate=drop_rate, loss_kind=loss_kind
        )
        super().__init__(
            stage,
            embed_dim,
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            norm=nn.LayerNorm(embed_dim, eps=1e-6),
            global_pool=("token" if class_token else "avg") if global_pool is None else global_pool,
            drop_rate=drop_rate,
            loss_weight=loss_weight,
        )

    def walk(self, x: Tensor) -> Iterator[tuple[Tensor, TokenGrid]]:
        """Tokens and their grid after each block."""
        self.check_images(x)
        losses: list[Tensor] = []
        for tokens, grid, _, loss in self.stages[0].score_steps(x):
            losses = [] if loss is None else [loss]
            self._keep_loss(losses)
            yield tokens, grid

    def forward_features(self, x: Tensor) -> Tensor:
        self.check_images(x)
        tokens, grid, _, loss = self.stages[0](x)
        self._keep_loss([loss] if self.training and loss is not None else [])
        return self._as_output(self.norm(tokens), grid)


def score_layers(
    dim: int, num_heads: int, depth: int, less_from: int | None, *, keep_last: bool = False, **less: Any
) -> list[nn.Module]:
    """The attention layers of a stage: vanilla ones up to `less_from`, then less attention.

    Scores are kept where somebody needs them: by the last vanilla layer in front of the others, and with `keep_last` by
    the last layer.
    """
    first = depth if less_from is None else less_from
    if not 1 <= first <= depth:
        raise SubquadError(f"less_from is between 1 and the stage's {depth} blocks, the first has scores: got {first}")
    vanilla = [
        ScoreAttention(dim, num_heads, keep_scores=j == first - 1 and (first < depth or keep_last))
        for j in range(first)
    ]
    return [*vanilla, *(LessAttention(dim, num_heads, **less) for _ in range(depth - first))]


def _less_from(less_from: Sequence[int | None] | None, depths: Sequence[int]) -> list[int | None]:
    if less_from is None:
        return [max(1, depth // 2) for depth in depths]
    if len(less_from) != len(depths):
        raise SubquadError(f"less_from has {len(less_from)} entries for {len(depths)} stages: give one for each")
    return list(less_from)
