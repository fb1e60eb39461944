"""A detection model that nobody here wrote, on four ranks beside one device: inference and a step of training."""

import re
from pathlib import Path

import pytest
import torch
import torchvision
from torchvision.models.detection import faster_rcnn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.testing import mesh

README = Path(__file__).parents[1] / "README.md"
HEAD = "roi_heads.box_head"
PLANS = {
    "replicated": {},
    "tensor-parallel head": {
        f"{HEAD}.fc6.weight": [Shard(0)],
        f"{HEAD}.fc6.bias": [Shard(0)],
        f"{HEAD}.fc7.weight": [Shard(1)],
    },
}


def detector():
    torch.manual_seed(0)
    make = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn
    sizes = {"min_size": 64, "max_size": 96, "rpn_pre_nms_top_n_test": 50, "rpn_pre_nms_top_n_train": 60}
    without = {"weights": None, "weights_backbone": None}
    model = make(num_classes=5, box_score_thresh=0.0, box_detections_per_img=10, **sizes, **without)
    # A head of a sixteenth of the width: it has most of the parameters.
    model.roi_heads.box_head = faster_rcnn.TwoMLPHead(256 * 7 * 7, 64)
    model.roi_heads.box_predictor = faster_rcnn.FastRCNNPredictor(64, 5)
    # In float64, so that rounding does not decide which boxes are kept.
    return model.double()


def pictures():
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(3, *size, generator=generator, dtype=torch.float64) for size in ((96, 120), (100, 90))]


def targets():
    of = [([[10.0, 10, 50, 60], [30, 20, 80, 90]], [1, 3]), ([[5.0, 5, 40, 40]], [2])]
    return [{"boxes": torch.tensor(b, dtype=torch.float64), "labels": torch.tensor(labels)} for b, labels in of]


def whole(x):
    return x.full_tensor() if isinstance(x, sw.MeshTensor) else x


def close(ours, theirs, scale=1.0):
    return torch.allclose(whole(ours), theirs, rtol=1e-8, atol=1e-8 * scale)


def lay(x):
    return sw.distribute_tensor(x, mesh((4,)), [Replicate()])


def infer(plan):
    model = detector().eval()
    with torch.no_grad():
        expected = model(pictures())
        sw.distribute_module(model, mesh((4,)), PLANS[plan])
        found = model([lay(picture) for picture in pictures()])
    return [
        (name, len(theirs[name]) > 0 and close(ours[name], theirs[name]))
        for ours, theirs in zip(found, expected, strict=True)
        for name in ("boxes", "labels", "scores")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_a_detector_finds_the_same_boxes(pool, plan):
    for found in pool.run(infer, plan, timeout=240):
        assert found == [(name, True) for name in ("boxes", "labels", "scores")] * 2


def losses_of(model, images, aims):
    torch.manual_seed(2)  # it samples boxes to train with
    losses = model(images, aims)
    sum(losses.values()).backward()
    return losses


def train(plan):
    one, several = detector(), detector()
    expected = losses_of(one, pictures(), targets())
    sw.distribute_module(several, mesh((4,)), PLANS[plan])
    placed = [{name: lay(value) for name, value in aim.items()} for aim in targets()]
    found = losses_of(several, [lay(picture) for picture in pictures()], placed)
    wrong = [name for name in expected if not close(found[name].detach(), expected[name].detach())]
    grads = dict(several.named_parameters())
    # A bias before a normalisation has no gradient but roundings, so all are judged by the largest.
    largest = max(float(p.grad.abs().max()) for p in one.parameters() if p.grad is not None)
    compared = [
        (name, close(grads[name].grad, p.grad, largest)) for name, p in one.named_parameters() if p.grad is not None
    ]
    return wrong, [name for name, right in compared if not right], len(compared)


@pytest.mark.parametrize("plan", [pytest.param("replicated", marks=pytest.mark.slow), "tensor-parallel head"])
def test_a_detector_trains(pool, plan):
    for wrong, wrong_grads, compared in pool.run(train, plan, timeout=240):
        assert (wrong, wrong_grads) == ([], [])
        assert compared > 100


def readme():
    program = {"__name__": "detect"}
    (block,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    exec(block, program)  # noqa: S102  our own page
    torch.manual_seed(0)
    model = program["detector"]().double()
    with torch.no_grad():
        expected = model(pictures())
    found = program["detect"](model, pictures(), mesh((4,), names=("tp",)))
    return [
        len(b[name]) > 0 and close(a[name], b[name])
        for a, b in zip(found, expected, strict=True)
        for name in ("boxes", "labels", "scores")
    ], type(found[0]["boxes"]).__name__


def test_the_readme_detects(pool):
    assert pool.run(readme, timeout=240) == [([True] * 6, "MeshTensor")] * 4
