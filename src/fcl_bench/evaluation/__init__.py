"""From counts of right answers to the metrics of the papers."""
