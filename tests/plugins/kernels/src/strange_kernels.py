"""Which rows go where."""


def stripes(rows, height, rank, ranks):
    """(first, last) of the stripes of `height` rows that a rank holds, dealt out like cards."""
    return [(at, min(at + height, rows)) for at in range(rank * height, rows, ranks * height)]


def half(rows, rank, ranks):
    """(first, last) of the one run of rows that a rank holds."""
    return rank * rows // ranks, (rank + 1) * rows // ranks
