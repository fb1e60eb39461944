"""The recipes of experts: plan files in ``plans``, by program and by the names of mesh dims."""

from pathlib import Path

from shardwise.program.plan_file import parse

PLANS = Path(__file__).parent / "plans"
GPT = "shardwise.demo.model:GPT"


def recipes(program, names):
    """Those for a program on mesh dims of these names, by the name of the recipe."""
    end = "-" + "-".join(names)
    files = (parse(path.read_text(), str(path)) for path in sorted(PLANS.glob(f"*{end}.plan")))
    fit = [file for file in files if file.mesh_names == tuple(names) and file.program == program]
    return {Path(file.source).stem.removesuffix(end): file for file in fit}
