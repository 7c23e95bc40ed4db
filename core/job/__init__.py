"""Everything that a run is told, as values: a job, and the sections of its configuration."""
