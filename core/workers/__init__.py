"""The workers inside a pool's processes: models, rewards, tasks, and the computation of updates."""
