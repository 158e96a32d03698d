"""The page of settings is what the config classes say."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_holds_every_setting_of_every_class() -> None:
    script = ROOT / "docs" / "write_settings.py"
    spec = importlib.util.spec_from_file_location("write_settings", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert written == module.page(), "run `python docs/write_settings.py`"
    for key in ("max_steps", "beta", "temperature", "beams", "init", "character_coverage"):
        assert f"| `{key}` |" in written
