"""The programs inside a pool's processes: model workers, tasks, and the path of an update."""
