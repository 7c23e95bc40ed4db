"""Data: rows of a source become tokenised examples, drawn in an order that a checkpoint resumes."""
