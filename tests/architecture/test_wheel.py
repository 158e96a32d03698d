"""The wheel, installed where nothing of this checkout is on the path, does what the README says."""

import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import gradvac

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, folder: Path) -> str:
    """In a folder of its own, without what this process tells its children about paths."""
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(folder)}
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = "import sys; from hatchling.builders.wheel import WheelBuilder\n"
    build += "print(next(WheelBuilder(sys.argv[1]).build(directory=sys.argv[2])))"
    made = run(sys.executable, "-c", build, ROOT, folder, folder=folder)
    return Path(made.strip())


def test_metadata(wheel: Path) -> None:
    assert wheel.name == f"gradvac-{gradvac.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert "gradvac/py.typed" in names
    assert "gradvac/configs/nmt/demo.toml" in names
    assert "Requires-Python: >=3.11" in metadata
    needed = re.findall(r"^Requires-Dist: (.*); extra == '(\w+)'$", metadata, re.MULTILINE)
    every = {package for package, extra in needed if extra not in ("all", "dev")}
    assert {package for package, extra in needed if extra == "all"} == every != set()


def test_program_and_command(wheel: Path, tmp_path: Path) -> None:
    """Libraries come from here, which pip would fetch; gradvac itself from the wheel alone."""
    venv.create(tmp_path / "env", with_pip=False)
    bin_folder = tmp_path / "env" / "bin"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "env" / "lib" / version / "site-packages"
    others = {sysconfig.get_paths()["purelib"], *(p for p in sys.path if "site-packages" in p)}
    (site / "libraries.pth").write_text("\n".join(sorted(others)))
    pip = (sys.executable, "-m", "pip", "--python", bin_folder / "python")
    run(*pip, "install", "--no-deps", "--no-index", wheel, folder=tmp_path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert block is not None
    program = tmp_path / "program.py"
    program.write_text(block[1] + "\nimport gradvac; print(gradvac.__file__)\n")
    printed = run(bin_folder / "python", program, folder=tmp_path)
    assert printed.splitlines()[-1].startswith(str(site))
    assert run(bin_folder / "gradvac", "--version", folder=tmp_path).startswith("gradvac 0")
    assert "Run folders" in run(bin_folder / "gradvac", "report", "--help", folder=tmp_path)
