"""Torchvision's classes with small arguments; none of its own kernels is needed."""

from functools import partial

import torch
import torchvision.models as tv
from torch import nn
from torchvision.models import segmentation, video
from zoo_trial import BATCH, Recipe


def image(size=32):
    return (torch.randn(BATCH, 3, size, size),)


def made(build, size=32):
    return build(), image(size)


def resnet(block, **options):
    return tv.ResNet(block, [1, 1, 1, 1], num_classes=6, **options)


def swin(name_v2):
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

    extra = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2} if name_v2 else {}
    return tv.SwinTransformer([4, 4], 8, [2, 2], [2, 4], [2, 2], num_classes=6, **extra)


def convnext():
    from torchvision.models.convnext import CNBlockConfig

    return tv.ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=6)


def vit():
    return tv.VisionTransformer(32, 8, 2, 4, 16, 32, num_classes=6)


def maxvit():
    return tv.MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 4, 0.0, num_classes=6)


def regnet():
    from torchvision.models.regnet import BlockParams

    params = BlockParams.from_init_params(depth=4, w_0=8, w_a=8.0, w_m=2.0, group_width=4, se_ratio=0.25)
    return tv.RegNet(params, num_classes=6, stem_width=8)


def vgg():
    from torchvision.models.vgg import make_layers

    features = make_layers([8, "M", 8, "M"], batch_norm=True)
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 6))


def segmented(head):
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    from torchvision.models._utils import IntermediateLayerGetter

    return (segmentation.FCN if head is segmentation.fcn.FCNHead else segmentation.DeepLabV3)(
        IntermediateLayerGetter(backbone, {"2": "out"}), head(8, 6), None
    )


def video_made():
    from torchvision.models.video.resnet import BasicBlock, BasicStem, Conv3DSimple

    model = video.resnet.VideoResNet(BasicBlock, [Conv3DSimple] * 4, [1, 1, 1, 1], BasicStem, num_classes=6)
    return model, (torch.randn(BATCH, 3, 4, 16, 16),)


class Trained(nn.Module):
    """A detector, whose losses only its training mode gives."""

    def __init__(self, detector):
        super().__init__()
        self.detector = detector

    def forward(self, images, targets):
        return self.detector(images, targets)


def retinanet():
    """A list of images of several sizes, anchors, and boxes that are matched to them."""
    from torchvision.models import detection

    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(8, 16, 3, 2, 1))
    backbone.out_channels = 16
    anchors = detection.anchor_utils.AnchorGenerator(sizes=((4, 8),), aspect_ratios=((0.5, 1.0, 2.0),))
    model = detection.RetinaNet(backbone, 3, min_size=32, max_size=32, anchor_generator=anchors)
    corners = torch.tensor([[2.0, 3.0, 12.0, 14.0], [8.0, 6.0, 20.0, 22.0]])
    targets = [{"boxes": corners + i, "labels": torch.tensor([1, 2])} for i in range(2)]
    return Trained(model), ([torch.randn(3, 32, 32), torch.randn(3, 24, 32)], targets)


BUILDS = {
    "resnet": (lambda: resnet(tv.resnet.BasicBlock), 32),
    "resnext": (lambda: resnet(tv.resnet.Bottleneck, groups=4, width_per_group=4), 32),
    "wide_resnet_group_norm": (lambda: resnet(tv.resnet.BasicBlock, norm_layer=partial(nn.GroupNorm, 4)), 32),
    "densenet": (lambda: tv.DenseNet(4, (2, 2), 8, num_classes=6), 32),
    "densenet_checkpointed": (lambda: tv.DenseNet(4, (2, 2), 8, num_classes=6, memory_efficient=True), 32),
    "mobilenet_v2": (lambda: tv.MobileNetV2(6, 0.25), 32),
    "mobilenet_v3": (lambda: tv.mobilenet_v3_small(num_classes=6, width_mult=0.25), 32),
    "shufflenet": (lambda: tv.ShuffleNetV2([1, 1, 1], [8, 8, 16, 16, 32], num_classes=6), 32),
    "squeezenet": (lambda: tv.SqueezeNet("1_1", 6), 64),
    "mnasnet": (lambda: tv.MNASNet(0.25, 6), 32),
    "googlenet": (lambda: tv.GoogLeNet(6, aux_logits=False, init_weights=False), 32),
    "efficientnet": (lambda: tv.efficientnet_b0(num_classes=6), 32),
    "convnext": (convnext, 32),
    "regnet": (regnet, 32),
    "vgg_bn": (vgg, 16),
    "vit": (vit, 32),
    "swin": (partial(swin, False), 32),
    "swin_v2": (partial(swin, True), 32),
    "maxvit": (maxvit, 32),
    "fcn": (lambda: segmented(segmentation.fcn.FCNHead), 16),
    "deeplab": (lambda: segmented(segmentation.deeplabv3.DeepLabHead), 16),
}

recipes = [Recipe(name, "torchvision", partial(made, *build)) for name, build in BUILDS.items()]
recipes.append(Recipe("video_resnet", "torchvision", video_made))
recipes.append(Recipe("retinanet", "torchvision", retinanet))
