"""Helpers of tests: fixtures in the large, jobs that run on ranks, references. No tests stand here."""
