"""Files of a run folder: whole or not at all, one writer at a time."""

import json
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from gradvac.lab.runs import RunFolder
from gradvac.lab.runs.manifest import MANIFEST
from gradvac.utils.files import (
    folder_lock,
    hash_file,
    hash_of,
    read_json,
    remove_leftovers,
    replacing,
    replacing_path,
    write_bytes,
    write_json,
)

from .. import needs


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    with replacing(path) as file:
        file.write(b"half")
        assert not path.exists()
        file.write(b" and half")
    assert path.read_bytes() == b"half and half"
    assert names(tmp_path) == ["facts.json"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    write_bytes(path, b"old")
    try:
        with replacing(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["facts.json"]


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    write_bytes(path, b"old")
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from gradvac.utils.files import replacing\n"
        "with replacing(Path(sys.argv[1])) as file:\n"
        "    file.write(b'new'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -9
    assert path.read_bytes() == b"old"
    assert len(names(tmp_path)) == 2
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["facts.json"]


def test_links_are_replaced_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    path = tmp_path / "facts.json"
    path.symlink_to(outside)
    write_bytes(path, b"new")
    assert not path.is_symlink()
    assert path.read_bytes() == b"new"
    assert outside.read_bytes() == b"precious"


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_mode_is_that_of_any_new_file(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        (tmp_path / "plain").write_bytes(b"")
        write_bytes(tmp_path / "facts.json", b"")
        with replacing_path(tmp_path / "by_path") as temporary:  # as who writes a file of its own
            temporary.unlink()
            os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o600))
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in names(tmp_path)}
    assert set(modes.values()) == {0o666 & ~umask}


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    with replacing(path) as first, replacing(path) as second:
        first.write(b"a" * 100)
        second.write(b"b")
    assert path.read_bytes() == b"a" * 100  # who comes last, whole
    assert names(tmp_path) == ["facts.json"]


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    assert read_json(path) == {}
    write_json(path, {"name": "ü"})
    assert read_json(path) == {"name": "ü"}
    path.write_text("[1]")
    assert read_json(path) == {}


def test_hashes(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a", b"text")
    write_bytes(tmp_path / "b", b"text")
    assert hash_file(tmp_path / "a") == hash_file(tmp_path / "b")
    assert hash_of({"a": 1, "b": 2}) == hash_of({"b": 2, "a": 1}) != hash_of({"a": 1, "b": 3})


def test_one_process_at_a_time(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.lock():
        code = (
            "import sys; from pathlib import Path; from gradvac.lab.runs import RunFolder\n"
            "with RunFolder(Path(sys.argv[1])).lock(): pass\n"
        )
        command = [sys.executable, "-c", code, str(folder.path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "another process is at work in" in done.stderr
        with (
            pytest.raises(ValueError, match=r"^busy now$"),
            folder_lock(folder.path, busy="busy now"),
        ):
            pass
    with folder.lock():
        pass


def test_saved_files_are_those_the_run_was_begun_with(tmp_path: Path) -> None:
    run, name = RunFolder(tmp_path), "inside/vocabulary.model"
    run.save_files({name: b"half of it"})
    run.save_files({name: b"pieces"})  # nothing was trained yet
    run.checkpoint(4).mkdir(parents=True)
    assert run.read_saved(name) == b"pieces"
    with pytest.raises(ValueError, match=r"another inside/vocabulary\.model"):
        run.save_files({name: b"other pieces"})
    (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(ValueError, match="puts it back"):
        run.read_saved(name)
    run.save_files({name: b"pieces"})  # what that command does
    run.verify_saved()


@pytest.mark.parametrize("damaged", [b"", b"{}", b'{"vocabulary.model": 3}', b"\xff" * 70])
def test_a_damaged_manifest_locks_no_run(tmp_path: Path, damaged: bytes) -> None:
    """The copy itself is intact: the run goes on, and the manifest is written again."""
    run, name = RunFolder(tmp_path), "vocabulary.model"
    run.save_files({name: b"pieces"})
    run.checkpoint(4).mkdir(parents=True)
    good = (tmp_path / MANIFEST).read_bytes()
    (tmp_path / MANIFEST).write_bytes(damaged)
    with pytest.raises(ValueError, match="puts it back"):
        run.read_saved(name)
    run.save_files({name: b"pieces"})
    assert (tmp_path / MANIFEST).read_bytes() == good


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[data]\nprepared = "x')
    with pytest.raises(ValueError, match=r"config\.toml: .*put back"):
        RunFolder(tmp_path).read_table()


@needs.FULL_DISK
def test_a_full_disk_says_what_was_being_written(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    with pytest.raises(OSError, match=r"No space left on device: '.*facts\.json'"), replacing(path):
        Path("/dev/full").write_text("x")
    assert names(tmp_path) == []


@pytest.mark.parametrize("metadata", [[], 3, "x", None])
def test_odd_metadata_of_weights_is_no_traceback(tmp_path: Path, metadata: object) -> None:
    """What reads the weights afterwards says that they are damaged."""
    header = json.dumps({"__metadata__": metadata}).encode()
    RunFolder(tmp_path).weights("best").write_bytes(struct.pack("<Q", len(header)) + header)
    assert RunFolder(tmp_path).identify_weights("best") == ""
