"""Pages hold what the code says; a rule that is added in three places is in all of them."""

import shutil
from pathlib import Path
from types import ModuleType

from ..drivers import load_module, run_driver

ROOT = Path(__file__).parents[2]
RULE = '''
from gradvac import gram as geometry
from gradvac.rules.rule import Rule


class EqualNorms(Rule):
    """Gives every task the same length.

    Args:
        length: How long.
        spared: Tasks that stay as they are; None: none.
    """

    name = "equalnorms"
    does = "gives the gradients of all tasks one length"
    task_options = ("spared",)

    def __init__(self, length: float = 1.0, spared: list[str] | None = None) -> None:
        self.length, self.spared = length, spared

    def weigh_finite(self, components, gram):
        return self.answer(gram, self.length * geometry.reciprocal(geometry.norms(gram)))
'''
CONFIG = '''
class EqualNormsConfig(RuleConfig):
    """The rule `equalnorms`.

    Attributes:
        length: equalnorms: How long.
        spared: equalnorms: Tasks that stay as they are.
    """

    rule_name = "equalnorms"

    length: float = 1.0
    spared: str | list[str] | None = None


class AlignerConfig(Section):'''
LOOK = """
import runpy, sys
from pathlib import Path
for name in [name for name in sys.modules if name.split(".")[0] == "gradvac"]:
    del sys.modules[name]  # of the fork server, from another folder
import gradvac
from gradvac.analysis.report.sentences import describe_method
from gradvac.lab.training import AlignConfig

assert gradvac.__file__.startswith(sys.argv[1])
assert "EqualNorms" in gradvac.__all__
assert gradvac.rule_named("equalnorms", length=2.0).length == 2.0
config = AlignConfig(rule="equalnorms", length=3.0, spared=["low"])
rule = config.build_rule(["a", "b"], {"a": "low", "b": "high"}, seed=0)
assert (rule.length, rule.spared) == (3.0, ["a"])
assert config.describe_rule().startswith("equalnorms(length=3.0,")
said = describe_method("equalnorms")[0].text
assert said == "EqualNorms gives the gradients of all tasks one length."
runpy.run_path(sys.argv[1] + "/docs/write_pages.py", run_name="__main__")
docs = Path(sys.argv[1], "docs")
guide, api, settings = ((docs / f"{n}.md").read_text() for n in ("guide", "api/rules", "settings"))
assert '| `EqualNorms` | `"equalnorms"` | gives the gradients of all tasks one length |' in guide
assert "\\n::: gradvac.EqualNorms\\n" in api
assert "| `length` | float | `1.0` | equalnorms: How long. |" in settings
"""


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def script() -> ModuleType:
    return load_module(ROOT / "docs" / "write_pages.py")


def test_pages_hold_what_the_code_says() -> None:
    made = script().pages(ROOT / "docs")
    for name, text in made.items():
        written = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert written == text, "run `make docs` (or `python docs/write_pages.py`)"
    for key in ("max_steps", "beta", "temperature", "beams", "init", "character_coverage"):
        assert f"| `{key}` |" in made["settings.md"]


def test_three_places_are_enough_for_a_rule(tmp_path: Path) -> None:
    """Its file, the registry, and a class of its settings: all the rest follows."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.pyc"))
    (tmp_path / "docs" / "api").mkdir(parents=True)
    for name in ("write_pages.py", "guide.md", "api/rules.md"):
        shutil.copy(ROOT / "docs" / name, tmp_path / "docs" / name)
    source = tmp_path / "src" / "gradvac"
    (source / "rules" / "equal_norms.py").write_text(RULE)
    replace(source / "rules" / "__init__.py", "in (GradVac,", "in (EqualNorms, GradVac,")
    first, new = "from gradvac.rules.gradnorm", "from gradvac.rules.equal_norms import EqualNorms\n"
    replace(source / "rules" / "__init__.py", first, new + first)
    align = source / "lab" / "training" / "align.py"
    replace(align, "class AlignerConfig(Section):", CONFIG.strip())
    replace(align, "    TorchJDConfig,\n", "    EqualNormsConfig,\n    TorchJDConfig,\n")
    (tmp_path / "src" / "look.py").write_text(LOOK)  # where it finds this package first
    run_driver(tmp_path / "src" / "look.py", tmp_path)
