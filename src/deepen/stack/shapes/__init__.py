"""Models of another shape than a stack of one stream: small, whole models on the same parts, one file a method."""
