"""Resharding: weights from any layout to any other. Planned and priced first (plan), then moved bucket by bucket (exchange)."""
