"""Rewards: a class with an option, and a function."""

from hybridflow.core.contracts.reward import Reward


class Digits(Reward):
    """The share of characters that are digits, times `scale`."""

    def __init__(self, scale: float = 1.0):
        self.scale = scale

    def __call__(self, samples):
        return [self.scale * share_of_digits(sample) for sample in samples]


def share_of_digits(sample):
    return sum(c.isdigit() for c in sample.response) / max(len(sample.response), 1)
