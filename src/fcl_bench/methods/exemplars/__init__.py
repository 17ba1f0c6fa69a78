"""Methods whose clients keep samples of earlier tasks."""
