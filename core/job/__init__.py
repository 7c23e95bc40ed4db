"""Turns the tables of a configuration into jobs: every problem is found, and nothing is started."""
