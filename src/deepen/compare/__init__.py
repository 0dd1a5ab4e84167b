"""Matched-budget experiments: variants x seeds under one budget, and paired statistics."""
