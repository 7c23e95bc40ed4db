"""Prints which room of the repository imports which, and the circles among them; exits 1 where there is one.

Every import counts, wherever it stands: in a function, and under TYPE_CHECKING. `python ci/rooms.py [FOLDER]`
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

FOLDERS = (
    "core",
    "settle",
    "kit",
    "planner",
    "inference",
    "report",
    "cli",
    "backends",
    "algorithms",
)
"""The folders of the repository that are packages, as setup.py has them too."""
NAMESPACE = "hybridflow"
Graph = dict[str, set[str]]


def modules(root: Path) -> dict[str, Path]:
    """Dotted name, without the namespace, of every module below the folders."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: Iterable[str]) -> set[str]:
    """The modules of ours that a file imports."""
    names = set(known)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner.removeprefix(f"{NAMESPACE}.") in names else node.module)
    ours = {
        name.removeprefix(f"{NAMESPACE}.") for name in found if name.startswith(f"{NAMESPACE}.")
    }
    return ours & names


def room(module: str) -> str:
    """core.job.roles is of the room core.job; core.controller is a room by itself; so is a folder outside core."""
    parts = module.split(".")
    return (
        ".".join(parts[:2])
        if parts[0] in ("core", "settle", "kit", "planner", "cli", "backends")
        else parts[0]
    )


def by_room(files: Mapping[str, set[str]]) -> Graph:
    """The imports between rooms."""
    graph: Graph = {}
    for module, imported in files.items():
        own = graph.setdefault(room(module), set())
        own |= {room(name) for name in imported if room(name) != room(module)}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The sets of nodes that reach each other (Tarjan 1972), those of more than one node."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            members = stack[at:]
            del stack[at:]
            if len(members) > 1:
                found.append(sorted(members))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def main(root: Path) -> int:
    every = modules(root)
    files = {name: imports(path, every) for name, path in every.items()}
    rooms = by_room(files)
    for name in sorted(rooms):
        print(f"{name:<24} -> {' '.join(sorted(rooms[name])) or '-'}")
    bad = 0
    for name, imported in files.items():
        if (
            name.startswith("core.") and "core" in imported
        ):  # its door is for others: it leads to every room
            bad += 1
            print(f"{name} imports hybridflow.core: import the module that has the name")
    for what, graph in (("rooms", rooms), ("files", files)):
        found = circles(graph)
        bad += len(found)
        print(f"circles of {what}: {'none' if not found else ''}")
        for members in found:
            print(f"  {' <-> '.join(members)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent))
