"""Distillation: the whole converted network fitted to its teacher's last features, and logits where there are any."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.conversion.aligning import relative_error, teacher_of, tokens_there
from subquad.conversion.best_states import Part
from subquad.conversion.fit_schedule import schedule_of
from subquad.conversion.fitting_loop import Goal, Progress, fit
from subquad.conversion.low_rank import check_peft, low_rank_changes
from subquad.conversion.replacing import check_teacher, converted_layers
from subquad.conversion.unlabelled_images import Taking, as_batches, fed
from subquad.errors import SubquadError, unknown_name
from subquad.weights.files import within_wrappers

TRAINED = ("all", "attention", "new", "lora")
"""What distillation may train: all of the network, its converted layers, what these have besides the old ones, or that
and changes of low rank to all linear layers."""


@torch.inference_mode(False)
@torch.enable_grad()
def distil(
    student: nn.Module,
    images: Any,
    *,
    teacher: nn.Module | None = None,
    train: str = "all",
    batch_size: int = 64,
    seed: int = 1,
    config: Taking | None = None,
    state_file: Path | str | None = None,
    **schedule: Any,
) -> Progress:
    """Train a converted network, in place, to answer as its teacher does; returns updates, seconds and losses.

    It ends as the best that held-out images found on the way, if only what it began as. The loss is the relative error
    of the last features, and, where the network has logits, the Kullback-Leibler divergence of its classes from the
    teacher's.

    Args:
        student: of `convert`, best after `align`.
        images: see `as_batches`.
        teacher: the network before it was converted; made of the student where it is left out.
        train: one of `TRAINED`.
        batch_size: images of an update.
        seed: of the order of the images.
        config: how the network takes pictures, where `images` are those: an InputConfig, or a processor of
            transformers, whose patches the network is handed.
        state_file: where the state is kept: called again with it, the fit goes on.
        schedule: fields of `Schedule`: `updates=500`, `lr=3e-4`, `time_budget=600`, …

    Raises:
        SubquadError: something does not fit, in one line.
    """
    plan = schedule_of(schedule, lr=3e-4)
    student, teacher = within_wrappers(student), within_wrappers(teacher)
    if teacher is None:
        teacher = teacher_of(student)
    check_teacher(student, teacher)
    batches = as_batches(images, batch_size=batch_size, seed=seed, config=config, network=teacher)

    def step(pictures: Any) -> dict[str, float]:
        with torch.no_grad():
            targets = fitted_of(teacher, answers_of(teacher, pictures))
        losses = losses_of(student, answers_of(student, pictures), targets)
        if torch.is_grad_enabled():
            torch.stack(list(losses.values())).sum().backward()
        return {name: float(loss.detach()) for name, loss in losses.items()}

    with _trained(student, train) as parameters:
        return fit(Goal("distilling", [Part(parameters)], step), student, teacher, batches, plan, state_file=state_file)


@contextmanager
def _trained(student: nn.Module, train: str) -> Iterator[list[nn.Parameter]]:
    """What is trained, for the time of the context."""
    parameters = trained_parameters(student, train)
    if train != "lora":
        yield parameters
        return
    with low_rank_changes(student) as changes:
        # which may stand in the new parts as well
        kept = {id(one) for one in student.parameters()}
        yield [*(one for one in parameters if id(one) in kept), *changes]


def trained_parameters(student: nn.Module, train: str) -> list[nn.Parameter]:
    """The parameters that a word of `TRAINED` names.

    Raises:
        SubquadError: it is none, or there are none.
    """
    if train not in TRAINED:
        raise unknown_name("train", train, TRAINED)
    layers = converted_layers(student).values()
    if train == "all":
        added = {id(one) for layer in layers for part in layer.added() for one in part.parameters()}
        # a teacher that was frozen as a whole is one by habit: its student is trained all the same
        frozen = not any(one.requires_grad for one in student.parameters() if id(one) not in added)
        parameters = [one for one in student.parameters() if frozen or one.requires_grad]
    elif train == "attention":
        parameters = [one for layer in layers for one in layer.parameters()]
    else:
        parameters = [one for layer in layers for part in layer.added() for one in part.parameters()]
    if not parameters and train == "new":
        raise SubquadError(f"train='{train}' leaves nothing to train: this mechanism adds no parameters")
    return parameters


def check_trainable(student: nn.Module, train: str) -> None:
    """Raise SubquadError where `distil` could not train what a word of `TRAINED` names."""
    trained_parameters(student, train)
    if train == "lora":
        check_peft()


def answers_of(model: Any, images: Any) -> dict[str, Tensor]:
    """What a network makes of images, by name: "features" and "logits" where it knows them apart, else its outputs.

    Raises:
        SubquadError: it answers with nothing that could be compared.
    """
    if isinstance(images, Tensor) and callable(own := getattr(model, "features_and_logits", None)):
        named: dict[str, Tensor] = own(images)
        return named
    if isinstance(images, Tensor) and hasattr(model, "forward_features") and hasattr(model, "forward_head"):
        features = model.forward_features(images)
        answers = {"features": features}
        if getattr(model, "num_classes", 0):
            answers["logits"] = model.forward_head(features)
        return answers
    answered = fed(model, images)
    if isinstance(answered, Tensor) and answered.dim() > 1 and answered.shape[1] == getattr(model, "num_classes", None):
        # classes of places, as segmenters have them
        return {"logits": answered}
    answers = {name: _as_map(name, one, images) for name, one in _tensors(answered)}
    if not answers:
        raise SubquadError(
            f"this {type(model).__name__} answers with no tensor of numbers with a point for each image: let it give "
            "features or logits, no classes or losses, where it is fitted and compared"
        )
    return answers


def fitted_of(model: Any, answers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of a network's answers that a student is fitted to: all, unless it says which by `fitted_by`."""
    names = getattr(model, "fitted_by", None) or answers
    return {name: answers[name] for name in names}


def judged_by(answers: Mapping[str, Tensor]) -> str:
    """The name of the features among answers: the first that are not logits, if there are others."""
    return next(name for name in answers if name != "logits" or len(answers) == 1)


def channels_at(model: Any, features: Tensor) -> int:
    """Which dimension of a network's features are the channels of a token: of maps (b, c, y, x) the second."""
    channels_last = getattr(model, "output_fmt", "NCHW") == "NHWC"
    return 1 if features.dim() == 4 and not channels_last else -1


def agreeing(answers: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> float:
    """How many images have the same most likely class; a share of each counts where places have classes."""
    same = likeliest(answers["logits"]) == targets["logits"].argmax(1)
    return float(same.float().flatten(1).mean(1).sum()) if same.dim() > 1 else float(same.sum())


def likeliest(logits: Tensor) -> Tensor:
    """The most likely class of logits (b, k, …), (b, …); −1, which is none, where some are NaN: it would be a class."""
    return logits.argmax(1).masked_fill(logits.isnan().any(1), -1)


def _tensors(answered: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Tensors of numbers in an answer, a row for each image, by where they are."""
    if isinstance(answered, Tensor):
        # a scale or a loss is of no image
        return [(_told_apart(name, answered), answered)] if answered.is_floating_point() and answered.dim() else []
    if isinstance(answered, Mapping):
        return [pair for key, value in answered.items() for pair in _tensors(value, f"{name} {key}".strip())]
    if isinstance(answered, list | tuple):
        return [pair for place, value in enumerate(answered) for pair in _tensors(value, f"{name or 'output'} {place}")]
    return []


def _as_map(name: str, answer: Tensor, images: Any) -> Tensor:
    """An answer; a map of a number for each place (b, y, x), as depth, as one of one channel: it has no tokens."""
    if answer.dim() != 3:
        return answer
    inputs = images.values() if isinstance(images, Mapping) else [images]
    sizes = [each.shape[-2:] for each in inputs if isinstance(each, Tensor) and each.dim() == 4]
    return answer.unsqueeze(1) if "depth" in name or answer.shape[1:] in sizes else answer


def _told_apart(name: str, answer: Tensor) -> str:
    """The name of an answer: "logits" (b, n, k) of tokens, or of queries, are no classes (b, k, …) of an image."""
    return f"{name} of tokens" if name == "logits" and answer.dim() == 3 else name or "output"


def losses_of(student: nn.Module, answers: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The loss of each of a student's answers: the divergence of classes for logits, relative errors for the others."""
    return {
        name: divergence(answers[name], target)
        if name == "logits"
        else relative_error(answers[name], target, tokens_there(student, target))
        for name, target in targets.items()
    }


def divergence(logits: Tensor, target: Tensor) -> Tensor:
    """The Kullback-Leibler divergence of classes (b, k, …) from the teacher's, in the mean over images and places."""
    ours, theirs = F.log_softmax(logits.float(), dim=1), F.log_softmax(target.detach().float(), dim=1)
    return (theirs.exp() * (theirs - ours)).sum(1).mean()
