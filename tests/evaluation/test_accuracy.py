"""Accuracy: exact whatever the batches and shards, and the model is left as it was."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

from subquad.errors import SubquadError
from subquad.tasks.accuracy import EvalSums, TopOne, evaluate
from subquad.tasks.classification import measure_throughput


class Echo(nn.Module):
    """A model whose images are its logits."""

    def forward(self, images):
        return images


def settings(classes=10):
    return {"device": "cpu", "num_classes": classes}


def example(count=41, classes=10):
    return torch.randn(count, classes), torch.randint(classes, (count,))


def test_the_numbers_are_those_of_their_definitions():
    logits, labels = example()
    result = evaluate(Echo(), zip(logits.split(8), labels.split(8), strict=True), **settings())
    ranks = (logits > logits.gather(1, labels[:, None])).sum(1)
    assert result.top1 == pytest.approx(100 * float((ranks < 1).double().mean()), abs=1e-12)
    assert result.top5 == pytest.approx(100 * float((ranks < 5).double().mean()), abs=1e-12)
    assert result.loss == pytest.approx(float(F.cross_entropy(logits, labels)), abs=1e-6)
    assert result.count == 41 and result.confusion.dtype == torch.long
    for label, place in zip(labels, logits.argmax(1), strict=True):
        result.confusion[label, place] -= 1
    assert not result.confusion.any()


def test_batches_do_not_change_the_numbers():
    logits, labels = example()
    results = [
        evaluate(Echo(), zip(logits.split(size), labels.split(size), strict=True), **settings()) for size in (1, 7, 41)
    ]
    assert len({(result.top1, result.top5, result.count) for result in results}) == 1
    assert results[0].loss == pytest.approx(results[1].loss, abs=1e-12)


def test_with_fewer_than_five_classes_all_are_the_best_five():
    logits, labels = example(classes=3)
    assert evaluate(Echo(), [(logits, labels)], **settings(3)).top5 == 100


def test_empty_batches_are_passed_over_and_no_image_at_all_is_an_error():
    logits, labels = example()
    empty = (logits[:0], labels[:0])
    assert evaluate(Echo(), [empty, (logits, labels), empty], **settings()).count == 41
    with pytest.raises(SubquadError, match="no images to evaluate"):
        evaluate(Echo(), [empty], **settings())


def test_a_model_with_other_outputs_is_refused():
    with pytest.raises(SubquadError, match="7 classes apart, not the 10"):
        evaluate(Echo(), [example(classes=7)], **settings())


@pytest.mark.parametrize("counts", [EvalSums, lambda classes: TopOne()])
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(4, 1, dtype=torch.long), r"for each of 4 images, \(4,\), got \(4, 1\) of int64"),
        (torch.eye(4), r"got \(4, 4\) of float32"),
        (torch.tensor([0, 1, 3, -100]), "0 to 3, got -100"),
        (torch.tensor([0, 1, 3, 4]), "0 to 3, got 4"),
    ],
)
def test_labels_that_are_no_class_of_each_image_are_refused(counts, labels, message):
    with pytest.raises(SubquadError, match=message):
        counts(4).add(torch.randn(4, 4), labels)


def test_the_share_of_no_images_is_an_error():
    with pytest.raises(SubquadError, match="no images to evaluate"):
        _ = TopOne().share


def test_every_module_is_left_in_its_mode():
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.BatchNorm1d(3)).train()
    model[2].eval()
    evaluate(model, [(torch.randn(5, 4), torch.zeros(5, dtype=torch.long))], **settings(3))
    assert [module.training for module in model.modules()] == [True, True, True, False]
    with pytest.raises(RuntimeError):
        evaluate(model, [(torch.randn(5, 9), torch.zeros(5, dtype=torch.long))], **settings(3))
    assert model.training


def test_dropout_is_off_and_no_graph_is_kept():
    modes = []

    class Spy(nn.Dropout):
        def forward(self, images):
            modes.append((self.training, torch.is_inference_mode_enabled()))
            return super().forward(images)

    logits, labels = example()
    first, second = (evaluate(Spy(0.9), [(logits, labels)], **settings()) for _ in range(2))
    assert first.loss == second.loss and modes == [(False, True)] * 2


def test_half_precision_is_used_when_asked_for():
    seen = []

    class Spy(nn.Linear):
        def forward(self, images):
            out = super().forward(images)
            seen.append(out.dtype)
            return out

    for dtype in (None, torch.bfloat16):
        evaluate(Spy(4, 3), [(torch.randn(5, 4), torch.zeros(5, dtype=torch.long))], amp_dtype=dtype, **settings(3))
    assert seen == [torch.float32, torch.bfloat16]


def test_a_model_that_gives_no_numbers_has_no_finite_loss():
    logits, labels = example()
    assert math.isnan(evaluate(Echo(), [(logits * torch.nan, labels)], **settings()).loss)


def _shard(rank, world_size, folder):
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    logits, labels = example()
    # one process has nothing to do
    own = range(rank, 41, world_size - 1) if rank < world_size - 1 else []
    result = evaluate(Echo(), [(logits[own], labels[own])], **settings())
    torch.save({"numbers": (result.top1, result.top5, result.loss), "confusion": result.confusion}, f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.slow
def test_processes_together_find_what_one_finds(tmp_path):
    torch.manual_seed(0)
    logits, labels = example()
    whole = evaluate(Echo(), [(logits, labels)], **settings())
    mp.spawn(_shard, (3, tmp_path), nprocs=3)
    for rank in range(3):
        found = torch.load(tmp_path / str(rank), weights_only=True)
        assert found["numbers"] == pytest.approx((whole.top1, whole.top5, whole.loss), abs=1e-12)
        assert torch.equal(found["confusion"], whole.confusion)


def test_sums_of_one_process_need_no_others():
    sums = EvalSums(10)
    sums.add(*example())
    before = sums.result()
    sums.reduce()
    assert sums.result().loss == before.loss


def test_throughput_is_positive_and_leaves_the_mode():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout()).train()
    assert measure_throughput(model, (8, 12), 4, "cpu", 3) > 0
    assert model.training and model[1].training
