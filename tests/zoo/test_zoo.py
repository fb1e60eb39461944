"""The zoo's models as tests (``pytest -m zoo``, ``nox -s zoo``), and that its judge sees a wrong number."""

import warnings

import pytest
import torch
from zoo_judge import judge, prepared
from zoo_packages import PACKAGES, installed, recipes_of
from zoo_trial import OURS, TOLERANCE, differences

pytestmark = [pytest.mark.zoo, pytest.mark.slow]


def test_a_difference_is_seen():
    one = {"loss 0": torch.tensor(1.0, dtype=torch.float64)}
    assert differences(one, {"loss 0": one["loss 0"] + 1e-8}, TOLERANCE) == ["loss 0: 1e-08 of 1, 1e-09 allowed"]
    assert differences(one, {"loss 0": one["loss 0"] + 1e-8}, TOLERANCE, {"loss 0": 1e-9}) == []
    assert differences(one, {}, TOLERANCE) == ["loss 0: on one side only"]
    assert differences(one, dict(one), TOLERANCE) == []


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("package", PACKAGES)
def test_no_model_is_wrong(pool, package, tmp_path):
    if package not in installed():
        pytest.skip(f"needs {package}: pip install -e '.[zoo]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {
            name: judge(prepared(pool, [package]), recipe, OURS, tmp_path, seconds=120.0)
            for name, recipe in recipes_of(package).items()
        }
    bad = {"wrong", "hung", "died"}
    assert {name: row for name, row in found.items() if any(verdict.result in bad for verdict in row)} == {}


SAMPLE = [
    "torch/lstm_packed",
    "torch/unet",
    "torchvision/mobilenet_v2",
    "timm/test_vit",
    "transformers/Llama",
    "transformers/T5",
    "transformers/Mixtral",
    "diffusers/unet_2d",
    "peft/lora",
    "torch_geometric/gcn",
]


@pytest.mark.sample(cases=10)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_fixed_sample_of_ten(pool, name, tmp_path):
    package = name.partition("/")[0]
    if package not in installed():
        pytest.skip(f"needs {package}: pip install -e '.[zoo]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdicts = judge(prepared(pool, [package]), recipes_of(package)[name], OURS, tmp_path, seconds=120.0)
    assert [(v.layout, v.result) for v in verdicts] == [(layout, "pass") for layout in OURS], verdicts
