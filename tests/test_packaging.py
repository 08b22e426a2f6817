"""What a release is made of: versions, file lists, README's commands, and a smoke test of every command."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from fnmatch import fnmatch

import pytest
import release_check
import smoke_test
from release_check import LAB, LIBRARY, ROOT, readme_commands, sdist_problems, version_problems
from typer.main import get_command

from laconic.cli.app import app


def tracked() -> set[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return set(done.stdout.splitlines())


def test_versions_of_both_distributions_and_the_changelog_agree():
    assert version_problems() == []
    problem, *_ = version_problems("v9.9")
    assert problem == f"the tag is v9.9, the version {LIBRARY.version}: expected the tag v{LIBRARY.version}"


def test_tagged_release_needs_addresses():
    """Both distributions lack them as long as there is no public repository; see docs/releasing.md."""
    missing = [problem for problem in version_problems(f"v{LIBRARY.version}") if "[project.urls]" in problem]
    texts = [(one.folder / "pyproject.toml").read_text() for one in (LIBRARY, LAB)]
    assert len(missing) == sum("[project.urls]" not in text for text in texts)


@pytest.mark.parametrize("distribution", [LIBRARY, LAB], ids=lambda distribution: distribution.name)
def test_source_distribution_includes_every_tracked_source_by_its_type(distribution):
    text = (distribution.folder / "pyproject.toml").read_text()
    patterns = re.findall(r'"/([^"]+)"', re.search(r"sdist\.include = \[(.*?)\n\]", text, re.S)[1])
    prefix = distribution.folder.relative_to(ROOT).as_posix().removeprefix(".").removesuffix("/")
    names = [name.removeprefix(f"{prefix}/") for name in tracked() if name.startswith(prefix)]
    sources = [name for name in names if name.startswith(("src/", "csrc/"))]
    missing = [name for name in sources if not any(fnmatch(name, pattern.replace("**/", "*")) for pattern in patterns)]
    assert len(sources) > 100 and missing == []
    assert all(any(fnmatch(name, pattern.replace("**/", "*")) for name in names) for pattern in patterns)


def test_source_distribution_with_other_files_is_refused(tmp_path):
    sources = [name for name in tracked() if name.startswith(("lab/src/", "lab/csrc/"))]
    names = [*(name.removeprefix("lab/") for name in sources[1:]), "notes.txt", "tests/test_it.py"]
    with tarfile.open(tmp_path / "lab.tar.gz", "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"laconic_lab-0/{name}"), io.BytesIO())
    problems = sdist_problems(LAB, tmp_path / "lab.tar.gz", tracked())
    assert problems == [
        "notes.txt is not tracked by git", "tests/test_it.py is not tracked by git",
        "tests/test_it.py does not belong there",
        f"{sources[0].removeprefix('lab/')} is missing: add its type to sdist.include",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("distribution", [LIBRARY, LAB], ids=lambda distribution: distribution.name)
def test_untracked_files_stay_out_of_the_source_distribution(distribution, tmp_path):
    # Not "build": the folder of that name in a checkout can be imported, too.
    pytest.importorskip("build.__main__", reason="no build")
    files = tracked()
    for name in files:
        if not name.startswith("results/"):
            (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / "tree" / name)
    folder = tmp_path / "tree" / distribution.folder.relative_to(ROOT)
    for stray in ("scratch.bin", "weights.py", f"src/{distribution.package}/model.safetensors", "csrc/core.o"):
        (folder / stray).write_text("stray")
    words = [sys.executable, "-m", "build", "--sdist", "--outdir", str(tmp_path), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,) = tmp_path.glob("*.tar.gz")
    assert sdist_problems(distribution, sdist, files) == []


def test_commands_and_files_are_read_from_a_readme():
    text = (
        "```sh\npip install 'laconic[cluster]'  # a wheel\nmake demo\n```\n"
        "<!-- file: train.py -->\n```python\nx = 1\n```\n"
        "```console\n$ torchrun \\\n  train.py\nloss 1\n$ laconic report runs\n```\n```python\nlaconic = 2\n```\n"
    )
    files, lines = readme_commands(text)
    assert files == {"train.py": "x = 1\n"}
    assert lines == ["pip install 'laconic[cluster]'  # a wheel", "torchrun    train.py", "laconic report runs"]


def test_smoke_test_runs_every_command():
    commands = set(get_command(app).commands)
    assert commands == {case.words.split()[0] for case in smoke_test.CASES} - {"--version"}


def test_wheels_of_the_stable_abi_begin_with_the_same_python_everywhere():
    settings = (ROOT / "pyproject.toml").read_text()
    first = int(re.search(r'wheel\.py-api = "cp3(\d+)"', settings)[1])
    assert release_check.STABLE_ABI[1] == first
    built = [int(minor) for minor in re.findall(r'"cp3(\d+)-\*"', settings)]
    assert built == list(range(10, max(built) + 1)) and first in built  # cibuildwheel


def test_core_codes_known_data_into_known_bytes(monkeypatch):
    assert smoke_test.core_problems() == []
    monkeypatch.setitem(smoke_test.DIGESTS, "rans", "0" * 16)
    (problem,) = smoke_test.core_problems()
    assert problem.startswith("rans: the core wrote bytes with SHA-256 ")


def test_commands_that_need_a_missing_package_are_known(monkeypatch):
    monkeypatch.setattr(smoke_test, "find_spec", lambda name: None if name in ("torch", "grpc") else name)
    cases = {case.words: case.missing for case in smoke_test.CASES}
    assert cases["--version"] == [] and cases["codecs --json"] == ["torch"]
    assert cases["server absent"] == ["grpc", "torch"]


def test_requirements_of_a_wheel_without_torch(tmp_path):
    metadata = (
        "Metadata-Version: 2.4\nName: laconic\nRequires-Dist: torch>=2.9\nRequires-Dist: torchvision\n"
        "Requires-Dist: numpy>=1.26\nProvides-Extra: cluster\nRequires-Dist: grpcio>=1.60; extra == 'cluster'\n"
        'Provides-Extra: plots\nRequires-Dist: matplotlib>=3.8; extra == "plots"\n\nRequires-Dist: text\n'
    )
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("laconic-0.dist-info/METADATA", metadata)
    assert release_check.requirements_without_torch(tmp_path / "a.whl") == ["torchvision", "numpy>=1.26"]
    assert release_check.requirements_without_torch(tmp_path / "a.whl", "cluster")[-1] == "grpcio>=1.60"


def test_summary_of_a_release_check_has_each_step_and_problem(tmp_path):
    steps = release_check.Steps(tmp_path)
    steps.report("wheel", [], "laconic.whl 12 bytes")
    text = steps.path.read_text()
    assert "| wheel | ok | 0 | laconic.whl 12 bytes |" in text and "interrupted" in text
    steps.report("metadata", ["no licence"], "twine")
    assert steps.finish() == 1
    text = steps.path.read_text()
    assert "| metadata | **failed** | 0 | twine |" in text and "- metadata: no licence" in text
    assert "1 problem, " in text and "interrupted" not in text
