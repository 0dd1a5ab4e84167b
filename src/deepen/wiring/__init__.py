"""Wirings: how a site reads from the stream and writes back, one file a method."""
