"""Data to train and compare stacks on: text, images, time series, and synthetic reasoning with exact answers."""
