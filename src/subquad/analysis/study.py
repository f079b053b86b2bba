"""Trained networks looked into, one after the other: measures, maps and counts of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset
from tqdm import tqdm

from subquad.analysis.findings import Findings, confusion_words, removal_shares
from subquad.analysis.measures import ALL_MEASURES
from subquad.analysis.network_measures import measure_network
from subquad.analysis.removal import check_removal
from subquad.analysis.small_maps import looking
from subquad.analysis.survey import NoQueriesError, count_confusions, count_hits, survey
from subquad.data import InputConfig, eval_transform, placing, read_image
from subquad.data.opening import check_words
from subquad.errors import SubquadError, unknown_name
from subquad.ranges import Count, Pixels, Positive, check_fields
from subquad.runs import open_trained
from subquad.tasks import ImageNetwork
from subquad.tasks.classification import images_of
from subquad.tasks.image_files import check_there, image_files, none_readable, readable_images
from subquad.text import counted

SURVEYED = 32
"""Images at a time in counts over a data set."""


@dataclass(frozen=True)
class Study:
    """What is looked into, and how far.

    Attributes:
        images: image files, or folders of them; held-out ones if left out.
        measures: names of `ALL_MEASURES`; all if left out.
        max_images: so many are looked at, evenly chosen.
        shown: so many of them have maps of every layer.
        img_size: pixels of the images, one number or (height, width); as in training if left out.
        batch_size: images at a time; a map is held for each.
        removed: count right answers without the keys around each query, over all held-out images.
        branches: there: whether local branches stay.
        confusion: count queries that have the weights of another one, over all held-out images.
        data, data_dir: what is held out; what the network was trained on if left out.
        max_held_out: so many of these only, evenly chosen.
        output: where counts are kept as they go, and gone on with; nowhere if left out.
    """

    images: Path | str | Sequence[Path | str] | None = None
    measures: Sequence[str] | None = None
    max_images: Positive = 64
    shown: Count = 4
    img_size: Pixels | None = None
    batch_size: Positive = 4
    removed: bool = False
    branches: bool = True
    confusion: bool = False
    data: str | None = None
    data_dir: str | None = None
    max_held_out: Positive | None = None
    output: Path | None = None
    log: Callable[[str], None] = field(default=lambda line: None, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)

    def of(self, sources: Sequence[Path | str]) -> Findings:
        """What there is to see in networks: run folders, weight files, or timm's by name.

        Raises:
            SubquadError: in one line, where one of them can't be opened or looked into as is asked.
        """
        for name in self.measures or ():
            if name not in ALL_MEASURES:
                raise unknown_name("measure", name, ALL_MEASURES)
        if self.images is None:
            check_words(self.data, self.data_dir)
        else:
            check_there([self.images] if isinstance(self.images, str | Path) else self.images)
        names = [name_of(source) for source in sources]
        for name in names:
            if names.count(name) > 1:
                raise SubquadError(f"two networks are called {name}: rename a folder")
        for source in sources if len(sources) > 1 else ():
            # minutes before it is its turn; it is not held until then, as many would not fit into memory
            self._opened(source)
        findings, first = Findings(), _First()
        for name, source in zip(names, sources, strict=True):
            trained = self._opened(source)
            self._measure(trained, name, findings, first)
            self._count(trained, name, findings)
        if not any(findings.rows.values()):
            # those of one mechanism alone
            raise SubquadError(f"no layer of {', '.join(findings.names)} has any of {', '.join(self.measures or ())}")
        return findings

    def _opened(self, source: Path | str) -> ImageNetwork:
        """A network that all that is asked for can be asked of."""
        trained = open_trained(source, img_size=self.img_size).image_network(self.img_size)
        if self.removed:
            if not getattr(trained.model, "num_classes", 0):
                raise SubquadError(
                    f"--removed counts a classifier's answers, and {name_of(source)} gives none: leave it out"
                )
            check_removal(trained.model)
        return trained

    def _measure(self, trained: ImageNetwork, name: str, findings: Findings, first: "_First") -> None:
        """The measures of one network, and maps of some images."""
        pictures, inputs = self._pictures(trained)
        batches = torch.stack(inputs).split(self.batch_size)
        bar = tqdm(batches, desc=f"measuring {name}", unit="batch", leave=False, disable=None)
        moved = (batch.to(trained.device) for batch in bar)
        rows = measure_network(trained.model, moved, self.measures or list(ALL_MEASURES), network=name)
        findings.rows[name], findings.images[name] = rows, len(inputs)
        if shown := min(self.shown, len(pictures)):
            chosen = [k * len(pictures) // shown for k in range(shown)]
            own = [pictures[k] for k in chosen]
            if not first.pictures:
                first.pictures, first.part = own, _part(trained.input)
                # a place of a map is one of what the network sees, not of what the crop leaves out
                findings.pictures[:] = map(placing(trained.input), own)
            if own == first.pictures:
                if _part(trained.input) != first.part:
                    self.log(f"{name}: it sees another part of the images than the first network, which is shown")
                looks = (looking(trained.model, inputs[k][None].to(trained.device)) for k in chosen)
                findings.looks[name] = [layers for (layers,) in looks]
            else:
                self.log(f"{name}: its images are not the first network's, so that its maps are not shown beside them")
        layers = max((row.layer for row in rows), default=0)
        measured = f"{counted(layers, 'layer')}, {counted(len(inputs), 'image')}"
        self.log(f"{name}: {measured if rows else 'none of these measures'}")

    def _pictures(self, trained: ImageNetwork) -> tuple[list[Any], list[Any]]:
        """Images as they are and as the network takes them: of the folders, else held-out ones."""
        if self.images is not None:
            return self._photographs(self.images, trained)
        if not (self.data or trained.data):
            raise SubquadError(
                "nothing says what was held out: name photographs with --images, or a data set with --data"
            )
        images = images_of(trained, data=self.data, data_dir=self.data_dir)
        pairs = ((k, images[k]) for k in _even_order(len(images), self.max_images))
        whole = sorted(islice(((k, pair[0]) for k, pair in pairs if pair is not None), self.max_images), key=_place)
        if not whole:
            raise SubquadError(f"none of {len(images)} held-out images can be read, the first is {images.path(0)}")
        return [images.picture(k) for k, _ in whole], [image for _, image in whole]

    def _photographs(
        self, paths: Path | str | Sequence[Path | str], trained: ImageNetwork
    ) -> tuple[list[Any], list[Any]]:
        files = image_files(paths)
        chosen = [files[k] for k in sorted(_even_order(len(files), self.max_images)[: self.max_images])]
        readable = list(readable_images(chosen, eval_transform(trained.input), strict=False, log=self.log))
        if not readable:
            raise none_readable(chosen)
        return [read_image(path) for path, _ in readable], [image for _, image in readable]

    def _count(self, trained: ImageNetwork, name: str, findings: Findings) -> None:
        """What is counted over all held-out images."""
        if not (self.removed or self.confusion):
            return
        images: Any = images_of(trained, data=self.data, data_dir=self.data_dir)
        if self.max_held_out and self.max_held_out < len(images):
            step = len(images) / self.max_held_out
            images = Subset(images, [int(k * step) for k in range(self.max_held_out)])
        settings: dict[str, Any] = {"batch_size": SURVEYED, "device": trained.device}
        about = {
            "network": name,
            "data": self.data or trained.data,
            "data_dir": self.data_dir or (None if self.data else trained.data_dir),
            "size": trained.input.img_size,
            "weights": trained.fingerprint,
        }
        if self.removed:
            findings.hits[name] = survey(
                images,
                count_hits(trained.model, branches=self.branches),
                about=about | {"branches": self.branches},
                file=self._kept(f"removed-{name}.json"),
                title=f"{name}, removed keys",
                **settings,
            )
            shares = removal_shares(findings.hits[name])
            self.log(f"{name}, top-1 % without keys: " + ", ".join(f"{k} {value:.1f}" for k, value in shares.items()))
        if self.confusion:
            try:
                findings.confusions[name] = survey(
                    images,
                    count_confusions(trained.model),
                    about=about,
                    file=self._kept(f"confused-{name}.json"),
                    title=f"{name}, confusion",
                    **settings,
                )
                self.log(f"{name}: {confusion_words(findings.confusions[name])}")
            except NoQueriesError as error:
                # the other networks are still to be counted
                self.log(f"{name}: {error}")

    def _kept(self, name: str) -> Path | None:
        return None if self.output is None else self.output / name


@dataclass
class _First:
    """What the first network's maps are of: its images as they are, and the part of them that it sees."""

    pictures: list[Any] = field(default_factory=list)
    part: tuple[str, float, float] | None = None


def _part(config: InputConfig) -> tuple[str, float, float]:
    """What decides which part of an image a network sees: how it is cropped, how much is left, and the aspect."""
    height, width = config.img_size
    return config.crop_mode, config.crop_pct, height / width


def _even_order(count: int, most: int) -> list[int]:
    """All of `count` places: `most` of them first, from the first part to the last, then what may stand in for them."""
    first = [k * count // most for k in range(most)] if most < count else list(range(count))
    chosen = set(first)
    return [*first, *(k for k in range(count) if k not in chosen)]


def _place(pair: tuple[int, Any]) -> int:
    return pair[0]


def name_of(source: Path | str) -> str:
    """What a network is called: its folder, its file, or timm's name of it."""
    if str(source).startswith("timm/"):
        return str(source).removeprefix("timm/").partition("=")[0]
    path = Path(source)
    return path.name if path.is_dir() else path.stem
