"""The project's checks; ``nox -l`` lists them, ``nox -s tests`` runs one."""

import shutil
from pathlib import Path

import nox

nox.options.sessions = ["lint", "types", "tests"]
nox.options.default_venv_backend = "virtualenv"

ROOT = Path(__file__).parent
# The releases of torch that the tests run with; private_torch/parts.py names the first and the last.
TORCH = ["2.11", "2.12", "2.13"]
CONTRIB = sorted(path.parent.name for path in (ROOT / "plugins_contrib").glob("shardwise-*/pyproject.toml"))


def install(session: nox.Session, *extras: str) -> None:
    """Install shardwise in editable mode with the tested versions."""
    session.install("-c", "constraints.txt", "-e", f".[{','.join(extras)}]")


@nox.session
def tests(session: nox.Session) -> None:
    """The everyday tests."""
    install(session, "test")
    session.run("pytest", *session.posargs)


def pins_without_torch(session: nox.Session) -> str:
    """A file of the tested versions of everything but torch and what it brings along, which differs by release."""
    pins = Path(session.create_tmp()) / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins.write_text(
        "\n".join(line for line in lines if not line.startswith(("torch", "setuptools==", "nvidia", "triton")))
    )
    return str(pins)


@nox.session
@nox.parametrize("version", TORCH, ids=TORCH)
def torch(session: nox.Session, version: str) -> None:
    """The everyday tests with one release of torch, and the tested versions of everything else."""
    session.install("-c", pins_without_torch(session), f"torch=={version}.*", "-e", ".[test]")
    session.run("pytest", *session.posargs)


@nox.session
def newest(session: nox.Session) -> None:
    """The tests of torch's private parts, then the everyday tests, with the newest torch that the index has."""
    pins = pins_without_torch(session)
    # By itself: with --pre for all, everything that is not pinned would be a pre-release, too.
    session.install("--pre", "-c", pins, "--upgrade", "torch")
    session.install("-c", pins, "-e", ".[test]")
    version = str(session.run("python", "-c", "import torch; print(torch.__version__)", silent=True)).strip()
    session.log(f"The newest torch here is {version}.")
    session.run("pytest", "-n", "0", "tests/private_torch", "-m", "slow or not slow")
    session.run("pytest", *session.posargs)
    session.log(f"These ran with torch {version}.")


@nox.session
def slow(session: nox.Session) -> None:
    """The wide sweeps that everyday runs leave out."""
    install(session, "test")
    session.run("pytest", "-m", "slow", *session.posargs)


@nox.session
def sample(session: nox.Session) -> None:
    """The fixed sample of the slow tests that .ci/run takes."""
    install(session, "test")
    session.run("pytest", "-m", "slow and sample", *session.posargs)


@nox.session
def gpu(session: nox.Session) -> None:
    """What needs a CUDA device, on the one that is there or on several, and then the figures of docs/performance.md.

    It ends at once where torch finds none. What fails in the tests does not keep the figures back.
    """
    # Without the constraints' torch, which may be built for CPUs alone.
    session.install("-e", ".[test]")
    found = "import sys, torch; sys.exit('torch finds no CUDA device') if not torch.cuda.is_available() else None"
    session.run("python", "-c", found)
    try:
        session.run("pytest", "-m", "cuda", "-n", "0", "tests", *session.posargs)
    finally:
        session.run("python", str(ROOT / "tests" / "benchmarks" / "run.py"), "--only", "bench_card")


@nox.session
def zoo(session: nox.Session) -> None:
    """Models of other packages, trained on one device and on a mesh: a table, and a JSON line each in build/."""
    install(session, "test", "zoo")
    session.run("python", "tests/zoo", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Formatting and lint rules."""
    session.install("-c", "constraints.txt", "ruff")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Type checking of core and plugins."""
    install(session, "test", "dev")
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """The site, into build/site, and every block of every page."""
    install(session, "test", "docs")
    session.run("mkdocs", "build", "--strict")
    session.run("pytest", "tests/docs", "-m", "slow or not slow", *session.posargs)


@nox.session
@nox.parametrize("name", CONTRIB, ids=CONTRIB)
def contrib(session: nox.Session, name: str) -> None:
    """One contrib distribution, in an environment of its own."""
    session.install("-c", "constraints.txt", ".", f"./plugins_contrib/{name}[test]")
    with session.chdir(ROOT / "plugins_contrib" / name):
        session.run("pytest", *session.posargs)


@nox.session
def rule_table(session: nox.Session) -> None:
    """Write docs/rule-table.md from the registry."""
    install(session, "test")
    table = session.run("shardwise", "rules", "--markdown", silent=True)
    head = (
        "# The rules of the first-party plugins\n\nGenerated by `nox -s rule_table`; [how a rule reads](rules.md). "
        "A row with the word lowering runs the rule's [lowering](lowerings.md) in place of the op.\n\n"
    )
    (ROOT / "docs" / "rule-table.md").write_text(head + str(table))


@nox.session
def known_ops(session: nox.Session) -> None:
    """Write which family has which op, for the error where a family is not installed."""
    install(session, "test")
    session.run("python", str(ROOT / ".ci" / "release" / "known_ops.py"))


@nox.session
def pages(session: nox.Session) -> None:
    """Write docs/families.md and docs/plugins-directory.md."""
    install(session, "test")
    session.run("python", str(ROOT / ".ci" / "release" / "pages.py"))


@nox.session
def pictures(session: nox.Session) -> None:
    """Draw docs/pictures/*.svg."""
    install(session, "test")
    session.run("python", str(ROOT / "tests" / "pictures"))


@nox.session
def reference(session: nox.Session) -> None:
    """Write docs/reference.md from the docstrings."""
    install(session, "test")
    session.run("python", str(ROOT / "tests" / "reference" / "reference_page.py"))


@nox.session
def bench(session: nox.Session) -> None:
    """The benchmarks beside DTensor, one after the other, and docs/performance.md; never part of a test."""
    install(session, "test", "bench")
    session.run("python", str(ROOT / "tests" / "benchmarks" / "run.py"), *session.posargs)


@nox.session
def sweep(session: nox.Session) -> None:
    """PyTorch's operator database beside one device, for us and DTensor; an hour and more (see tests/sweep/run.py)."""
    install(session, "test")
    both = ("--library", "shardwise", "--library", "dtensor")
    session.run("python", str(ROOT / "tests" / "sweep" / "run.py"), *(session.posargs or both))


@nox.session
def wheel(session: nox.Session) -> None:
    """Build the wheel and use it from outside the checkout."""
    folder = session.create_tmp()
    session.run("pip", "wheel", "--no-deps", "--wheel-dir", folder, ".")
    (built,) = Path(folder).glob("shardwise-*.whl")
    session.install("-c", "constraints.txt", str(built))
    smoke = ROOT / "tests" / "packaging" / "smoke.py"
    with session.chdir(folder):
        session.run("python", str(smoke))


@nox.session
def distributions(session: nox.Session) -> None:
    """Build what a release has into build/dist: core, each family, and shardwise, which requires them all."""
    session.install("-c", "constraints.txt", "hatchling", "twine")
    folder = ROOT / "build" / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    session.run("python", str(ROOT / ".ci" / "release" / "distributions.py"), "--sources", str(folder))
    session.run("twine", "check", "--strict", *map(str, sorted(folder.iterdir())))
