"""Counts what makes code easy or hard to read, beside the same counts of code bases that read well.

    python ci/text.py                every folder together
    python ci/text.py core/job ...   each of these folders or files

A report for readers, who judge; nothing fails by it. Templates and tests are not counted.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from rooms import FOLDERS

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 100
BESIDE = {
    "tokens a line, median": "4 to 6",
    "tokens a line, 99th percentile": "20 to 26",
    f"lines over {WIDTH} columns, %": "0.1 to 4.3",
    "blank lines in functions, %": "4.1 to 7.6",
    "comments per 100 lines": "5.0 to 7.5",
    "`a, b = x, y` per 1,000 lines": "0.6 to 2.1",
    "nested comprehensions per 1,000 lines": "0 to 1.4",
    "public functions and classes with docstrings, %": "22 to 72",
    "settings with docstrings, %": "",
    "one-letter locals, %": "",
}
"""Counted of prime-rl, torchtitan, pluggy and tox; the last two were not."""
SETTINGS = ("Config", "Section", "Settings")
"""How the names of classes end whose fields are settings."""
COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Text:
    """The counts of some files."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.tokens: list[int] = []
        """Of each line with code."""

    def add(self, path: Path) -> None:
        source = path.read_text()
        lines = source.splitlines()
        tree = ast.parse(source)
        self.counts["lines"] += len(lines)
        self.counts["wide"] += sum(len(line) > WIDTH for line in lines)
        self._add_tokens(source)
        for node in ast.walk(tree):
            self._add_node(node, lines)
        for documented in _public(tree):
            self.counts["public"] += 1
            self.counts["public documented"] += documented
        for documented in _settings(tree):
            self.counts["settings"] += 1
            self.counts["settings documented"] += documented

    def _add_tokens(self, source: str) -> None:
        per_line: Counter[int] = Counter()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in COUNTED:
                per_line[token.start[0]] += 1
            elif token.type == tokenize.COMMENT:
                self.counts["comments"] += 1
        self.tokens += per_line.values()

    def _add_node(self, node: ast.AST, lines: list[str]) -> None:
        counts = self.counts
        if isinstance(node, ast.Assign):
            sides = (node.targets[0], node.value)
            counts["tuple assignments"] += all(isinstance(side, ast.Tuple) for side in sides)
        elif isinstance(node, COMPREHENSIONS):
            inner = (child for child in ast.walk(node) if child is not node)
            nested = len(node.generators) > 1 or any(isinstance(c, COMPREHENSIONS) for c in inner)
            counts["nested comprehensions"] += nested
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            counts["locals"] += 1
            counts["one-letter locals"] += len(node.id) == 1 and node.id != "_"
        elif isinstance(node, FUNCTIONS):
            body = lines[node.lineno - 1 : node.end_lineno]
            counts["function lines"] += len(body)
            counts["blank function lines"] += sum(not line.strip() for line in body)

    def figures(self) -> dict[str, float]:
        """By the names of BESIDE."""
        counts = self.counts
        thousands = counts["lines"] / 1000
        percentiles = sorted(self.tokens) or [0]
        values = (
            statistics.median(percentiles),
            percentiles[int(0.99 * len(percentiles))],
            100 * counts["wide"] / max(counts["lines"], 1),
            100 * counts["blank function lines"] / max(counts["function lines"], 1),
            100 * counts["comments"] / max(counts["lines"], 1),
            counts["tuple assignments"] / max(thousands, 1e-3),
            counts["nested comprehensions"] / max(thousands, 1e-3),
            100 * counts["public documented"] / max(counts["public"], 1),
            100 * counts["settings documented"] / max(counts["settings"], 1),
            100 * counts["one-letter locals"] / max(counts["locals"], 1),
        )
        return dict(zip(BESIDE, values, strict=True))


def _public(node: ast.AST) -> Iterator[bool]:
    """For each public function and class, outside functions, whether it has a docstring."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)) and not child.name.startswith("_"):
            yield ast.get_docstring(child) is not None
            if isinstance(child, ast.ClassDef):
                yield from _public(child)


def _settings(tree: ast.Module) -> Iterator[bool]:
    """For each field of a class of settings, whether a docstring follows it."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or not node.name.endswith(SETTINGS):
            continue
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
                text = after.value if isinstance(after, ast.Expr) else None
                yield isinstance(text, ast.Constant) and isinstance(text.value, str)


def files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def count(paths: Iterable[Path]) -> dict[str, float]:
    text = Text()
    for path in files(paths):
        text.add(path)
    return text.figures()


def main(arguments: list[str]) -> int:
    folders = [ROOT / folder for folder in FOLDERS]
    reports = {name: [Path(name)] for name in arguments} or {", ".join(FOLDERS): folders}
    for name, paths in reports.items():
        print(name)
        for figure_name, figure in count(paths).items():
            print(f"  {figure_name:<50} {figure:7.1f}   {BESIDE[figure_name]}".rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
