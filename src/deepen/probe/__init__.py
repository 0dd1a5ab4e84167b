"""What a model predicts, and how far a program moves it."""
