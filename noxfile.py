"""The project's checks; ``nox -l`` lists them, ``nox -s tests`` runs one."""

from pathlib import Path

import nox

nox.options.sessions = ["lint", "types", "tests"]
nox.options.default_venv_backend = "virtualenv"

ROOT = Path(__file__).parent


def install(session: nox.Session, *extras: str) -> None:
    """Install shardwise in editable mode with the tested versions."""
    session.install("-c", "constraints.txt", "-e", f".[{','.join(extras)}]")


@nox.session
def tests(session: nox.Session) -> None:
    """The everyday tests."""
    install(session, "test")
    session.run("pytest", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """The wide sweeps that everyday runs leave out."""
    install(session, "test")
    session.run("pytest", "-m", "slow", *session.posargs)


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
    """Links between the pages, and the examples in them."""
    install(session, "test")
    session.run("pytest", "tests/docs", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """The benchmarks beside DTensor, one after the other; never part of a test."""
    install(session, "test")
    for script in sorted((ROOT / "tests" / "benchmarks").glob("bench_*.py")):
        session.run("python", str(script), *session.posargs)


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
