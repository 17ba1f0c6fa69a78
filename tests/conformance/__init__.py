"""What every method passes, those from outside of the repository too."""
