"""How often a classifier is right, from sums that any number of processes can add up."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from subquad.errors import SubquadError
from subquad.inference import in_evaluation


@dataclass(frozen=True)
class EvalResult:
    """Accuracy in percent, mean cross-entropy, number of images, and how often class i (row) was taken for j."""

    top1: float
    top5: float
    loss: float
    count: int
    confusion: Tensor


class EvalSums:
    """What has been counted so far, on the CPU: sums of losses and of hits, confused pairs."""

    def __init__(self, num_classes: int):
        self.loss = torch.zeros((), dtype=torch.float64)
        self.top5 = torch.zeros((), dtype=torch.long)
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.long)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: logits (b, classes), labels (b,)."""
        logits, labels = logits.detach().cpu().float(), labels.cpu()
        classes = len(self.confusion)
        if logits.shape[-1] != classes:
            raise SubquadError(f"the model tells {logits.shape[-1]} classes apart, not the {classes} that are counted")
        check_labels(labels, logits)
        self.loss += F.cross_entropy(logits, labels, reduction="none").double().sum()
        best = logits.topk(min(5, classes)).indices
        self.top5 += (best == labels[:, None]).sum()
        self.confusion += torch.bincount(labels * classes + best[:, 0], minlength=classes**2).view_as(self.confusion)

    def reduce(self, device: torch.device | str = "cpu") -> None:
        """Add up the sums of all processes, by way of `device`, if there are several."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        for sums in (self.loss, self.top5, self.confusion):
            total = sums.to(device)
            dist.all_reduce(total)
            sums.copy_(total)

    def result(self) -> EvalResult:
        """Make means of the sums.

        Raises:
            SubquadError: nothing was counted.
        """
        count = int(self.confusion.sum())
        if not count:
            raise SubquadError("there are no images to evaluate")
        return EvalResult(
            top1=100 * int(self.confusion.diagonal().sum()) / count,
            top5=100 * int(self.top5) / count,
            loss=float(self.loss) / count,
            count=count,
            confusion=self.confusion,
        )


class TopOne:
    """Counts images whose most likely class is theirs."""

    def __init__(self) -> None:
        self.right = self.count = 0

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: logits (b, classes), labels (b,). No answer that has NaN in it is right."""
        check_labels(labels, logits)
        right = (logits.argmax(1) == labels.to(logits.device)) & ~logits.isnan().any(1)
        self.right += int(right.sum())
        self.count += len(labels)

    @property
    def share(self) -> float:
        """Of images that are told right."""
        if not self.count:
            raise SubquadError("there are no images to evaluate")
        return self.right / self.count


def evaluate(
    model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    *,
    device: torch.device | str,
    amp_dtype: torch.dtype | None = None,
    num_classes: int,
) -> EvalResult:
    """Judge `model` on (images, labels); in several processes on those of all loaders, which must differ.

    With fewer than 5 classes all of them are the top 5.
    """
    device = torch.device(device)
    sums = EvalSums(num_classes)
    with evaluating(model), torch.autocast(device.type, amp_dtype, enabled=amp_dtype is not None):
        for images, labels in tqdm(loader, desc="evaluation", leave=False, disable=None if _is_first() else True):
            if len(labels):
                sums.add(model(images.to(device, non_blocking=True)), labels)
    sums.reduce(device)
    return sums.result()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """`model` in evaluation mode without gradients; afterwards every module is in the mode it was in."""
    with in_evaluation(model), torch.inference_mode():
        yield


def check_labels(labels: Tensor, logits: Tensor) -> None:
    """Raise where labels are no class each of logits (b, classes): what is compared by numbers fits more shapes."""
    count, classes = logits.shape
    if labels.shape != (count,) or labels.dtype.is_floating_point:
        dtype = str(labels.dtype).removeprefix("torch.")
        raise SubquadError(
            f"labels are a class's number for each of {count} images, ({count},), got {tuple(labels.shape)} of {dtype}"
        )
    if count and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        wrong = int(labels.min()) if labels.min() < 0 else int(labels.max())
        raise SubquadError(f"labels are numbers of classes, 0 to {classes - 1}, got {wrong}: leave out what has none")


def check_finite(answer: Tensor, what: Path | str) -> None:
    """Raise where a network's answer has numbers that are not finite."""
    if not answer.isfinite().all():
        raise SubquadError(f"the network's answer to {what} is not finite: its weights are damaged, or it has diverged")


def _is_first() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
