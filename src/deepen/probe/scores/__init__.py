"""Which layers matter: one file a score, and one pass that feeds all that only watch the stream."""
