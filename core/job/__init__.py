"""A job with all its resolved settings, and the sections of its configuration."""
