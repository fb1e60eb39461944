"""``shardwise plugins check``: what it passes, and everything that it must find."""

import json
import sys
import textwrap
import zipfile
from zlib import crc32

import pytest
from click.testing import CliRunner

from shardwise.cli import check as command
from shardwise.cli import main
from shardwise.cli.new import bounds
from shardwise.testing.light import Imported

BOUNDS = f"shardwise{bounds('0.1.0.dev0')}"

OPS = """
    import torch
    from torch import Tensor

    @torch.library.custom_op("{package}::scaled", mutates_args=())
    def scaled(x: Tensor) -> Tensor:
        return -x

    @scaled.register_fake
    def _(x):
        return torch.empty_like(x)
"""
PLUGIN = """
    import torch
    from shardwise.hookspecs import hookimpl
    from shardwise.rule import rule
    {imports}

    @hookimpl
    def {hook}(registry):
        from {package} import ops
        registry.add({rules})
"""
SCALED = 'rule(torch.ops.{package}.scaled.default, "... -> ...")'
PROJECT = """
    [project]
    name = "{name}"
    version = "1.0"
    keywords = [{keywords}]
    dependencies = [{requires}]
    [project.entry-points."{group}"]
    {entry} = "{package}.plugin"
"""


@pytest.fixture
def checkout(tmp_path, request):
    """``checkout(...)``: the folder of a distribution that is not installed, with one custom op and one rule for it."""

    def make(
        name="acme-kernels",
        *,
        entry=None,
        group="shardwise.plugins.v1",
        requires=(BOUNDS,),
        imports="",
        hook="shardwise_register",
        rules=SCALED,
        samples=None,
        root="src",
        keywords=("shardwise",),
    ):
        package = f"{name.replace('-', '_')}_{crc32(request.node.name.encode())}"
        said = {
            "name": name,
            "entry": entry or name,
            "group": group,
            "package": package,
            "imports": imports,
            "hook": hook,
            "rules": rules.format(package=package),
            "requires": ", ".join(f'"{line}"' for line in requires),
            "keywords": ", ".join(f'"{word}"' for word in keywords),
        }
        folder = tmp_path / "checkout"
        inner = folder / root / package
        inner.mkdir(parents=True)
        texts = {"__init__.py": "", "py.typed": "", "ops.py": OPS, "plugin.py": PLUGIN}
        for file, text in texts.items():
            (inner / file).write_text(textwrap.dedent(text).format(**said))
        (folder / "pyproject.toml").write_text(textwrap.dedent(PROJECT).format(**said))
        if samples is not None:
            (folder / "tests").mkdir()
            (folder / "tests" / "samples.py").write_text(textwrap.dedent(samples).format(**said))
        return folder

    return make


@pytest.fixture
def quick(monkeypatch):
    """No process that tries the imports: what it finds has tests of its own."""

    def tried(modules, roots):
        return {name: Imported(f"{roots[0]}/{name.replace('.', '/')}.py" if roots else "") for name in modules}

    monkeypatch.setattr(command, "probe", tried)


def run(*arguments):
    return CliRunner().invoke(main, ["plugins", "check", *map(str, arguments)])


def report_of(*arguments, exit_code):
    """The findings that are not ok, by check."""
    result = run(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    rows = json.loads(result.stdout)
    return {row["check"]: f"{row['result']}: {row['found']}" for row in rows if row["result"] != "ok"}


SAMPLES = """
    import torch
    from {package} import ops
    SAMPLES = {{torch.ops.{package}.scaled.default: lambda: [((torch.randn(5, 7),), {{}})]}}
"""


# -- conventions ---------------------------------------------------------------------------------------------------


def test_a_missing_keyword_and_a_missing_py_typed_are_notes(checkout, quick):
    folder = checkout(samples=SAMPLES, keywords=("pytorch", "shardwise-like"))
    (typed,) = folder.rglob("py.typed")
    typed.unlink()
    report = report_of(folder, exit_code=0)
    assert set(report) == {"keyword", "typed"}
    assert report["keyword"].startswith("note: the distribution has not the keyword shardwise")
    assert f"the package {typed.parent.name} has no py.typed" in report["typed"]
    result = run(folder, "--strict")
    assert result.exit_code == 0, result.output
    assert "2 notes, 0 warnings, 0 failed" in result.output
    assert 'Add keywords = ["shardwise", ...] to [project].' in result.output


@pytest.mark.parametrize("words", ["", "Keywords: pytorch,sharding\n", "Keywords: pytorch sharding\n"])
def test_the_keyword_of_an_installed_plugin_is_looked_for_too(install, source, quick, words):
    install("acme-kernels", source(), metadata=f"{words}Requires-Dist: {BOUNDS}\n")
    assert report_of("acme-kernels", exit_code=1)["keyword"].startswith("note: ")
    # Its module lies in no package, which cannot be typed.
    assert "typed" not in report_of("acme-kernels", exit_code=1)


@pytest.mark.parametrize("words", ["Keywords: pytorch,Shardwise\n", "Keywords: pytorch shardwise\n"])
def test_the_keyword_may_be_written_in_both_ways(install, source, quick, words):
    install("acme-kernels", source(), metadata=f"{words}Requires-Dist: {BOUNDS}\n")
    assert "keyword" not in report_of("acme-kernels", exit_code=1)


def test_a_samples_file_without_samples_says_so_and_fails_where_none_can_be_guessed(checkout, quick):
    report = report_of(checkout(samples="SAMPLES = {{}}"), exit_code=0)
    assert set(report) == {"samples"}  # the op takes one tensor: its samples are guessed
    assert report["samples"].startswith("warning: ")
    assert "has no sample: SAMPLES is empty, so samples are guessed from the schemas" in report["samples"]


def test_samples_that_are_not_a_file_of_python(checkout, quick, tmp_path):
    (tmp_path / "samples.txt").write_text("SAMPLES = {}")
    report = report_of(checkout(), "--samples", tmp_path / "samples.txt", exit_code=1)
    assert f"{tmp_path / 'samples.txt'} is not a .py file" in report["samples"]


def test_empty_samples_of_an_op_whose_samples_cannot_be_guessed_are_a_failure(install, source, quick):
    site = install("acme-kernels", source(), metadata=f"Keywords: shardwise\nRequires-Dist: {BOUNDS}\n")
    declare_samples(site, "acme-kernels", "acme_kernels_samples")
    (site / "acme_kernels_samples.py").write_text("SAMPLES = {}")
    report = report_of("acme-kernels", exit_code=1)
    assert report["samples"].startswith("warning: [shardwise.samples] acme_kernels_samples has no sample")
    assert report["oracle"].startswith("failed: 1 op, 0 rows, 0 cases")


# -- what it takes -------------------------------------------------------------------------------------------------


def test_a_sound_checkout_passes(checkout, quick):
    folder = checkout(samples=SAMPLES)
    result = run(folder, "--strict")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("acme-kernels 1.0 (checkout, ")
    assert "nothing but what torch brings" in result.output
    assert "0 warnings, 0 failed" in result.output


def test_nothing_stays_imported(checkout, quick):
    path, modules = list(sys.path), set(sys.modules)
    assert report_of(checkout(samples=SAMPLES), exit_code=0) == {}
    assert sys.path == path
    assert not [name for name in set(sys.modules) - modules if name.startswith("acme")]


def test_a_flat_checkout(checkout, quick):
    assert report_of(checkout(samples=SAMPLES, root="."), exit_code=0) == {}


def test_a_checkout_that_hatch_finds_elsewhere(checkout, quick):
    folder = checkout(samples=SAMPLES, root="python/lib")
    (package,) = (folder / "python" / "lib").iterdir()
    with (folder / "pyproject.toml").open("a") as file:
        file.write(f'[tool.hatch.build.targets.wheel]\npackages = ["python/lib/{package.name}"]\n')
    assert report_of(folder, exit_code=0) == {}


def test_an_installed_plugin(install, source, quick):
    install("acme-kernels", source(), metadata=f"Keywords: shardwise\nRequires-Dist: {BOUNDS}\n")
    # Samples that are guessed from the schema reach none of its rows: so nothing was tried, which is no success.
    report = report_of("acme-kernels", exit_code=1)
    assert set(report) == {"samples", "oracle"}
    assert report["samples"] == "warning: it declares none in the group shardwise.samples"
    assert report["oracle"] == "failed: 1 op, 0 rows, 0 cases: 0 refuted; no row was tried, so nothing is known of it"


def declare_samples(site, name, module):
    (about,) = site.glob(f"{name.replace('-', '_')}-*.dist-info")
    with (about / "entry_points.txt").open("a") as file:
        file.write(f"[shardwise.samples]\n{name} = {module}\n")


def test_an_installed_plugin_is_judged_by_the_samples_that_it_declares(install, source, quick):
    site = install("acme-kernels", source(), metadata=f"Keywords: shardwise\nRequires-Dist: {BOUNDS}\n")
    declare_samples(site, "acme-kernels", "acme_kernels_samples")
    (site / "acme_kernels_samples.py").write_text(
        "import torch\nop = torch.ops.aten._copy_from_and_resize.default\n"
        "SAMPLES = {op: lambda: [((torch.randn(3), torch.randn(3)), {})]}\nSTAND_INS = {op: lambda a, b: a.clone()}\n"
    )
    result = run("acme-kernels", "--strict", "--json")
    rows = {row["check"]: row for row in json.loads(result.stdout)}
    assert (rows["samples"]["result"], rows["samples"]["found"]) == ("ok", "[shardwise.samples] acme_kernels_samples")
    assert rows["oracle"]["found"].startswith("1 op, 1 row, ")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "ModuleNotFoundError"), ("raise OSError('gone')", "OSError: gone"), ("SAMPLES = 3", "not a mapping")],
)
def test_declared_samples_that_cannot_be_read(install, source, quick, text, words):
    site = install("acme-kernels", source(), metadata=f"Keywords: shardwise\nRequires-Dist: {BOUNDS}\n")
    declare_samples(site, "acme-kernels", "acme_kernels_samples")
    if text is not None:
        (site / "acme_kernels_samples.py").write_text(text)
    report = report_of("acme-kernels", exit_code=1)
    assert set(report) == {"samples"}
    assert words in report["samples"]


def test_a_first_party_plugin_with_its_samples(quick):
    from pathlib import Path

    samples = Path(__file__).parents[1] / "plugins" / "samples_embedding.py"
    assert report_of("shardwise-embedding", "--samples", samples, "--cases", "4", exit_code=0) == {}


def test_a_wheel(checkout, tmp_path, quick):
    folder = checkout()
    (package,) = (folder / "src").iterdir()
    about = "acme_kernels-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "acme_kernels-1.0-py3-none-any.whl", "w") as wheel:
        for path in package.glob("*.py"):
            wheel.write(path, f"{package.name}/{path.name}")
        metadata = f"Metadata-Version: 2.1\nName: acme-kernels\nVersion: 1.0\nRequires-Dist: {BOUNDS}\n"
        wheel.writestr(f"{about}/METADATA", metadata)
        entries = f"[shardwise.plugins.v1]\nacme-kernels = {package.name}.plugin\n"
        entries += f"[shardwise.samples]\nacme-kernels = {package.name}.samples\n"
        wheel.writestr(f"{about}/entry_points.txt", entries)
        wheel.writestr(f"{package.name}/samples.py", textwrap.dedent(SAMPLES).format(package=package.name))
    result = run(wheel.filename, "--strict")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("acme-kernels 1.0 (wheel)\n")


def test_a_file(checkout, quick):
    folder = checkout()
    (package,) = (folder / "src").iterdir()
    rows = json.loads(run(package / "plugin.py", "--strict", "--json").stdout)
    assert [(row["check"], row["result"]) for row in rows] == [
        (check, "ok") for check in ("import", "surface", "hook", "conflicts", "oracle")
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shardwise-matmull", "Close to it: shardwise-matmul"),
        ("no/such/folder", "does not exist"),
        ("./nothing", "./nothing does not exist"),
        ("nothing.whl", "does not exist"),
        (__file__.replace(".py", ".txt"), "does not exist"),
    ],
)
def test_what_is_not_there(name, words):
    result = run(name)
    assert result.exit_code == 1
    assert words in result.output


def test_what_is_no_plugin(tmp_path):
    (tmp_path / "bad.whl").write_text("no archive")
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\n")
    (tmp_path / "notes.txt").write_text("")
    assert "is not a wheel" in run(tmp_path / "bad.whl").output
    assert "has no [project] with a name" in run(tmp_path).output
    assert "is not a folder, a wheel or a .py file" in run(tmp_path / "notes.txt").output
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty").output.endswith("is not a checkout of a plugin: it has no pyproject.toml\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = [", "cannot be read: TOMLDecodeError: Invalid"),
        ("project = 3", "has no [project] with a name"),
        ("[project]\nname = 3", "has no [project] with a name"),
        ('[project]\nname = "acme"\nentry-points = 3', "has a table of another form"),
        ('[project]\nname = "acme"\ndependencies = 3', "has a table of another form"),
    ],
)
def test_tables_that_make_no_sense(tmp_path, text, words):
    (tmp_path / "pyproject.toml").write_text(text)
    result = run(tmp_path)
    assert (result.exit_code, result.exception.__class__) == (1, SystemExit)
    assert words in result.output


# -- metadata ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "check", "words"),
    [
        ({"group": "shardwise.plugins.v7"}, "entry point", "failed: it registers under shardwise.plugins.v7"),
        ({"group": "shardwise.plugin.v1"}, "entry point", "failed: it registers under shardwise.plugin.v1"),
        ({"group": "console_scripts"}, "entry point", "failed: the group shardwise.plugins.v1 has no entry"),
        ({"entry": "kernels"}, "entry point", "failed: kernels = "),
        ({"requires": ()}, "requires", "failed: it does not depend on shardwise"),
        ({"requires": ("shardwise>=99",)}, "requires", "failed: shardwise>=99, and "),
        ({"requires": ("shardwise",)}, "requires", "warning: shardwise has no lower and no upper bound"),
        ({"requires": ("shardwise>=0.1.0.dev0",)}, "requires", "warning: shardwise>=0.1.0.dev0 has no upper bound"),
    ],
)
def test_metadata(checkout, quick, options, check, words):
    report = report_of(checkout(samples=SAMPLES, **options), exit_code=int(words.startswith("failed")))
    assert report[check].startswith(words), report


def test_a_package_of_the_wheel_that_is_not_there(checkout, quick):
    folder = checkout(samples=SAMPLES)
    with (folder / "pyproject.toml").open("a") as file:
        file.write('[tool.hatch.build.targets.wheel]\npackages = ["src/acme_kernel"]\n')
    found = "failed: pyproject.toml has src/acme_kernel for the wheel, and there is no such folder"
    assert report_of(folder, exit_code=1) == {"packages": found}


# -- imports -------------------------------------------------------------------------------------------------------


def test_findings_on_imports(checkout, monkeypatch):
    imported = {"error": Imported(error="OSError: no libacme.so"), "elsewhere": Imported("/elsewhere/plugin.py")}
    folder = checkout()
    for kind, words in (("error", "OSError: no libacme.so"), ("elsewhere", "comes from /elsewhere/plugin.py")):
        monkeypatch.setattr(command, "probe", lambda modules, _, kind=kind: dict.fromkeys(modules, imported[kind]))
        assert words in report_of(folder, exit_code=1)["import"]


def test_inner_modules_are_a_warning(checkout, quick):
    folder = checkout(imports="def later():\n        from shardwise.kernel import dispatcher", samples=SAMPLES)
    assert "shardwise.kernel.dispatcher (plugin.py:" in report_of(folder, exit_code=0)["surface"]
    assert run(folder, "--strict").exit_code == 1


# -- hooks and rules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hook": "shardwise_registr"}, "unknown hook 'shardwise_registr'"),
        ({"rules": "3"}, "is an int"),
        ({"rules": f"{SCALED}, {SCALED}"}, "the plugin has two rules for it"),
        ({"rules": 'rule(torch.ops.{package}.nothing.default, "... -> ...")'}, "has no attribute 'nothing'"),
        ({"rules": 'rule(torch.ops.{package}.scaled.default, "m k -> m")'}, "NotationError"),
    ],
    ids=["misspelt hook", "no rule", "twice", "no such op", "notation"],
)
def test_hooks(checkout, quick, options, words):
    report = report_of(checkout(**options), exit_code=1)["hook"]
    assert report.startswith("failed: acme-kernels: ")
    assert words in report


def test_a_hook_that_is_not_marked(checkout, quick):
    folder = checkout()
    (path,) = folder.glob("src/*/plugin.py")
    path.write_text(path.read_text().replace("@hookimpl", ""))
    assert "implements no shardwise_register" in report_of(folder, exit_code=1)["hook"]


def test_a_hook_with_a_wrong_argument_is_told_which(checkout, quick):
    folder = checkout()
    (path,) = folder.glob("src/*/plugin.py")
    path.write_text(path.read_text().replace("registry", "reg"))
    (row,) = [r for r in json.loads(run(folder, "--json").stdout) if r["check"] == "hook"]
    assert "{'reg'} are declared in the hookimpl but can not be found" in row["found"]
    assert "\n" not in row["found"]


def test_an_entry_point_that_names_the_hook_is_told_to_name_the_module(checkout, quick):
    folder = checkout(samples=SAMPLES)
    path = folder / "pyproject.toml"
    path.write_text(path.read_text().replace('.plugin"', '.plugin:shardwise_register"'))
    (row,) = [r for r in json.loads(run(folder, "--json").stdout) if r["check"] == "hook"]
    assert row["do"].startswith('The entry point names a module: acme-kernels = "acme_kernels')


def test_a_hook_that_registers_nothing(checkout, quick):
    assert report_of(checkout(rules=""), exit_code=1) == {"hook": "failed: acme-kernels registers nothing"}


MM = 'rule(torch.ops.aten.mm.default, "m k, k n -> m n", reduce=dict(k="sum"){more})'
MM_SAMPLES = """
    import torch
    SAMPLES = {{torch.ops.aten.mm.default: [((torch.randn(5, 7), torch.randn(7, 3)), {{}})]}}
"""


def test_a_conflict_with_first_party_rules(checkout, quick):
    folder = checkout(rules=MM.replace("{more}", ""), samples=MM_SAMPLES)
    report = report_of(folder, exit_code=1)["conflicts"]
    assert report.startswith("failed: shardwise-matmul (shardwise ")
    assert "aten.mm.default" in report


def test_a_declared_replacement_is_no_conflict(checkout, quick):
    assert (
        report_of(checkout(rules=MM.replace("{more}", ', replaces="shardwise"'), samples=MM_SAMPLES), exit_code=0) == {}
    )


def test_a_replacement_of_nothing(checkout, quick):
    rules = 'rule(torch.ops.{package}.scaled.default, "... -> ...", replaces="shardwise")'
    report = report_of(checkout(rules=rules, samples=SAMPLES), exit_code=0)
    assert report["conflicts"].startswith("warning: replaces='shardwise', which has no rule for ")


def test_a_conflict_with_another_third_party_is_a_warning(checkout, install, source, quick):
    install("bolt-kernels", source())
    folder = checkout(rules='rule(torch.ops.aten._copy_from_and_resize.default, "R, R -> R")', samples="SAMPLES = {{}}")
    report = report_of(folder, exit_code=1)["conflicts"]  # 1, for it has no samples
    assert report.startswith("warning: bolt-kernels 1.0 has rules for aten._copy_from_and_resize")


def test_an_installed_copy_of_itself_is_no_conflict(checkout, install, quick, source):
    install("acme-kernels", source())
    folder = checkout(rules='rule(torch.ops.aten._copy_from_and_resize.default, "R, R -> R")', samples="SAMPLES = {{}}")
    assert "conflicts" not in report_of(folder, exit_code=1)


# -- the oracle ----------------------------------------------------------------------------------------------------

WRONG = 'rule(torch.ops.{package}.scaled.default, "... -> ...", partial=["sum -> sum", "product -> product"])'


def test_a_wrong_row_fails_with_the_words_of_the_oracle(checkout, quick):
    rows = json.loads(run(checkout(rules=WRONG, samples=SAMPLES), "--json").stdout)
    refuted, total = [row for row in rows if row["check"] == "oracle"]
    assert refuted["result"] == total["result"] == "failed"
    assert "row 'product -> product'" in refuted["found"]
    assert "plugin.py:" in refuted["found"]
    assert "1 refuted" in total["found"]


def test_rows_that_no_sample_reaches_are_warnings(checkout, quick):
    rules = SCALED.replace(")", ', partial=["avg -> avg"])')
    folder = checkout(rules=rules, samples=SAMPLES.replace("torch.randn(5, 7)", "torch.arange(8).to(torch.int8)"))
    report = report_of(folder, exit_code=0)["oracle"]
    assert report.startswith("warning: ")
    assert "no sample reaches the rows" in report
    assert "avg -> avg" in report
    row = report.partition("no sample reaches the rows ")[2]
    with (folder / "tests" / "samples.py").open("a") as file:
        file.write(f"UNEXERCISED = {{{row!r}: 'integers only'}}\n")
    assert report_of(folder, exit_code=0) == {}


def test_ops_without_samples_are_warnings_and_no_sample_at_all_is_a_failure(checkout, quick):
    folder = checkout(samples=SAMPLES.replace("[((torch.randn(5, 7),), {{}})]", "[]"))
    rows = json.loads(run(folder, "--json").stdout)
    one, total = [row for row in rows if row["check"] == "oracle"]
    assert (one["result"], total["result"]) == ("warning", "failed")
    assert "none of its samples is legal" in one["found"]
    assert "0 rows, 0 cases" in total["found"]


def test_an_op_that_is_left_out_for_a_reason_is_no_warning_but_all_of_them_are_a_failure(checkout, quick):
    samples = """
        import torch
        from {package} import ops
        op = torch.ops.{package}.scaled.default
        SAMPLES, UNSAMPLED = {{op: list}}, {{op: "needs a GPU"}}
    """
    rows = json.loads(run(checkout(samples=samples), "--json").stdout)
    one, total = [row for row in rows if row["check"] == "oracle"]
    assert (one["result"], one["found"].partition(": ")[2]) == ("ok", "not judged, needs a GPU")
    assert total["result"] == "failed"
    assert "no row was tried" in total["found"]


@pytest.mark.parametrize(
    ("samples", "check", "words"),
    [
        ("raise OSError('gone')", "samples", "OSError: gone"),
        ("SAMPLES = 3", "samples", "SAMPLES is a int, not a mapping"),
        (SAMPLES.replace("SAMPLES", "SAMPLE"), "samples", "it defines no SAMPLES, but SAMPLE"),
        ("import torch", "samples", "it defines no SAMPLES"),
        (
            SAMPLES.replace("torch.randn(5, 7)", "no_such_name"),
            "oracle",
            "the function of its samples raised NameError",
        ),
    ],
)
def test_samples_that_cannot_be_read(checkout, quick, samples, check, words):
    rows = json.loads(run(checkout(samples=samples), "--json").stdout)
    assert any(r["check"] == check and r["result"] == "failed" and words in r["found"] for r in rows), rows


def test_a_checkout_without_samples_is_told_so(checkout, quick):
    assert report_of(checkout(), exit_code=0)["samples"] == (
        "warning: it declares none in the group shardwise.samples, and there is no tests/samples.py"
    )


def test_samples_for_other_ops_are_a_warning(checkout, quick):
    report = report_of(checkout(samples=SAMPLES + "    SAMPLES[torch.ops.aten.mm.default] = list\n"), exit_code=0)
    assert report["samples"] == "warning: the plugin has no rule for aten.mm.default"


def test_how_many_cases(checkout, quick):
    folder = checkout(samples=SAMPLES)
    count = {}
    for arguments in (["--cases", "5"], [], ["--full"]):
        rows = json.loads(run(folder, *arguments, "--json").stdout)
        count[" ".join(arguments)] = int(rows[-1]["found"].split(" rows, ")[1].split()[0])
    assert count["--cases 5"] == 5
    assert count["--cases 5"] < count[""] <= 25
    assert count["--full"] >= count[""]
    assert run(folder, "--full", "--cases", "5").exit_code == 2


def test_a_finding_is_one_line_and_all_of_it_in_json(checkout, quick):
    raising = "def calls():\n    raise OSError('first\\nsecond')\n"
    samples = "import torch\nfrom {package} import ops\nSAMPLES = {{torch.ops.{package}.scaled.default: calls}}\n"
    folder = checkout(samples=raising + samples)
    output = run(folder).output
    assert "raised OSError: first" in output
    assert "second" not in output
    assert "first\nsecond" in report_of(folder, exit_code=1)["oracle"]


@pytest.mark.parametrize(
    ("op", "place", "found"),
    [
        ("nobody::op", "{package}.nowhere:RULE", "there is no module {package}.nowhere"),
        ("nobody::op", "nobody_has_this.rules:RULE", "there is no module nobody_has_this.rules"),
        ("aten::_fft_c2c", "{package}.nowhere:RULE", "there is no module {package}.nowhere"),
        (
            "aten::_fft_c2c",
            "{package}.ops:NOTHING",
            "AttributeError: module '{package}.ops' has no attribute",
        ),
    ],
)
def test_a_rule_that_is_not_at_its_place_fails(checkout, quick, op, place, found):
    folder = checkout(rules=f"{SCALED}); registry.add_later('{op}', '{place}'", samples=SAMPLES)
    later = report_of(folder, exit_code=1)["later"]
    (package,) = (inner.name for inner in (folder / "src").iterdir())
    name = op.replace("::", ".")
    assert later.startswith(f"failed: the rule of {name}.default cannot be had: {found.format(package=package)}"), later


def test_a_rule_by_the_name_of_an_op_is_judged_where_the_op_exists(checkout, quick):
    both = SCALED + "); registry.add_later('nobody::op', '{package}.ops:RULE'"
    report = report_of(checkout(rules=both, samples=SAMPLES), exit_code=0)
    assert report == {
        "later": "warning: the rule of nobody.op.default is not judged: no library that is imported has the op"
    }
