"""Puts each fault of tests/faults/patches/ back, in a copy, and sees its test fail.

A patch begins with what was wrong, and with a line "test: FILE[::NAME] [-k EXPRESSION]". It is a fault that was once
there, written against the present code: one that no longer applies is to be written anew.

    python ci/faults.py            every patch
    python ci/faults.py f3 f5-name these
    python ci/faults.py --apply    only whether they apply

Exits 1 where a patch does not apply, or where its test passes with the fault.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from copies import run_tests

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "tests/faults/patches"
FAILED = 1
"""pytest's status where tests failed; others mean that none ran."""


def test_of(patch: Path) -> list[str]:
    """The arguments of pytest in a patch's head."""
    for line in patch.read_text().splitlines():
        if line.startswith("test: "):
            return line.removeprefix("test: ").split()
        if line.startswith("---"):
            break
    raise SystemExit(f"{patch}: its head has no line that begins with 'test: '")


def applies(patch: Path) -> bool:
    """Whether a patch applies to this tree."""
    check = ["git", "apply", "--check", str(patch)]
    return subprocess.run(check, cwd=ROOT, capture_output=True).returncode == 0


def notices(patch: Path) -> str:
    """What the patch's test says in a copy with the fault: "fails", or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        tracked = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
        )
        for name in tracked.stdout.decode().split("\0"):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        done = subprocess.run(
            ["git", "apply", str(patch)], cwd=copy, capture_output=True, text=True
        )
        if done.returncode:
            return f"does not apply: {done.stderr.strip()}"

        # The package is imported from the copy: its folders are those of the namespace `hybridflow`.
        package = Path(folder) / "path" / "hybridflow"
        package.parent.mkdir()
        package.symlink_to(copy)
        ran = run_tests(package.parent, ["-n0", *test_of(patch)], copy)
    if ran is None:
        return "its test does not end"
    if ran.returncode == FAILED:
        return "fails"
    if ran.returncode == 0:
        return "passes with the fault"
    return f"does not run:\n{ran.stdout[-2000:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "faults", nargs="*", help="faults, such as f3, or one patch of it, such as f3-flipped"
    )
    parser.add_argument("--apply", action="store_true", help="only see whether they apply")
    options = parser.parse_args()
    patches = sorted(
        PATCHES.glob("*.patch"),
        key=lambda path: (int(path.stem.strip("f").partition("-")[0]), path.stem),
    )
    if options.faults:
        names = {patch: {patch.stem, patch.stem.partition("-")[0]} for patch in patches}
        if unknown := set(options.faults).difference(*names.values()):
            parser.error(f"there is no patch of {', '.join(sorted(unknown))} in {PATCHES}")
        patches = [patch for patch in patches if names[patch] & set(options.faults)]
    good = True
    for patch in patches:
        said = (
            ("applies" if applies(patch) else "does not apply") if options.apply else notices(patch)
        )
        print(f"{patch.stem}: {said}", flush=True)
        good &= said in ("applies", "fails")
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
