"""The page on CUDA names tests that exist, and lists every place of the plugins' lowerings that reads from a device."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cuda.md").read_text()

# By file of a plugin: the words of the page's table that stand for what it reads from the device.
READS = {
    "plugins/shardwise_linalg/batches.py": "`linalg` ops that can fail",
    "plugins/shardwise_loss/classes.py": "a target out of range",
    "plugins/shardwise_pointwise/scaling.py": "a large partial tensor divided",
    "plugins/shardwise_random/categories.py": "`multinomial`",
    "plugins/shardwise_random/parameters.py": "`bernoulli`, `normal`",
    "plugins/shardwise_reduce/largest.py": "`topk` along a sharded dim",
    "plugins/shardwise_tensor/composites.py": "`tensor_split` at positions",
    "plugins/shardwise_tensor/copying.py": "`torch.equal`, `torch.allclose`",
    "plugins/shardwise_tensor/owning.py": "an index into a sharded dim that is written",
    "plugins/shardwise_tensor/padded.py": "a padding mask of `nn.TransformerEncoder`",
    "plugins/shardwise_tensor/putting.py": "an index into a sharded dim that is written",
}
METHODS = {"item", "tolist", "nonzero", "cpu", "numpy"}


def test_the_tests_that_it_names_exist():
    named = re.findall(r"`(tests/[\w/.]+\.py)(?:::(\w+))?`", PAGE)
    assert len(named) > 15
    missing = [
        f"{path}::{test}"
        for path, test in named
        if not (ROOT / path).exists() or (test and f"def {test}(" not in (ROOT / path).read_text())
    ]
    assert not missing


def reads(path):
    """Whether a file has a call that reads a tensor: ``x.item()`` and the like, or ``bool(...)`` of a reduction."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute) and function.attr in METHODS and not node.args:
                return True
            if (
                isinstance(function, ast.Name)
                and function.id == "bool"
                and re.search(r"\.(any|all)\(|all_reduce", ast.unparse(node))
            ):
                return True
    return False


def test_every_place_that_reads_from_a_device_is_in_its_table():
    found = {str(path.relative_to(ROOT)) for path in (ROOT / "plugins").rglob("*.py") if reads(path)}
    assert found == set(READS), "docs/cuda.md says what waits for the device, and why"
    assert not [words for words in READS.values() if words not in PAGE]
