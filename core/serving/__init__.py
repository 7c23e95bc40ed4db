"""Engines at work: requests that come while others run, engines in processes of their own, and a service on top."""
