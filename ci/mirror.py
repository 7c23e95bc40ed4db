"""Prints which modules with functions have a mirrored test that notices when they break.

The mirrored test of `settle/reader.py` is `tests/settle/test_reader.py`. A module counts as mirrored when that file
fails as soon as the module's functions raise (that it passes otherwise, `make test` sees). Each module is broken in a
copy of the package; the functions raise from the first test on, not at import, so that a file that imports the module
and calls nothing does not count.

    python ci/mirror.py                    every module: some minutes
    python ci/mirror.py core/job kit       those of these folders or files
    python ci/mirror.py --paths            only whether the mirrored files exist: a second; a report, never fails

Functions that hold no statement of their own (abstract ones, protocols) are not counted, nor are modules that have
no others. Exits 1 where fewer than 85% of all modules fail when broken.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from copies import run_tests
from rooms import FOLDERS

ROOT = Path(__file__).resolve().parent.parent
LEAST = 0.85
SWITCH = "HYBRIDFLOW_MIRROR"
BREAK = ast.parse(
    f"if __import__('os').environ.get({SWITCH!r}):\n    raise RuntimeError('broken by ci/mirror.py')"
).body
PYTEST_PLUGIN = f"import os\n\ndef pytest_runtest_setup(item):\n    os.environ[{SWITCH!r}] = '1'\n"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def does_something(function: Function) -> bool:
    """Whether a function has a statement beside its docstring, `...`, `pass` and `raise NotImplementedError`."""
    names = {ast.unparse(decorator).rpartition(".")[2] for decorator in function.decorator_list}
    if names & {"abstractmethod", "overload", "hookspec"}:
        return False
    return not all(
        isinstance(statement, ast.Pass)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        or (isinstance(statement, ast.Raise) and "NotImplementedError" in ast.unparse(statement))
        for statement in function.body
    )


def functions(tree: ast.Module) -> list[Function]:
    every = [node for node in ast.walk(tree) if isinstance(node, Function)]
    return [function for function in every if does_something(function)]


def modules(root: Path) -> list[Path]:
    """Paths, relative to `root`, of the modules with functions."""
    every = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    return [path.relative_to(root) for path in every if functions(ast.parse(path.read_text()))]


def mirrored(module: Path) -> Path:
    """The path of a module's test file."""
    name = "init" if module.stem == "__init__" else module.stem
    return Path("tests") / module.parent / f"test_{name}.py"


def broken(source: str) -> str:
    """The source of a module whose functions raise while the switch is set."""
    tree = ast.parse(source)
    for function in functions(tree):
        has_docstring = ast.get_docstring(function) is not None
        function.body[has_docstring:has_docstring] = BREAK
    return ast.unparse(tree)


class Copy:
    """An installed copy of the package, in which one module at a time is broken."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__")
        for name in FOLDERS:
            shutil.copytree(ROOT / name, folder / "hybridflow" / name, ignore=ignored)
        (folder / "mirror_switch.py").write_text(PYTEST_PLUGIN)

    def passes(self, test: Path, *plugins: str) -> bool | None:
        """Whether a test file passes; None where all of it is skipped, or where it cannot be read or does not end."""
        done = run_tests(self.folder, [*plugins, str(test)], ROOT)
        if done is None:
            return None
        if done.returncode == 0:
            return True if " passed" in done.stdout else None
        return False if done.returncode == pytest.ExitCode.TESTS_FAILED else None

    def notices(self, module: Path) -> str:
        """ "" where the mirrored test notices that the module is broken, otherwise what is wrong."""
        test = mirrored(module)
        if not (ROOT / test).exists():
            return f"there is no {test}"
        path = self.folder / "hybridflow" / module
        source = path.read_text()
        try:
            path.write_text(broken(source))
            result = self.passes(test, "-p", "mirror_switch")
        finally:
            path.write_text(source)
        if result is None:
            return f"{test} is skipped here, cannot be read or does not end"
        return f"{test} passes when every function raises" if result else ""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", help="folders or modules; default: all")
    parser.add_argument(
        "--paths", action="store_true", dest="only_paths", help="look whether the test files exist"
    )
    parser.add_argument("--jobs", type=int, default=2, help="test files at once")
    given = parser.parse_args(arguments)
    under = [Path(path) for path in given.paths]
    chosen = [
        m
        for m in modules(ROOT)
        if not under or any(m == path or path in m.parents for path in under)
    ]

    if given.only_paths:
        problems = {
            m: "" if (ROOT / mirrored(m)).exists() else f"there is no {mirrored(m)}" for m in chosen
        }
    else:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
            copies: SimpleQueue[Copy] = SimpleQueue()
            for number in range(given.jobs):
                copies.put(Copy(Path(folder) / str(number)))

            def look(module: Path) -> str:
                copy = copies.get()
                try:
                    return copy.notices(module)
                finally:
                    copies.put(copy)

            problems = dict(zip(chosen, pool.map(look, chosen), strict=True))

    for module, problem in problems.items():
        if problem:
            print(f"{module}: {problem}")
    count = sum(not problem for problem in problems.values())
    share = count / max(len(problems), 1)
    print(
        f"mirrored: {count} of {len(problems)} modules with functions ({share:.0%}; bar {LEAST:.0%})"
    )
    return 0 if given.only_paths or share >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
