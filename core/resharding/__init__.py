"""Resharding: moving the weights of a model from any layout to any other.

plan decides which rank sends which boxes to which, and computes the cost; rounds cuts the plan so
that its buffers stay small; exchange runs the rounds on one rank. Their helpers: demands finds the
missing boxes and their senders, balance evens out the loads of senders, flows and boxes are compact
descriptions.
"""
