"""The programs inside the processes: hosts, model workers, tasks, the path of an update, batches as messages."""
