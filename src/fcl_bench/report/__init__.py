"""Run records: the folder on disk, the tables on screen, the figure."""
