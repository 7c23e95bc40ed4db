"""A run from its first process to its last file: session, checkpoints, folder, reporting, validation."""
