"""Engines at work: engines built by name, requests that come while others run, and a service."""
