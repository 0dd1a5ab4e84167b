"""Feed-forward sublayers, one file a method."""
