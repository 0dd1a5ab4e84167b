"""Side-by-side runs against peers; `make bench` runs them all."""
