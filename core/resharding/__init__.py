"""Resharding: moving the weights of a model from any layout to any other.

plan decides which rank sends which boxes to whom, and prices it; rounds cuts the plan so that its
buffers stay small; exchange runs the rounds on one rank. The others help: demands says what is
missing and who sends it, balance evens out the senders, flows and boxes are compact descriptions.
"""
