"""A configuration's tables become jobs: everything resolved, every problem found, nothing started."""
